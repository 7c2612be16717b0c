"""Choice of the attention implementation of a step: our kernel, which reads lengths and ancestors on the device, or
PyTorch's, which reads a mask."""

import torch
from torch import Tensor

from specctl import kernels
from specctl.environment import switch
from specctl.kernels.self_check import attention_mismatch, passes


def by_kernel(device: torch.device | str) -> bool:
    """Whether plans for `device` have an `Ancestry` instead of a mask: on a GPU with Triton. If the kernel does not
    support a model's heads (`serves`), the model turns the ancestry into a mask.

    The environment variable SPECCTL_ATTENTION=kernel|sdpa overrides the choice, on any device. UsageError for other
    values.
    """
    if chosen := switch("SPECCTL_ATTENTION"):
        return chosen == "kernel"
    device = torch.device(device)
    return device.type == "cuda" and kernels.select_backend(device) == "triton"


def served(q: Tensor, rows: Tensor) -> bool:
    """Whether the kernel computes attention of queries [B, T, Hq, D] over `rows` [.., 2·Hkv, D] as the reference does,
    for a plan with an `Ancestry`."""
    return _answers(q.device, q.dtype, q.shape[2], rows.shape[-2] // 2, q.shape[3])


def serves(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether a model with these heads uses the attention kernel on `device`."""
    return by_kernel(device) and _answers(device, dtype, heads, kv_heads, dim)


def _answers(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    # A kernel requested by name is not tried first: if it fails, the user sees the error.
    if switch("SPECCTL_ATTENTION") == "kernel":
        return True
    return passes("attention on {} runs in PyTorch", attention_mismatch, device, dtype, (heads, kv_heads, dim), False)


def serves_pages(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether the kernel reads pages as the reference does, on a GPU with Triton."""
    warning = "KV caches on {} are contiguous, not paged"
    return passes(warning, attention_mismatch, device, dtype, (heads, kv_heads, dim), True)
