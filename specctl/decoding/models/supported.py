"""Requirements of speculative decoding on a target: its architecture, its sequence length, and files that hold exactly
the tensors of its model.

`transformers` initializes missing tensors at random, with a warning that few users see, and ignores tensors that the
model has no place for.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specctl import regular_files
from specctl.errors import CheckpointError, brief

DENSE = {"llama", "mistral", "qwen2", "qwen3"}
"""Model types of text models that the lean step may compute; their layers have no recurrent state."""
ATTENTION = {"full_attention", "sliding_attention"}
WITH_ENGINES = (
    "it works where an engine runs it: distill --server or --from-log, train-drafter --features-from, eval-server, "
    "export; specctl doctor --target lists the commands"
)
ALIBI = {"bloom", "mpt"}  # in addition to configurations with `alibi`
ADAPTER = "adapter_config.json"
SHOWN = 3  # names listed in a message
REPORT = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Options of `from_pretrained` that make it report missing tensors, for `check_loaded`."""
FP8 = "fp8"  # the `quant_method` of DeepSeek's and Qwen's fp8 checkpoints
KV_CACHE_SCALES = ("k_scale", "v_scale")  # scales of a quantized KV cache: the weights are complete without them


def unsupported_reason(config, model_class: type | None = None) -> str | None:
    """Reason why drafts cannot be verified on this architecture, or None if they can.

    A rejected draft must leave no trace, and tree nodes have positions that differ from their cache slots. Only
    attention over stored keys and values, with an arbitrary mask and explicit positions, supports this. If this table
    lets an unsuitable model through, `self_check.py` detects it on loading.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or [])
    # Granite 4 also has models of this class without recurrent layers.
    if getattr(model_class, "_is_stateful", False) and not (kinds and kinds <= ATTENTION):
        return "its layers keep a recurrent state, which cannot be rolled back after a rejected draft"
    other = sorted(kinds - ATTENTION)
    if other:
        return f"layers of type {', '.join(other)}: only full attention and sliding-window attention are supported"
    if text.model_type in ALIBI or getattr(text, "alibi", False):
        return "ALiBi attention biases, which depend on cache slots, but a draft tree needs positions"
    if "local" in (getattr(text, "attention_layers", None) or []):
        return "local attention layers, which depend on cache slots, but a draft tree needs positions"
    if getattr(text, "index_topk", None):
        return "sparse attention through an indexer that has a separate cache"
    return None


def engine_only_reason(config) -> str | None:
    """Reason why only an engine can run a target that `load_config` has read, or None if our own loop can, too."""
    if (quantized := quantisation(config)) is not None and (reason := _unreadable_reason(quantized)) is not None:
        return reason
    if config.model_type in DENSE:
        # without the mapping, which imports the models' code
        return unsupported_reason(config) or _unknown_rope_reason(config)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return "it is a vision-language or speech model, and specctl itself runs only text models"
    return unsupported_reason(config, model)


def quantisation(config: Any) -> Any:
    """The `quantization_config` of a model or of its text part, or None if it is not quantized."""
    parts = (config, config.get_text_config())
    return next((held for part in parts if (held := getattr(part, "quantization_config", None))), None)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress `transformers`' warnings about missing or unexpected tensors."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _unreadable_reason(quantized: Any) -> str | None:
    """Reason why `transformers` cannot read quantized weights on this machine: an unknown method, such as ModelOpt's,
    or a package that is not installed. Returns None if it can, or if the configuration is faulty, which loading
    reports."""
    import torch
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

    try:
        if not (quantized.get("load_in_8bit") or quantized.get("load_in_4bit")):  # old files of bitsandbytes
            method = quantized["quant_method"]
            if method != "bitsandbytes" and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
                return f"its quantization_config.quant_method is {method!r:.60}, which transformers cannot read"
        with quiet():
            quantizer = AutoHfQuantizer.from_config(quantized, pre_quantized=True)
            quantizer.validate_environment(device_map=None, weights_only=True, dtype=torch.bfloat16)
    except (ImportError, RuntimeError) as error:
        return f"its weights are quantized, and transformers cannot read them here: {brief(str(error))}"
    except Exception:  # a configuration can make a quantizer raise anything
        return None
    return None


def check_decodable(name: str, config: Any) -> None:
    """Raise CheckpointError if only an engine can run the target `name`."""
    reason = engine_only_reason(config)
    if reason is not None:
        raise unsupported_error(name, reason)


def unsupported_error(name: str, reason: str) -> CheckpointError:
    """Error for a target that `unsupported_reason` or a trial has rejected, where specctl itself would decode it."""
    return CheckpointError(f"target {name} cannot verify drafts: {reason}", WITH_ENGINES)


def ropes(config) -> dict[str, dict[str, Any]]:
    """RoPE parameters by `rope_type`: several entries if kinds of layers differ, no entry without RoPE."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {one.get("rope_type", "default"): one for one in nested or [parameters] if one}


