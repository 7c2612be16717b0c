"""Block-parallel heads as published: DFlash, DSpark and DFlash 2, in the form that vLLM and SGLang read.

Tensors: fc, hidden_norm, layers.*, norm. DSpark adds markov_head.* and confidence_head.proj; with the latter both
engines can verify fewer tokens if few are likely to be accepted. DFlash 2 adds layers.*.{attention,mlp}_conv.* and
candidate_selector.*. A smaller draft vocabulary adds lm_head and d2t (int64 [Vd], offsets). `target_layer_ids` are
indices of layer outputs, which are one less than indices into hidden_states.

Blocks. In DFlash and DFlash 2, `block_size` includes the anchor, which drafts no token. In DSpark all slots draft.
Engines feed one mask per draft token, and in layers without a causal mask all slots see each other: with another number
of tokens, the head computes something else. Windows and causal layers: see `block_attention`.
"""

from dataclasses import replace
from typing import Any

from specctl.errors import CheckpointError
from specctl.formats import block_attention, eagle3, llama, serving_commands
from specctl.formats.block import (
    DFLASH2_KEYS,
    EMBEDDING,
    LAYERS,
    LM_HEAD,
    MARKOV,
    MASK_FILE,
    Block,
    checked_block,
    read_parts,
)
from specctl.formats.head import Deployment, Files, Head, Serving, TargetFacts
from specctl.formats.head_directory import HeadDirectory

DFLASH, DSPARK, DFLASH2 = "dflash", "dspark", "dflash2"
ARCHITECTURES = {DFLASH: "DFlashDraftModel", DSPARK: "Qwen3DSparkModel", DFLASH2: "DFlash2DraftModel"}
"""Kind of head → its name in config.json."""
READ = {name: kind for kind, name in ARCHITECTURES.items()} | {"DSparkDraftModel": DSPARK, "LingDSparkModel": DSPARK}
"""Architecture → kind; the last two are other names of Qwen3DSparkModel."""
METHODS = {
    ("vllm", DFLASH): "dflash",
    ("vllm", DSPARK): "dspark",
    ("vllm", DFLASH2): "dflash",
    ("sglang", DFLASH): "DFLASH",
    ("sglang", DSPARK): "DSPARK",
    ("sglang", DFLASH2): "DFLASH",
}
"""(Reader, kind) → the reader's name of the method."""
V2_RUNNER = (DSPARK, DFLASH2)  # kinds that vLLM drafts with only in its V2 model runner
MASK_ROW_NOTE = (
    "SGLang overwrites the target's embedding of token {} with the head's mask embedding: sequences with that token "
    "get output that differs from the target's own"
)
TARGET_SCALES = "logit_scale", "logits_scaling", "lm_head_multiplier"
"""Config keys of targets that scale the logits of their vocabulary head."""


