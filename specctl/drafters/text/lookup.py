"""Family `lookup`: copy what followed the last occurrence of the current n-gram (prompt lookup decoding, Saxena 2023).

No weights: the text itself is the model. Strong where the output repeats the input (schemas, code, summaries).
"""

from __future__ import annotations

from functools import partial

import torch

from specctl.decoding.records import DraftTree, Score
from specctl.decoding.state import DecodeState, PerText
from specctl.drafters.hybrid.gate import TEXT_CAME_TRUE
from specctl.drafters.tree import ProposedTree
from specctl.recipe import DraftingRecipe

# On a CPU 8 rows cost what 1 costs, more do not. Tokens per pass of the built-in target at depth 4 / 5 / 7: sql 1.57 /
# 1.65 / 1.65, math 2.18 / 2.32 / 2.46; without 1-grams 1.63 and 2.18 at depth 7; 4-grams change nothing.
DEPTH = {"cpu": 7, "cuda": 10}
LONGEST, SHORTEST = 3, 1  # n-grams that are looked up, longest first

# How often the token behind a match of so many tokens is the next one, in 1,050 responses of the built-in target to
# training prompts of seven domains.
HITS = (0.0, 0.22, 0.41, 0.58, 0.62, 0.70, 0.78, 0.82, 0.85, 0.87, 0.87, 0.87, 0.88, 0.90, 0.92, 0.94, 0.95, 0.96, 0.97)


class Lookup:
    """Drafts a chain of up to `depth` tokens (None = the device's default) behind a match of `longest`..`shortest`."""

    taps: tuple[int, ...] = ()
    came_true = TEXT_CAME_TRUE

    def __init__(self, depth: int | None = None, longest: int = LONGEST, shortest: int = SHORTEST):
        self.depth, self.longest, self.shortest = depth, longest, shortest

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        self.advance(state)
        depth = self._depth(state)
        indices = state.memory[self].rows
        chains = [
            index.continuation(row.ids, min(depth, budget, row.room))
            for index, row in zip(indices, state.rows, strict=True)
        ]
        return DraftTree.from_chains(chains, state.device)

    def offer(self, state: DecodeState, nodes: int) -> list[ProposedTree]:
        """A chain of at most `nodes` tokens behind every text's match, no longer than it has room for."""
        self.advance(state)
        trees = []
        for index, row in zip(state.memory[self].rows, state.rows, strict=True):
            tokens = index.continuation(row.ids, min(nodes, row.room))
            length = index.matched(row.ids) if tokens else 0
            odds = [HITS[min(length + depth, len(HITS) - 1)] for depth in range(len(tokens))]
            trees.append(ProposedTree(tokens, list(range(-1, len(tokens) - 1)), odds))
        return trees

    def advance(self, state: DecodeState) -> None:
        memory = state.memory.get(self)
        if memory is None:
            memory = state.memory[self] = PerText(partial(NGramIndex, self.longest, self.shortest), state.batch)
        for index, row in zip(memory.rows, state.rows, strict=True):
            index.extend(row.ids)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """The token behind the match before each position: whatever the depth, the text before it is the same."""
        self.advance(state)
        scores = []
        for index, span in zip(state.memory[self].rows, spans, strict=True):
            tokens = torch.tensor(index.expected[span.start : span.stop], dtype=torch.long, device=state.device)
            scores.append(Score(span, tokens=tokens.view(1, -1, 1), children=(1,) * self._depth(state)))
        return scores

    def behind(self, state: DecodeState) -> list[int]:
        """Reading text is no forward pass."""
        return [0] * state.batch

    def _depth(self, state: DecodeState) -> int:
        return self.depth or DEPTH.get(state.device.type, max(DEPTH.values()))

    def invalidate(self, state: DecodeState) -> None:
        """There are no weights that could change."""


class NGramIndex:
    """Where each n-gram of a growing text last stood; every token is looked at once."""

    def __init__(self, longest: int, shortest: int):
        self.sizes = range(longest, shortest - 1, -1)
        self.after: dict[tuple[int, ...], int] = {}  # n-gram → position behind its last occurrence
        self.expected: list[int] = [-1]  # what would have been proposed for each position, −1 = nothing

    def extend(self, ids: list[int]) -> None:
        """Index the n-grams that have a token behind them: the one at the very end must not find itself."""
        after = self.after
        for end in range(len(self.expected), len(ids)):
            grams = [tuple(ids[end - size : end]) for size in self.sizes if size <= end]
            self.expected.append(next((ids[after[gram]] for gram in grams if gram in after), -1))
            after.update(dict.fromkeys(grams, end))

    def matched(self, ids: list[int]) -> int:
        """How many tokens at the end of `ids` stand before the occurrence that `continuation` goes on from; no more
        than `HITS` tells apart."""
        start = next((self.after[gram] for size in self.sizes if (gram := tuple(ids[-size:])) in self.after), 0)
        count = 0
        while count < min(start, len(HITS)) and ids[start - 1 - count] == ids[-1 - count]:
            count += 1
        return count

    def continuation(self, ids: list[int], count: int) -> list[int]:
        """The `count` tokens behind the last occurrence of the longest known n-gram at the end of `ids`, or [].

        A match close to the end runs into its own copy: the text is periodic there and the copy goes on.
        """
        if count <= 0:
            return []
        for size in self.sizes:
            start = self.after.get(tuple(ids[-size:])) if size <= len(ids) else None
            if start is not None:
                found = ids[start : start + count]
                period = len(found)
                while len(found) < count:
                    found += found[-period:][: count - len(found)]
                return found
        return []


def drafter(drafting: DraftingRecipe) -> Lookup:
    """The drafter `lookup`."""
    return Lookup(drafting.depth)