def check_ropes(config) -> None:
    """Raise ValueError for a type of RoPE that is no name."""
    for kind in ropes(config):
        if not isinstance(kind, str):
            raise ValueError(f"rope_type is {kind!r:.60}, not a name such as 'default'")


def _unknown_rope_reason(config) -> str | None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    unknown = ropes(config.get_text_config()).keys() - ROPE_INIT_FUNCTIONS.keys() - {"default"}
    return f"RoPE of type {brief(', '.join(sorted(unknown)))}, which transformers does not have" if unknown else None


def context_limit(config) -> int | None:
    """Longest sequence that can be decoded, or None if the configuration names no limit.

    LongRoPE changes the frequencies of *every* position once a sequence outgrows the original context. Cached keys
    would then have wrong frequencies, and a draft that crosses the limit would change the text. Sequences therefore end
    at the original context.
    """
    limit = getattr(config, "max_position_embeddings", None) or None
    longrope = ropes(config).get("longrope")
    if longrope is None:
        return limit
    original = longrope["original_max_position_embeddings"]
    return min(limit or original, original)


def window_size(config) -> int | None:
    """Window of the sliding-window layers, or None if every layer attends to all positions."""
    kinds = getattr(config, "layer_types", None)
    if not getattr(config, "use_sliding_window", True) or (kinds and "sliding_attention" not in kinds):
        return None
    return getattr(config, "sliding_window", None)


def value_of_all_layers(config: Any, name: str, default: int | None) -> int | None:
    """One value for all layers: `default` if the configuration names none, or None if layers differ."""
    try:
        value = getattr(config, name, None) or default
    except RuntimeError:  # transformers raises this if layers differ
        return None
    if not isinstance(value, list):
        return value
    return value[0] if len(set(value)) == 1 else None


def weight_files(directory: Path) -> list[Path]:
    """Files that `transformers` reads a model's weights from, in name order."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index, single = directory / f"{stem}.{suffix}.index.json", directory / f"{stem}.{suffix}"
        if single.is_file():
            return [single]
        if index.is_file():
            return sorted(directory / name for name in set(regular_files.read_json(index)["weight_map"].values()))
    return []


def check_adapter(what: str, directory: Path | None) -> None:
    """Raise CheckpointError if a PEFT adapter lies next to a model's weights. `transformers` would apply it; other
    readers of the weights would not.

    Args:
        what: name of the model for messages, such as "target builtin".
        directory: the model's directory, or None if it is not on this machine.
    """
    if directory is not None and (directory / ADAPTER).is_file():
        raise _adapted(what)


def check_loaded(what: str, model: Any, info: Mapping[str, Any]) -> None:
    """Raise CheckpointError if `transformers` has not found all weights of `model`, or has applied an adapter.

    Args:
        what: name of the model for messages.
        info: report of `from_pretrained` with `REPORT`. Tied matrices and computed buffers do not count as missing.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise _adapted(what)
    found = _misfit(model, info)
    if found is not None:
        problem, hint = found
        raise CheckpointError(f"{what}: {problem}", hint)


