"""Small Python tasks as records, and helpers that their solutions and examples share."""

import math
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from .grammar import pick

Arguments = tuple[Any, ...]


class Task(NamedTuple):
    """A small Python task. `text` completes "Write a function to …"; `parameters` and `returns` are annotations.

    `run(*arguments(random))` gives the result of an example call.
    """

    name: str
    text: str
    parameters: tuple[tuple[str, str], ...]
    returns: str
    arguments: Callable[[Random], Arguments]
    run: Callable[..., Any]


def is_prime(n: int) -> bool:
    """Test by trial division, for small numbers."""
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def digits(n: int) -> list[int]:
    """Decimal digits of |n|."""
    return [int(d) for d in str(abs(n))]


def numbers(random: Random) -> list[int]:
    """Draw three to eight integers from a random range."""
    low, high = pick(random, ((0, 12), (1, 30), (-20, 20), (-9, 99), (1, 130)))
    width = high - low + 1  # `randint` is several times slower
    return [low + int(random.random() * width) for _ in range(3 + int(random.random() * 6))]
