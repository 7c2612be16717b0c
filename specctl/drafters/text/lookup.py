"""Drafter `lookup`: copy the tokens after the last occurrence of the current n-gram (prompt lookup, Saxena 2023).

It has no weights, as the text itself is the model. It is strong if the output repeats the input (schemas, code,
summaries).
"""

import torch

from specctl.decoding.protocols import DeviceDraft, Drafter
from specctl.decoding.records import DraftTree, Score
from specctl.decoding.state import DecodeState, per_text
from specctl.drafters.hybrid.gate import TEXT_CALIBRATION
from specctl.drafters.text.device_rounds import TextRounds
from specctl.drafters.tree import ProposedTree
from specctl.recipe import DraftingRecipe

# Drafts of one size, where nothing weighs the nodes (`hybrid.weighed`). On a CPU 8 rows cost the same as 1, and further
# rows cost more. Tokens per pass of the built-in target at depth 4 / 5 / 7: sql 1.57 / 1.65 / 1.65, math 2.18 / 2.32 /
# 2.46. Without 1-grams it is 1.63 and 2.18 at depth 7; 4-grams make no difference.
DEPTH = {"cpu": 7, "cuda": 10}
SIZES = 3, 2, 1  # lengths of the n-grams that are looked up, in this order

# HITS[n] is how often the token after a match of n tokens is the next one, measured in 1,050 responses of the built-in
# target to training prompts of seven domains.
HITS = (0.0, 0.22, 0.41, 0.58, 0.62, 0.70, 0.78, 0.82, 0.85, 0.87, 0.87, 0.87, 0.88, 0.90, 0.92, 0.94, 0.95, 0.96, 0.97)


class Lookup(Drafter):
    """Drafts a chain after an earlier occurrence of the last three, two or one tokens of the text.

    `depth` is the maximal chain length; the default depends on the device. `nodes` limits it further.
    """

    calibration = TEXT_CALIBRATION
    fixed_shape = True  # with padding

    def __init__(self, depth: int | None = None, nodes: int | None = None):
        self.depth, self.nodes = depth, nodes

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        self.advance(state)
        depth = self._depth(state)
        indices = state.memory[self].rows
        chains = [
            index.continuation(row.ids, min(depth, budget, row.draft_room))
            for index, row in zip(indices, state.rows, strict=True)
        ]
        return DraftTree.from_chains(chains, state.device)

    def propose_trees(self, state: DecodeState, nodes: int) -> list[ProposedTree]:
        """Draft for every sequence a chain of at most `nodes` tokens, no longer than the sequence has room for."""
        self.advance(state)
        trees = []
        for index, row in zip(state.memory[self].rows, state.rows, strict=True):
            tokens = index.continuation(row.ids, min(nodes, row.draft_room))
            length = index.matched(row.ids) if tokens else 0
            odds = [HITS[min(length + depth, len(HITS) - 1)] for depth in range(len(tokens))]
            trees.append(ProposedTree(tokens, list(range(-1, len(tokens) - 1)), odds))
        return trees

    def advance(self, state: DecodeState) -> None:
        indices = per_text(state, self, NGramIndex)
        for index, row in zip(indices, state.rows, strict=True):
            index.extend(row.ids)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Proposed token at every position; it is the same for all depths, as the preceding text is the same."""
        self.advance(state)
        scores = []
        for index, span in zip(state.memory[self].rows, spans, strict=True):
            tokens = torch.tensor(index.expected[span.start : span.stop], dtype=torch.long, device=state.device)
            scores.append(Score(span, tokens=tokens.view(1, -1, 1), children=(1,) * self._depth(state)))
        return scores

    def on_device(self, state: DecodeState, budget: int) -> DeviceDraft:
        nodes = min(self._depth(state), budget)
        return TextRounds(self, state, nodes, nodes, chain=True)

    def _depth(self, state: DecodeState) -> int:
        depth = self.depth or DEPTH.get(state.device.type, max(DEPTH.values()))
        return min(depth, self.nodes or depth)


class NGramIndex:
    """Index of the last occurrence of each n-gram in a growing text; every token is processed once."""

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], int] = {}  # n-gram → position after its last occurrence
        self.expected: list[int] = [-1]  # token that would have been proposed at each position, −1 = none

    def extend(self, ids: list[int]) -> None:
        """Index all n-grams with a following token. The last n-gram is left out, so it cannot match itself."""
        after = self.after
        for end in range(len(self.expected), len(ids)):
            grams = [tuple(ids[end - size : end]) for size in SIZES if size <= end]
            self.expected.append(next((ids[after[gram]] for gram in grams if gram in after), -1))
            after.update(dict.fromkeys(grams, end))

    def matched(self, ids: list[int]) -> int:
        """Count the tokens at the end of `ids` that precede also the occurrence used by `continuation`.

        The count stops at the length of `HITS`.
        """
        start = next((self.after[gram] for size in SIZES if (gram := tuple(ids[-size:])) in self.after), 0)
        count = 0
        while count < min(start, len(HITS)) and ids[start - 1 - count] == ids[-1 - count]:
            count += 1
        return count

    def continuation(self, ids: list[int], count: int) -> list[int]:
        """The `count` tokens after the last occurrence of the longest known n-gram that ends `ids`; [] without a match.

        If the match is so close to the end that fewer tokens follow it, the text is periodic and the copy is repeated.
        """
        if count <= 0:
            return []
        for size in SIZES:
            start = self.after.get(tuple(ids[-size:])) if size <= len(ids) else None
            if start is not None:
                found = ids[start : start + count]
                period = len(found)
                assert period, "the n-gram is not from this text"
                while len(found) < count:
                    found += found[-period:][: count - len(found)]
                return found
        return []


def make_drafter(drafting: DraftingRecipe) -> Lookup:
    return Lookup(drafting.depth, drafting.nodes)
