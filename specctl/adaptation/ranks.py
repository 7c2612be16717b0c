"""Several processes that learn as one: each makes the sums over its share of every batch, and all the same update.

An update is a function of whole vectors (the norm that clips, the distance that projects, two points w_t and ŵ_t, N
members under Hedge, a state to go back to), where DeepSpeed's engine has one set of weights, which ZeRO cuts up, and an
optimizer of its own: so it is losses and gradients that are summed here, and nothing else knows of it.
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

# Of a sum. The decoder sees who has died; and all may stand still for hours while others have their turn.
PATIENCE = timedelta(days=365)


class Group:
    """One process on its own."""

    rank, size = 0, 1

    def share(self, batch: Sequence[Item]) -> list[Item]:
        """The texts of a batch that are this rank's, perhaps none. Dealt out in turn: neighbours are about as long."""
        return list(batch[self.rank :: self.size])

    def sum(self, x: Tensor) -> Tensor:
        """Σ over the ranks, bit for bit the same on all of them. It may take the place of x, to save memory."""
        return x


ALONE = Group()


class Ranks(Group):
    """Processes on devices of this machine, all of one kind: they talk by NCCL on GPUs, else by gloo.

    They meet in a file, as another program could take a port in the meantime.
    """

    def __init__(self, rank: int, devices: Sequence[str], meeting: Path):
        """Wait for the others. `devices` are those of all ranks, `meeting` is a directory that only they know."""
        self.rank, self.size, self.device = rank, len(devices), torch.device(devices[rank])
        gpu = self.device.type == "cuda"
        if gpu:
            torch.cuda.set_device(self.device)
            os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")  # it kills what has stood still
        elif sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it listens where the host's name points to
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=dist.FileStore(str(meeting / "ranks"), self.size),
            rank=rank,
            world_size=self.size,
            timeout=PATIENCE,
            device_id=self.device if gpu else None,
        )

    def sum(self, x: Tensor) -> Tensor:
        total = x.to(self.device).contiguous()
        dist.all_reduce(total)
        return total.to(x.device)


def check(devices: Sequence[str]) -> None:
    """Raises RecipeError where this machine has no such GPU."""
    count = torch.cuda.device_count()
    for name in devices:
        if name.startswith("cuda") and (torch.device(name).index or 0) >= count:
            raise RecipeError(f"learner_device: there is no {name}, this machine has {count} GPU(s)")
