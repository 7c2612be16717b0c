"""Timing of functions against each other. They run in turn, so that a drift of the machine's speed affects all
functions alike, and their medians are compared."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from specctl.progress import interrupts

WARM_UP = 3


def medians(functions: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each function. Raises Interrupted if a signal has arrived."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + WARM_UP):
        for name, function in functions.items():
            interrupts.check()
            synchronise(device)
            started = time.perf_counter()
            function()
            synchronise(device)
            if repeat >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def work_clock(device: torch.device) -> Callable[[], float]:
    """A clock, in seconds, for the work that this thread gives a device. On a CPU it is the thread's CPU time, which
    other processes on the core do not affect. A GPU's work takes no CPU time, so there it is wall-clock time."""
    return time.thread_time if device.type == "cpu" else time.perf_counter


def synchronise(device: torch.device) -> None:
    """Wait for a GPU to finish its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth(device: torch.device) -> float:
    """Bytes per second of one reduction over memory: the upper bound for any kernel that reads its input once."""
    values = torch.ones(2**26 if device.type == "cpu" else 2**29, dtype=torch.bfloat16, device=device).view(torch.int64)
    best = min(medians({"read": values.max}, 5, device).values())
    return values.numel() * 8 / best


class Stopwatch:
    """Seconds spent in prefills and in rounds. The time between two steps does not count."""

    def __init__(self) -> None:
        self.prefill_s = self.decode_s = 0.0
        self.start()

    def start(self) -> None:
        self.mark = time.perf_counter()

    def prefilled(self) -> None:
        self.prefill_s += time.perf_counter() - self.mark

    def decoded(self) -> None:
        self.decode_s += time.perf_counter() - self.mark
