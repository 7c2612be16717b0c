"""Read the features of the next batch in a thread and copy them to a GPU, while a step computes.

A copy from pageable memory waits until it is read, and until the GPU has done all queued work. From pinned memory, on a
separate stream, the copy runs at the same time as the step. A CPU needs no copy, so features are read when they are
used. That takes under 1 % of a step of the built-in target (3 % in fp8), and a thread would slow the step down by as
much.
"""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

import torch

from specctl.training.feature_files import Features

Sent = Callable[[], Features]
"""Features on their way to the device: call it when they are needed."""


class Prefetcher:
    """Reads the features of the next batch in a thread.

    There is one thread at a time, and its caller never reads at the same time: `take` waits for the thread, so `read`
    may open and close files without a lock. The thread is a daemon: a file system that hangs must not keep alive a
    process that was told to stop.
    """

    def __init__(self, read: Callable[[int], Features], send: Callable[[Features], Sent]):
        """Set the functions that the thread calls: `read` on the index of an example, `send` on the features read."""
        self.read, self.send = read, send
        self._sent: Future[dict[int, Sent]] | None = None

    def start(self, indices: list[int]) -> None:
        """Start to read the features of `indices`; the previous read must have been taken."""
        assert self._sent is None
        self._sent = Future()
        Thread(target=self._run, args=(self._sent, indices), name="read-ahead", daemon=True).start()

    def take(self, indices: list[int]) -> dict[int, Features]:
        """Return the features that were read ahead for `indices`, and drop all others. Re-raises an error of the
        thread."""
        if self._sent is None:
            return {}
        under_way, self._sent = self._sent, None
        sent = under_way.result()
        return {index: sent[index]() for index in indices if index in sent}

    def _run(self, found: Future[dict[int, Sent]], indices: list[int]) -> None:
        try:
            found.set_result({index: self.send(self.read(index)) for index in indices})
        except BaseException as error:  # `take` raises it in the caller's thread
            found.set_exception(error)


class PinnedCopies:
    """Copies host tensors to a GPU through pinned memory, on a separate stream."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    def __call__(self, features: Features) -> Sent:
        """Start the copy. Calling the result makes the current stream wait for the copy, not the host. Tensors that are
        on the GPU must have been computed on this object's stream."""
        with torch.cuda.stream(self.stream):
            moved = [
                tensor if tensor.is_cuda else tensor.pin_memory().to(self.device, non_blocking=True)
                for tensor in vars(features).values()
            ]
            copied = self.stream.record_event()

        def arrive() -> Features:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(copied)
            for tensor in moved:  # the copying stream must not reuse its memory before this stream has read it
                tensor.record_stream(computing)
            return Features(*moved)

        return arrive
