"""A gateway to running engines in a process of its own, so that a learner beside it does not slow it down."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specctl.errors import SpecctlError
from specctl.gateway import server, traffic_log
from specctl.gateway.metrics import DrafterCounts, LearningCounts, Meter
from specctl.gateway.running_engines import EngineWork, RunningEngines, engines_app
from specctl.recipe.select import PolicyRecipe
from specctl.recipe.serve import LimitsRecipe
from specctl.selection.certificate import Certificate

SECONDS_TO_END = 5.0  # beyond the time for requests in flight


@dataclass(frozen=True)
class ServerPolicy:
    """The policy that chooses a server for every text: its name, the constants of policies, and the seed of its
    draws."""

    name: str
    options: PolicyRecipe
    seed: int


@dataclass(frozen=True)
class ProxyWork:
    """Counts of a gateway at its end: of its meter, and of its engines.

    Attributes:
        servers: counts by address of the server.
        certificate: lower bound of the speed, or None if no policy chose.
    """

    servers: dict[str, DrafterCounts]
    certificate: Certificate | None
    engines: EngineWork

    def to_json(self) -> dict[str, Any]:
        """The counts as JSON-able values."""
        made = self.certificate
        bound = None if made is None else vars(made) | {"log_capital": made.log_capital.tolist()}
        servers = {name: vars(counts) for name, counts in self.servers.items()}
        return {"servers": servers, "certificate": bound, "engines": vars(self.engines)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ProxyWork:
        """Read the counts of `to_json`."""
        bound = values["certificate"]
        return cls(
            {name: DrafterCounts(**counts) for name, counts in values["servers"].items()},
            None if bound is None else Certificate(**bound | {"log_capital": np.array(bound["log_capital"])}),
            EngineWork(**values["engines"]),
        )


@dataclass(frozen=True)
class ProxyOptions:
    """Protection of the gateway, and its choice of servers.

    Attributes:
        key: API key that clients must send, or None.
        onward: API key for the engines, in the place of the client's, or None to pass that on.
        policy: policy that chooses a server, or None for the least busy one.
        on_end: called with the counts after the gateway's end, unless its process was killed.
    """

    limits: LimitsRecipe = field(default_factory=LimitsRecipe)
    key: str | None = None
    onward: str | None = None
    policy: ServerPolicy | None = None
    on_end: Callable[[ProxyWork], None] = lambda work: None


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
        """Show these counts, by name of the drafter, on its page and its metrics."""
        self.tell({name: one.to_json() for name, one in counts.items()})

    def tell(self, document: Any) -> None:
        """Send a line. Does nothing if the process has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(document).encode() + b"\n")
            self._process.stdin.flush()


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
        gateway = GatewayProcess(process, address)
        chosen = options.policy
        policy = None if chosen is None else [chosen.name, chosen.options.model_dump(), chosen.seed]
        guard = [options.limits.model_dump(), options.key, options.onward, policy]
        gateway.tell([place.fileno(), servers, str(log), max_bytes, *guard])
    try:
        yield gateway
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
            options.on_end(ProxyWork.from_json(json.loads(said)))


def main() -> None:
    """Serve until stdin ends, which happens when the parent process ends."""
    descriptor, servers, log, max_bytes, limits, key, onward, policy = json.loads(sys.stdin.buffer.readline())
    meter, dispatch = Meter("engines"), None
    if policy is not None:
        from specctl.selection.dispatch import Dispatcher  # imports torch, which takes seconds

        name, options, seed = policy
        dispatch = Dispatcher([*servers], name, PolicyRecipe(**options), seed)
    backend = RunningEngines(servers, meter, traffic_log.opened(Path(log), max_bytes), dispatch, onward)
    app = engines_app(backend, LimitsRecipe(**limits), key)

    def follow() -> None:
        for line in sys.stdin.buffer:
            meter.learning = {name: LearningCounts.from_json(one) for name, one in json.loads(line).items()}

    server.run(app, socket.socket(fileno=descriptor), server.stop_after(follow))
    engines = backend.work()
    print(json.dumps(ProxyWork(meter.drafters, meter.certificate, engines).to_json()))


if __name__ == "__main__":
    main()
