"""Made-up rows of a recorded table, drawn from a seed, for tests that do not depend on the values."""

import numpy as np
import pytest

from specctl.lab.recorded.table_file import Recorded
from specctl.lab.recorded.trace import Trace
from specctl.selection.game.game import Game

ARMS, DEPTH = ["sql", "lookup", "suffix"], 4


@pytest.fixture
def made_up():
    """`made_up(place)`: the recorded answer to the query at position `place` of a stream."""

    def row(place):
        draw = np.random.default_rng(place)
        shape = (len(ARMS), int(draw.integers(1, 30)))
        whole = (*shape, DEPTH)
        drafted = draw.integers(0, DEPTH + 1, shape).astype(np.int16)
        trace = Trace(
            query=f"query {place}",
            domain="sql" if place % 2 else "maths über alles",
            accepted=draw.integers(0, drafted + 1).astype(np.int16),
            drafted=drafted,
            gamma=draw.random(whole, np.float32),
            overlap=draw.random(whole, np.float32),
            hit=draw.integers(0, 3, whole).astype(np.uint8),
            ended=bool(place % 3),
            session=place // 2,
            prompt=10 + place,
        )
        return Recorded(place, trace, draw.random(len(ARMS)), draw.integers(0, 50, len(ARMS)))

    return row


@pytest.fixture(scope="session")
def target(shallow):
    """A third of the layers: the tests of this folder compare two computations on arbitrary texts."""
    return shallow


@pytest.fixture
def kept_rounds(monkeypatch):
    """Live games keep their rounds, too, so that a test can read the rounds."""
    monkeypatch.setattr(Game, "keeps_log", True)
