"""The `speculators` format of heads (vllm-project/speculators): tensors layers.0.*, and layer keys in a nested config.

Its layer ids are indices into hidden_states, as in vLLM. If `norm_before_residual` is missing, vLLM takes it for true.
By default the package trains heads with three of EAGLE-3.1's norms (all but `fc_norm`) and a window of 2,048 tokens.

Block-parallel heads (types dflash, dspark and dflash2). `block_size` always includes the anchor. The package itself
uses the target's row of `mask_token_id` as mask embedding. By default it trains a window of 2,048 tokens in all layers.
Heads are read and written as vLLM 0.32 runs them. The package's own forward differs in three points:

- It shows all slots of a block the last `sliding_window` tokens before the block. vLLM counts the window from each
  slot's own position, so slot s sees s + 1 tokens less of the context.
- Its layers without a window are never causal. vLLM's dflash and dflash2 run all layers causally unless
  `sliding_window_non_causal` is true.
- Its dspark reads this key too. vLLM's dspark ignores it: exactly the layers with a window are causal.

MTP layers. The format covers targets with tensors `mtp.*`, under names of the package. `speculators stitch-mtp` writes
the tensors back into the target. For a dense target the layer is Qwen3's.
"""

import shlex
from dataclasses import replace
from typing import Any

from specctl.decoding.models.loading import is_hub_id, servable
from specctl.drafters.mtp import layouts
from specctl.drafters.mtp.layouts import LAYOUTS
from specctl.errors import CheckpointError
from specctl.families import SLIDING
from specctl.formats import block_attention, dflash, eagle3, llama, mtp, peagle, serving_commands
from specctl.formats.block import DFLASH2_KEYS, Block, checked_block, read_parts
from specctl.formats.head import Deployment, Files, Head, Serving, TargetFacts
from specctl.formats.head_directory import HeadDirectory

VERSION = "0.9.0"  # of the package from which these keys were taken
TYPE = "speculators_model_type"
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # in the order of the package's own files
BLOCKS = dflash.ARCHITECTURES | {dflash.DSPARK: "DSparkDraftModel"}
"""Type of a block-parallel head → its architecture."""
TYPES = ("eagle3", "peagle", *BLOCKS, "mtp")
LAYER = "transformer_layer_config"
NON_CAUSAL = "sliding_window_non_causal"
BLOCK_LAYERS = "aux_hidden_state_layer_ids"
MTP_LAYOUT = replace(
    LAYOUTS["mimo"], prefix="mtp_layers.", first="mtp_layers.0.", state_first=False, normed=LAYOUTS["qwen"].normed
)
VERIFIER_COPIES = ("verifier_lm_head.weight", "verifier_norm.weight")
OWN_MASK = "vLLM uses the head's mask embedding here; the package itself uses the target's embedding of mask_token_id"

UNREAD_NORM = (
    "vLLM 0.32 ignores fc_norm in P-EAGLE heads of this format, so its drafts would differ: "
    "use --to vllm for files that it serves"
)


