"""EAGLE-3 heads as published, in the form that vLLM, SGLang and the reference repository (SafeAILab/EAGLE) read.

Tensors without a prefix: fc, midlayer.*, norm, lm_head, d2t (int64 [Vd], **offset**: target id = i + d2t[i]), t2d (bool
[V]). `embed_tokens` is optional (engines share the target's). A full draft vocabulary has neither d2t nor t2d.

Several layers are named layers.0.*, layers.1.* etc. Before the attention of a layer after the first, vLLM applies
`input_layernorm` and SGLang `hidden_norm`; files for SGLang have one tensor under both names. The reference repository
has one layer.

Feature layers. hidden_states[k] is the output of layer k − 1. Without a key, all readers tap [2], [n//2] and [n−3].
The key is `eagle_aux_hidden_state_layer_ids`: vLLM reads it at the top level as k, SGLang below `eagle_config` as
k − 1. Both collect the states in the order of the layers, and ignore the order of the list.

EAGLE-3.1. The norms are flags next to the other keys; `norm_before_fc` may stand below `eagle_config`. Their tensors
are `fc_norm.{i}` and `input_norm`. vLLM applies a window if `layer_types` says so, and the window includes the row
itself.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from specctl.errors import CheckpointError
from specctl.families import FULL, MIN_SLIDING_WINDOW, SLIDING
from specctl.formats import llama, serving_commands
from specctl.formats.head import Deployment, Files, Head, Serving, TargetFacts
from specctl.formats.head_directory import HeadDirectory

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYERS = "eagle_aux_hidden_state_layer_ids"
NORMS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
WINDOW = "sliding_window"
FIRST, VLLM_NORM, SGLANG_NORM = "layers.0.", "input_layernorm.weight", "hidden_norm.weight"
COUNT = "num_layers"
UNREAD = {"sglang": ("norm_before_residual", WINDOW), "eagle": (*NORMS, WINDOW, COUNT)}
"""Options that a reader ignores silently, and would then draft with a different head."""
PLAIN = {WINDOW: "null", COUNT: "1"}
"""Value of an option that every reader computes, if it is not false."""
METHODS = {"vllm": "eagle3", "sglang": "EAGLE3"}


def write(head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
    """The directory of a head. Raises CheckpointError if its reader could not run it."""
    tapped = tuple(head.architecture["taps"])
    if to == "eagle" and tapped != facts.default_taps:  # the reference code has no key for other layers
        raise CheckpointError(
            f"the head reads hidden_states {list(tapped)}, but the reference code always reads "
            f"{list(facts.default_taps)}",
            hint="use --to vllm or --to sglang",
        )
    check_taps(head, facts, count=3)
    unread = options(head, UNREAD.get(to, ()))
    if unread:
        reader = serving_commands.VERSIONS.get(to, "the reference code")
        raise CheckpointError(
            f"the head has {' and '.join(unread)}, which {reader} ignores: its drafts would differ",
            hint="use --to vllm or --to speculators, or train with "
            + " ".join(f"drafter.{key}={PLAIN.get(key, 'false')}" for key in unread),
        )
    config = {
        "architectures": [ARCHITECTURE],
        **llama.write_config(head.architecture, facts, head.tensors["fc.weight"].dtype),
        **dict.fromkeys((key for key in NORMS if head.architecture.get(key)), True),
        **window_keys(head),
        "draft_vocab_size": head.architecture["draft_vocab_size"],
    }
    if tapped != facts.default_taps:
        config |= {LAYERS: list(tapped), "eagle_config": {LAYERS: [tap - 1 for tap in tapped]}}
    return Files(config, tensors(head, to))


def options(head: Head, keys: Collection[str]) -> list[str]:
    """The options among `keys` in which a head differs from EAGLE-3's paper."""
    shape = {**head.architecture, COUNT: head.architecture.get(COUNT, 1) > 1}
    return [key for key in keys if shape.get(key)]


