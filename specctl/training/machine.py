"""The machine that an estimate is for: the recipe's `resources`, or this machine."""

import math
import os
from dataclasses import dataclass
from typing import Any

import torch

from specctl import threads
from specctl.decoding.models.lean import pick_target_dtype
from specctl.decoding.models.loading import DTYPES, cpu_has_bf16
from specctl.recipe import TrainRecipe

GB = 1e9


@dataclass(frozen=True)
class Device:
    """Data-sheet values of a device: peak dense bf16 TFLOP/s, and memory in GB.

    NaN stands for a value that is taken from this machine. `utilisation` is the share of the peak that training is
    assumed to reach.
    """

    tflops: float
    memory_gb: float
    utilisation: float = 0.3


DEVICES = {
    "a100-40g": Device(312, 40),
    "a100-80g": Device(312, 80),
    "h100-80g": Device(989, 80),
    "h200": Device(989, 141),
    "l40s": Device(362, 48),
    "rtx4090": Device(165, 24),
    # One core with AVX512-BF16; the utilization is measured with a head for the built-in target.
    "cpu": Device(0.4, math.nan, 0.07),
}
"""Devices by the names of `resources.gpu`."""
PRODUCTS = {"A100": "a100-80g", "H100": "h100-80g", "H200": "h200", "L40S": "l40s", "RTX 4090": "rtx4090"}


@dataclass(frozen=True)
class Machine:
    """Hardware of a training run: `gpus` devices of type `gpu` (for a CPU: cores), in `processes` processes.

    `memory_gb` is the memory of one GPU, or the part of the CPU's memory that one process gets. If a process has
    several GPUs, its target is spread over them, and they work one after the other.
    """

    gpu: str
    gpus: int
    processes: int
    memory_gb: float

    @property
    def shards(self) -> int:
        return 1 if self.gpu == "cpu" else max(1, self.gpus // self.processes)

    @property
    def flops(self) -> float:
        """FLOP/s of all processes together, at the assumed utilization."""
        device = DEVICES[self.gpu]
        return device.tflops * 1e12 * device.utilisation * (self.gpus if self.gpu == "cpu" else self.processes)

    def dtype(self, name: str) -> torch.dtype:
        """Resolve a dtype name like `pick_dtype`, for a machine that need not be this one."""
        if name != "auto":
            return DTYPES[name]
        return torch.bfloat16 if self.gpu != "cpu" or cpu_has_bf16() else torch.float32

    def target_dtype(self, name: str, config: Any) -> torch.dtype:
        """Resolve a dtype name like `pick_target_dtype`, for a machine that need not be this one."""
        return self.dtype(name) if self.gpu != "cpu" else pick_target_dtype(name, torch.device("cpu"), config)


def machine_for(recipe: TrainRecipe) -> Machine | None:
    """The machine that `resources` names, or this one. Returns None for a GPU that the table does not know.

    Under a launcher WORLD_SIZE counts the processes; otherwise `resources.processes` does.
    """
    resources = recipe.resources
    name, count, memory = _here(recipe)
    gpu = resources.gpu or name
    if gpu is None:
        return None
    gpus = resources.gpus or (count if gpu == name else 1)
    alone = gpu == "cpu" or recipe.target.device_map is not None
    processes = int(os.environ.get("WORLD_SIZE", 0)) or resources.processes or (1 if alone else gpus)
    limit = DEVICES[gpu].memory_gb
    return Machine(gpu, gpus, processes, memory / processes if math.isnan(limit) else limit)


def _here(recipe: TrainRecipe) -> tuple[str | None, int, float]:
    """(name in the table, number, memory in GB) of this machine's GPUs, or of its cores."""
    if recipe.target.device == "cpu" or recipe.resources.gpu == "cpu" or not torch.cuda.is_available():
        import psutil

        return "cpu", recipe.resources.threads or threads.cores(), psutil.virtual_memory().total / GB
    memory = torch.cuda.get_device_properties(0).total_memory / GB
    product = torch.cuda.get_device_name(0)
    name = next((key for part, key in PRODUCTS.items() if part in product), None)
    return "a100-40g" if name == "a100-80g" and memory < 60 else name, torch.cuda.device_count(), memory
