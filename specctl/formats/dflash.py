"""Block-parallel heads as published: DFlash, DSpark and DFlash 2, as vLLM and SGLang read them.

Tensors: fc, hidden_norm, layers.*, norm, for DSpark markov_head.* and confidence_head.proj, by which both engines can
verify less where little will be kept; for DFlash 2 layers.*.{attention,mlp}_conv.* and candidate_selector.*; a smaller
draft vocabulary adds lm_head and d2t (int64 [Vd], offsets). `target_layer_ids` name outputs of layers, one less than
indices of hidden_states.

A block. DFlash's `block_size` counts the anchor, which drafts nothing, and so does DFlash 2's; DSpark's slots all
draft. Engines feed as many masks as they are told to draft tokens, and every slot sees every other: a shorter block is
another head.

The mask. All read the target's row of `mask_token_id`. A head with an embedding of its own brings it to DFlash in both
engines as `mask_embedding.pt`, to vLLM's DSpark as that row of its own `embed_tokens`; SGLang's takes neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specctl.errors import CheckpointError
from specctl.formats import eagle3_raw, engines, foreign, llama
from specctl.formats.foreign import Foreign
from specctl.formats.head import Files, Head, LengthRange, Serving, TargetFacts

DFLASH, DSPARK, DFLASH2 = "dflash", "dspark", "dflash2"
ARCHITECTURES = {DFLASH: "DFlashDraftModel", DSPARK: "Qwen3DSparkModel", DFLASH2: "DFlash2DraftModel"}
"""Kind of head → its name in config.json."""
READ = {name: kind for kind, name in ARCHITECTURES.items()} | {"DSparkDraftModel": DSPARK, "LingDSparkModel": DSPARK}
"""Architecture → kind; the last two name what Qwen3DSparkModel is."""
METHODS = {
    ("vllm", DFLASH): "dflash",
    ("vllm", DSPARK): "dspark",
    ("vllm", DFLASH2): "dflash",
    ("sglang", DFLASH): "DFLASH",
    ("sglang", DSPARK): "DSPARK",
    ("sglang", DFLASH2): "DFLASH",
}
"""Reader, kind → what it calls the method."""
V2_RUNNER = (DSPARK, DFLASH2)  # kinds that vLLM drafts with in its V2 model runner alone
MASK_FILE, EMBEDDING, LM_HEAD = "mask_embedding.pt", "embed_tokens.weight", "lm_head.weight"
MARKOV = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj.weight", "confidence_head.proj.bias"
SELECTOR = tuple(f"candidate_selector.{n}" for n in ("predecessor_codebook", "successor_codebook"))
STEER = "candidate_selector.hidden_projection.weight"
LOCAL = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Keys of what DFlash 2 has and the others have not."""
LAYERS = "target_layer_ids"
THETA = 1_000_000.0  # where none is named, in vLLM
OTHER_NAMES = {
    "model.": "",
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}
"""Beginnings of names that engines read as others."""

MUST_BE: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, False),
    "causal": (None, False),
    "use_swa": (None, False),
    "use_sliding_window": (None, False),
    "attention_sink_bias": (None, False),
    "add_swa_attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "use_gemma_norm": (None, False),
    "use_aux_hidden_state": (None, True),
    "projector_type": (None,),
    "markov_head_type": (None, "vanilla"),
    "input_embedding_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None, 0),
    "noise_embed_scale": (None, 1.0),
}
"""Keys beside those of Llama that change what a head computes, and their values where it computes what ours does."""

ROW = (
    "SGLang puts the head's mask embedding in the place of the target's row of token {}: texts with that token are "
    "answered otherwise than by the target alone"
)
TARGET_SCALES = "logit_scale", "logits_scaling", "lm_head_multiplier"
"""Keys of targets that do not draw from their vocabulary head's products as they are."""


class Block(NamedTuple):
    """The keys that the formats call by different names, as our fields are called; `mask`: the embedding of the masks,
    where the head has one of its own."""

    taps: tuple[int, ...]
    block_size: int
    sample_from_anchor: bool
    mask_token_id: int
    markov_rank: int
    mask: Tensor | None
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16