def tensors(head: Head, to: str) -> dict[str, Tensor]:
    """The tensors by the names that a reader expects."""
    kept = without_full_mapping(head)
    if head.architecture.get(COUNT, 1) == 1:
        return kept
    kept = {name.replace("midlayer.", FIRST): tensor for name, tensor in kept.items()}
    norms = {name: tensor for name, tensor in kept.items() if name.startswith("layers.") and name.endswith(VLLM_NORM)}
    del norms[FIRST + VLLM_NORM]
    return kept | {name.replace(VLLM_NORM, SGLANG_NORM): t for name, t in norms.items() if to == "sglang"}


def window_keys(head: Head) -> dict[str, Any]:
    """The keys of layers with a window; empty for a head without a window."""
    window, count = head.architecture.get(WINDOW), head.architecture.get(COUNT, 1)
    return {WINDOW: window, "use_sliding_window": True, "layer_types": [SLIDING] * count} if window else {}


def check_taps(head: Head, facts: TargetFacts, count: int | None = None) -> None:
    """Raise CheckpointError unless engines can feed these taps: intermediate layers, each once, in ascending order.

    The last layer is excluded, because engines would give its state before the final norm.
    """
    taps = list(head.architecture["taps"])
    if (
        taps != sorted(set(taps))
        or not all(0 < tap < facts.num_layers for tap in taps)
        or len(taps) != (count or len(taps))
    ):
        last = facts.num_layers - 1
        hint = f"train with {count or 'some'} ascending layers in 1 … {last} as drafter.taps"
        if last < (count or 1):
            hint = f"engines read {count or 1} of the target's layers but never the last, and it has {last + 1} layers"
        raise CheckpointError(f"the head taps hidden_states {taps}, which no engine can provide", hint)


def without_full_mapping(head: Head) -> dict[str, Tensor]:
    """The tensors, without d2t and t2d if the head drafts the target's whole vocabulary."""
    full = head.architecture["draft_vocab_size"] == head.architecture["vocab_size"]
    return {name: tensor for name, tensor in head.tensors.items() if not (full and name in ("d2t", "t2d"))}


def claims(found: HeadDirectory) -> bool:
    """Whether a directory looks like an EAGLE-3 head."""
    names = found.tensors.keys()
    return "lm_head.weight" in names and any(name.endswith("hidden_norm.weight") for name in names)


def read(found: HeadDirectory, facts: TargetFacts) -> Head:
    """Read a published head. Raises CheckpointError if our head cannot represent it, or it does not fit the target."""
    return read_parts(found, found.config, taps(found, facts), facts)


def read_parts(found: HeadDirectory, config: Mapping[str, Any], taps: tuple[int, ...], facts: TargetFacts) -> Head:
    """Read a head with its Llama keys in `config`, which taps hidden_states `taps`."""
    return read_layers(_with_one_norm(found.bare()), config, taps, facts)


def read_layers(found: HeadDirectory, config: Mapping[str, Any], taps: tuple[int, ...], facts: TargetFacts) -> Head:
    """Read a head as `read_parts`, from tensors without a prefix, where layers after the first have vLLM's norm."""
    if not all(0 <= tap < facts.num_layers for tap in taps) or list(taps) != sorted(set(taps)):
        right = f"must be ascending indices of hidden_states in 0 … {facts.num_layers - 1} of target {facts.name}"
        raise found.invalid(LAYERS, list(taps), right)
    count = layer_count(found, config)
    options = _norms(found, config) | _window(found, llama.without_unused_window(found, config), count)
    shape = llama.read_config(found, config, facts, own=(*NORMS, "use_aux_norm", WINDOW, "layer_types")) | options
    head_vocab = config["vocab_size"]
    notes = llama.check_vocabulary(found, head_vocab, facts)
    renamed = {name.replace(FIRST, "midlayer."): tensor for name, tensor in found.tensors.items()}
    found = llama.without_copies(found.with_tensors(renamed), facts, {"embed_tokens.weight": facts.embedding})
    rows = llama.row_count(found, "lm_head.weight") or 0
    ids, more = draft_ids(found, rows, head_vocab)
    kept = ids < facts.vocab_size  # further rows are padding, which is never drafted
    found = found.without(("d2t", "t2d"))
    size, width = shape["hidden_size"], len(taps) * shape["hidden_size"]
    layer = llama.layer_shapes(shape, 2 * size) | {SGLANG_NORM: (size,), VLLM_NORM: (size,)}
    upper = llama.layer_shapes(shape, size) | {VLLM_NORM: (size,)}
    tensors = llama.take_exactly(
        found,
        {
            "fc.weight": (size, width),
            **({f"fc_norm.{i}.weight": (size,) for i in range(len(taps))} if options.get("fc_norm") else {}),
            **({"input_norm.weight": (width,)} if options.get("norm_before_fc") else {}),
            **{f"midlayer.{name}": shape for name, shape in layer.items()},
            **{f"layers.{place}.{name}": shape for place in range(1, count) for name, shape in upper.items()},
            "norm.weight": (size,),
            "lm_head.weight": (rows, size),
        },
    )
    if not kept.all():
        tensors["lm_head.weight"], ids = tensors["lm_head.weight"][kept], ids[kept]
    tensors |= mapping_of(ids, facts.vocab_size)
    architecture = shape | {"draft_vocab_size": len(ids), "taps": list(taps)} | ({COUNT: count} if count > 1 else {})
    return Head("eagle3", architecture, tensors, (*notes, *more))


