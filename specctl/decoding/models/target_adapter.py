"""A LoRA adapter of a target: a directory that peft has written. Loading merges it into the target's weights.

The merge is peft's own, so DoRA, rank-stabilized LoRA, ranks by layer and modules that were trained as a whole are
included. All code after it sees ordinary weights.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from specctl import regular_files
from specctl.decoding.models.loading import first_line
from specctl.decoding.models.supported import ADAPTER, quantisation
from specctl.errors import CheckpointError, near_path

WEIGHTS = "adapter_model.safetensors"
NAME = "default"  # peft's name of a model's only adapter
COPY = "copy the files again"
WRONG_SHAPE = re.compile(r"size mismatch for (\S+): [^[]*\[(.*?)\][^[]*\[(.*?)\]")  # in torch's message


def files(adapter: str) -> list[Path]:
    """The files of an adapter. CheckpointError if it is no directory of a LoRA adapter with safetensors weights."""
    directory = Path(adapter).expanduser()
    if not directory.is_dir():
        hint = f"{near_path(adapter)}give a local directory; for one on the hub: hf download ID --local-dir DIR"
        raise CheckpointError(f"adapter directory {adapter} {regular_files.directory_fault(directory)}", hint)
    if not (directory / ADAPTER).is_file():
        hint = "give a directory that peft's save_pretrained has written"
        raise CheckpointError(f"{adapter} is not an adapter directory: it has no {ADAPTER}", hint)
    if not (directory / WEIGHTS).is_file():
        hint = "load the adapter with peft, and save it with save_pretrained"
        raise CheckpointError(f"adapter {adapter} has no {WEIGHTS}", hint)
    try:
        config = regular_files.read_json(directory / ADAPTER)
        kind = config["peft_type"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"adapter {adapter}: {ADAPTER} cannot be read: {first_line(error)}", COPY) from error
    if kind != "LORA":
        hint = "use a LoRA adapter, such as one with DoRA or rank-stabilized LoRA; or merge it yourself"
        raise CheckpointError(f"adapter {adapter} is of peft type {kind!r:.60}, not 'LORA'", hint)
    if config.get("layer_replication"):
        hint = "save the target with the adapter merged, and give it as the target"
        raise CheckpointError(f"adapter {adapter} repeats layers of the target (layer_replication)", hint)
    return [directory / ADAPTER, directory / WEIGHTS]


def shapes(adapter: str) -> dict[str, tuple[int, ...]]:
    """Shapes of an adapter's tensors by peft's names, from the header of its file. CheckpointError as `files`."""
    path = files(adapter)[1]
    with _errors(adapter):
        regular_files.check(path)
        with safe_open(path, "pt") as held:
            return {name: tuple(held.get_slice(name).get_shape()) for name in held.keys()}  # noqa: SIM118


def check(adapter: str, target: str, config: Any, *, trust_remote_code: bool = False) -> None:
    """Check an adapter against the configuration of the target named `target`, without reading weights.

    Raises CheckpointError: it is no LoRA adapter, it does not fit the target, or the target is quantized.
    """
    from specctl.decoding.models.ends import model_on_meta

    if quantisation(config) is not None:
        raise CheckpointError(
            f"target {target} is quantized, so that adapter {adapter} cannot be merged into its weights",
            "use weights that are not quantized, or a GGUF file",
        )
    held = {name: torch.empty(shape, device="meta") for name, shape in shapes(adapter).items()}
    with _errors(adapter, target):
        model = model_on_meta(config, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            _wrapped(model, adapter, held, init_lora_weights=False).merge_and_unload()


LAYERLESS = "which is loaded without its layers", "load the whole target with features.whole_target=true"


def check_outside(adapter: str, target: str, reason: tuple[str, str] = LAYERLESS) -> None:
    """Raise CheckpointError if an adapter changes parts of the target `target` that are outside of its layers. `reason`
    is the end of the message, and the hint."""
    found = next((name for name in shapes(adapter) if not any(map(str.isdigit, name.split(".")))), None)
    if found is not None:
        raise CheckpointError(
            f"adapter {adapter} changes {_module(found)} of target {target}, {reason[0]}",
            reason[1],
        )


def merge(model: Any, adapter: str, target: str) -> Any:
    """Merge an adapter into a `transformers` model, in place, and return it. The result equals the result of peft's
    `merge_and_unload`. CheckpointError if the adapter does not fit the target named `target`, or is damaged."""
    path = files(adapter)[1]
    with _errors(adapter, target):
        regular_files.check(path)
        held = load_file(path)
        if not all(tensor.isfinite().all() for tensor in held.values()):
            raise CheckpointError(f"{WEIGHTS} contains values that are not finite", COPY)
        return _wrapped(model, adapter, held).merge_and_unload()  # safe_merge=True would round twice in bf16


def _wrapped(model: Any, adapter: str, held: Mapping[str, Tensor], **changes: Any) -> Any:
    """The peft model with an adapter's tensors `held`. CheckpointError if it has no place for one, or lacks one."""
    import peft

    config = peft.PeftConfig.from_pretrained(str(Path(adapter).expanduser()))
    config.inference_mode = True
    scales = [config.lora_alpha, *config.alpha_pattern.values()]
    if not all(isinstance(one, int | float) and math.isfinite(one) for one in scales):
        raise CheckpointError(f"{ADAPTER}: lora_alpha or alpha_pattern is no finite number", COPY)
    for key, value in changes.items():
        setattr(config, key, value)
    wrapped = peft.PeftModel(model, config, NAME)
    result: Any = peft.set_peft_model_state_dict(wrapped, dict(held), NAME)
    if result.unexpected_keys:
        module = _module(result.unexpected_keys[0])
        raise CheckpointError(f"it changes {module}, but the target has none, or {ADAPTER} does not name it")
    own = dict(wrapped.named_parameters())  # each once: a tied head's are the embedding's
    missing = [name for name in result.missing_keys if f".{NAME}" in name and name in own]
    if missing:
        raise CheckpointError(f"{WEIGHTS} lacks the weights of {_module(missing[0])}")
    return wrapped


def _module(name: str) -> str:
    """Name of the target's module that a tensor of peft changes."""
    own = re.split(r"\.(?:lora_|modules_to_save|token_adapter|base_layer)", name.removeprefix("base_model.model."))[0]
    return own.removesuffix(".weight")


@contextmanager
def _errors(adapter: str, target: str | None = None) -> Iterator[None]:
    """Turn any exception of peft or safetensors into a CheckpointError of one line."""
    fits = f"adapter {adapter}" + (f" does not fit target {target}" if target is not None else "")
    try:
        with warnings.catch_warnings(action="ignore"):  # such as about matrices that are checked here
            yield
    except CheckpointError as error:
        raise CheckpointError(f"{fits}: {error.message}", error.hint or "name the base of the adapter") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"adapter {adapter}: {WEIGHTS} cannot be read: {first_line(error)}", COPY) from error
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # files can make peft raise anything
        problem, shape = first_line(error), WRONG_SHAPE.search(str(error))
        if shape is not None:
            problem = f"its {_module(shape[1])} has a matrix of shape [{shape[2]}], but the target needs [{shape[3]}]"
        raise CheckpointError(f"{fits}: {problem}", "name the base of the adapter with --target") from error
