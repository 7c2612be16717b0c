"""Decoding kernels: layers, random numbers, rows, sampling, acceptance. Only this module selects a backend.

`reference` is the specification and has the documentation; every backend has the same signatures. A tensor on a CPU
goes to `cpu`. A tensor on a CUDA device goes to `triton` if Triton is installed and agrees with the reference there
(`self_check`), otherwise to `reference`. The environment variable SPECCTL_KERNELS=reference|cpu|triton overrides this.
Triton reads CPU tensors only in its interpreter (TRITON_INTERPRET=1); without it they go to `cpu`.
"""

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

import torch

from . import reference
from .paging import PAGE as PAGE
from .paging import gather_pages as gather_pages
from .paging import slots_of as slots_of
from .reference import Ancestry as Ancestry
from .reference import DrafterFeedback as DrafterFeedback
from .rows import GREEDY_BELOW as GREEDY_BELOW
from .rows import DraftRows as DraftRows
from .rows import Rows as Rows
from .rows import as_rows as as_rows
from .rows import nan_count as nan_count
from .rows import probabilities as probabilities
from .rows import token_probability as token_probability

BACKENDS = {"reference": ".reference", "cpu": ".cpu", "triton": ".triton_backend"}  # imported on first use
TRITON = importlib.util.find_spec("triton") is not None  # found, not imported
DEFAULTS = {"cpu": "cpu"} | ({"cuda": "triton"} if TRITON else {})  # device type → name; others use the reference

F = TypeVar("F", bound=Callable[..., Any])


def backend(device_type: str) -> str:
    """Name of the backend for tensors on `device_type` ("cpu", "cuda", …).

    Raises ValueError if SPECCTL_KERNELS names no backend, and ImportError if it names Triton, which is not installed.
    """
    name = os.environ.get("SPECCTL_KERNELS") or DEFAULTS.get(device_type, "reference")
    if name not in BACKENDS:
        raise ValueError(f"SPECCTL_KERNELS={name!r} is not a kernel backend; valid: {', '.join(BACKENDS)}")
    if name == "triton":
        if not TRITON:
            raise ImportError("SPECCTL_KERNELS=triton, but Triton is not installed: pip install 'triton>=3.2'")
        if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "cpu"
    return name


@functools.cache
def checked_backend(name: str, device: torch.device) -> str:
    """`name`, or "reference" with a warning if that backend fails on `device`."""
    from . import self_check

    current = torch.cuda.device(device if device.type == "cuda" else -1)  # Triton launches on the current device
    with current, torch.autocast(device.type, enabled=False):  # autocast of training would round the reference
        reason = self_check.mismatch(_module(name), device)
    if reason is None:
        return name
    warnings.warn(f"kernels on {device} run in plain PyTorch: {name}: {reason}", stacklevel=2)
    return "reference"


def select_backend(device: torch.device) -> str:
    """Name of the backend for `device`. Triton is tested once before its first use."""
    name = backend(device.type)
    if name == "triton" and "SPECCTL_KERNELS" not in os.environ:  # a user who names Triton sees its errors
        name = checked_backend(name, device)
    return name


def _dispatched(specification: F) -> F:
    @functools.wraps(specification)
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        device = first.device
        kernel = getattr(_module(select_backend(device)), specification.__name__)
        if device.type != "cuda":
            return kernel(first, *args, **kwargs)
        with torch.cuda.device(device):  # Triton launches on the current device
            return kernel(first, *args, **kwargs)

    return cast(F, call)


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(BACKENDS[name], __name__)


argmax = _dispatched(reference.argmax)
attention = _dispatched(reference.attention)
add_rms_norm = _dispatched(reference.add_rms_norm)
rope_and_cache = _dispatched(reference.rope_and_cache)
silu_and_mul = _dispatched(reference.silu_and_mul)
span_attention = _dispatched(reference.span_attention)
span_attention_backward = _dispatched(reference.span_attention_backward)
uniform = _dispatched(reference.uniform)
row_params = _dispatched(reference.row_params)
sample_rows = _dispatched(reference.sample_rows)
walk_tree = _dispatched(reference.walk_tree)
sample_tree = _dispatched(reference.sample_tree)
accept_chain = _dispatched(reference.accept_chain)
expand_topk = _dispatched(reference.expand_topk)
finite_rows = _dispatched(reference.finite_rows)
drafter_feedback = _dispatched(reference.drafter_feedback)
distill_rows = _dispatched(reference.distill_rows)
