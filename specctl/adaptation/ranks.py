"""Data-parallel learning: each process sums over its share of every batch, and all processes make the same update.

An update is a function of whole vectors: the norm for clipping, the distance for projection, the points w_t and ŵ_t, N
members under Hedge, a state to go back to. DeepSpeed's engine has one set of weights, which ZeRO partitions, and an
optimizer of its own. So losses and gradients are summed here, and no other module knows about the ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from specctl.errors import RecipeError

Item = TypeVar("Item")

# Timeout of a sum. The decoder notices a worker that died, and all may be stopped for hours while other contenders run.
TIMEOUT = timedelta(days=365)


class Group:
    """A group of one process."""

    rank, size = 0, 1

    def share(self, batch: Sequence[Item]) -> list[Item]:
        """This rank's texts of a batch, perhaps none: dealt out in turn, because neighbours have similar lengths."""
        return list(batch[self.rank :: self.size])

    def sum(self, x: Tensor) -> Tensor:
        """Σ over the ranks, bit for bit the same on each. It may overwrite x, to save memory."""
        return x


SINGLE_PROCESS = Group()


class Ranks(Group):
    """Processes on devices of this machine, all of one kind. They communicate by NCCL on GPUs, otherwise by gloo.

    They meet through a file, because another program could take a port in the meantime.
    """

    def __init__(self, rank: int, devices: Sequence[str], rendezvous: Path):
        """Wait for the other ranks. `devices` are the devices of all ranks; `rendezvous` is their private directory."""
        self.rank, self.size, self.device = rank, len(devices), torch.device(devices[rank])
        gpu = self.device.type == "cuda"
        if gpu:
            torch.cuda.set_device(self.device)
            os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")  # the monitor kills processes that were stopped
        elif sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo listens on the address of the host name
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=dist.FileStore(str(rendezvous / "ranks"), self.size),
            rank=rank,
            world_size=self.size,
            timeout=TIMEOUT,
            device_id=self.device if gpu else None,
        )

    def sum(self, x: Tensor) -> Tensor:
        total = x.to(self.device).contiguous()
        dist.all_reduce(total)
        return total.to(x.device)


def check(devices: Sequence[str]) -> None:
    """Raise RecipeError if this machine lacks one of these GPUs."""
    count = torch.cuda.device_count()
    for name in devices:
        if name.startswith("cuda") and (torch.device(name).index or 0) >= count:
            raise RecipeError(f"learner_device: {name} does not exist, this machine has {count} GPU(s)")
