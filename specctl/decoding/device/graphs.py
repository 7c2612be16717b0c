"""CUDA graphs of whole decoding rounds: captured after a shape has come up a few times, checked against a plain run,
then replayed."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3  # plain rounds of a span before its capture: they do lazy initialization, and a short text needs no graph
STEP = 256  # smallest difference of two spans
ATTEMPTS = 3  # failed shapes before a device counts as unable to run graphs
Shape = tuple[str, int]
"""Kind of drafter and batch size of a round."""
_refused: set[tuple[torch.device, Shape]] = set()


def may_capture(device: torch.device, shape: Shape) -> bool:
    """Whether to capture such rounds: on a GPU where in this process neither a graph of this shape nor graphs of
    several others have failed."""
    failed = [other for where, other in _refused if where == device]
    return device.type == "cuda" and shape not in failed and len(failed) < ATTEMPTS


def refuse(device: torch.device, shape: Shape) -> None:
    """Stop capturing such rounds on `device`. Other shapes may still work: memory may have been too short for this one
    only."""
    _refused.add((device, shape))


def span_for(needed: int, capacity: int) -> int:
    """Round `needed` cache slots up to the span of a round. Spans take few values, since each has a separate graph. For
    long texts a span is at most a quarter longer than needed."""
    step = max(STEP, 1 << max(needed.bit_length() - 3, 0))
    return min(-(-needed // step) * step, capacity)


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of a device for warm-up and capture, or None on a CPU. All captures share one stream, as cuBLAS keeps
    a workspace per stream."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def run_on_side_stream(run: Callable[[], object], side: torch.cuda.Stream | None) -> None:
    """Run on the capture stream. Libraries then allocate their per-stream state before the capture."""
    if side is None:
        run()
        return
    current = torch.cuda.current_stream(side.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        run()
    current.wait_stream(side)


def capture(run: Callable[[], object], side: torch.cuda.Stream | None, pool: Any = None) -> Any:
    """Capture the launches of `run` as a graph, without executing them. Its memory comes from `pool`, the pool of an
    earlier graph captured on the same stream."""
    assert side is not None
    graph = torch.cuda.CUDAGraph()
    options: Any = dict(pool=pool, stream=side, capture_error_mode="thread_local")
    with torch.cuda.graph(graph, **options):
        run()
    return graph


def replay_of(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """A function that replays the launches of `run`. Raises any error of the capture."""
    side = side_stream(device)
    run_on_side_stream(run, side)
    return capture(run, side).replay


class Graphs:
    """Plays rounds of a batch: functions of a span that read and write tensors at fixed addresses.

    Of the tensors that a round changes, only `carried` influence it: with these restored, it can be run again. `answer`
    is the output of a round. `began` is the start of the last round; a capture before it does not count.
    """

    began: DeviceTime

    def __init__(self, carried: list[Tensor], answer: Tensor):
        self.carried, self.answer = carried, answer
        self.seen: Counter[int] = Counter()
        self.graphs: dict[int, Any] = {}
        self.unproven: set[int] = set()  # spans of graphs to check at the next replay
        self.proven: set[int] = set()  # spans of graphs that were checked after the batch had another size
        self.side, self.pool = side_stream(answer.device), None

    def play(self, run: Callable[[int], None], span: int) -> bool:
        """Play one round, `run(span)`. Returns whether it was the replay of a graph.

        RuntimeError if a graph's answer differs from the plain round's. Errors of the capture are raised, too.
        """
        self.began, once = DeviceTime(self.answer.device), partial(run, span)
        if span in self.unproven:
            self.unproven.remove(span)
            self.proven.add(span)
            self._replay_checked(once, lambda: self.graphs[span])
        elif span in self.graphs:
            self.graphs[span].replay()
        elif self.seen[span] < WARM_UP:
            self.seen[span] += 1
            run(span)
        else:
            self.graphs[span] = self._replay_checked(once, lambda: capture(once, self.side, self.pool))
            self.pool = self.graphs[span].pool()
        return span in self.graphs

    def check_again(self) -> None:
        """Compare the next replay of every graph with a plain round, once for each graph: the batch has had another
        size meanwhile."""
        self.unproven |= self.graphs.keys() - self.proven

    def _replay_checked(self, run: Callable[[], None], graph_of: Callable[[], Any]) -> Any:
        """Replay a graph once, after a plain run for comparison, and return it."""
        before = [tensor.clone() for tensor in self.carried]
        run_on_side_stream(run, self.side)
        expected = self.answer.clone()
        for tensor, value in zip(self.carried, before, strict=True):
            tensor.copy_(value)
        self.answer.fill_(-1)  # so that a graph that does nothing leaves no valid answer behind
        graph = graph_of()
        self.began = DeviceTime(self.answer.device)
        graph.replay()
        if not torch.equal(self.answer, expected):
            raise RuntimeError("the CUDA graph of a round commits different tokens from the round without a graph")
        return graph


class DeviceTime:
    """A point in the queue of work on a device. A CPU works synchronously, so there it is a point in time."""

    def __init__(self, device: torch.device):
        self.event: torch.cuda.Event | None = None
        self.at = time.perf_counter()
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has reached this point."""
        if self.event is not None:
            self.event.synchronize()

    def since(self, earlier: DeviceTime) -> float:
        """Seconds of device work since `earlier`. The device must have passed both points. Idle time before the first
        launch does not count; idle time between launches does."""
        if self.event is None or earlier.event is None:
            return self.at - earlier.at
        return earlier.event.elapsed_time(self.event) / 1000


class Readback:
    """Asynchronous copy of a small tensor to the host, and the time of the work from `began` to the end of the copy.

    `host_seconds`: time of the host's work before `began`, for which the device waited.
    """

    def __init__(self, tensor: Tensor, began: DeviceTime, host_seconds: float = 0.0):
        self.copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        self.copy.copy_(tensor, non_blocking=True)
        self.began, self.ended, self.host_seconds = began, DeviceTime(tensor.device), host_seconds

    def tolist(self) -> list[list[int]]:
        """The tensor as a list, after waiting for the copy."""
        self.ended.wait()
        return self.copy.tolist()

    @property
    def seconds(self) -> float:
        """Seconds from `began` to the end of the copy, plus `host_seconds`. The copy must have been waited for."""
        return self.ended.since(self.began) + self.host_seconds
