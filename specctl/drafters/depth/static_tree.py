"""Static draft trees: their form is chosen once, tokens are filled in every round (Cai et al. 2024, arXiv 2401.10774,
§2.1.2 and 2.3.3; Ankner et al. 2024, arXiv 2402.05109, §3).

A node is a path of ranks: (0, 2) is the third likeliest token behind the likeliest one. The nodes kept are those whose
paths are accepted most often, by the accuracies of the ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from specctl import kernels
from specctl.decoding.records import PADDING, ChainRows, DraftTree
from specctl.decoding.state import DecodeState
from specctl.drafters.tree import Pays, TreeShape

Path = tuple[int, ...]


def default_shape(device: torch.device) -> TreeShape:
    """On a CPU (measured on the built-in target) a chain with the runner-up of most depths as leaves: eight rows cost
    the target little more than one, fifteen do. On a GPU about as many nodes as the papers' trees have."""
    if device.type == "cpu":
        return TreeShape(depth=4, width=1, nodes=7, children=2, stop_below=0.05)
    return TreeShape(depth=4, width=16, nodes=60, children=10, stop_below=0.0)


def best_paths(shape: TreeShape, accuracy: Sequence[float]) -> list[Path]:
    """The paths most often accepted, best first: every beginning of the list is a tree too.

    At most `shape.width` nodes of a level have children, the `shape.children` likeliest tokens at most.

    Args:
        accuracy: how often each rank is the target's token where its parent was; ranks beyond are not used.
    """
    ranks = range(min(shape.children, len(accuracy)))
    heap: list[tuple[float, int, Path]] = [
        (-accuracy[rank], 1, (rank,)) for rank in ranks
    ]  # of equals the shorter first: parents before children
    heapq.heapify(heap)
    opened = [0] * (shape.depth + 1)  # nodes of each level that have children
    found: list[Path] = []
    while heap and len(found) < shape.nodes:
        chance, depth, path = heapq.heappop(heap)
        found.append(path)
        if depth < shape.depth and opened[depth] < shape.width:
            opened[depth] += 1
            for rank in ranks:
                heapq.heappush(heap, (chance * accuracy[rank], depth + 1, (*path, rank)))
    return found


@dataclass(frozen=True)
class Level:
    """The nodes of one depth.

    Attributes:
        ranks: how many candidates the parents are asked for.
        parent: [n] of every node, the place of its parent among the nodes of the level above that have children.
        rank: [n] of every node.
        inner: [m] which of the nodes have children.
    """

    ranks: int
    parent: Tensor
    rank: Tensor
    inner: Tensor


class StaticTree:
    """A tree of `paths` (each with its beginnings), level by level, in the order of `DraftTree`'s nodes."""

    def __init__(self, paths: Sequence[Path], device: torch.device):
        self.paths = sorted(paths, key=lambda path: (len(path), path))
        self.device = device
        place = {path: i for i, path in enumerate(self.paths)} | {(): -1}
        links = [place[path[:-1]] for path in self.paths]
        self.parents = torch.tensor([links], device=device)
        self.depths = torch.tensor([[len(path) for path in self.paths]], device=device)
        self.chain = links == list(range(-1, len(links) - 1))

    @cached_property
    def levels(self) -> list[Level]:
        above: list[Path] = [()]
        result = []
        inner = {path[:-1] for path in self.paths}
        for depth in range(1, len(self.paths[-1]) + 1):
            level = [path for path in self.paths if len(path) == depth]
            place = {path: i for i, path in enumerate(above)}
            ranks = [path[-1] for path in level]
            columns = ([place[path[:-1]] for path in level], ranks, [i for i, p in enumerate(level) if p in inner])
            result.append(
                Level(max(ranks) + 1, *(torch.tensor(c, dtype=torch.long, device=self.device) for c in columns))
            )
            above = [path for path in level if path in inner]
        return result

    def grow(
        self, roots: Tensor, logits: Callable[[int, Tensor], Tensor], ids: Tensor | None, pays: Pays | None
    ) -> tuple[DraftTree, Tensor]:
        """The draft with this tree's form, cut before the first level that is not worth drafting, and the log
        probability [B, n] of each node given its parent.

        Args:
            roots: [B] last committed token of every sequence.
            logits: (depth, paths) → [B, m, Vd], the next token's behind the m nodes of a depth that have children, or
                [B, 1, Vd] where all have the same; `paths` [B, m, depth + 1] are their tokens, the root's first.
            ids: [Vd] target id of every draft token; None = the same.
            pays: None = all levels.
        """
        batch = roots.shape[0]
        paths, joint = roots.view(-1, 1, 1), torch.zeros(batch, 1, device=roots.device)
        drafted: list[Tensor] = []
        claimed: list[Tensor] = []
        first: list[Tensor] = []
        for depth, level in enumerate(self.levels):
            if depth and pays is not None and not pays(joint.amax(1).tolist()):
                break
            rows = logits(depth, paths)
            first.append(rows[:, 0])
            gain, index = kernels.expand_topk(rows.flatten(0, 1), level.ranks)
            shape = (-1, paths.shape[1], -1)
            gain, index = (t.view(batch, -1, level.ranks).expand(shape) for t in (gain, index))
            tokens = index[:, level.parent, level.rank]
            if ids is not None:
                tokens = ids[tokens]
            drafted.append(tokens)
            claimed.append(gain[:, level.parent, level.rank])
            joint = (joint[:, level.parent] + claimed[-1])[:, level.inner]
            paths = torch.cat((paths[:, level.parent], tokens.unsqueeze(-1)), -1)[:, level.inner]
        flat = torch.cat(drafted, 1)
        parents = self.parents[:, : flat.shape[1]].expand(batch, -1)
        return DraftTree(flat, parents, chain=self.chain, q=ChainRows(first, ids)), torch.cat(claimed, 1)

    def within(self, draft: DraftTree, room: Tensor) -> DraftTree:
        """A draft of this form without the nodes that are deeper than a sequence has `room` [B] for."""
        fits = self.depths[:, : draft.size] <= room.unsqueeze(1)
        return replace(draft, parents=torch.where(fits, draft.parents, PADDING))


class Trees:
    """The trees of a drafter: one of the full shape, and smaller ones near the end of a text or of the budget."""

    def __init__(self, shape: TreeShape, accuracy: Sequence[float], device: torch.device):
        self.shape = shape
        self.paths = best_paths(shape, accuracy)
        self._made = lru_cache(64)(lambda paths: StaticTree(paths, device))

    @property
    def children(self) -> tuple[int, ...]:
        """How many children a node of the level above has at most, at each depth."""
        depth = max(map(len, self.paths))
        return tuple(max(path[-1] for path in self.paths if len(path) == d + 1) + 1 for d in range(depth))

    def whole(self, budget: int) -> StaticTree | None:
        """At most `budget` nodes; None where that is none."""
        return self._made(tuple(self.paths[:budget])) if budget > 0 else None

    def of(self, state: DecodeState, budget: int) -> StaticTree | None:
        """At most `budget` nodes, no deeper than some sequence has room for; None where nothing fits."""
        depth = min(self.shape.depth, max(row.room for row in state.rows), budget)
        if depth <= 0:
            return None
        if state.exact_rows:  # bitwise equality is promised for chains; a tree's siblings sit between the rows it keeps
            return self._made(tuple((0,) * (d + 1) for d in range(depth)))
        return self._made(tuple(path for path in self.paths if len(path) <= depth)[:budget])