def serving(head: Head, to: str, use: Deployment) -> Serving:
    """The command line of an engine, or the line of Python for the reference repository."""
    if to == "eagle":
        return serving_commands.eagle_repository(use, eagle3=True)
    return serving_commands.serving(to, METHODS[to], use)


def _norms(found: HeadDirectory, config: Mapping[str, Any]) -> dict[str, bool]:
    """The enabled norms of EAGLE-3.1. SGLang's `use_aux_norm` is an older name of `fc_norm`."""
    llama.check_types(found, config)
    given = {key: config.get(key) for key in (*NORMS, "use_aux_norm")}
    inner = config.get("eagle_config") or {}
    if inner.get("norm_before_fc") is not None:
        given["norm_before_fc"] = inner["norm_before_fc"]
    for key, value in given.items():
        if value is not None and not isinstance(value, bool):
            raise found.invalid(key, value, "must be true or false")
    given["fc_norm"] = given["fc_norm"] or given.pop("use_aux_norm")
    if given["fc_norm"] and given["norm_before_fc"]:
        raise found.invalid(
            "fc_norm", True, "must be false if norm_before_fc is true: specctl's head has one of the two"
        )
    return {key: True for key in NORMS if given[key]}


def layer_count(found: HeadDirectory, config: Mapping[str, Any], *, stated: bool = False) -> int:
    """Number of layers. Raises CheckpointError if `num_hidden_layers` is another number.

    Published EAGLE-3 heads of one layer may give the target's number there: it is accepted unless `stated`.
    """
    places = (name.split(".")[1] for name in found.tensors if name.startswith("layers."))
    held = len({"0", *(place for place in places if place.isdecimal())})
    declared = config.get("num_hidden_layers", 1)
    if (stated or held > 1) and declared != held:
        right = f"must be {held}, the number of layers in {found.file.name}"
        raise found.invalid("num_hidden_layers", declared, right)
    return held


def _with_one_norm(found: HeadDirectory) -> HeadDirectory:
    """`found` with vLLM's name of the norm before the attention in layers after the first, instead of SGLang's.

    Raises CheckpointError if there are both, with different values.
    """
    kept = dict(found.tensors)
    for name, norm in found.tensors.items():
        if not name.startswith("layers.") or name.startswith(FIRST) or not name.endswith(SGLANG_NORM):
            continue
        usual = kept.setdefault(name.replace(SGLANG_NORM, VLLM_NORM), norm)
        if usual.shape != norm.shape or not torch.equal(usual, norm):
            right = f"must equal {VLLM_NORM}: vLLM computes this layer with {VLLM_NORM}, SGLang with {SGLANG_NORM}"
            raise found.invalid(name, "another tensor", right, where=found.file)
        del kept[name]
    return found.with_tensors(kept)


