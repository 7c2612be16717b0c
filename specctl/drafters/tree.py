"""Dynamic draft trees: expand the likeliest nodes, keep the likeliest candidates (EAGLE-2, Li et al. 2024, §4)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from specctl.decoding.records import PADDING, ChainRows, DraftTree, first_chain
from specctl.decoding.state import DecodeState
from specctl.recipe import DraftingRecipe

Pays = Callable[[list[float]], bool]
"""Whether a further level of a draft is worth drafting, given the joint log probability of the likeliest node of the
last level of every sequence."""


class ProposedTree(NamedTuple):
    """A tree of what a drafter proposes behind a text: tokens, parents first; the places of their parents (−1 = the end
    of the text); and the probability that it gives each, given its parent."""

    tokens: list[int]
    parents: list[int]
    odds: list[float]


@dataclass(frozen=True)
class TreeShape:
    """Shape of a draft.

    `depth` expansions at most; each expands the `width` most probable nodes of the last level into `children`
    candidates; the `nodes` candidates of highest joint probability are kept. A level whose best joint probability is
    under `stop_below` is not expanded: a draft that will be rejected costs as much as one that will not. Of the
    candidates under `keep_above` only the likeliest is kept: the others are not worth their rows.
    """

    depth: int
    width: int
    nodes: int
    children: int
    stop_below: float
    keep_above: float = 0.0

    @property
    def chain(self) -> bool:
        return self.width == 1 and self.children == 1

    def within(self, budget: int) -> TreeShape:
        """The shape where a draft may have `budget` nodes at most.

        A level expands no more nodes than the draft keeps of one on average, down to a chain with runners-up: every
        node that is expanded costs the head a row, and in a batch those rows are what the budget was cut for.
        """
        if budget >= self.nodes:
            return self
        return replace(self, nodes=budget, width=min(self.width, max(1, budget // self.depth)))

    @property
    def floor(self) -> float:
        """`stop_below` as a log probability."""
        return math.log(self.stop_below) if self.stop_below > 0 else -math.inf

    @property
    def least(self) -> float:
        """`keep_above` as a log probability."""
        return math.log(self.keep_above) if self.keep_above > 0 else -math.inf


def default_shape(device: torch.device) -> TreeShape:
    """On a CPU a chain with the runners-up of each depth as leaves, which cost no forward of the head. A row of the
    target's step costs 0.06 of the whole step, and a level of the head 0.1, so candidates that are hardly ever
    accepted are left out (chosen on 72 development texts of five domains in fp32; in bf16 it is 1.29 against 1.13 x
    plain for SmolLM2-135M on 12 development prompts, 1.28 against 0.96 for the built-in target). A GPU takes a larger
    tree (EAGLE-2)."""
    if device.type != "cpu":
        return TreeShape(depth=6, width=8, nodes=48, children=8, stop_below=0.0)
    return TreeShape(depth=12, width=1, nodes=14, children=3, stop_below=0.15, keep_above=0.04)


def shape_for(drafting: DraftingRecipe, default: TreeShape) -> TreeShape:
    """The family's default with what a `DraftingRecipe` sets."""
    fields = ("depth", "width", "nodes", "children", "stop_below", "keep_above")
    given = {name: value for name in fields if (value := getattr(drafting, name, None)) is not None}
    return TreeShape(**{**vars(default), **given})


class Shaped:
    """A drafter of dynamic trees.

    Attributes:
        shape: of its drafts.
    """

    shape: TreeShape

    def shaped(self, drafting: DraftingRecipe) -> Self:
        """The same drafter with another shape of its drafts: it shares weights and memory."""
        twin = copy.copy(self)
        twin.shape = shape_for(drafting, self.shape)
        return twin

    @property
    def even(self) -> bool:
        """Whether no draft ends early, and all have as many nodes."""
        return self.shape.stop_below <= 0 and self.shape.keep_above <= 0

    def children(self, state: DecodeState) -> tuple[int, ...]:
        """How many children a node has at every level of a draft; exact mode drafts chains."""
        if self.shape.chain or state.exact_rows:
            return (1,) * self.shape.depth
        return (self.shape.children,) * min(self.shape.depth, self.shape.nodes)


