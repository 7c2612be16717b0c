"""Drafter `lookahead`: n-grams of the target's own Jacobi iterations (Lookahead decoding, Fu et al. 2024).

See arXiv 2402.02057. A window of `columns` × `levels` guessed tokens lies in the draft tree, after the last committed
token. Level 0 is one chain, and the other levels of column j are a chain after its token of level 0. In every round the
target predicts one more token for each column, in the pass that verifies the draft. The column and this token are an
n-gram of `levels` + 1 tokens, and the column goes on without its oldest token. The draft also has the newest n-grams
that begin with the last committed token. As in the released code with POOL_FROM_PROMPT, n-grams of the text count, too.

Two differences: n-grams with a common beginning share its rows, and the window begins with n-grams of the prompt, not
with random tokens.
"""

from functools import partial

import torch

from specctl.decoding.protocols import Drafter, ReadsVerdicts
from specctl.decoding.records import DraftTree, Score, Verdict
from specctl.decoding.state import DecodeState, per_text
from specctl.recipe import DraftingRecipe

# N − 1, W and G of the released example. The paper's values for a model of 7B are 4, 15 and 15: 119 nodes, where a
# step has 62.
LEVELS, COLUMNS, CANDIDATES = 4, 7, 7


class LookaheadDrafter(Drafter, ReadsVerdicts):
    """Drafts the window and at most `candidates` n-grams, of one sequence each.

    Half of the nodes of a step are for the window. It has fewer columns if they do not suffice. In exact mode a draft
    is the newest n-gram, without the window.
    """

    def __init__(self, depth: int | None = None, columns: int | None = None, candidates: int | None = None):
        """`depth`: number of levels of the window, and of tokens after the first one of an n-gram."""
        self.levels, self.columns = depth or LEVELS, columns or COLUMNS
        self.candidates = candidates or CANDIDATES
        self.depth = max(self.levels, self.levels + self.columns - 2)  # of the longest draft, the last column's

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        self.advance(state)
        trees = []
        for window, row in zip(state.memory[self].rows, state.rows, strict=True):
            trees.append(window.draft(row.ids[-1], row.draft_room, budget, chain=bool(state.exact_rows)))
        return DraftTree.from_trees(trees, state.device)

    def read_verdict(self, state: DecodeState, draft: DraftTree, verdict: Verdict) -> None:
        """Move the windows on by the tokens that the target predicts after their columns."""
        windows: list[Window] = state.memory[self].rows
        trees = zip(windows, draft.tokens.tolist(), draft.parents.tolist(), strict=True)
        nodes = [window.ends(tokens, parents) for window, tokens, parents in trees]
        places = [b * (draft.size + 1) + node + 1 for b, ends in enumerate(nodes) for node in ends]
        if not places:
            return
        rows = verdict.logits.flatten(0, 1)[torch.tensor(places, device=verdict.logits.device)]
        predicted = iter(rows.argmax(-1).tolist())
        for window, ends in zip(windows, nodes, strict=True):
            window.go_on([next(predicted) for _ in ends])

    def advance(self, state: DecodeState) -> None:
        windows = per_text(state, self, partial(Window, self.levels, self.columns, self.candidates))
        for window, row in zip(windows, state.rows, strict=True):
            window.read(row.ids)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """First tokens of the n-grams known before each position: a lower bound, as an idle window does not go on."""
        self.advance(state)
        width, scores = 1 if state.exact_rows else self.candidates, []
        for window, span in zip(state.memory[self].rows, spans, strict=True):
            expected = [window.expected[position][:width] for position in span]
            padded = [tokens + [-1] * (width - len(tokens)) for tokens in expected]
            tokens = torch.tensor(padded, dtype=torch.long, device=state.device).view(1, len(span), width)
            scores.append(Score(span, tokens=tokens, children=(width,) * self.levels))
        return scores


class Window:
    """The window and the n-grams of one sequence.

    Attributes:
        columns: `levels` tokens each, the oldest guess first. The first column begins with the last committed token.
        pool: first token → the other tokens of at most `candidates` n-grams, the newest last.
        expected: for every position of the text, the distinct first guesses of the pool when it was reached, the
            newest first.
        asked: paths of the columns in the draft that the target verifies next.
    """

    def __init__(self, levels: int, columns: int, candidates: int):
        self.levels, self.width, self.candidates = levels, columns, candidates
        self.columns: list[list[int]] = []
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}
        self.expected: list[list[int]] = [[]]
        self.asked: list[list[int]] = []

    def read(self, ids: list[int]) -> None:
        """Keep the n-grams of the new tokens of a text. The first call also fills the window."""
        if not self.columns:
            starts = [column * len(ids) // self.width for column in range(self.width)]
            self.columns = [[ids[(start + i) % len(ids)] for i in range(self.levels)] for start in starts]
        for end in range(len(self.expected), len(ids)):
            self.expected.append(list(dict.fromkeys(gram[0] for gram in self.newest(ids[end - 1]))))
            if end >= self.levels:
                self.keep(ids[end - self.levels : end + 1])

    def keep(self, gram: list[int]) -> None:
        """Add an n-gram to the pool as the newest one."""
        first, *others = gram
        known = self.pool.setdefault(first, {})
        known.pop(tuple(others), None)
        known[tuple(others)] = None
        if len(known) > self.candidates:
            del known[next(iter(known))]

    def newest(self, token: int) -> list[tuple[int, ...]]:
        """The other tokens of the n-grams that begin with `token`, newest first."""
        return [*reversed(self.pool.get(token, {}))]

    def draft(self, last: int, room: int, budget: int, *, chain: bool) -> tuple[list[int], list[int]]:
        """Tokens and parents of at most `budget` nodes after the token `last`, at most `room` levels deep."""
        columns = 0 if chain else min(self.width, (budget + 1) // (2 * self.levels))
        self.columns[0][0] = last
        first = [column[0] for column in self.columns]
        paths = [first[1 : j + 1] + self.columns[j][1:] for j in range(columns)]
        self.asked = [path for path in paths if len(path) <= room]
        tree: dict[tuple[int, int], int] = {}  # (parent, token) → node
        grams = [gram[:room] for gram in self.newest(last)[: 1 if chain else None]]
        for part, limit in ((grams, budget - max(columns * self.levels - 1, 0)), (self.asked, budget)):
            for path in part:
                parent = -1
                for token in path:
                    if (parent, token) not in tree and len(tree) >= limit:
                        break
                    parent = tree.setdefault((parent, token), len(tree))
        return [token for _, token in tree], [parent for parent, _ in tree]

    def ends(self, tokens: list[int], parents: list[int]) -> list[int]:
        """The node of a verified draft at which each column ends; −1 = the root. From the first column that the draft
        lacks, columns have no node."""
        tree = {link: node for node, link in enumerate(zip(parents, tokens, strict=True))}
        found = []
        for path in self.asked:
            node: int | None = -1
            for token in path:
                node = None if node is None else tree.get((node, token))
            if node is None:
                break
            found.append(node)
        self.asked = []
        return found

    def go_on(self, predicted: list[int]) -> None:
        """Append one predicted token to each of the first columns, which lose their first token."""
        for column, token in zip(self.columns, predicted, strict=False):
            self.keep([*column, token])
            del column[0]
            column.append(token)


def make_drafter(drafting: DraftingRecipe) -> LookaheadDrafter:
    return LookaheadDrafter(drafting.depth, drafting.width, drafting.children)
