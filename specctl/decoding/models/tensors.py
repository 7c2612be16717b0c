"""Are the tensors of a model in its files? `transformers` draws those that are missing at random, with a warning that
few see, and reads past those that it has no place for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from specctl.errors import CheckpointError

ADAPTER = "adapter_config.json"
SHOWN = 3  # names in a message
REPORT = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Options of `from_pretrained` that make it say what it has not found, for `check_loaded`."""
OF_CACHES = ("k_scale", "v_scale")  # scales of a quantised KV cache: the weights are whole without them


def weight_files(directory: Path) -> list[Path]:
    """The files that `transformers` reads a model's weights from, in name order."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index, single = directory / f"{stem}.{suffix}.index.json", directory / f"{stem}.{suffix}"
        if single.is_file():
            return [single]
        if index.is_file():
            return sorted(directory / name for name in set(json.loads(index.read_text())["weight_map"].values()))
    return []


def check_adapter(what: str, directory: Path | None) -> None:
    """Raise CheckpointError where a PEFT adapter lies beside the weights of a model: `transformers` would apply it, and
    whoever reads the weights would not.

    Args:
        what: the model in messages, such as "target builtin".
        directory: of the model; None where it is not on this machine.
    """
    if directory is not None and (directory / ADAPTER).is_file():
        raise _adapted(what)


def check_loaded(what: str, model: Any, info: Mapping[str, Any]) -> None:
    """Raise CheckpointError where `transformers` has not found all weights of `model`, or has applied an adapter.

    Args:
        what: the model in messages.
        info: what `from_pretrained` says with `REPORT`. Tied matrices and buffers that are computed are not missing.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise _adapted(what)
    found = _misfit(model, info)
    if found is not None:
        said, hint = found
        raise CheckpointError(f"{what}: {said}", hint)


def check_headers(what: str, directory: Path | None, config: Any) -> None:
    """As `check_loaded`, by the headers of the safetensors files of a causal LM of this `config`; no weight is read.

    Does nothing where the model has no such files on this machine, is quantised (quantisers need their packages), or
    cannot be laid out without weights: loading it then says what is wrong.
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
    except Exception:  # whatever a file or an architecture makes `transformers` raise
        return
    check_loaded(what, *loaded)


def check_quantisation(what: str, config: Any) -> None:
    """Raise CheckpointError for weights of a `quant_method` that `transformers` does not know: it would skip them."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    found = quantisation(config)
    if not isinstance(found, Mapping) or found.get("load_in_8bit") or found.get("load_in_4bit"):
        return
    method = found.get("quant_method")
    if method is not None and method not in AUTO_QUANTIZATION_CONFIG_MAPPING and method != "bitsandbytes":
        raise CheckpointError(
            f"{what}: config.json: quantization_config.quant_method is {method!r:.60}, which transformers cannot read",
            f"take weights that are not quantised, or one of {', '.join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))}",
        )


def quantisation(config: Any) -> Any:
    """The `quantization_config` of a model or of its text part; None where it is not quantised."""
    parts = (config, config.get_text_config())
    return next((held for part in parts if (held := getattr(part, "quantization_config", None))), None)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep `transformers` from warning of what is missing, or too much, in a model's files."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _misfit(model: Any, info: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first fault of the tensors that were found, and what would help; None where there is none."""
    missing = sorted(info["missing_keys"])
    unexpected = sorted(info["unexpected_keys"])
    if missing:
        said = f"its files lack {_some(missing)} of config.json"
        ends = {name: held for held in unexpected for name in missing if held.endswith(f".{name}")}
        if ends:
            name, held = next(iter(ends.items()))
            wrapped = "save the model itself (peft: merge_and_unload) without what was wrapped around it"
            return f"{said}, and hold them under the prefix {held.removesuffix(name)!r}", wrapped
        if any("lora_" in held or ".base_layer." in held for held in unexpected):
            return said, "merge the adapter into the weights first (peft: merge_and_unload) and save those"
        return said, "copy the weights again, or the config.json that belongs to them"
    if info["mismatched_keys"]:
        name, held, wanted = sorted(info["mismatched_keys"])[0]
        said = f"{name} is {list(held)} in its files, {list(wanted)} by config.json"
        return said, "copy the weights again, or the config.json that belongs to them"
    if quantisation(model.config) is not None:
        return None
    start = f"{model.base_model_prefix}."  # which files have, or not, for models that have it, or not
    names = {name.removeprefix(start) for name in model.state_dict()}
    owned = {one: f"{one.removeprefix(start).rpartition('.')[0]}.weight" for one in unexpected}
    beside = [one for one, weight in owned.items() if weight in names and not one.endswith(OF_CACHES)]
    if beside:
        said = f"its files hold {_some(beside)}, which a model of this config.json has no place for"
        return (
            said,
            "copy the config.json that belongs to the weights (a bias, or quantization_config, is missing in it)",
        )
    return None


def _some(names: list[str]) -> str:
    """The first names of several, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _adapted(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what}: a PEFT adapter ({ADAPTER}) lies beside its weights",
        "merge it first (peft: merge_and_unload, then save_pretrained into another directory); where the weights "
        f"hold it already, delete {ADAPTER}",
    )
