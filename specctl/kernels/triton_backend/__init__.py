"""Triton kernels for GPUs. `reference` documents the functions. They never synchronize with the host.

These kernels also run on a CPU in Triton's interpreter (TRITON_INTERPRET=1 before the import), where the tests compare
them with the reference. They use no libdevice and no autotuning.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from .. import reference
from . import attention as attending
from . import distill, expand, layers, rows, spans, verify
from . import drafter_feedback as feedback

__all__ = [
    "accept_chain",
    "add_rms_norm",
    "argmax",
    "attention",
    "distill_rows",
    "drafter_feedback",
    "expand_topk",
    "finite_rows",
    "rope_and_cache",
    "row_params",
    "sample_rows",
    "sample_tree",
    "silu_and_mul",
    "span_attention",
    "span_attention_backward",
    "uniform",
    "walk_tree",
]

F = TypeVar("F", bound=Callable[..., Any])


def _on_its_device(function: F) -> F:
    """Launch on the device of the first argument: Triton would launch on the current device."""

    @functools.wraps(function)
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(first.device if first.device.type == "cuda" else -1):
            return function(first, *args, **kwargs)

    return cast(F, call)


attention = _on_its_device(attending.attention)
add_rms_norm = _on_its_device(layers.add_rms_norm)
rope_and_cache = _on_its_device(layers.rope_and_cache)
silu_and_mul = _on_its_device(layers.silu_and_mul)
span_attention = _on_its_device(spans.span_attention)
span_attention_backward = _on_its_device(spans.span_attention_backward)
argmax = _on_its_device(rows.argmax)
uniform = _on_its_device(rows.uniform)
row_params = _on_its_device(rows.row_params)
sample_rows = _on_its_device(rows.sample_rows)
walk_tree = _on_its_device(verify.walk_tree)
sample_tree = _on_its_device(verify.sample_tree)
accept_chain = _on_its_device(verify.accept_chain)
expand_topk = _on_its_device(expand.expand_topk)
finite_rows = reference.finite_rows  # one reduction
distill_rows = _on_its_device(distill.distill_rows)
drafter_feedback = _on_its_device(feedback.drafter_feedback)
