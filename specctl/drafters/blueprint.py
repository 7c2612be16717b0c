"""From the files of a drafter to its module. Both are somebody's data until they have passed here: config.json is read
by a schema, the module is drawn without memory and compared with the weights, and only then built.

Messages begin with the name of the file; whoever knows its directory puts that before them.
"""

from __future__ import annotations

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

from specctl.drafters.checkpoint import AGAIN, CONFIG, WEIGHTS
from specctl.errors import CheckpointError

TABLES = 1 << 30  # bytes of what a module computes for itself, beside its weights
SHOWN = 60  # characters of a value in a message

Count = Annotated[int, Field(strict=True, gt=0, le=1 << 10)]  # of layers, heads, taps
Size = Annotated[int, Field(strict=True, gt=0, le=1 << 24)]  # of states and vocabularies
Length = Annotated[int, Field(strict=True, gt=0, le=1 << 31)]  # in tokens
Place = Annotated[int, Field(strict=True, ge=0, le=1 << 10)]  # among layers

Shape = TypeVar("Shape")
Made = TypeVar("Made")
Module = TypeVar("Module", bound=nn.Module)


def misfit(file: str, key: str, why: str) -> CheckpointError:
    """The error for a drafter whose `file` is wrong at `key`."""
    return CheckpointError(f"{file}: {key}: {why}", AGAIN)


@contextmanager
def located(directory: Path) -> Iterator[None]:
    """Put the directory before the name of a file with which a CheckpointError from within begins."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{directory}/{error.message}", error.hint) from error


def read(shape: type[Shape], values: Any, place: str = "architecture") -> Shape:
    """The dataclass `shape` from what config.json holds at `place`. CheckpointError names the first key that is wrong,
    missing, or one too many."""
    try:
        return TypeAdapter(shape).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, (place, *first["loc"])))
        why = first["msg"].removeprefix("Value error, ")
        given = "" if first["type"] in ("missing", "value_error") else f", it is {shown(first['input'])}"
        raise misfit(CONFIG, key, why + given) from error


def filled(make: Callable[[], Module], tensors: Mapping[str, Tensor]) -> Module:
    """The module that `make` makes, with `tensors` as its state.

    `make` runs twice: first on `meta`, where a matrix of any size costs nothing, and only so far as there can be
    weights for what it makes. Raises CheckpointError where names, shapes or kinds of numbers differ.
    """
    outline = guarded(lambda: _outline(make, len(tensors)))
    compare(outline.state_dict(), tensors)
    beside = sum(buffer.nbytes for buffer in outline.buffers())
    if beside > TABLES + sum(tensor.nbytes for tensor in tensors.values()):
        raise misfit(CONFIG, "architecture", f"calls for tables of {beside >> 20:,} MiB beside the weights")
    module = guarded(make)
    module.load_state_dict(dict(tensors))
    return module


def guarded(make: Callable[[], Made]) -> Made:
    """The result of `make`, which follows config.json. CheckpointError for whatever goes wrong in it."""
    try:
        return make()
    except CheckpointError:
        raise
    except Exception as error:  # whatever the code of an architecture raises at sizes that nobody has tried
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise misfit(CONFIG, "architecture", f"describes nothing that can be made ({said})") from error


def compare(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for the first tensor that is missing, too many, of another shape or kind of number."""
    for name, tensor in wanted.items():
        if name not in found:
            raise misfit(WEIGHTS, name, f"is missing, {CONFIG} calls for {list(tensor.shape)}: they do not fit")
    for name, tensor in found.items():
        if name not in wanted:
            raise misfit(WEIGHTS, shown(name), f"has no place in what {CONFIG} describes: they do not fit")
        if tensor.shape != wanted[name].shape:
            shapes = f"has shape {list(tensor.shape)}, {CONFIG} calls for {list(wanted[name].shape)}"
            raise misfit(WEIGHTS, name, f"{shapes}: they do not fit")
        if tensor.is_floating_point() != wanted[name].is_floating_point() or tensor.is_complex():
            raise misfit(WEIGHTS, name, f"holds {tensor.dtype}, it should hold {wanted[name].dtype}")


def shown(value: Any) -> str:
    """A value as it stands in a message: on one line, and no longer than one."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _outline(make: Callable[[], Module], tensors: int) -> Module:
    with torch.device("meta"), _at_most(2 * tensors + 16, 64 * tensors + 256):
        return make()


@contextmanager
def _at_most(parameters: int, modules: int) -> Iterator[None]:
    """Stop by CheckpointError whatever makes more parameters or parts of modules than this within: a billion layers
    take for ever on `meta`, too."""
    left = {"parameters": parameters, "modules": modules}

    def counter(kind: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            left[kind] -= 1
            if left[kind] < 0:
                raise misfit(CONFIG, "architecture", f"calls for more layers than {WEIGHTS} has: they do not fit")

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