def check_headers(what: str, directory: Path | None, config: Any) -> None:
    """Run `check_loaded` on the headers of a causal LM's safetensors files, before any weight is read.

    Does nothing if the model has no such files on this machine, or cannot be built without weights. Loading then
    reports the error. Of a quantized model (quantizers need their packages) only the scales of fp8 are checked.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if directory is None:
        return
    files = weight_files(directory)
    if not files or not all(file.is_file() and file.suffix == ".safetensors" for file in files):
        return
    if (quantized := quantisation(config)) is not None:
        if quantized.get("quant_method") == FP8:
            _check_scales(what, files)
        return
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory, device_map={"": torch.device("meta")}, **REPORT, trust_remote_code=False
            )
    except Exception:  # files and architectures can make `transformers` raise anything
        return
    check_loaded(what, *loaded)


def _check_scales(what: str, files: list[Path]) -> None:
    """Raise CheckpointError unless every fp8 weight has its scale. `transformers` would multiply by the bare codes."""
    from safetensors import safe_open

    kinds: dict[str, str] = {}
    for file in files:
        regular_files.check(file)
        with safe_open(file, "pt") as held:
            kinds |= {name: held.get_slice(name).get_dtype() for name in list(held.keys())}
    bare = sorted(one for one, kind in kinds.items() if kind.startswith("F8") and f"{one}_scale_inv" not in kinds)
    if bare:
        raise CheckpointError(
            f"{what}: its files have no scales (…_scale_inv) of the fp8 weights {_some(bare)}",
            "copy the weights again; if they were never scaled, delete quantization_config from config.json; engines "
            "may read scales of other names",
        )


def _misfit(model: Any, info: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first fault among the tensors of the files, and a hint how to fix it (None if there is no fault)."""
    missing = sorted(info["missing_keys"])
    unexpected = sorted(info["unexpected_keys"])
    if missing:
        problem = f"its files lack {_some(missing)}, which config.json requires"
        ends = {name: held for held in unexpected for name in missing if held.endswith(f".{name}")}
        if ends:
            name, held = next(iter(ends.items()))
            wrapped = "save the inner model (peft: merge_and_unload) without its wrapper"
            return f"{problem}, but have such tensors under the prefix {held.removesuffix(name)!r}", wrapped
        if any("lora_" in held or ".base_layer." in held for held in unexpected):
            return problem, "merge the adapter into the weights first (peft: merge_and_unload) and save those"
        return problem, "copy the weights again, or the config.json that belongs to them"
    if info["mismatched_keys"]:
        name, held, wanted = sorted(info["mismatched_keys"])[0]
        problem = f"{name} has shape {list(held)} in its files, but config.json requires {list(wanted)}"
        return problem, "copy the weights again, or the config.json that belongs to them"
    if quantisation(model.config) is not None:
        return None
    start = f"{model.base_model_prefix}."  # the prefix may be present in the files, in the model, in both or in neither
    names = {name.removeprefix(start) for name in model.state_dict()}
    owned = {one: f"{one.removeprefix(start).rpartition('.')[0]}.weight" for one in unexpected}
    strangers = [one for one, weight in owned.items() if weight in names and not one.endswith(KV_CACHE_SCALES)]
    if strangers:
        problem = f"its files contain {_some(strangers)}, which a model with this config.json does not have"
        return (
            problem,
            "copy the config.json that belongs to the weights (this one lacks a bias or quantization_config)",
        )
    return None


def _some(names: list[str]) -> str:
    """The first names of a list, and the number of the remaining ones."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _adapted(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what}: a PEFT adapter ({ADAPTER}) is in the directory of its weights",
        "move its files to a directory of their own and name that with --target-adapter; if the weights already "
        f"contain it, delete {ADAPTER}",
    )
