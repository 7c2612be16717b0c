"""Checks that a model's files hold exactly its tensors.

`transformers` initializes missing tensors at random, with a warning that few users see, and ignores tensors that the
model has no place for.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specctl import regular_files
from specctl.decoding.models.supported import quantisation, quiet
from specctl.errors import CheckpointError

ADAPTER = "adapter_config.json"
SHOWN = 3  # names listed in a message
REPORT = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Options of `from_pretrained` that make it report missing tensors, for `check_loaded`."""
KV_CACHE_SCALES = ("k_scale", "v_scale")  # scales of a quantized KV cache: the weights are complete without them


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

    Does nothing if the model has no such files on this machine, is quantized (quantizers need their packages), or
    cannot be built without weights. Loading then reports the error.
    """
    from transformers import AutoModelForCausalLM

    if directory is None or quantisation(config) is not None:
        return
    files = weight_files(directory)
    if not files or not all(file.is_file() and file.suffix == ".safetensors" for file in files):
        return
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory, device_map={"": torch.device("meta")}, **REPORT, trust_remote_code=False
            )
    except Exception:  # files and architectures can make `transformers` raise anything
        return
    check_loaded(what, *loaded)


def check_quantisation(what: str, config: Any) -> None:
    """Raise CheckpointError if `transformers` does not know the weights' `quant_method`: it would ignore the
    quantization."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    found = quantisation(config)
    if not isinstance(found, Mapping) or found.get("load_in_8bit") or found.get("load_in_4bit"):
        return
    method = found.get("quant_method")
    if method is not None and method not in AUTO_QUANTIZATION_CONFIG_MAPPING and method != "bitsandbytes":
        raise CheckpointError(
            f"{what}: config.json: quantization_config.quant_method is {method!r:.60}, which transformers cannot read",
            f"use weights that are not quantized, or one of {', '.join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))}",
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
