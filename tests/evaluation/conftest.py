"""The built-in target, and a drafter whose quality is known."""

import pytest

from specctl.decoding.records import DraftTree
from specctl.decoding.target import load_target


@pytest.fixture(scope="package")
def target():
    return load_target("builtin", device="cpu", dtype="fp32")


@pytest.fixture(scope="package")
def scripted():
    return Script


class Script:
    """Drafts `depth` tokens of a text known for each prompt: the plain answer makes a perfect drafter."""

    taps: tuple[int, ...] = ()

    def __init__(self, answers: dict[tuple[int, ...], list[int]], depth: int):
        self.answers, self.depth = answers, depth

    def propose(self, state, budget):
        chains = []
        for row in state.rows:
            answer = self.answers.get(tuple(row.ids[: row.prompt_length]), [])
            chains.append(answer[len(row.output) :][: min(self.depth, budget)])
        return DraftTree.from_chains(chains, state.device)

    def advance(self, state):
        pass

    def invalidate(self, state):
        pass