def write(head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
    """The directory of a head. Raises CheckpointError if its reader could not run it, or would draft differently."""
    shape, kind = head.architecture, kind_of(head)
    if shape["sample_from_anchor"] != (kind == DSPARK):
        markov = kind == DSPARK
        raise CheckpointError(
            f"the head has {'a' if markov else 'no'} Markov head and drafts from its {'second' if markov else 'first'} "
            f"slot on: engines support only the opposite",
            hint="use --to speculators, which supports it"
            if markov
            else "train it with drafter.markov_rank, or so that it drafts from the second slot on",
        )
    if to == "sglang":
        _check_sglang(head)
    check_logits(head, facts)
    eagle3.check_taps(head, facts)
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
        # vLLM reads these keys only at the top level, SGLang in both places.
        config |= {LAYERS: layers, "sample_from_anchor": True, **markov_keys(head)}
    else:
        config["dflash_config"] = {
            LAYERS: layers,
            "mask_token_id": shape["mask_token_id"],
            **block_attention.nested_causal(shape),
            **dflash2_keys(head),
        }
    return files(head, facts, config)


def layer_config(head: Head, facts: TargetFacts) -> dict[str, Any]:
    """The config keys of the decoder layers, which are Qwen3 layers."""
    return {
        **llama.write_config(head.architecture, facts, head.tensors["fc.weight"].dtype),
        "model_type": "qwen3",
        "num_hidden_layers": head.architecture["num_layers"],
        **block_attention.keys(head.architecture),
    }


def files(head: Head, facts: TargetFacts, config: dict[str, Any]) -> Files:
    """The directory with `config`, and the mask embedding in the place where vLLM looks for it."""
    tensors = eagle3.without_full_mapping(head)
    mask = tensors.pop("mask_embedding", None)
    if mask is None:
        return Files(config, tensors)
    token = head.architecture["mask_token_id"]
    if kind_of(head) == DSPARK:
        embedding = facts.token_embedding().to(mask.dtype, copy=True)
        embedding[token] = mask
        return Files(config, tensors | {EMBEDDING: embedding})
    return Files(config, tensors, pickles={MASK_FILE: {"mask_token_id": token, "embedding": mask.clone()}})


def needs_v2_runner(head: Head) -> bool:
    """Whether vLLM runs the head only in its V2 model runner: by its kind, or as only some layers have a window."""
    return kind_of(head) in V2_RUNNER or len({*block_attention.kinds(head.architecture)}) > 1


def kind_of(head: Head) -> str:
    """`DFLASH`, `DSPARK` or `DFLASH2`. Raises CheckpointError if the head is of another kind."""
    shape = head.architecture
    convolved, selects = bool(shape.get("conv_kernel_size")), bool(shape.get("selector_rank"))
    if convolved != selects:
        raise CheckpointError(
            f"the head has {'convolutions' if convolved else 'a candidate selector'} but no "
            f"{'candidate selector' if convolved else 'convolutions'}: engines run both (DFlash 2) or neither",
            hint="train it with drafter.conv_kernel_size=4 drafter.selector_rank=32, or without both",
        )
    if selects and shape["draft_vocab_size"] != shape["vocab_size"]:
        raise CheckpointError(
            f"the head has a draft vocabulary of {shape['draft_vocab_size']}, but engines run DFlash 2 with "
            "the whole vocabulary",
            hint="train it without drafter.vocab_size",
        )
    return DFLASH2 if selects else DSPARK if shape["markov_rank"] else DFLASH


def dflash2_keys(head: Head) -> dict[str, Any]:
    """The keys of convolutions and candidate selector, if a head has them."""
    return {key: head.architecture[key] for key in DFLASH2_KEYS} if kind_of(head) == DFLASH2 else {}


def markov_keys(head: Head) -> dict[str, Any]:
    """The keys of a Markov head, and of the confidence head that may read it."""
    confident = bool(head.architecture.get("confidence"))
    keys = {"markov_rank": head.architecture["markov_rank"], "markov_head_type": "vanilla"}
    keys["enable_confidence_head"] = confident
    return keys | ({"confidence_head_with_markov": True} if confident else {})


def check_logits(head: Head, facts: TargetFacts) -> None:
    """Raise CheckpointError if the target scales its logits: engines would add the head's terms to unscaled logits."""
    scaled = {key: value for key in TARGET_SCALES if (value := getattr(facts.text_config, key, None)) not in (None, 1)}
    if scaled and kind_of(head) != DFLASH and LM_HEAD not in head.tensors:
        raise CheckpointError(
            f"target {facts.name} scales its logits ({scaled}), but engines do not scale draft logits",
            hint="train with drafter.vocab_size: the head then has a separate vocabulary matrix",
        )


def _check_sglang(head: Head) -> None:
    """Raise CheckpointError for heads that SGLang would run with other matrices.

    SGLang always uses the target's vocabulary head, even if the directory holds one. With DSpark it also uses the
    target's embedding.
    """
    shape = head.architecture
    if shape["draft_vocab_size"] != shape["vocab_size"]:
        raise CheckpointError(
            f"the head has a draft vocabulary of {shape['draft_vocab_size']}, but SGLang drafts with the whole "
            "vocabulary",
            hint="train without drafter.vocab_size, or use --to vllm",
        )
    if kind_of(head) == DSPARK and shape["own_mask"]:
        raise CheckpointError(
            "the head has a learned mask embedding, but SGLang's DSPARK uses the target's embedding of mask_token_id",
            hint="use --to vllm; or train without a Markov head for SGLang: drafter.markov_rank=0",
        )


def claims(found: HeadDirectory) -> bool:
    """Whether a directory looks like a block-parallel head, even if it cannot be read."""
    names = found.config.get("architectures")
    blocks = isinstance(names, list) and any("DFlash" in str(name) or "DSpark" in str(name) for name in names)
    return blocks or "dflash_config" in found.config or MARKOV[0] in found.tensors


def read(found: HeadDirectory, facts: TargetFacts) -> Head:
    """Read a published head. Raises CheckpointError if our head cannot represent it, or it does not fit the target."""
    config = found.config
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise found.invalid("dflash_config", nested, "must be an object with target_layer_ids and mask_token_id")
    names = config.get("architectures")
    known = [kind for name, kind in READ.items() if isinstance(names, list) and name in names]
    if len(known) != 1:
        raise found.invalid("architectures", names, f"must be a list of one of {', '.join(READ)}")
    declared = {**config, **nested}  # both engines let dflash_config override the top level
    layers = declared.get(LAYERS) or declared.get("dspark_target_layer_ids")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise found.invalid(
            LAYERS, layers, "must be the list of layers with the outputs that the head reads, counted from 0"
        )
    mask = next(
        (declared[key] for key in ("mask_token_id", "dspark_noise_token_id") if declared.get(key) is not None), None
    )
    spark = known[0] == DSPARK
    anchor = declared.get("sample_from_anchor", spark)
    if anchor is not spark or config.get("dspark_bonus_anchor") not in (None, not anchor):
        raise found.invalid("sample_from_anchor", anchor, f"must be {spark} for a {config['architectures'][0]}")
    local = known[0] == DFLASH2
    block = Block(
        taps=tuple(layer + 1 for layer in layers),
        block_size=declared.get("block_size", declared.get("dspark_block_size")),
        sample_from_anchor=anchor,
        mask_token_id=mask,
        markov_rank=declared.get("markov_rank", declared.get("dspark_markov_rank")) if spark else 0,
        **({key: declared.get(key) for key in DFLASH2_KEYS} if local else {}),
    )
    block = checked_block(found, facts, block, local=local)
    for key in ("conv_kernel_size", "selector_rank") if not local else ():
        if declared.get(key):
            raise found.invalid(key, declared[key], f"must be missing: only a {ARCHITECTURES[DFLASH2]} has it")
    # vLLM reads `causal` inside dflash_config only.
    outer, declared = config.get("causal"), declared | {"causal": nested.get("causal")}
    head = read_parts(found, declared, block, facts)
    if outer is not None and any(causal != outer for causal in block_attention.causal_layers(head.architecture)):
        raise found.invalid("causal", outer, "must be in dflash_config, where vLLM reads it, or be named is_causal")
    return replace(head, notes=(*head.notes, *block_attention.sglang_notes(declared, head.architecture)))


def serving(head: Head, to: str, use: Deployment) -> Serving:
    """The command line of an engine."""
    kind = kind_of(head)
    found = serving_commands.serving(to, METHODS[to, kind], use, v2_runner=needs_v2_runner(head))
    if to == "sglang" and head.architecture["own_mask"]:
        found.notes.append(MASK_ROW_NOTE.format(head.architecture["mask_token_id"]))
    return found
