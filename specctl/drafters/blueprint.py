"""Build a drafter's module safely from files that are not trusted.

config.json is validated by a schema. The module is first built on the `meta` device, without memory, and compared with
the weights; only then is it really built.

Error messages begin with the name of the file. A caller that knows the directory puts it in front (`prefix_errors`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from specctl.drafters.checkpoint import CONFIG, RECOPY_HINT, WEIGHTS
from specctl.errors import CheckpointError

MAX_BUFFER_BYTES = 1 << 30  # bytes of buffers that a module may compute for itself, in addition to its weights
RANDOM = ("kaiming_uniform_", "normal_", "uniform_")  # of torch, and of transformers in their place
SHOWN = 60  # characters of a value in a message

Count = Annotated[int, Field(strict=True, gt=0, le=1 << 10)]  # number of layers, heads or taps
Size = Annotated[int, Field(strict=True, gt=0, le=1 << 24)]  # hidden size or vocabulary size
Length = Annotated[int, Field(strict=True, gt=0, le=1 << 31)]  # in tokens
LayerIndex = Annotated[int, Field(strict=True, ge=0, le=1 << 10)]  # index of a layer
Token = Annotated[int, Field(strict=True, ge=0)]
Flag = Annotated[bool, Field(strict=True)]

Shape = TypeVar("Shape")
Made = TypeVar("Made")
Module = TypeVar("Module", bound=nn.Module)


def config_error(file: str, key: str, why: str) -> CheckpointError:
    """Build the error for a drafter with a wrong value for `key` in its `file`."""
    return CheckpointError(f"{file}: {key}: {why}", RECOPY_HINT)


@contextmanager
def prefix_errors(directory: Path) -> Iterator[None]:
    """Prefix the message of a CheckpointError raised inside the block with the directory."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{directory}/{error.message}", error.hint) from error


def read(shape: type[Shape], values: Any, place: str = "architecture") -> Shape:
    """Parse the value at `place` in config.json into the dataclass `shape`.

    Raises CheckpointError for the first key that is wrong, missing or unknown.
    """
    try:
        return TypeAdapter(shape).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, (place, *first["loc"])))
        why = first["msg"].removeprefix("Value error, ")
        given = "" if first["type"] in ("missing", "value_error") else f", got {shortened_repr(first['input'])}"
        raise config_error(CONFIG, key, why + given) from error


def build_with_weights(make: Callable[[], Module], tensors: Mapping[str, Tensor]) -> Module:
    """Build a module with `make` and load `tensors` as its state.

    `make` runs twice. The first run is on the `meta` device, where a matrix of any size costs nothing, and it stops
    once the module has more layers than `tensors` could fill. Neither run draws the random values of a new module: for
    a head of a billion weights that took seconds. Raises CheckpointError if tensor names, shapes or kinds of dtype
    differ.
    """
    with _NoRandomValues():
        outline = build_or_raise(lambda: _outline(make, len(tensors)))
        check_tensors(outline.state_dict(), tensors)
        beside = sum(buffer.nbytes for buffer in outline.buffers())
        if beside > MAX_BUFFER_BYTES + sum(tensor.nbytes for tensor in tensors.values()):
            raise config_error(
                CONFIG, "architecture", f"requires tables of {beside >> 20:,} MiB in addition to the weights"
            )
        module = build_or_raise(make)
    module.load_state_dict(dict(tensors))
    return module


def build_or_raise(make: Callable[[], Made]) -> Made:
    """Call `make`, which builds something from config.json, and turn any exception into a CheckpointError."""
    try:
        return make()
    except CheckpointError:
        raise
    except Exception as error:  # any exception that a model class raises for untested sizes
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise config_error(CONFIG, "architecture", f"describes a module that cannot be built ({reason})") from error


def check_tensors(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for the first tensor that is missing, unexpected, of a wrong shape or kind of dtype, or has
    values that are not finite."""
    for name, tensor in wanted.items():
        if name not in found:
            raise config_error(
                WEIGHTS, name, f"is missing, but {CONFIG} requires {list(tensor.shape)}: the files do not match"
            )
    for name, tensor in found.items():
        if name not in wanted:
            raise config_error(
                WEIGHTS,
                shortened_repr(name),
                f"is not part of the module that {CONFIG} describes: the files do not match",
            )
        if tensor.shape != wanted[name].shape:
            shapes = f"has shape {list(tensor.shape)}, but {CONFIG} requires {list(wanted[name].shape)}"
            raise config_error(WEIGHTS, name, f"{shapes}: the files do not match")
        if tensor.is_floating_point() != wanted[name].is_floating_point() or tensor.is_complex():
            raise config_error(WEIGHTS, name, f"has dtype {tensor.dtype}, but should have {wanted[name].dtype}")
        check_finite(name, tensor)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError if a tensor contains values that are not finite."""
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise config_error(WEIGHTS, name, "contains values that are not finite")


def shortened_repr(value: Any) -> str:
    """Format a value for a message: its repr, cut to SHOWN characters."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


class _NoRandomValues(TorchFunctionMode):
    """A context in which a new module draws no random weights: its parameters stay uninitialized."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", None) in RANDOM:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def _outline(make: Callable[[], Module], tensors: int) -> Module:
    with torch.device("meta"), _at_most(2 * tensors + 16, 64 * tensors + 256):
        return make()


@contextmanager
def _at_most(parameters: int, modules: int) -> Iterator[None]:
    """Raise CheckpointError once the block has created more parameters or submodules than allowed.

    A config.json may ask for a billion layers, which would take forever even on the `meta` device.
    """
    left = {"parameters": parameters, "modules": modules}

    def counter(kind: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            left[kind] -= 1
            if left[kind] < 0:
                raise config_error(
                    CONFIG, "architecture", f"requires more layers than {WEIGHTS} has: the files do not match"
                )

        return count

    handles = [
        register_module_parameter_registration_hook(counter("parameters")),
        register_module_module_registration_hook(counter("modules")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
