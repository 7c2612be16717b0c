"""CUDA graphs of whole rounds: captured once a shape has come up a few times, compared, then replayed."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3  # rounds of a span before its graph: they settle what is made lazily, and a short text needs no graph
STEP = 256  # least difference of two spans
ATTEMPTS = 3  # shapes that may fail on a device until it is taken for one that has no graphs
Shape = tuple[str, int]
"""The rounds of a kind of drafter, for a batch of this size."""
_refused: set[tuple[torch.device, Shape]] = set()


def available(device: torch.device, shape: Shape) -> bool:
    """A GPU on which no graph of such rounds has failed in this process, nor those of several others."""
    failed = [other for where, other in _refused if where == device]
    return device.type == "cuda" and shape not in failed and len(failed) < ATTEMPTS


def refuse(device: torch.device, shape: Shape) -> None:
    """Capture no such rounds on `device` any more: memory may have been too short for this shape alone."""
    _refused.add((device, shape))


def span_for(needed: int, capacity: int) -> int:
    """Cache slots that a round reads which needs so many: of few sizes, since each has a graph of its own, and at most
    a quarter more than needed once there are many."""
    step = max(STEP, 1 << max(needed.bit_length() - 3, 0))
    return min(-(-needed // step) * step, capacity)


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of a device to warm up and capture on; None where there are none. One for all that is captured: cuBLAS
    keeps a workspace for every stream."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def aside(run: Callable[[], object], side: torch.cuda.Stream | None) -> None:
    """Run on the stream that will capture: what a library keeps for each stream is then made outside of a capture."""
    if side is None:
        run()
        return
    current = torch.cuda.current_stream(side.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        run()
    current.wait_stream(side)


def capture(run: Callable[[], object], side: torch.cuda.Stream | None, pool: Any = None) -> Any:
    """A graph of what `run` launches, which is not executed; its memory comes from `pool`, that of an earlier graph
    captured on the same stream."""
    assert side is not None
    graph = torch.cuda.CUDAGraph()
    options: Any = dict(pool=pool, stream=side, capture_error_mode="thread_local")
    with torch.cuda.graph(graph, **options):
        run()
    return graph


def replay_of(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """A function that replays what `run` launches. Raises whatever capturing raises."""
    side = side_stream(device)
    aside(run, side)
    return capture(run, side).replay


class Graphs:
    """Plays rounds of a batch, functions of a span that read and write tensors which keep their places.

    Rounds depend on nothing that they change but `carried`: with those restored, a round can be run again. `answer` is
    what a round says; `began`: when the last one did, without the capture that may have come before it.
    """

    began: Moment

    def __init__(self, carried: list[Tensor], answer: Tensor):
        self.carried, self.answer = carried, answer
        self.seen: Counter[int] = Counter()
        self.graphs: dict[int, Any] = {}
        self.side, self.pool = side_stream(answer.device), None

    def play(self, run: Callable[[int], None], span: int) -> bool:
        """One round, `run(span)`; whether it was the replay of a graph.

        RuntimeError where a graph says something else than the round itself; besides whatever capturing raises.
        """
        self.began = Moment(self.answer.device)
        if span in self.graphs:
            self.graphs[span].replay()
        elif self.seen[span] < WARM_UP:
            self.seen[span] += 1
            run(span)
        else:
            self.graphs[span] = self._captured(partial(run, span))
        return span in self.graphs

    def _captured(self, run: Callable[[], None]) -> Any:
        """The graph of a round, played once; before it the round itself, for comparison."""
        before = [tensor.clone() for tensor in self.carried]
        aside(run, self.side)
        expected = self.answer.clone()
        for tensor, value in zip(self.carried, before, strict=True):
            tensor.copy_(value)
        self.answer.fill_(-1)  # a graph that does nothing must not find the answer there
        graph = capture(run, self.side, self.pool)
        self.began = Moment(self.answer.device)
        graph.replay()
        if not torch.equal(self.answer, expected):
            raise RuntimeError("the graph of a round commits other tokens than the round itself")
        self.pool = graph.pool()
        return graph


class Moment:
    """A point in the work that a device was given; on a CPU, which works at once, a point in time."""

    def __init__(self, device: torch.device):
        self.event: torch.cuda.Event | None = None
        self.at = time.perf_counter()
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has come so far."""
        if self.event is not None:
            self.event.synchronize()

    def since(self, earlier: Moment) -> float:
        """Seconds of work from another moment on; the device has passed both. Time in which it had nothing to do before
        the first of it is not counted, time between two launches is."""
        if self.event is None or earlier.event is None:
            return self.at - earlier.at
        return earlier.event.elapsed_time(self.event) / 1000


class Readback:
    """A small tensor on its way to the host, and the work from `began` until it was copied."""

    def __init__(self, tensor: Tensor, began: Moment):
        self.copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        self.copy.copy_(tensor, non_blocking=True)
        self.began, self.ended = began, Moment(tensor.device)

    def tolist(self) -> list[list[int]]:
        """Waits until it is there."""
        self.ended.wait()
        return self.copy.tolist()

    @property
    def seconds(self) -> float:
        """Seconds of that work, once it is there."""
        return self.ended.since(self.began)
