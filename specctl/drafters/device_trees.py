"""Grow the dynamic draft trees of a batch on the device: `tree.TreeBuilder` as tensors of fixed shapes."""

import torch
from torch import Tensor

from specctl.decoding.records import PADDING, DraftTree


class DeviceTreeBuilder:
    """Candidate nodes of the draft trees of a batch, level by level, in the order they were added.

    All trees have the same number of candidates.

    Attributes:
        joint: one tensor [B, m] per level: log probabilities of the paths from the root, in fp64 to match Python
            floats.
        tokens: one tensor [B, m] per level.
    """

    def __init__(self) -> None:
        self.joint: list[Tensor] = []
        self.tokens: list[Tensor] = []
        self.parents: list[Tensor] = []

    def add(self, above: Tensor | None, gains: Tensor, tokens: Tensor) -> None:
        """Append a level: the children of the nodes `above`.

        Args:
            above: [B, n] indices of the parents in the previous level. If None, the parent is the root and n = 1.
            gains: [B, n, c] log probabilities of the children given their parents.
            tokens: [B, n, c] tokens of the children.
        """
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
        """Indices [B, n] of the `width` most probable nodes of the last level, or of all nodes if it has fewer."""
        return self.joint[-1].sort(dim=-1, descending=True, stable=True).indices[:, :width]

    def best(self, room: Tensor, nodes: int, chain: bool) -> DraftTree:
        """Keep the `nodes` candidates of highest joint probability, in the order they were added.

        `room` [B] limits the depth of each tree; deeper candidates become padding.
        """
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