def _window(found: HeadDirectory, config: Mapping[str, Any], count: int) -> dict[str, int]:
    """The window of the `count` layers, if they have one. Engines decide by `layer_types`."""
    window, kinds = config.get(WINDOW), config.get("layer_types")
    if kinds is None and window is not None:
        raise found.invalid(
            WINDOW, window, f'must be null, or set layer_types to ["{SLIDING}"] too: engines read that key'
        )
    if kinds is None:
        return {}
    if kinds != [SLIDING] * count:
        few = f'["{FULL}"] or ["{SLIDING}"]: specctl\'s head has one layer'
        many = f"{count} equal kinds: all layers of specctl's head have one window, or none"
        raise found.invalid("layer_types", kinds, f"must be {few if count == 1 else many}")
    if type(window) is not int or window < MIN_SLIDING_WINDOW:
        raise found.invalid(WINDOW, window, f"must be a number of tokens, at least {MIN_SLIDING_WINDOW}")
    return {WINDOW: window}


def taps(found: HeadDirectory, facts: TargetFacts) -> tuple[int, ...]:
    """The tapped hidden_states, from either of the two keys or the default."""
    llama.check_types(found, found.config)
    outer = found.config.get(LAYERS)
    inner = (found.config.get("eagle_config") or {}).get(LAYERS)
    if inner is not None and not (isinstance(inner, list) and all(type(layer) is int for layer in inner)):
        raise found.invalid(f"eagle_config.{LAYERS}", inner, "must be a list of layer numbers")
    shifted = tuple(layer + 1 for layer in inner) if inner else None
    if outer and shifted and tuple(outer) != shifted:
        right = f"eagle_config.{LAYERS} counts from one less (SGLang's convention): delete the wrong key"
        raise found.invalid(LAYERS, f"{outer} while eagle_config has {inner}", right)
    return tuple(outer) if outer else shifted or facts.default_taps


def draft_ids(found: HeadDirectory, rows: int, vocab_size: int) -> tuple[Tensor, list[str]]:
    """[Vd] target id of every draft token, and notes about the conversion."""
    declared = found.config.get("draft_vocab_size") or rows
    if rows and declared != rows:
        raise found.invalid(
            "draft_vocab_size", declared, f"must be {rows}, the number of rows of lm_head.weight in {found.file.name}"
        )
    d2t, t2d = found.tensors.get("d2t"), found.tensors.get("t2d")
    if d2t is None:
        if rows != vocab_size:
            right = (
                f"must be [{rows}] offsets: lm_head.weight has {rows} rows, but the vocabulary has {vocab_size} tokens"
            )
            raise found.invalid("d2t", "missing", right, where=found.file)
        return torch.arange(rows), []
    for name, tensor, length in (("d2t", d2t, rows), ("t2d", t2d, vocab_size)):
        if tensor is not None and tuple(tensor.shape) != (length,):
            raise found.invalid(name, f"of shape {list(tensor.shape)}", f"must have shape [{length}]", where=found.file)
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            raise found.invalid(name, f"of {tensor.dtype}", "must contain integers", where=found.file)
    d2t = d2t.long()
    members = None if t2d is None else t2d.bool().nonzero().squeeze(1)
    shifted = d2t + torch.arange(rows)
    # Offsets of ascending ids never decrease, while the ids themselves always increase.
    rising = rows > 1 and bool((d2t.diff() > 0).all())
    if _maps(shifted, vocab_size, members) and (members is not None or not rising):
        return shifted, []
    if members is not None and _maps(d2t, vocab_size, members):
        return d2t, ["converted d2t from target ids to offsets: t2d shows that it contains ids"]
    what = "strictly increasing, like ids instead of offsets" if rising else "not a mapping into the vocabulary"
    right = (
        f"must be offsets: i + d2t[i] is a distinct target id in 0 … {vocab_size - 1}, and t2d marks exactly these ids"
    )
    raise found.invalid("d2t", what, right, where=found.file)


def mapping_of(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The tensors d2t and t2d of a draft vocabulary with the target ids `ids` [Vd]."""
    member = torch.zeros(vocab_size, dtype=torch.bool)
    member[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": member}


def _maps(ids: Tensor, vocab_size: int, members: Tensor | None) -> bool:
    """Whether `ids` are distinct tokens of the vocabulary, and equal `members` if these are known."""
    order = ids.sort().values
    if not len(order) or int(order[0]) < 0 or int(order[-1]) >= vocab_size or bool((order.diff() == 0).any()):
        return False
    return members is None or torch.equal(order, members)
