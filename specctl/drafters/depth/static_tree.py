"""Static draft trees with a fixed form; every round fills in the tokens.

See Cai et al. 2024, arXiv 2401.10774, §2.1.2 and 2.3.3, and Ankner et al. 2024, arXiv 2402.05109, §3.

A node is a path of ranks: (0, 2) is the third likeliest token after the likeliest one. The tree keeps the nodes with
the paths that are accepted most often, estimated from the accuracy of each rank.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from specctl import kernels
from specctl.decoding.records import PADDING, ChainRows, DraftTree
from specctl.decoding.state import DecodeState
from specctl.drafters.tree import TreeShape, WorthLevel

Path = tuple[int, ...]


def default_shape(device: torch.device) -> TreeShape:
    """Default shape of a static tree on a device.

    On a CPU it is a chain with the runner-up of most depths as leaves. Measured on the built-in target, eight rows cost
    little more than one, but fifteen do. On a GPU it has about as many nodes as the papers' trees.
    """
    if device.type == "cpu":
        return TreeShape(depth=4, width=1, nodes=7, children=2, stop_below=0.05)
    return TreeShape(depth=4, width=16, nodes=60, children=10, stop_below=0.0)


def best_paths(shape: TreeShape, accuracy: Sequence[float]) -> list[Path]:
    """Return the paths that are accepted most often, best first; every prefix of the list is a valid tree.

    At most `shape.width` nodes of a level have children, each at most the `shape.children` likeliest tokens.

    Args:
        accuracy: how often each rank is the target's token if the parent was accepted; ranks beyond the list are not
            used.
    """
    ranks = range(min(shape.children, len(accuracy)))
    # Ties go to the shorter path, so parents come before children.
    heap: list[tuple[float, int, Path]] = [(-accuracy[rank], 1, (rank,)) for rank in ranks]
    heapq.heapify(heap)
    opened = [0] * (shape.depth + 1)  # number of nodes per level that have children
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
    """Nodes of one depth.

    Attributes:
        ranks: number of candidates requested for each parent.
        parent: [n] for every node, the index of its parent among the nodes of the previous level that have children.
        rank: [n] for every node, its rank among the candidates of its parent.
        inner: [m] indices of the nodes that have children.
    """

    ranks: int
    parent: Tensor
    rank: Tensor
    inner: Tensor


class StaticTree:
    """Tree given by `paths` (with all their prefixes), level by level, in the order of `DraftTree`'s nodes."""

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
        self, roots: Tensor, logits: Callable[[int, Tensor], Tensor], ids: Tensor | None, pays: WorthLevel | None
    ) -> tuple[DraftTree, Tensor]:
        """Fill in the tree's tokens; stop before the first level that is not worth drafting.

        Returns the draft and the log probability [B, n] of each node given its parent.

        Args:
            roots: [B] last committed token of every sequence.
            logits: function (depth, paths) → [B, m, Vd], the next-token logits after the m nodes of a depth that have
                children, or [B, 1, Vd] if all of them share the same logits. `paths` [B, m, depth + 1] are the nodes'
                tokens, the root's first.
            ids: [Vd] target token id of every draft token, or None if they are the same.
            pays: decides whether a further level is drafted. If None, all levels are.
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
        """Return the draft without the nodes that are deeper than their sequence has `draft_room` [B] for."""
        fits = self.depths[:, : draft.size] <= room.unsqueeze(1)
        return replace(draft, parents=torch.where(fits, draft.parents, PADDING))


class Trees:
    """Static trees of a drafter: the full shape, and smaller trees near the end of a text or for a smaller budget."""

    def __init__(self, shape: TreeShape, accuracy: Sequence[float], device: torch.device):
        self.shape = shape
        self.paths = best_paths(shape, accuracy)
        self._made = lru_cache(64)(lambda paths: StaticTree(paths, device))

    @property
    def children(self) -> tuple[int, ...]:
        """Maximal number of children per node at each depth."""
        depth = max(map(len, self.paths))
        return tuple(max(path[-1] for path in self.paths if len(path) == d + 1) + 1 for d in range(depth))

    def full_tree(self, budget: int) -> StaticTree | None:
        """Return the tree with at most `budget` nodes, or None if the budget is zero."""
        return self._made(tuple(self.paths[:budget])) if budget > 0 else None

    def tree_for(self, state: DecodeState, budget: int) -> StaticTree | None:
        """Return the tree with at most `budget` nodes, as deep as the sequence with the most room allows, or None."""
        depth = min(self.shape.depth, max(row.draft_room for row in state.rows), budget)
        if depth <= 0:
            return None
        if state.exact_rows:  # only chains stay bitwise equal: a tree's rejected siblings sit between the rows it keeps
            return self._made(tuple((0,) * (d + 1) for d in range(depth)))
        return self._made(tuple(path for path in self.paths if len(path) <= depth)[:budget])
