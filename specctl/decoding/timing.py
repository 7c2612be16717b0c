"""Timing functions against each other: in turn, so that a machine whose speed drifts slows all of them; medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

WARM_UP = 3


def medians(functions: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Seconds of each function."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + WARM_UP):
        for name, function in functions.items():
            synchronise(device)
            started = time.perf_counter()
            function()
            synchronise(device)
            if repeat >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def cold_medians(
    functions: Mapping[str, Callable[[], object]], repeats: int, device: torch.device, cache: Tensor
) -> dict[str, float]:
    """Seconds of each function on a GPU whose L2 cache holds nothing of it: `cache`, of several times that size, is
    written before each call. The GPU measures, behind that write, so that the host's time to launch is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + WARM_UP):
        for name, function in functions.items():
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cache.zero_()
            started.record(torch.cuda.current_stream(device))
            function()
            ended.record(torch.cuda.current_stream(device))
            synchronise(device)
            if repeat >= WARM_UP:
                seconds[name].append(started.elapsed_time(ended) / 1000)
    return {name: statistics.median(values) for name, values in seconds.items()}


def clock_of(device: torch.device) -> Callable[[], float]:
    """A clock of the work that this thread gives a device, in seconds: what other processes take of a core is no cost
    of ours; a GPU's work takes no time of this thread, so there it is a clock on the wall."""
    return time.thread_time if device.type == "cpu" else time.perf_counter


def synchronise(device: torch.device) -> None:
    """Wait for a GPU to finish what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth(device: torch.device) -> float:
    """Bytes a second that one reduction reads from memory: the floor of any kernel that reads its input once."""
    values = torch.ones(2**26 if device.type == "cpu" else 2**29, dtype=torch.bfloat16, device=device).view(torch.int64)
    best = min(medians({"read": values.max}, 5, device).values())
    return values.numel() * 8 / best
