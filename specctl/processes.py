"""Processes of torchrun that decode as one: what must they share so that all of them do the same?

With a target in slices (`decoding/models/parallel.py`) every process runs the same commands on the same prompts. A
forward gives all of them the same bits, and random numbers are counted, so their decisions are equal as far as they
follow from texts. What follows from a clock does not: there `agree` takes the first process'.
"""

from __future__ import annotations

import atexit
import os
import zlib
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from specctl.errors import SpecctlError, UsageError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
PATIENCE = timedelta(minutes=10)  # of a process for the slowest, which may still read its weights
_joined = 1


def join(count: int, device: torch.device) -> int:
    """Decode as one with the other processes of torchrun from now on; returns which of them this one is.

    Raises UsageError where they are not `count`.
    """
    global _joined
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != count:
        raise UsageError(
            f"target.tensor_parallel={count} needs {count} processes, and {world} "
            f"{'was' if world == 1 else 'were'} started",
            f"torchrun --nproc-per-node {count} -m specctl …",
        )
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
        leave_at_exit()
    _joined = count
    return dist.get_rank()


@cache
def leave_at_exit() -> None:
    """Destroy the process group when this process ends. Otherwise gloo's threads abort the process and NCCL warns."""

    def leave() -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(leave)


def joined() -> int:
    """The processes that decode as one; 1 = this one is by itself."""
    return _joined


def follows() -> bool:
    """Whether this process only helps another one, which speaks, writes and stops for all."""
    return _joined > 1 and os.environ["RANK"] != "0"


def agree(value: T) -> T:
    """The first process' value, which may be anything that can be pickled; all call this at the same place."""
    if _joined == 1:
        return value
    import torch
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def same(what: str, value: object) -> None:
    """Raise SpecctlError in every process where `value`, told apart by its `repr`, is not the same in all of them."""
    if _joined == 1:
        return
    import torch
    import torch.distributed as dist

    own = torch.tensor([zlib.crc32(f"{what}: {value!r}".encode())])
    all_of_them = torch.empty(_joined, 1, dtype=own.dtype)
    dist.all_gather(list(all_of_them), own)
    if (all_of_them != own).any():
        raise SpecctlError(
            f"the processes of target.tensor_parallel={_joined} have come to differ in {what}",
            "start all of them with the same command, environment and versions, on GPUs or processors of one kind",
        )
