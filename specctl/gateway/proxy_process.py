"""A gateway to running engines in a process of its own, so that a learner beside it does not slow it down."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specctl.errors import SpecctlError
from specctl.gateway import server, traffic_log
from specctl.gateway.metrics import Meter
from specctl.gateway.running_engines import RunningEngines, engines_app
from specctl.recipe.serve import LimitsRecipe

SECONDS_TO_END = 5.0  # beyond the time for requests in flight

Check = Callable[[], None]
"""Raises SpecctlError if the process has ended."""


@contextmanager
def running(listen: str, servers: dict[str, str], log: Path, max_bytes: int) -> Iterator[tuple[str, Check]]:
    """Run a gateway in its own process. Yields its address, and a function that checks whether it still runs.

    `servers`: engine by address. At the end it accepts no more requests, and answers all requests still in flight.
    Raises UsageError as `server.listening` does.
    """
    limits = LimitsRecipe()
    with server.listening(listen) as (place, address):
        traffic_log.close(traffic_log.opened(log, max_bytes))  # report here if the log cannot be opened
        process = subprocess.Popen(
            [sys.executable, "-m", "specctl.gateway.proxy_process"],
            stdin=subprocess.PIPE,
            pass_fds=[place.fileno()],
            start_new_session=True,  # Ctrl-C is for the learning process
        )
        # Send the settings over stdin: all users can read a process's arguments, and addresses may hold passwords.
        settings = json.dumps([place.fileno(), servers, str(log), max_bytes])
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended
            process.stdin.write(settings.encode() + b"\n")
            process.stdin.flush()

    def check() -> None:
        if (status := process.poll()) is not None:
            raise SpecctlError(
                f"the process of the gateway at {address} has ended, with status {status}", "start again"
            )

    try:
        yield address, check
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(limits.stop_s + SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    """Serve until stdin ends, which happens when the parent process ends."""
    descriptor, servers, log, max_bytes = json.loads(sys.stdin.buffer.readline())
    backend = RunningEngines(servers, Meter("engines"), traffic_log.opened(Path(log), max_bytes))
    app = engines_app(backend, LimitsRecipe())
    server.run(app, socket.socket(fileno=descriptor), server.stop_after(lambda: os.read(0, 1)))


if __name__ == "__main__":
    main()
