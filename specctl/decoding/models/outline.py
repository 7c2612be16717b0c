"""Build modules without drawing the random weights of a new model: on the meta device, or to load weights next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

RANDOM = ("kaiming_uniform_", "normal_", "uniform_")  # of torch, and of transformers in their place


class NoRandomValues(TorchFunctionMode):
    """A context in which new modules leave the weights as they are that they would draw at random."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", None) in RANDOM:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """A context in which new modules have shapes and no memory."""
    with torch.device("meta"), NoRandomValues():
        yield
