"""Tensor parallelism: the torchrun processes that hold slices of one target, and how they take the same decisions.

With a target in slices (`decoding/models/parallel.py`) every process runs the same commands on the same prompts. A
forward gives the same bits in all processes, and random streams are counter-based, so decisions that follow from texts
are equal. Decisions that follow from a clock differ: for them `broadcast_value` takes the value of rank 0.
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
PATIENCE = timedelta(minutes=10)  # for the slowest process, which may still be reading its weights
_joined = 1


def join_group(count: int, device: torch.device) -> int:
    """Join the process group of the target's `count` slices; returns the rank of this process.

    Raises UsageError if torchrun has not started `count` processes.
    """
    global _joined
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != count:
        raise UsageError(
            f"target.tensor_parallel={count} needs {count} processes, but {world} "
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
    """Destroy the process group when this process ends; otherwise gloo's threads abort it, and NCCL warns."""

    def leave() -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(leave)


def group_size() -> int:
    """Return the number of processes that share the target, 1 without tensor parallelism."""
    return _joined


def is_follower() -> bool:
    """Whether this process is not rank 0 of several: rank 0 prints, writes and decides when to stop for all."""
    return _joined > 1 and os.environ["RANK"] != "0"


def broadcast_value(value: T) -> T:
    """Return rank 0's `value`, which can be pickled, in every process. All processes call this at the same place."""
    if _joined == 1:
        return value
    import torch
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def check_same(what: str, value: object) -> None:
    """Raise SpecctlError in every process unless `value` has the same `repr` in all. `what` names it in the message."""
    if _joined == 1:
        return
    import torch
    import torch.distributed as dist

    own = torch.tensor([zlib.crc32(f"{what}: {value!r}".encode())])
    all_of_them = torch.empty(_joined, 1, dtype=own.dtype)
    dist.all_gather(list(all_of_them), own)
    if (all_of_them != own).any():
        raise SpecctlError(
            f"the processes of target.tensor_parallel={_joined} differ in {what}",
            "start all of them with the same command, environment and versions, on the same kind of GPU or CPU",
        )
