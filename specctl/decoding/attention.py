"""Choice of the attention implementation of a step: our kernel, which reads lengths and ancestors on the device, or
PyTorch's, which reads a mask."""

import functools
import warnings

import torch
from torch import Tensor

from specctl import kernels
from specctl.environment import switch
from specctl.kernels import self_check

_refused: set[torch.device] = set()  # GPUs on which the kernels do not run on Triton


def by_kernel(device: torch.device | str) -> bool:
    """Whether plans for `device` have an `Ancestry` instead of a mask: on a GPU with Triton. If the kernel does not
    support a model's heads (`serves`), the model turns the ancestry into a mask.

    The environment variable SPECCTL_ATTENTION=kernel|sdpa overrides the choice, on any device. UsageError for other
    values.
    """
    if chosen := switch("SPECCTL_ATTENTION"):
        return chosen == "kernel"
    device = torch.device(device)
    return device.type == "cuda" and kernels.backend("cuda") == "triton" and device not in _refused


def served(q: Tensor, rows: Tensor) -> bool:
    """Whether the kernel computes attention of queries [B, T, Hq, D] over `rows` [.., 2·Hkv, D] as the reference does,
    for a plan with an `Ancestry`."""
    return _answers(q.device, q.dtype, q.shape[2], rows.shape[-2] // 2, q.shape[3])


def serves(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether a model with these heads uses the attention kernel on `device`."""
    return by_kernel(device) and _answers(device, dtype, heads, kv_heads, dim)


def _answers(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    # A kernel requested by name is not tried first: if it fails, the user sees the error.
    return switch("SPECCTL_ATTENTION") == "kernel" or _tried(device, dtype, heads, kv_heads, dim)


@functools.cache
def _tried(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Try the kernel once for these heads. If it fails, warn once; models with these heads then use PyTorch's
    attention. Other head shapes on this device keep the kernel."""
    if (
        device.type == "cuda" and kernels.select_backend(device) != "triton"
    ):  # `kernels.select_backend` has already warned
        _refused.add(device)
        return False
    reason = self_check.attention_mismatch(kernels.attention, device, dtype, (heads, kv_heads, dim))
    if reason is not None:
        warnings.warn(f"attention on {device} runs in PyTorch: {reason}", stacklevel=2)
    return reason is None


@functools.cache
def serves_pages(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether the kernel reads pages as the reference does. It is tried once per model shape, with one warning if it
    fails."""
    if kernels.select_backend(device) != "triton":  # `kernels.select_backend` has already warned
        return False
    reason = self_check.attention_mismatch(kernels.attention, device, dtype, (heads, kv_heads, dim), paged=True)
    if reason is not None:
        warnings.warn(f"KV caches on {device} are contiguous, not paged: {reason}", stacklevel=2)
    return reason is None
