"""Code that the formats of block-parallel heads share: the names of tensors, and the reader of a head.

Mask embedding. By default every reader uses the target's row of `mask_token_id`. A head with a trained mask embedding
ships it for DFlash as `mask_embedding.pt` (both engines), and for vLLM's DSpark as that row in a full `embed_tokens`.
SGLang's DSpark reads neither.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specctl.formats import block_attention, eagle3, head_directory, llama
from specctl.formats.head import Head, TargetFacts
from specctl.formats.head_directory import HeadDirectory

MASK_FILE, EMBEDDING, LM_HEAD = "mask_embedding.pt", "embed_tokens.weight", "lm_head.weight"
MARKOV = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj.weight", "confidence_head.proj.bias"
SELECTOR = tuple(f"candidate_selector.{n}" for n in ("predecessor_codebook", "successor_codebook"))
SELECTOR_PROJECTION = "candidate_selector.hidden_projection.weight"
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Config keys that only DFlash 2 has."""
LAYERS = "target_layer_ids"
THETA = 1_000_000.0  # vLLM's default
OTHER_NAMES = {
    "model.": "",
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}
"""Prefixes of tensor names, and the prefixes that engines replace them by."""

MUST_BE: dict[str, tuple[Any, ...]] = {
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
"""Further keys that change what a head computes, and the values with which it computes the same as our head."""


class Block(NamedTuple):
    """Keys that the formats name differently, under our names; `checked_block` checks the values.

    `mask`: the head's trained mask embedding, if it has one.
    """

    taps: tuple[int, ...]
    block_size: Any
    sample_from_anchor: Any
    mask_token_id: Any
    markov_rank: Any
    mask: Tensor | None = None
    conv_kernel_size: Any = 0
    conv_group_size: Any = 16
    selector_rank: Any = 0
    selector_top_k: Any = 16


def checked_block(found: HeadDirectory, facts: TargetFacts, block: Block, *, local: bool) -> Block:
    """Return the block of a head, completed by its mask embedding. Raises CheckpointError for invalid values.

    `local`: the head has convolutions and a candidate selector.
    """
    taps, block_size, sample_from_anchor, mask_token_id, markov_rank, *_ = block
    if list(taps) != sorted(set(taps)) or not taps or not all(0 <= tap < facts.num_layers for tap in taps):
        right = f"must be ascending layers of target {facts.name}, counted from 0 and below {facts.num_layers - 1}"
        raise found.invalid(LAYERS, [tap - 1 for tap in taps], right)
    if type(block_size) is not int or block_size < 2:
        raise found.invalid("block_size", block_size, "must be the number of slots of a block, at least 2")
    if type(sample_from_anchor) is not bool:
        raise found.invalid("sample_from_anchor", sample_from_anchor, "must be true or false")
    if type(mask_token_id) is not int or not 0 <= mask_token_id < facts.vocab_size:
        right = f"must be the token of the masked slots, in 0 … {facts.vocab_size - 1} (the target's vocabulary)"
        raise found.invalid("mask_token_id", mask_token_id, right)
    if type(markov_rank) is not int or markov_rank < 0 or bool(markov_rank) != (MARKOV[0] in found.tensors):
        right = f"must be the number of columns of {MARKOV[0]}, or 0 without that tensor"
        raise found.invalid("markov_rank", markov_rank, right)
    for key in DFLASH2_KEYS if local else ():
        value = getattr(block, key)
        if type(value) is not int or value < 1:
            raise found.invalid(key, value, "must be given and at least 1 for a DFlash 2 head")
    return block._replace(mask=_shipped_mask(found, mask_token_id))


def _shipped_mask(found: HeadDirectory, token: int) -> Tensor | None:
    """The mask embedding in a file next to the weights. DSpark heads have none: engines do not open it for them."""
    file = found.file.parent / MASK_FILE
    if MARKOV[0] in found.tensors or not file.exists():
        return None
    content = head_directory.unpickled(file)
    if isinstance(content, dict) and content.get("mask_token_id", token) != token:
        right = f"must be {token}, the mask_token_id of config.json"
        raise found.invalid("mask_token_id", content["mask_token_id"], right, where=file)
    if isinstance(content, dict) and content.get("per_position"):
        raise found.invalid(
            "per_position", True, "must be false: only one embedding for all slots is supported", where=file
        )
    mask = content.get("embedding") if isinstance(content, dict) else content
    if not isinstance(mask, Tensor) or not mask.is_floating_point() or not mask.isfinite().all():
        raise found.invalid("embedding", f"{mask!r:.60}", "must be a tensor of finite numbers", where=file)
    return mask.reshape(-1)


def read_parts(found: HeadDirectory, config: Mapping[str, Any], block: Block, facts: TargetFacts) -> Head:
    """Read a head with its layer keys in `config`. Raises CheckpointError as `read` does."""
    layers, shape = _read_layers(found, config, facts)
    attention = block_attention.read(found, config, layers, block.block_size)
    vocab = config["vocab_size"]
    notes = llama.check_vocabulary(found, vocab, facts)
    found, confident, dropped = _confidence(_renamed(found), config, block)
    found, mask = _without_embedding(found, block, facts)
    found, ids, more = _vocabulary(found, config, vocab, facts)
    size, rank = shape["hidden_size"], block.markov_rank
    rows = llama.row_count(found, LM_HEAD)
    drafted = vocab if rows is None else rows
    local = _local_shapes(found, block, shape, layers, vocab) if block.selector_rank else {}
    layer = llama.layer_shapes(shape, size) | {
        "input_layernorm.weight": (size,),
        "self_attn.q_norm.weight": (shape["head_dim"],),
        "self_attn.k_norm.weight": (shape["head_dim"],),
    }
    tensors = llama.take_exactly(
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
            raise found.invalid(
                "embedding", f"of shape {list(mask.shape)}", f"must have shape [{size}]", where=found.file
            )
        tensors["mask_embedding"] = mask.to(tensors["fc.weight"].dtype)
    for name in (MARKOV[0], *SELECTOR):
        if name in tensors:
            tensors[name] = llama.fitted_rows(tensors[name], facts.vocab_size)
    if ids is None:
        if rank:
            tensors[MARKOV[1]] = llama.fitted_rows(tensors[MARKOV[1]], facts.vocab_size)
    else:
        kept = ids < facts.vocab_size  # further rows are padding, which is never drafted
        for name in (LM_HEAD, MARKOV[1]):
            if name in tensors:
                tensors[name] = tensors[name][kept]
        ids = ids[kept]
        tensors |= eagle3.mapping_of(ids, facts.vocab_size)
    architecture = shape | {
        "draft_vocab_size": facts.vocab_size if ids is None else len(ids),
        "num_layers": layers,
        "own_mask": mask is not None,
        "confidence": confident,
        **{name: value for name, value in block._asdict().items() if name != "mask"},
        "taps": list(block.taps),
        **attention,
    }
    return Head("dflash", architecture, tensors, (*notes, *more, *dropped))


def _local_shapes(
    found: HeadDirectory, block: Block, shape: Mapping[str, Any], layers: int, vocab: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that only DFlash 2 has, by name. Raises CheckpointError if sizes do not fit."""
    size, taps, rank = shape["hidden_size"], block.conv_kernel_size, block.selector_rank
    if size % block.conv_group_size:
        raise found.invalid("conv_group_size", block.conv_group_size, f"must divide hidden_size, {size}")
    if taps > block.block_size:
        raise found.invalid(
            "conv_kernel_size", taps, f"must not exceed the number of slots of a block, {block.block_size}"
        )
    rows = llama.row_count(found, LM_HEAD)
    if rows is not None and rows != vocab:
        raise found.invalid(
            "draft_vocab_size", rows, f"must be {vocab}: engines run DFlash 2 with the whole vocabulary"
        )
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
        SELECTOR_PROJECTION: (rank, size),
    }


def _read_layers(found: HeadDirectory, config: Mapping[str, Any], facts: TargetFacts) -> tuple[int, dict[str, Any]]:
    """The number of layers, and the fields of each layer."""
    for key, allowed in MUST_BE.items():
        if config.get(key) not in allowed:
            right = " or ".join(str(value) for value in allowed if value is not None) or "missing"
            raise found.invalid(key, config[key], f"must be {right}: specctl's head supports nothing else")
    layers = config.get("num_hidden_layers")
    if type(layers) is not int or layers < 1:
        raise found.invalid("num_hidden_layers", layers, "must be the number of decoder layers")
    for key in ("head_dim", "num_key_value_heads"):
        if config.get(key) is None:
            raise found.invalid(key, "missing", "must be given: the default differs between Qwen3 and other families")
    # Ignore tied embeddings, as the head uses the target's matrices. `block_attention` reads the keys of attention.
    same = {"num_hidden_layers": 1, "sliding_window": None, "layer_types": None, "tie_word_embeddings": False}
    return layers, llama.read_config(found, {"rope_theta": THETA, **config, **same}, facts)


def _renamed(found: HeadDirectory) -> HeadDirectory:
    """Tensors under the names that engines give them."""
    renamed = {}
    for name, tensor in found.tensors.items():
        for start, other in OTHER_NAMES.items():
            name = other + name[len(start) :] if name.startswith(start) else name
        renamed[name] = tensor
    return found.with_tensors(renamed)


def _confidence(found: HeadDirectory, config: Mapping[str, Any], block: Block) -> tuple[HeadDirectory, bool, list[str]]:
    """Whether `found` has a confidence head like ours.

    Any other confidence head is removed from `found`, with a note. Drafts do not depend on it.
    """
    parts = {name for name in found.tensors if name.startswith("confidence_head.")}
    off = config.get("enable_confidence_head") is False
    with_markov = config.get("confidence_head_with_markov") is True
    if not parts or (block.markov_rank and with_markov and not off):
        return found, bool(parts), []
    why = "config.json turns it off" if off else "specctl's confidence head needs a Markov head"
    return found.without(parts), False, [f"its confidence head is not imported: {why}. Drafts do not depend on it"]


def _without_embedding(found: HeadDirectory, block: Block, facts: TargetFacts) -> tuple[HeadDirectory, Tensor | None]:
    """Remove the copy of the target's embedding. Returns the mask embedding if it is not the target's row."""
    shipped, ours = found.tensors.get(EMBEDDING), facts.embedding
    if shipped is None:
        return found, block.mask
    token, mask = block.mask_token_id, block.mask
    if shipped.dim() != 2 or token >= len(shipped):
        right = f"must have shape [{facts.vocab_size}, {facts.hidden_size}]"
        raise found.invalid(EMBEDDING, f"of shape {list(shipped.shape)}", right, where=found.file)
    row = shipped[token]
    if mask is None and (ours is None or not torch.equal(row.float(), ours[token].to(row).float())):
        mask = row.clone()
    if ours is not None and shipped.shape[1:] == ours.shape[1:]:
        shipped = shipped.clone()
        shipped[token] = ours[token].to(shipped)
    without = llama.without_copies(found.with_tensors({**found.tensors, EMBEDDING: shipped}), facts, {EMBEDDING: ours})
    return without, mask


def _vocabulary(
    found: HeadDirectory, config: Mapping[str, Any], vocab: int, facts: TargetFacts
) -> tuple[HeadDirectory, Tensor | None, list[str]]:
    """Return `found` without mappings and copies of the target's head, the draft ids, and notes.

    The draft ids are target ids of a smaller draft vocabulary, or None if the head drafts the target's vocabulary.
    """
    rows = llama.row_count(found, LM_HEAD)
    drafted = config.get("draft_vocab_size") or rows or vocab
    if rows is None and drafted != vocab:
        right = f"must have shape [{drafted}, {facts.hidden_size}]: the head drafts {drafted} of {vocab} tokens"
        raise found.invalid(LM_HEAD, "missing", right, where=found.file)
    ids: Tensor | None = None
    notes: list[str] = []
    if rows is not None:
        ids, notes = eagle3.draft_ids(found, rows, vocab)
        if rows == vocab and torch.equal(ids, torch.arange(rows)):
            ids = None
    without = found.without(("d2t", "t2d"))
    if ids is None:
        without = llama.without_copies(without, facts, {LM_HEAD: facts.head_weight})
    elif int((ids < facts.vocab_size).sum()) >= facts.vocab_size:
        raise found.invalid(
            "d2t", "a mapping of all tokens", "must be missing if the head drafts the target's whole vocabulary"
        )
    return without, ids, notes