def write(head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
    """The directory of a head. CheckpointError where its reader could not feed it, or would draft otherwise."""
    shape, kind = head.architecture, kind_of(head)
    if shape["sample_from_anchor"] != (kind == DSPARK):
        markov = kind == DSPARK
        raise CheckpointError(
            f"the head has {'a' if markov else 'no'} Markov head and drafts from its {'second' if markov else 'first'} "
            f"slot on: engines know the opposite only",
            hint="--to speculators can say so"
            if markov
            else "train it with drafter.markov_rank, or drafting otherwise",
        )
    if to == "sglang":
        _check_sglang(head)
    check_logits(head, facts)
    eagle3_raw.check_taps(head, facts)
    layers = [tap - 1 for tap in shape["taps"]]
    config = {
        **layer_config(head, facts),
        "architectures": [ARCHITECTURES[kind]],
        "draft_vocab_size": shape["draft_vocab_size"],
        "num_target_layers": facts.num_layers,
        "block_size": shape["block_size"],
        "mask_token_id": shape["mask_token_id"],
    }
    if kind == DSPARK:
        # vLLM finds these at the top alone, SGLang in both places.
        config |= {LAYERS: layers, "sample_from_anchor": True, **markov_keys(head)}
    else:
        config["dflash_config"] = {
            LAYERS: layers,
            "mask_token_id": shape["mask_token_id"],
            "causal": False,
            **local_keys(head),
        }
    return files(head, facts, config)


def layer_config(head: Head, facts: TargetFacts) -> dict[str, Any]:
    """The keys of the decoder layers, those of Qwen3."""
    layers = head.architecture["num_layers"]
    return {
        **llama.write_config(head.architecture, facts, head.tensors["fc.weight"].dtype),
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def files(head: Head, facts: TargetFacts, config: dict[str, Any]) -> Files:
    """The directory with `config`, and the mask's embedding where vLLM looks for it."""
    tensors = eagle3_raw.without_mapping_of_all(head)
    mask = tensors.pop("mask_embedding", None)
    if mask is None:
        return Files(config, tensors)
    token = head.architecture["mask_token_id"]
    if kind_of(head) == DSPARK:
        embedding = facts.token_embedding().to(mask.dtype, copy=True)
        embedding[token] = mask
        return Files(config, tensors | {EMBEDDING: embedding})
    return Files(config, tensors, pickles={MASK_FILE: {"mask_token_id": token, "embedding": mask.clone()}})


def kind_of(head: Head) -> str:
    """`DFLASH`, `DSPARK` or `DFLASH2`. CheckpointError for a head that is none of them."""
    shape = head.architecture
    convolved, selects = bool(shape.get("conv_kernel_size")), bool(shape.get("selector_rank"))
    if convolved != selects:
        raise CheckpointError(
            f"the head has {'convolutions' if convolved else 'a candidate selector'} and no "
            f"{'candidate selector' if convolved else 'convolutions'}: engines run both (DFlash 2) or neither",
            hint="train it with drafter.conv_kernel_size=4 drafter.selector_rank=32, or without both",
        )
    if selects and shape["draft_vocab_size"] != shape["vocab_size"]:
        raise CheckpointError(
            f"the head has a draft vocabulary of {shape['draft_vocab_size']}, engines run DFlash 2 with the whole one",
            hint="train it without drafter.vocab_size",
        )
    return DFLASH2 if selects else DSPARK if shape["markov_rank"] else DFLASH


def local_keys(head: Head) -> dict[str, Any]:
    """The keys of convolutions and candidate selector, where a head has them."""
    return {key: head.architecture[key] for key in LOCAL} if kind_of(head) == DFLASH2 else {}


def markov_keys(head: Head) -> dict[str, Any]:
    """The keys of a Markov head, and of the confidence head that may read it."""
    confident = bool(head.architecture.get("confidence"))
    keys = {"markov_rank": head.architecture["markov_rank"], "markov_head_type": "vanilla"}
    keys["enable_confidence_head"] = confident
    return keys | ({"confidence_head_with_markov": True} if confident else {})


def check_logits(head: Head, facts: TargetFacts) -> None:
    """CheckpointError where engines would add to a multiple of them."""
    scaled = {key: value for key in TARGET_SCALES if (value := getattr(facts.text_config, key, None)) not in (None, 1)}
    if scaled and kind_of(head) != DFLASH and LM_HEAD not in head.tensors:
        raise CheckpointError(
            f"target {facts.name} scales its logits ({scaled}), engines do not scale those of a draft",
            hint="train with drafter.vocab_size: the head then has a vocabulary matrix of its own",
        )


def _check_sglang(head: Head) -> None:
    """SGLang takes the target's vocabulary head, whatever is shipped, and with DSpark its embedding, too."""
    shape = head.architecture
    if shape["draft_vocab_size"] != shape["vocab_size"]:
        raise CheckpointError(
            f"the head has a draft vocabulary of {shape['draft_vocab_size']}, SGLang drafts with the whole one",
            hint="train without drafter.vocab_size, or --to vllm",
        )
    if kind_of(head) == DSPARK and shape["own_mask"]:
        raise CheckpointError(
            "the head has learnt the embedding of its masks; SGLang's DSPARK reads the target's row of mask_token_id",
            hint="--to vllm takes it; SGLang takes such heads without a Markov head: drafter.markov_rank=0",
        )


def claims(found: Foreign) -> bool:
    """Whether a directory looks like a block-parallel head, also one that cannot be read."""
    names = found.config.get("architectures")
    blocks = isinstance(names, list) and any("DFlash" in str(name) or "DSpark" in str(name) for name in names)
    return blocks or "dflash_config" in found.config or MARKOV[0] in found.tensors


def read(found: Foreign, facts: TargetFacts) -> Head:
    """A published head. CheckpointError says what our head cannot represent, or what does not fit the target."""
    config = found.config
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise found.refuse("dflash_config", nested, "an object with target_layer_ids and mask_token_id")
    known = [READ[name] for name in config.get("architectures") or [] if name in READ]
    if len(known) != 1:
        raise found.refuse("architectures", config.get("architectures"), f"one of {', '.join(READ)}")
    said = {**config, **nested}  # in this order in both engines
    layers = said.get(LAYERS) or said.get("dspark_target_layer_ids")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise found.refuse(LAYERS, layers, "a list of the layers whose outputs the head reads, from 0")
    mask = next((said[key] for key in ("mask_token_id", "dspark_noise_token_id") if said.get(key) is not None), None)
    spark = known[0] == DSPARK
    anchor = said.get("sample_from_anchor", spark)
    if anchor is not spark or config.get("dspark_bonus_anchor") not in (None, not anchor):
        raise found.refuse("sample_from_anchor", anchor, f"{spark}: the layout of a {config['architectures'][0]}")
    block = read_block(
        found,
        facts,
        taps=tuple(layer + 1 for layer in layers),
        block_size=said.get("block_size", said.get("dspark_block_size")),
        sample_from_anchor=anchor,
        mask_token_id=mask,
        markov_rank=said.get("markov_rank", said.get("dspark_markov_rank")) if spark else 0,
        local=said if known[0] == DFLASH2 else {},
    )
    for key in ("conv_kernel_size", "selector_rank") if known[0] != DFLASH2 else ():
        if said.get(key):
            raise found.refuse(key, said[key], f"missing: this belongs to a {ARCHITECTURES[DFLASH2]}")
    return read_parts(found, said, block, facts)


def read_block(
    found: Foreign,
    facts: TargetFacts,
    *,
    taps: tuple[int, ...],
    block_size: Any,
    sample_from_anchor: Any,
    mask_token_id: Any,
    markov_rank: Any,
    local: Mapping[str, Any],
) -> Block:
    """The block of a head of a configuration's values; `local`: where its convolutions and candidate selector are
    described, if it has them. CheckpointError where they are none that a head can have."""
    if list(taps) != sorted(set(taps)) or not taps or not all(0 <= tap < facts.num_layers for tap in taps):
        right = f"ascending layers, as outputs (from 0) below {facts.num_layers - 1}: target {facts.name}"
        raise found.refuse(LAYERS, [tap - 1 for tap in taps], right)
    if type(block_size) is not int or block_size < 2:
        raise found.refuse("block_size", block_size, "the slots of a block, two or more")
    if type(sample_from_anchor) is not bool:
        raise found.refuse("sample_from_anchor", sample_from_anchor, "true or false")
    if type(mask_token_id) is not int or not 0 <= mask_token_id < facts.vocab_size:
        right = f"a token of the target's vocabulary, 0 … {facts.vocab_size - 1}, which stands in the masked slots"
        raise found.refuse("mask_token_id", mask_token_id, right)
    if type(markov_rank) is not int or markov_rank < 0 or bool(markov_rank) != (MARKOV[0] in found.tensors):
        right = f"the columns of {MARKOV[0]}, 0 without that tensor"
        raise found.refuse("markov_rank", markov_rank, right)
    sizes: dict[str, int] = {}
    for key in LOCAL if local else ():
        value = local.get(key)
        if type(value) is not int or value < 1:
            raise found.refuse(key, value, "written out, 1 or more: a head of DFlash 2 has it")
        sizes[key] = value
    mask = _shipped_mask(found, mask_token_id)
    return Block(taps, block_size, sample_from_anchor, mask_token_id, markov_rank, mask, **sizes)


def _shipped_mask(found: Foreign, token: int) -> Tensor | None:
    """The embedding in the file beside the weights, which vLLM's DSpark and SGLang's do not open."""
    file = found.file.parent / MASK_FILE
    if MARKOV[0] in found.tensors or not file.exists():
        return None
    content = foreign.unpickled(file)
    if isinstance(content, dict) and content.get("mask_token_id", token) != token:
        right = f"{token}, the mask_token_id of config.json"
        raise found.refuse("mask_token_id", content["mask_token_id"], right, where=file)
    if isinstance(content, dict) and content.get("per_position"):
        raise found.refuse("per_position", True, "one embedding for all slots", where=file)
    mask = content.get("embedding") if isinstance(content, dict) else content
    if not isinstance(mask, Tensor) or not mask.is_floating_point() or not mask.isfinite().all():
        raise found.refuse("embedding", f"{mask!r:.60}", "a tensor of finite numbers", where=file)
    return mask.reshape(-1)


def read_parts(found: Foreign, config: Mapping[str, Any], block: Block, facts: TargetFacts) -> Head:
    """A head whose keys of layers are in `config`. CheckpointError as for `read`."""
    layers, shape = _read_layers(found, config, facts)
    vocab = config["vocab_size"]
    notes = llama.check_vocabulary(found, vocab, facts)
    found, confident, dropped = _confidence(_renamed(found), config, block)
    found, mask = _without_embedding(found, block, facts)
    found, ids, more = _vocabulary(found, config, vocab, facts)
    size, rank = shape["hidden_size"], block.markov_rank
    rows = llama.rows(found, LM_HEAD)
    drafted = vocab if rows is None else rows
    local = _local_shapes(found, block, shape, layers, vocab) if block.selector_rank else {}
    layer = llama.layer_shapes(shape, size) | {
        "input_layernorm.weight": (size,),
        "self_attn.q_norm.weight": (shape["head_dim"],),
        "self_attn.k_norm.weight": (shape["head_dim"],),
    }
    tensors = llama.take(
        found,
        {
            "fc.weight": (size, len(block.taps) * size),
            "hidden_norm.weight": (size,),
            **{f"layers.{k}.{name}": shape for k in range(layers) for name, shape in layer.items()},
            "norm.weight": (size,),
            **({} if rows is None else {LM_HEAD: (rows, size)}),
            **({MARKOV[0]: (vocab, rank), MARKOV[1]: (drafted, rank)} if rank else {}),
            **({CONFIDENCE[0]: (1, size + rank), CONFIDENCE[1]: (1,)} if confident else {}),
            **local,
        },
    )
    if mask is not None:
        if mask.shape != (size,):
            raise found.refuse("embedding", f"of shape {list(mask.shape)}", f"[{size}]", where=found.file)
        tensors["mask_embedding"] = mask.to(tensors["fc.weight"].dtype)
    for name in (MARKOV[0], *SELECTOR):
        if name in tensors:
            tensors[name] = _rows(tensors[name], facts.vocab_size)
    if ids is None:
        if rank:
            tensors[MARKOV[1]] = _rows(tensors[MARKOV[1]], facts.vocab_size)
    else:
        kept = ids < facts.vocab_size  # rows beyond it are padding, which is never drafted
        for name in (LM_HEAD, MARKOV[1]):
            if name in tensors:
                tensors[name] = tensors[name][kept]
        ids = ids[kept]
        member = torch.zeros(facts.vocab_size, dtype=torch.bool)
        member[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": member}
    architecture = shape | {
        "draft_vocab_size": facts.vocab_size if ids is None else len(ids),
        "num_layers": layers,
        "own_mask": mask is not None,
        "confidence": confident,
        **{name: value for name, value in block._asdict().items() if name != "mask"},
        "taps": list(block.taps),
    }
    return Head("dflash", architecture, tensors, (*notes, *more, *dropped))


def _local_shapes(
    found: Foreign, block: Block, shape: Mapping[str, Any], layers: int, vocab: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of what DFlash 2 has and the others have not, by tensor. CheckpointError where sizes do not fit."""
    size, taps, rank = shape["hidden_size"], block.conv_kernel_size, block.selector_rank
    if size % block.conv_group_size:
        raise found.refuse("conv_group_size", block.conv_group_size, f"a divisor of hidden_size, {size}")
    if taps > block.block_size:
        raise found.refuse("conv_kernel_size", taps, f"at most the slots of a block, {block.block_size}")
    rows = llama.rows(found, LM_HEAD)
    if rows is not None and rows != vocab:
        raise found.refuse("draft_vocab_size", rows, f"{vocab}, the whole vocabulary, as engines run DFlash 2")
    convs = {
        "base_kernel": (2, taps, size),
        "kernel_projection.weight": (2 * taps * size // block.conv_group_size, size),
    }
    return {
        **{
            f"layers.{k}.{side}_conv.{n}": s
            for k in range(layers)
            for side in ("attention", "mlp")
            for n, s in convs.items()
        },
        **dict.fromkeys(SELECTOR, (vocab, rank)),
        STEER: (rank, size),
    }


def _read_layers(found: Foreign, config: Mapping[str, Any], facts: TargetFacts) -> tuple[int, dict[str, Any]]:
    """The number of layers, and the fields of each."""
    for key, allowed in MUST_BE.items():
        if config.get(key) not in allowed:
            right = " or ".join(str(value) for value in allowed if value is not None) or "missing"
            raise found.refuse(key, config[key], f"{right}: our head computes nothing else")
    layers, types = config.get("num_hidden_layers"), config.get("layer_types")
    if type(layers) is not int or layers < 1:
        raise found.refuse("num_hidden_layers", layers, "the number of decoder layers")
    if types is not None and (not isinstance(types, list) or set(types) != {"full_attention"}):
        raise found.refuse("layer_types", types, "full_attention alone: our head's layers see the whole context")
    for key in ("head_dim", "num_key_value_heads"):
        if config.get(key) is None:
            raise found.refuse(key, "missing", "written out: Qwen3's default is not that of other families")
    # A window is of no effect under these layer types, a tie to the target's own matrices none at all.
    same = {"num_hidden_layers": 1, "sliding_window": None, "layer_types": None, "tie_word_embeddings": False}
    return layers, llama.read_config(found, {"rope_theta": THETA, **config, **same}, facts)


def _renamed(found: Foreign) -> Foreign:
    """Tensors by the names that engines give them."""
    renamed = {}
    for name, tensor in found.tensors.items():
        for start, other in OTHER_NAMES.items():
            name = other + name[len(start) :] if name.startswith(start) else name
        renamed[name] = tensor
    return found.renamed(renamed)


def _confidence(found: Foreign, config: Mapping[str, Any], block: Block) -> tuple[Foreign, bool, list[str]]:
    """Whether `found` has a confidence head such as ours; `found` without another one, on which drafts do not depend
    either, and a note of that."""
    parts = {name for name in found.tensors if name.startswith("confidence_head.")}
    off = config.get("enable_confidence_head") is False
    with_markov = config.get("confidence_head_with_markov") is True
    if not parts or (block.markov_rank and with_markov and not off):
        return found, bool(parts), []
    why = "config.json turns it off" if off else "ours reads a Markov head"
    kept = {name: tensor for name, tensor in found.tensors.items() if name not in parts}
    return found.renamed(kept), False, [f"its confidence head is left out: {why}; drafts do not depend on it"]


def _without_embedding(found: Foreign, block: Block, facts: TargetFacts) -> tuple[Foreign, Tensor | None]:
    """`found` without the copy of the target's embedding, and the mask's, where it is not the target's row."""
    shipped, ours = found.tensors.get(EMBEDDING), facts.embedding
    if shipped is None:
        return found, block.mask
    token, mask = block.mask_token_id, block.mask
    if shipped.dim() != 2 or token >= len(shipped):
        right = f"[{facts.vocab_size}, {facts.hidden_size}]"
        raise found.refuse(EMBEDDING, f"of shape {list(shipped.shape)}", right, where=found.file)
    row = shipped[token]
    if mask is None and (ours is None or not torch.equal(row.float(), ours[token].to(row).float())):
        mask = row.clone()
    if ours is not None and shipped.shape[1:] == ours.shape[1:]:
        shipped = shipped.clone()
        shipped[token] = ours[token].to(shipped)
    without = llama.without_copies(found.renamed({**found.tensors, EMBEDDING: shipped}), facts, {EMBEDDING: ours})
    return without, mask


def _vocabulary(
    found: Foreign, config: Mapping[str, Any], vocab: int, facts: TargetFacts
) -> tuple[Foreign, Tensor | None, list[str]]:
    """`found` without mappings and copies of the target's head, the target ids of a smaller draft vocabulary (None: it
    is the target's), and notes."""
    rows, mapping = llama.rows(found, LM_HEAD), ("d2t", "t2d")
    drafted = config.get("draft_vocab_size") or rows or vocab
    if rows is None and drafted != vocab:
        right = f"[{drafted}, {facts.hidden_size}]: the head drafts {drafted} of {vocab} tokens"
        raise found.refuse(LM_HEAD, "missing", right, where=found.file)
    ids: Tensor | None = None
    notes: list[str] = []
    if rows is not None:
        ids, notes = eagle3_raw.draft_ids(found, rows, vocab)
        if rows == vocab and torch.equal(ids, torch.arange(rows)):
            ids = None
    without = found.renamed({name: tensor for name, tensor in found.tensors.items() if name not in mapping})
    if ids is None:
        without = llama.without_copies(without, facts, {LM_HEAD: facts.head_weight})
    elif int((ids < facts.vocab_size).sum()) >= facts.vocab_size:
        raise found.refuse("d2t", "a mapping of all tokens", "none: the order of the target's vocabulary")
    return without, ids, notes


def _rows(tensor: Tensor, rows: int) -> Tensor:
    """The first `rows` of a matrix, zeros for those that it lacks: no token stands there."""
    return torch.cat((tensor[:rows], tensor.new_zeros(max(rows - len(tensor), 0), tensor.shape[1])))


def serving(
    head: Head, to: str, place: Path, facts: TargetFacts, tokens: int, schedule: Sequence[LengthRange] = ()
) -> Serving:
    """The command line of an engine."""
    kind = kind_of(head)
    found = engines.serving(to, METHODS[to, kind], place, facts, tokens, schedule, v2_runner=kind in V2_RUNNER)
    if to == "sglang" and head.architecture["own_mask"]:
        found.notes.append(ROW.format(head.architecture["mask_token_id"]))
    return found