def write(head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
    """The directory of a head that drafts `tokens` per round."""
    if head.family == "mtp":
        return _write_mtp(head, facts, tokens)
    eagle3.check_taps(head, facts)
    if head.family == "dflash":
        return _write_block(head, facts, tokens)
    layer = llama.write_config(head.architecture, facts, head.tensors["fc.weight"].dtype)
    layer |= eagle3.window_keys(head)
    config = {
        "architectures": ["Eagle3DraftModel"],
        **_proposal("eagle3", facts, tokens),
        **{key: head.architecture.get(key, False) for key in NORMS},
        eagle3.LAYERS: list(head.architecture["taps"]),
        **_layer_keys(head, facts, layer),
    }
    if head.family == "peagle":
        config |= {
            "architectures": ["PEagleSpeculator"],
            **_proposal("peagle", facts, tokens),
            "mask_token_id": head.architecture["mask_token_id"],
            LAYER: layer | peagle.depth_key(head),
        }
    return Files(config, peagle.tensors(head))


def _write_mtp(head: Head, facts: TargetFacts, tokens: int) -> Files:
    """Files of an MTP layer. Raises CheckpointError if the package's layer computes something else."""
    shape, kind = head.architecture, facts.text_config.model_type
    wrong = {
        f"has layout {shape['layout']}, not that of a target with tensors mtp.*": shape["layout"] != "qwen",
        f"belongs to a target of model type {kind}, not qwen3": kind != "qwen3",
        "has no query and key norms": not shape["qk_norm"],
        "has biases": shape["qkv_bias"],
        "reads the state before the final norm (normed_features), for which the format has no key": not shape[
            "normed_features"
        ],
    }
    if reasons := [why for why, it_is in wrong.items() if it_is]:
        raise CheckpointError(
            f"speculators {VERSION} does not support this MTP layer, which {reasons[0]}",
            "use --to vllm, which writes the target",
        )
    config = {
        "architectures": ["MTPDraftModel"],
        **_proposal("mtp", facts, tokens),
        "num_nextn_predict_layers": 1,
        LAYER: facts.text_config.to_diff_dict(),
    }
    return Files(config, layouts.to_target_names(MTP_LAYOUT, head.tensors))


def _read_mtp(found: HeadDirectory, facts: TargetFacts) -> Head:
    tensors = {n: t for n, t in found.tensors.items() if n not in ("embed_tokens.weight", "lm_head.weight")}
    for name in tensors:
        if not name.startswith(MTP_LAYOUT.prefix):
            raise found.invalid(
                name, "unknown", f"the tensors of an MTP layer are named {MTP_LAYOUT.first}*", where=found.file
            )
    held = layouts.to_our_names(MTP_LAYOUT, tensors, str(found.file.parent))
    return mtp.read_layer(found, "qwen", held, MTP_LAYOUT.normed, facts)


def _proposal(algorithm: str, facts: TargetFacts, tokens: int) -> dict[str, Any]:
    """The keys for the type of a head, its draft length and its target."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        TYPE: algorithm,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": servable(facts.name), "architectures": list(facts.architectures)},
        },
    }


def _layer_keys(head: Head, facts: TargetFacts, layer: dict[str, Any]) -> dict[str, Any]:
    return {
        "draft_vocab_size": head.architecture["draft_vocab_size"],
        "target_hidden_size": facts.hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": layer["torch_dtype"],
        LAYER: layer,
    }


def _write_block(head: Head, facts: TargetFacts, tokens: int) -> Files:
    """Files of a block-parallel head. Raises CheckpointError if vLLM would draft differently."""
    shape, kind = head.architecture, dflash.kind_of(head)
    if shape["sample_from_anchor"] and kind != dflash.DSPARK:
        raise CheckpointError(
            "the head has no Markov head and drafts from its first slot on, which vLLM's dflash does not",
            hint="train it with drafter.markov_rank, or so that it drafts from the second slot on",
        )
    dflash.check_logits(head, facts)
    config = {
        "architectures": [BLOCKS[kind]],
        **_proposal(kind, facts, tokens),
        BLOCK_LAYERS: list(shape["taps"]),
        "mask_token_id": shape["mask_token_id"],
        "block_size": shape["block_size"],
        "sample_from_anchor": shape["sample_from_anchor"],
        NON_CAUSAL: not block_attention.causal_windows(shape, alike=kind != dflash.DSPARK),
        **dflash.dflash2_keys(head),
        **_layer_keys(head, facts, dflash.layer_config(head, facts)),
    }
    if kind == dflash.DSPARK:
        config |= dflash.markov_keys(head)
    return dflash.files(head, facts, config)


def claims(found: HeadDirectory) -> bool:
    return TYPE in found.config


def read(found: HeadDirectory, facts: TargetFacts) -> Head:
    """Read a head of one of the `TYPES`. Raises CheckpointError if our head cannot represent it."""
    config, kind = found.config, found.config.get(TYPE)
    if kind not in TYPES:
        raise found.invalid(
            TYPE, repr(kind), f"must be one of {', '.join(TYPES)}: no other type of this format can be imported"
        )
    if kind == "eagle3" and "norm_before_residual" not in config:
        right = "must be given, true or false: the default is true in vLLM and false in the package"
        raise found.invalid("norm_before_residual", "missing", right)
    layer = config.get(LAYER)
    if not isinstance(layer, dict):
        raise found.invalid(LAYER, layer, "must be a Llama configuration")
    found = found.without(VERIFIER_COPIES)
    llama.check_types(found, config)
    if kind == "mtp":
        return _read_mtp(found, facts)
    if kind in BLOCKS:
        return _read_block(found, layer, facts)
    # Flags among the layer's keys are ignored: vLLM overwrites them, and the package reads the outer flags.
    flags = {key: config.get(key) for key in (*NORMS, "use_aux_norm", "target_hidden_size")}
    taps = tuple(config.get(eagle3.LAYERS) or facts.default_taps)
    layer = {**layer, **flags, "eagle_config": None}
    if kind == "peagle":
        more = {key: config[key] for key in ("mask_token_id", "speculators_config") if key in config}
        return peagle.read_parts(found, layer | more, taps, facts)
    return eagle3.read_parts(found, layer, taps, facts)


def _read_block(found: HeadDirectory, layer: dict[str, Any], facts: TargetFacts) -> Head:
    config, kind = found.config, found.config[TYPE]
    markov = kind == dflash.DSPARK
    taps, anchor = config.get(BLOCK_LAYERS), config.get("sample_from_anchor")
    if not isinstance(taps, list) or not all(type(tap) is int for tap in taps):
        raise found.invalid(BLOCK_LAYERS, taps, "must be a list of indices of hidden_states")
    if markov and anchor is None:
        raise found.invalid(
            "sample_from_anchor", "missing", "must be given: the default is false in vLLM and true in the package"
        )
    local = kind == dflash.DFLASH2
    block = Block(
        taps=tuple(taps),
        block_size=config.get("block_size"),
        sample_from_anchor=bool(anchor) if anchor is None else anchor,
        mask_token_id=config.get("mask_token_id"),
        markov_rank=config.get("markov_rank", 0) if markov else 0,
        **({key: config.get(key) for key in DFLASH2_KEYS} if local else {}),
    )
    block = checked_block(found, facts, block, local=local)
    confidence = ("enable_confidence_head", "confidence_head_with_markov")
    more = ("draft_vocab_size", "target_hidden_size", "markov_head_type", "use_aux_hidden_state", *confidence)
    found_keys = {key: config[key] for key in more if key in config}
    head = read_parts(found, {**layer, **found_keys, "causal": _override(found, layer)}, block, facts)
    return replace(head, notes=(*head.notes, *block_attention.package_notes(head.architecture, config.get(NON_CAUSAL))))


def _override(found: HeadDirectory, layer: dict[str, Any]) -> bool | None:
    """Causal flag of all layers that vLLM derives from `sliding_window_non_causal`, or None if it ignores the key.

    Raises CheckpointError if the key is missing and matters.
    """
    kind, declared = found.config[TYPE], found.config.get(NON_CAUSAL)
    if declared not in (None, True, False):
        raise found.invalid(NON_CAUSAL, declared, "must be true or false")
    if declared is None and kind == dflash.DFLASH and SLIDING in (layer.get(block_attention.TYPES) or []):
        right = "must be given, true or false: the default is true in vLLM and false in the package"
        raise found.invalid(NON_CAUSAL, "missing", right)
    return None if kind == dflash.DSPARK else declared is False


def serving(head: Head, to: str, use: Deployment) -> Serving:
    """Command lines of vLLM: the target with the head, and the head alone, which names its target.

    For an MTP layer it is the package's command, which puts the layer into the target.
    """
    if head.family == "mtp":
        return Serving(
            [f"speculators stitch-mtp {shlex.quote(str(use.place))} {shlex.quote(servable(use.facts.name))}"]
        )
    block, parallel = head.family == "dflash", head.family == "peagle"
    if parallel and head.architecture.get("fc_norm"):
        return Serving([], [UNREAD_NORM])
    kind = dflash.kind_of(head) if block else None
    method = "eagle3" if kind is None else dflash.METHODS["vllm", kind]
    options = {"parallel_drafting": True} if parallel else None
    found = serving_commands.serving("vllm", method, use, options, block and dflash.needs_v2_runner(head))
    # vLLM cannot serve such a directory alone if its verifier is a local path.
    if found.commands and is_hub_id(use.facts.name):
        found.commands.append(f"vllm serve {shlex.quote(str(use.place))}")
    if block and head.architecture["own_mask"]:
        found.notes.append(OWN_MASK)
    if block:
        shape = head.architecture
        found.notes.extend(block_attention.package_notes(shape, not block_attention.causal_windows(shape)))
    return found
