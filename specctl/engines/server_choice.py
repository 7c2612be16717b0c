"""Choice of a server for a text: the interface of rules that learn, and the rule that does not.

This module imports nothing heavy: a gateway beside a learner has a process of its own, which must start at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specctl.engines.proxy_messages import TextCounts


@dataclass(frozen=True)
class ServerChoice:
    """Addresses to try for a request, in order, until one answers.

    Attributes:
        decide_us: microseconds of the choice, or None if nothing was chosen.
    """

    order: Sequence[str]
    decide_us: float | None = None


@dataclass(frozen=True)
class ServedByEngine:
    """A finished text: its server, its number of tokens and of target passes, and the microseconds of the choice.

    Attributes:
        accepted: drafted tokens among the `tokens`, or None if the server does not report them.
    """

    url: str
    tokens: int
    passes: int
    accepted: int | None
    decide_us: float | None


class Dispatch(Protocol):
    """A rule that selects the server for a text, and learns from the answer."""

    def choose(self, body: Mapping[str, Any], in_flight: Mapping[str, int]) -> ServerChoice:
        """Order the servers for a request for one text, given the number of requests in flight per address."""
        ...

    def learn(self, choice: ServerChoice, url: str, counts: TextCounts) -> None:
        """Learn from a text that `url` has written completely."""
        ...

    def settle(self) -> None:
        """Compute now for what the next choice would wait, after texts that were learnt from."""
        ...


class LeastBusy:
    """Dispatch that puts the server with the fewest requests in flight first."""

    def choose(self, body: Mapping[str, Any], in_flight: Mapping[str, int]) -> ServerChoice:
        return ServerChoice(sorted(in_flight, key=lambda one: in_flight[one]))

    def learn(self, choice: ServerChoice, url: str, counts: TextCounts) -> None:
        """Learn nothing: an idle server says nothing about the quality of its text."""

    def settle(self) -> None:
        """Compute nothing."""
