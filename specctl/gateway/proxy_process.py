"""A gateway to running engines in a process of its own, so that a learner beside it does not slow it down."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specctl.errors import SpecctlError
from specctl.gateway import server, traffic_log
from specctl.gateway.metrics import GatewayWork, LearningCounts, Meter
from specctl.gateway.running_engines import RunningEngines, engines_app
from specctl.recipe.select import PolicyRecipe
from specctl.recipe.serve import LimitsRecipe

SECONDS_TO_END = 5.0  # beyond the time for requests in flight


@dataclass(frozen=True)
class ProxyOptions:
    """Protection of the gateway, and its choice of servers.

    Attributes:
        key: API key that clients must send, or None.
        onward: API key for the engines, in the place of the client's, or None to pass that on.
        policy: name, constants and seed of the policy that chooses a server, or None for the least busy one.
        on_end: called with the counts after the gateway's end, unless its process was killed.
    """

    limits: LimitsRecipe = field(default_factory=LimitsRecipe)
    key: str | None = None
    onward: str | None = None
    policy: tuple[str, PolicyRecipe, int] | None = None
    on_end: Callable[[GatewayWork], None] = lambda work: None


DEFAULT_OPTIONS = ProxyOptions()


class GatewayProcess:
    """A gateway in its own process, as the process of the learner sees it."""

    def __init__(self, process: subprocess.Popen[bytes], address: str):
        self._process, self.address = process, address

    def check(self) -> None:
        """Raise SpecctlError if the process has ended."""
        if (status := self._process.poll()) is not None:
            raise SpecctlError(
                f"the process of the gateway at {self.address} has ended, with status {status}", "start again"
            )

    def show(self, counts: Mapping[str, LearningCounts]) -> None:
        """Show these counts, by name of the drafter, on its page and its metrics. Does nothing if the process has
        ended."""
        _send(self._process, {**counts})


@contextmanager
def running(
    listen: str,
    servers: dict[str, str],
    log: Path,
    max_bytes: int,
    options: ProxyOptions = DEFAULT_OPTIONS,
    *,
    fresh: bool = False,
) -> Iterator[GatewayProcess]:
    """Run a gateway in its own process during the block.

    At the end it accepts no more requests, and answers all requests still in flight. Raises UsageError as
    `server.listening` does.

    Args:
        servers: engine by address.
        fresh: delete the log of an earlier run.
    """
    with server.listening(listen) as (place, address):
        traffic_log.close(traffic_log.opened(log, max_bytes))  # report here if the log cannot be opened
        if fresh:
            traffic_log.delete(log)
        process = subprocess.Popen(
            [sys.executable, "-m", "specctl.gateway.proxy_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[place.fileno()],
            start_new_session=True,  # Ctrl-C is for the learning process
        )
        # Send the settings over stdin: all users can read a process's arguments, and addresses may hold passwords.
        guard = options.limits, options.key, options.onward, options.policy
        _send(process, (place.fileno(), servers, log, max_bytes, *guard))
    try:
        yield GatewayProcess(process, address)
    finally:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdin = None  # closed: `communicate` must not flush it
        try:
            said, _ = process.communicate(timeout=options.limits.stop_s + SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        if said:
            options.on_end(pickle.loads(said))


def _send(process: subprocess.Popen[bytes], message: Any) -> None:
    """Send an object to the process, unless it has ended. Pickles pass only between a process and its own child."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        pickle.dump(message, process.stdin)
        process.stdin.flush()


def main() -> None:
    """Serve until stdin ends, which happens when the parent process ends."""
    descriptor, servers, log, max_bytes, limits, key, onward, policy = pickle.load(sys.stdin.buffer)
    meter, dispatch = Meter("engines"), None
    if policy is not None:
        from specctl.selection.dispatch import Dispatcher  # imports torch, which takes seconds

        dispatch = Dispatcher([*servers], *policy)
    backend = RunningEngines(servers, meter, traffic_log.opened(log, max_bytes), dispatch, onward)
    app = engines_app(backend, limits, key)

    def follow() -> None:
        with suppress(EOFError):
            while True:
                meter.learning = pickle.load(sys.stdin.buffer)

    server.run(app, socket.socket(fileno=descriptor), server.stop_after(follow))
    sys.stdout.buffer.write(pickle.dumps(backend.work()))


if __name__ == "__main__":
    main()