class GrowingTree:
    """A draft tree while it grows: parallel lists over candidates, in the order they were found."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.joint: list[float] = []  # log probability of the path from the root
        self.expanded: dict[int, int] = {}  # node → its row behind the committed slots
        self.level = range(0)  # nodes found by the last expansion
        self.starts: list[int] = []  # first node of every level

    def add(self, parent: int, gains: list[float], tokens: list[int]) -> None:
        start = len(self.tokens)
        if parent == -1 or self._level_of(parent):
            self.starts.append(start)
        score = self.joint[parent] if parent >= 0 else 0.0
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self.joint += [score + gain for gain in gains]
        self.level = range(self.starts[-1], len(self.tokens))

    def _level_of(self, parent: int) -> bool:
        """True when `parent` is of the current level, so that its children open the next one."""
        return parent in self.level

    def frontier(self, width: int) -> list[int]:
        """The `width` most probable nodes of the last level (repeated when there are fewer)."""
        best = sorted(self.level, key=lambda node: -self.joint[node])[:width]
        return best + best[-1:] * (width - len(best))

    def within(self, depth: int) -> range:
        """The nodes that are no deeper."""
        return range(self.starts[depth] if depth < len(self.starts) else len(self.tokens))

    def proposal(self, depth: int) -> ProposedTree:
        """The nodes that are no deeper, with their probabilities given their parents."""
        kept = len(self.within(depth))
        joint = [*self.joint[:kept], 0.0]  # the last one is the root's
        parents = self.parents[:kept]
        odds = [math.exp(joint[node] - joint[parent]) for node, parent in enumerate(parents)]
        return ProposedTree(self.tokens[:kept], parents, odds)

    def source(self, frontier: list[int]) -> list[int]:
        """Place of each node's parent among the rows of the step before."""
        rows = [self.expanded[self.parents[node]] for node in frontier]
        return [row % len(frontier) for row in rows]

    def ancestors(self, node: int) -> list[int]:
        found = []
        while (node := self.parents[node]) >= 0:
            found.append(node)
        return found


def best(
    growing: list[GrowingTree], rooms: list[int], shape: TreeShape, device: torch.device, q: ChainRows
) -> DraftTree:
    """The candidates of highest joint probability that a shape keeps, no deeper than a sequence has room for.

    A child is never more probable than its parent and is found later, so a stable choice keeps the tree connected and
    parents first.

    Args:
        q: the rows that the first chains were chosen from.
    """
    tokens, parents = [], []
    for tree, room in zip(growing, rooms, strict=True):
        ranked = sorted(tree.within(room), key=lambda node: -tree.joint[node])[: shape.nodes]
        kept = sorted(ranked[:1] + [node for node in ranked[1:] if tree.joint[node] >= shape.least])
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        tokens.append([tree.tokens[node] for node in kept])
        parents.append([place[tree.parents[node]] for node in kept])
    width = max(map(len, tokens))
    for row, links in zip(tokens, parents, strict=True):
        links += [PADDING] * (width - len(links))
        row += [0] * (width - len(row))
    return DraftTree(torch.tensor(tokens, device=device), torch.tensor(parents, device=device), chain=False, q=q)


def chain_rows(growing: list[GrowingTree], rows: list[Tensor], ids: Tensor | None) -> ChainRows:
    """The rows that the first chains were chosen from.

    Args:
        rows: draft logits of each expansion [B·width, Vd]; of the first one, which expands the roots, [B, Vd].
        ids: [Vd] target id of every draft token.
    """
    return ChainRows(rows, ids, [_chain_places(tree, b, rows) for b, tree in enumerate(growing)])


def _chain_places(tree: GrowingTree, b: int, rows: list[Tensor]) -> list[int]:
    """Rows of sequence b in each of `rows` that the first chain was chosen from, as deep as its nodes were expanded."""
    places = [b]
    for node, later in zip(first_chain(tree.parents), rows[1:], strict=False):
        if node not in tree.expanded:
            break
        width = len(later) // len(rows[0])
        places.append(b * width + tree.expanded[node] % width)
    return places
