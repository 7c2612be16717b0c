"""EAGLE-3 heads as published, in the form that vLLM, SGLang and the reference repository (SafeAILab/EAGLE) read.

Tensors without a prefix: fc, midlayer.*, norm, lm_head, d2t (int64 [Vd], **offset**: target id = i + d2t[i]), t2d (bool
[V]). `embed_tokens` is optional (engines share the target's). A full draft vocabulary has neither d2t nor t2d.

Feature layers. hidden_states[k] is the output of layer k − 1. Without a key, all readers tap [2], [n//2] and [n−3].
The key is `eagle_aux_hidden_state_layer_ids`: vLLM reads it at the top level as k, SGLang below `eagle_config` as
k − 1. Both collect the states in the order of the layers, and ignore the order of the list.

EAGLE-3.1. The norms are flags next to the other keys; `norm_before_fc` may stand below `eagle_config`. Their tensors
are `fc_norm.{i}` and `input_norm`. vLLM applies a window if `layer_types` says so, and the window includes the row
itself.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specctl.errors import CheckpointError
from specctl.families import MIN_SLIDING_WINDOW
from specctl.formats import llama, serving_commands
from specctl.formats.head import Deployment, Files, Head, Serving, TargetFacts
from specctl.formats.head_directory import HeadDirectory

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYERS = "eagle_aux_hidden_state_layer_ids"
NORMS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
WINDOW = "sliding_window"
SLIDING = llama.SLIDING
UNREAD = {"sglang": ("norm_before_residual", WINDOW), "eagle": (*NORMS, WINDOW)}
"""Options that a reader ignores silently, and would then draft with a different head."""
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
    unread = [key for key in UNREAD.get(to, ()) if head.architecture.get(key)]
    if unread:
        reader = serving_commands.VERSIONS.get(to, "the reference code")
        raise CheckpointError(
            f"the head has {' and '.join(unread)}, which {reader} ignores: its drafts would differ",
            hint="use --to vllm or --to speculators, or train with "
            + " ".join(f"drafter.{key}={'null' if key == WINDOW else 'false'}" for key in unread),
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
    return Files(config, without_full_mapping(head))


def window_keys(head: Head) -> dict[str, Any]:
    """The keys of a layer with a window; empty for a head without a window."""
    window = head.architecture.get(WINDOW)
    return {WINDOW: window, "use_sliding_window": True, "layer_types": [SLIDING]} if window else {}


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
        raise CheckpointError(
            f"the head taps hidden_states {taps}, which no engine can provide",
            hint=f"train with {count or 'some'} ascending layers in 1 … {facts.num_layers - 1} as drafter.taps",
        )


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
    if not all(0 <= tap < facts.num_layers for tap in taps) or list(taps) != sorted(set(taps)):
        right = f"must be ascending indices of hidden_states in 0 … {facts.num_layers - 1} of target {facts.name}"
        raise found.invalid(LAYERS, list(taps), right)
    options = _norms(found, config) | _window(found, llama.without_unused_window(found, config))
    shape = llama.read_config(found, config, facts, own=(*NORMS, "use_aux_norm", WINDOW, "layer_types")) | options
    head_vocab = config["vocab_size"]
    notes = llama.check_vocabulary(found, head_vocab, facts)
    renamed = {name.removeprefix("model.").replace("layers.0.", "midlayer."): t for name, t in found.tensors.items()}
    found = llama.without_copies(found.with_tensors(renamed), facts, {"embed_tokens.weight": facts.embedding})
    rows = llama.row_count(found, "lm_head.weight") or 0
    ids, more = draft_ids(found, rows, head_vocab)
    kept = ids < facts.vocab_size  # further rows are padding, which is never drafted
    found = found.without(("d2t", "t2d"))
    size, width = shape["hidden_size"], len(taps) * shape["hidden_size"]
    layer = llama.layer_shapes(shape, 2 * size) | {"hidden_norm.weight": (size,), "input_layernorm.weight": (size,)}
    tensors = llama.take_exactly(
        found,
        {
            "fc.weight": (size, width),
            **({f"fc_norm.{i}.weight": (size,) for i in range(len(taps))} if options.get("fc_norm") else {}),
            **({"input_norm.weight": (width,)} if options.get("norm_before_fc") else {}),
            **{f"midlayer.{name}": shape for name, shape in layer.items()},
            "norm.weight": (size,),
            "lm_head.weight": (rows, size),
        },
    )
    if not kept.all():
        tensors["lm_head.weight"], ids = tensors["lm_head.weight"][kept], ids[kept]
    tensors |= mapping_of(ids, facts.vocab_size)
    architecture = shape | {"draft_vocab_size": len(ids), "taps": list(taps)}
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


def _window(found: HeadDirectory, config: Mapping[str, Any]) -> dict[str, int]:
    """The window of the layer, if it has one. Engines decide by `layer_types`."""
    window, kinds = config.get(WINDOW), config.get("layer_types")
    if kinds is None and window is not None:
        raise found.invalid(
            WINDOW, window, f'must be null, or set layer_types to ["{SLIDING}"] too: engines read that key'
        )
    if kinds not in (None, [SLIDING]):
        raise found.invalid(
            "layer_types", kinds, f'must be ["{llama.FULL}"] or ["{SLIDING}"]: specctl\'s head has one layer'
        )
    if kinds != [SLIDING]:
        return {}
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
    said = found.config.get("draft_vocab_size") or rows
    if rows and said != rows:
        raise found.invalid(
            "draft_vocab_size", said, f"must be {rows}, the number of rows of lm_head.weight in {found.file.name}"
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
