"""Windows and causal layers of block-parallel heads, in the keys of published configurations.

Engines decide by layer. A layer whose type is `sliding_attention` has the window `sliding_window`, which includes the
row's own position. vLLM 0.32 makes all layers causal, or none, as `is_causal` says, else `dflash_config.causal`;
without both keys the layers with a window are causal. SGLang 0.5.23 reads `is_causal` and the types only. llama.cpp
has one flag for all layers.
"""

from collections.abc import Mapping
from typing import Any

from specctl.errors import CheckpointError
from specctl.families import FULL, MIN_SLIDING_WINDOW, SLIDING
from specctl.formats.head_directory import HeadDirectory

WINDOW, TYPES, CAUSAL = "sliding_window", "layer_types", "is_causal"
LATE = 28  # default of `max_window_layers` in configurations of Qwen3
IGNORED = "SGLang ignores {}, so it drafts otherwise with this directory: export it again with --to sglang"
WINDOWS_DIFFER = (
    "vLLM, and so the head here, counts a window from each slot's own position; the package shows all slots of a block "
    "the last tokens before the block"
)


def kinds(architecture: Mapping[str, Any]) -> list[str]:
    """The type of each layer of a head."""
    return list(architecture.get(TYPES) or [FULL] * architecture["num_layers"])


def causal_layers(architecture: Mapping[str, Any]) -> list[bool]:
    """For each layer of a head, whether rows of a block attend only to rows up to themselves."""
    declared = architecture.get(CAUSAL)
    return [kind == SLIDING if declared is None else declared for kind in kinds(architecture)]


def keys(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration that both vLLM and SGLang read."""
    window, declared = architecture.get(WINDOW), architecture.get(CAUSAL)
    attention = {TYPES: kinds(architecture), "use_sliding_window": window is not None, WINDOW: window}
    return attention if declared is None else attention | {CAUSAL: declared}


def nested_causal(architecture: Mapping[str, Any]) -> dict[str, bool]:
    """The key in `dflash_config`, which older versions of vLLM read; empty if only layers with a window are causal."""
    causal = set(causal_layers(architecture))
    implied = architecture.get(CAUSAL) is None and architecture.get(WINDOW) is not None
    return {} if implied else {"causal": causal.pop()}


def read(found: HeadDirectory, config: Mapping[str, Any], layers: int, block_size: int) -> dict[str, Any]:
    """Fields of a `BlockConfig`, as vLLM resolves the keys; empty for full attention without a causal mask.

    `config` has the keys of `dflash_config` at its top level, too. Raises CheckpointError if the keys are incomplete or
    contradictory.
    """
    types = _types(found, config, layers)
    causal = [kind == SLIDING for kind in types]
    for key in ("causal", CAUSAL):  # the last one wins
        declared = config.get(key)
        if declared not in (None, True, False):
            raise found.invalid(key, declared, "must be true or false")
        causal = causal if declared is None else [bool(declared)] * layers
    if config.get("use_swa") and SLIDING not in types:
        types = [SLIDING] * layers
    fields: dict[str, Any] = {}
    if SLIDING in types:
        size = config.get("swa_window_size")
        window, least = config.get(WINDOW) if size is None else size, max(MIN_SLIDING_WINDOW, block_size + 1)
        if type(window) is not int or window < least:
            raise found.invalid(WINDOW, window, f"must be a number of tokens, at least {least}")
        fields = {WINDOW: window, TYPES: types}
    return fields if causal == [kind == SLIDING for kind in types] else fields | {CAUSAL: causal[0]}


def _types(found: HeadDirectory, config: Mapping[str, Any], layers: int) -> list[str]:
    types, on = config.get(TYPES), config.get("use_sliding_window")
    if types is None:
        late = config.get("max_window_layers")
        first = (LATE if type(late) is not int else late) if on else layers
        return [SLIDING if layer >= first else FULL for layer in range(layers)]
    if not isinstance(types, list) or len(types) < layers or not {*map(str, types)} <= {SLIDING, FULL}:
        raise found.invalid(TYPES, types, f"must be {SLIDING} or {FULL} for each of the {layers} layers")
    types = types[:layers]
    if on is False and SLIDING in types:
        raise found.invalid("use_sliding_window", False, f"must be true, or remove {SLIDING} from {TYPES}")
    return types


def sglang_notes(config: Mapping[str, Any], architecture: Mapping[str, Any]) -> list[str]:
    """Note about keys that only vLLM reads, if SGLang drafts otherwise without them."""
    declared, forced = config.get(CAUSAL), config.get("use_swa") and SLIDING not in (config.get(TYPES) or ())
    types = [FULL] * architecture["num_layers"] if forced else kinds(architecture)
    causal = [kind == SLIDING if declared is None else declared for kind in types]
    wrong = ["dflash_config.use_swa"] if types != kinds(architecture) else []
    if config.get("causal") is not None and causal != causal_layers(architecture):
        wrong.append("dflash_config.causal")
    return [IGNORED.format(" and ".join(wrong))] if wrong else []


def causal_windows(architecture: Mapping[str, Any], alike: bool = False) -> bool:
    """Whether the layers with a window are causal; if no layer has one, whether all layers are.

    With `alike`, the engine has one causal flag for all layers. Raises CheckpointError if the layers then differ.
    """
    types, causal = kinds(architecture), causal_layers(architecture)
    if alike and len({*causal}) > 1:
        raise CheckpointError(
            "only some layers of the head are causal, but this format's engine has one causal flag for all layers",
            hint="use --to vllm, or train with drafter.is_causal=true or false",
        )
    return causal[types.index(SLIDING) if SLIDING in types else 0]


def package_notes(architecture: Mapping[str, Any], non_causal: bool | None) -> list[str]:
    """Notes about drafts of vLLM, and so of the head here, that differ from the forward of the package `speculators`.

    `non_causal`: the head's `sliding_window_non_causal`.
    """
    types, causal = kinds(architecture), causal_layers(architecture)
    notes = [WINDOWS_DIFFER] if SLIDING in types else []
    theirs = [kind == SLIDING and not non_causal for kind in types]
    wrong = [str(layer) for layer, pair in enumerate(zip(causal, theirs, strict=True)) if pair[0] != pair[1]]
    if wrong:
        how = "with" if causal[int(wrong[0])] else "without"
        where = f"layer{'s' * (len(wrong) > 1)} {', '.join(wrong)}"
        notes.append(f"vLLM 0.32 runs {where} {how} a causal mask, but the package does not")
    return notes
