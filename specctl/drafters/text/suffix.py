"""Drafter `suffix`: a tree of the most probable continuations of the longest suffix that occurred before.

This is SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) on a suffix automaton of prompt and output. With a
`Datastore` of a domain's responses the drafter reads both at once: see `specctl.drafters.retrieval.drafter`.
"""

import torch

from specctl.decoding.protocols import DeviceDraft, Drafter
from specctl.decoding.records import DraftTree, Score
from specctl.decoding.state import DecodeState, per_text
from specctl.drafters.hybrid.gate import STORE_CALIBRATION, TEXT_CALIBRATION
from specctl.drafters.text.automaton import Match, SuffixAutomaton
from specctl.drafters.text.device_rounds import TextRounds
from specctl.drafters.text.text_tree import TextIndex, TextPosition, TextTreeShape, first_level, grow
from specctl.drafters.tree import ProposedTree
from specctl.recipe import DraftingRecipe

# Size of drafts where nothing weighs the nodes (`hybrid.weighed`).
# Speedup over plain decoding of the built-in target on a CPU (sql, code, summarization; 20 prompts each; one thread of
# a busy machine, on which equal drafts differ by up to 20 %):
#   chain of 7     text 1.55 2.16 1.18   with a store of 400 responses 2.30 2.99 1.68   (lookup 1.54 1.80 1.20)
#    7 nodes       text 1.58 1.80 1.15   with the store 2.94 2.82 1.86
#   14 nodes       text 1.63 2.09 1.01   with the store 2.71 2.95 1.74
# 14 nodes yield up to 9 % (text) and 8 to 17 % (store) more tokens per pass than 7, and cost as much as they gain. A
# chain of 7 yields as much as a tree from the text, but 2 to 16 % less from a store. On an H100, 31 nodes cost 11 % of
# a plain step of an 8B model.
NODES = {"cpu": 7, "cuda": 30}
DEPTH, CHILDREN = 16, 5
MIN_PROBABILITY = 0.02  # minimal joint probability of a node that may pay off (`hybrid.weighed`)


class Suffix(Drafter):
    """Drafts trees from each sequence's own text, and from `corpus` if one is given."""

    fixed_shape = True  # with padding

    def __init__(
        self,
        depth: int | None = None,
        nodes: int | None = None,
        children: int | None = None,
        corpus: TextIndex | None = None,
    ):
        self.depth, self.nodes, self.children = depth or DEPTH, nodes, children or CHILDREN
        self.corpus = corpus
        self.calibration = TEXT_CALIBRATION if corpus is None else STORE_CALIBRATION

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        """Draft a tree of at most `budget` nodes per sequence, no deeper than the sequence has room for."""
        trees = self._trees(state, min(self._shape(state).nodes, budget))
        return DraftTree.from_trees([(tree.tokens, tree.parents) for tree in trees], state.device)

    def propose_trees(self, state: DecodeState, nodes: int) -> list[ProposedTree]:
        """The `nodes` most probable continuations of every text, without nodes that are not worth a row."""
        return self._trees(state, nodes, MIN_PROBABILITY)

    def _trees(self, state: DecodeState, nodes: int, least: float = 0.0) -> list[ProposedTree]:
        """The `nodes` most probable continuations of every text, no deeper than it has room for."""
        self.advance(state)
        shape, trees = self._shape(state), []
        for text, row in zip(state.memory[self].rows, state.rows, strict=True):
            fitting = TextTreeShape(min(shape.depth, row.draft_room), nodes, shape.children, least)
            trees.append(grow(self._places(text.automaton, row.ids), fitting))
        return trees

    def advance(self, state: DecodeState) -> None:
        for text, row in zip(per_text(state, self, SuffixText), state.rows, strict=True):
            text.automaton.extend(row.ids)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """First level of the tree before each position; it is the same for all depths, as the preceding text is."""
        self.advance(state)
        shape, scores = self._shape(state), []
        for text, row, span in zip(state.memory[self].rows, state.rows, spans, strict=True):
            proposed = []
            for end in span:
                tree = grow(self._places(text.before(end, row.ids), row.ids[:end]), shape)
                proposed.append(first_level(tree))
            width = max(map(len, proposed), default=0)
            padded = [tokens + [-1] * (width - len(tokens)) for tokens in proposed]
            tokens = torch.tensor(padded, device=state.device).long().view(1, len(span), width)
            scores.append(Score(span, tokens=tokens, children=(shape.children,) * min(shape.depth, shape.nodes)))
        return scores

    def on_device(self, state: DecodeState, budget: int) -> DeviceDraft:
        shape = self._shape(state)
        return TextRounds(self, state, min(shape.nodes, budget), shape.depth, chain=shape.children == 1)

    def _shape(self, state: DecodeState) -> TextTreeShape:
        # Exact mode promises bitwise equality for chains only: a tree's rejected siblings sit between the rows it
        # keeps.
        children = 1 if state.exact_rows else self.children
        return TextTreeShape(self.depth, self.nodes or NODES.get(state.device.type, max(NODES.values())), children)

    def _places(self, automaton: SuffixAutomaton, ids: list[int]) -> list[TextPosition]:
        """Places from which a draft for the text `ids`, read by `automaton`, continues."""
        own: list[TextPosition] = [Match.of(automaton)]
        return own if self.corpus is None else [*own, self.corpus.find(ids, self.depth)]


class SuffixText:
    """Suffix automaton of one sequence."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self._trail = SuffixAutomaton()

    def before(self, end: int, ids: list[int]) -> SuffixAutomaton:
        """Return the automaton of `ids[:end]`, a second one that is built when a sequence is scored.

        Ascending positions cost as much as the first automaton does; a step back reads the text again from its start.
        """
        if self._trail.size > end:
            self._trail = SuffixAutomaton()
        self._trail.extend(ids, end)
        return self._trail


def make_drafter(drafting: DraftingRecipe) -> Suffix:
    return Suffix(drafting.depth, drafting.nodes, drafting.children)
