"""Choice between fused kernels and PyTorch for the small operations of a decoder layer."""

import functools
import os
import warnings
from typing import NamedTuple

import torch

from specctl import kernels
from specctl.errors import UsageError
from specctl.kernels import self_check

CHOICES = ("fused", "plain")


class LayerShape(NamedTuple):
    """Sizes that the kernels are compiled for."""

    hidden: int
    inner: int  # width of the MLP
    heads: int
    kv_heads: int
    dim: int
    normed: bool  # queries and keys have norms


def fuses(device: torch.device, dtype: torch.dtype, shape: LayerShape) -> bool:
    """Whether layers of this shape run fused: on a GPU with Triton, if a trial with that shape agrees with the
    reference. If it does not, one warning is issued.

    The environment variable SPECCTL_LAYERS=fused|plain overrides the choice, on any device. UsageError for other
    values.
    """
    chosen = os.environ.get("SPECCTL_LAYERS")
    if chosen:
        if chosen not in CHOICES:
            raise UsageError(f"SPECCTL_LAYERS={chosen!r} is not a valid value", f"use one of {', '.join(CHOICES)}")
        return chosen == "fused"
    return device.type == "cuda" and kernels.backend("cuda") == "triton" and tried(device, dtype, shape)


@functools.cache
def tried(device: torch.device, dtype: torch.dtype, shape: LayerShape) -> bool:
    """Whether the kernels agree with the reference. They are tried once per device, dtype and shape."""
    if (
        device.type == "cuda" and kernels.select_backend(device) != "triton"
    ):  # `kernels.select_backend` has already warned
        return False
    reason = self_check.layer_mismatch(kernels, device, dtype, *shape)
    if reason is not None:
        warnings.warn(f"layers on {device} run unfused: {reason}", stacklevel=2)
    return reason is None
