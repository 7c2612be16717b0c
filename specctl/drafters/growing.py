"""Dynamic draft trees of a batch while they grow on the device: `tree.GrowingTree` in tensors of fixed shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.decoding.records import PADDING, DraftTree


class GrowingTrees:
    """Candidates level by level, in the order they were found; of all trees as many.

    Attributes:
        joint: of every level, [B, m] log probabilities of the paths from the root; in fp64, as Python adds them.
        tokens: of every level, [B, m].
    """

    def __init__(self) -> None:
        self.joint: list[Tensor] = []
        self.tokens: list[Tensor] = []
        self.parents: list[Tensor] = []

    def add(self, above: Tensor | None, gains: Tensor, tokens: Tensor) -> None:
        """A level: behind each of the nodes `above` [B, n], given by their places in the last level, children with
        these log probabilities and tokens [B, n, c]. None: behind the root, n = 1."""
        level = gains.double()
        if above is None:
            parents = torch.full_like(tokens[:, 0, 0], -1).unsqueeze(1)
        else:
            level = self.joint[-1].gather(1, above).unsqueeze(-1) + level
            parents = above + sum(part.shape[1] for part in self.joint[:-1])
        self.parents.append(parents.repeat_interleave(tokens.shape[2], 1))
        self.joint.append(level.flatten(1))
        self.tokens.append(tokens.flatten(1))

    def frontier(self, width: int) -> Tensor:
        """[B, n] places in the last level of its `width` most probable nodes, or of all where they are fewer."""
        return self.joint[-1].sort(dim=-1, descending=True, stable=True).indices[:, :width]

    def best(self, room: Tensor, nodes: int, chain: bool) -> DraftTree:
        """The candidates of highest joint probability that there is `room` [B] for, in the order they were found."""
        tokens, parents = torch.cat(self.tokens, 1), torch.cat(self.parents, 1)
        deep = room.unsqueeze(1)
        fits = torch.cat([(deep > level).expand(-1, part.shape[1]) for level, part in enumerate(self.joint)], 1)
        joint = torch.cat(self.joint, 1).masked_fill(~fits, -torch.inf)
        kept = joint.sort(dim=-1, descending=True, stable=True).indices[:, :nodes].sort(-1).values
        place = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        place = torch.zeros_like(tokens).scatter(1, kept, place)
        above = parents.gather(1, kept)
        links = torch.where(above < 0, -1, place.gather(1, above.clamp(min=0)))
        return DraftTree(tokens.gather(1, kept), torch.where(fits.gather(1, kept), links, PADDING), chain=chain)
