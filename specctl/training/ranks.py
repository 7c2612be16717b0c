"""Sums over the ranks of a training, and blocks that end in all of them when one fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from specctl.errors import Interrupted, SpecctlError


def over_ranks(values: list[int], device: torch.device) -> list[int]:
    """Sum each of `values` over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [int(value) for value in values]  # without waiting for the device
    total = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return total.tolist()


@contextmanager
def ends_together(device: torch.device, slices: int = 1) -> Iterator[None]:
    """Wait for all ranks at the end of a block. If one of them fails or is interrupted, all end: the others would
    wait for it until their job is killed, and a killed job does not go back into the queue.

    The block has no collectives, except the target's own if each rank has one of its `slices`. A rank that fails among
    them does not wait for the others: they are in the middle of a forward.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        if slices > 1:
            raise
        error = failure
    interrupted, failed = over_ranks([isinstance(error, Interrupted), error is not None], device)
    if error is not None:
        raise error
    if failed:
        raise SystemExit(Interrupted.exit_code if interrupted == failed else SpecctlError.exit_code)
