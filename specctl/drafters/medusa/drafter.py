"""Drafter of family `medusa` (Cai et al. 2024, arXiv 2401.10774): one forward of all heads fills a static tree."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl import kernels
from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.protocols import DeviceDraft
from specctl.decoding.records import DraftTree
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters.depth.drafter import DepthDrafter, DepthFamily
from specctl.drafters.depth.head import HeadsConfig
from specctl.drafters.depth.static_tree import StaticTree
from specctl.drafters.feature.head import DraftHead
from specctl.drafters.feature.layer import last_slots, select_taps
from specctl.drafters.medusa.head import MedusaHeads
from specctl.drafters.tree import TreeShape

# Share of the target's tokens at each rank, measured on the built-in target (sql, 400 steps) at depth 1.
ACCURACY = (0.5, 0.11, 0.06, 0.05, 0.04, 0.03, 0.025, 0.02, 0.02, 0.012)


class MedusaDrafter(DepthDrafter):
    """Runs `MedusaHeads` for drafting; it keeps no state between rounds."""

    reads_tokens = False

    def __init__(self, module: MedusaHeads, target: Target, shape: TreeShape):
        super().__init__(module, target, shape, ACCURACY)
        blocks: Any = module.blocks
        heads: Any = module.lm_head
        self.blocks = [self.linear(block.linear) for block in blocks]
        self.heads = [self.linear(head) for head in heads]

    def logits(self, k: int, states: Tensor, tokens: Tensor) -> Tensor:
        return self.heads[k](states + F.silu(self.blocks[k](states)))

    def states(self, state: DecodeState, width: int) -> tuple[Tensor, list[int]]:
        return last_slots(state, width, self.taps)

    def last(self, state: DecodeState) -> Tensor:
        return last_slots(state, 1, self.taps)[0]

    def lattice(self, state: DecodeState, count: int) -> tuple[Tensor, Tensor]:
        """The `count` likeliest tokens of every depth: log probabilities and token ids [B, depth, count]."""
        last = self.last(state)
        rows = [kernels.expand_topk(self.logits(k, last, last), count) for k in range(self.shape.depth)]
        logprob, index = (torch.stack(part, 1) for part in zip(*rows, strict=True))
        return logprob, index if self.ids is None else self.ids[index]

    def rounds(self, tree: StaticTree, state: DecodeState) -> MedusaRounds:
        return MedusaRounds(self, tree)


class MedusaRounds(DeviceDraft):
    """Device-side rounds that draft a static tree from the target's last state, without memory between rounds."""

    def __init__(self, drafter: MedusaDrafter, tree: StaticTree):
        self.drafter, self.tree = drafter, tree
        self.depth, self.reach = len(tree.levels), 1 + len(tree.paths)

    def propose(self, sequences: DeviceBatch, span: int) -> DraftTree:
        last, drafter = sequences.committed_slots(sequences.length - 1, 1), self.drafter
        return drafter.draft_at(self.tree, sequences, select_taps(last.tapped[:, 0], last.taps, drafter.taps))


# In the published `medusa_lm_head`, head K is a `Sequential` of its block, `K.0`, and its vocabulary matrix, `K.1`.
PARTS = "blocks", "lm_head"


class MedusaFamily(DepthFamily):
    """Medusa heads. They are stored as `K.0.` and `K.1.` instead of `blocks.K.` and `lm_head.K.`."""

    head, config, drafter, layers = MedusaHeads, HeadsConfig, MedusaDrafter, 1

    def stored_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        rename = partial(re.sub, rf"^({'|'.join(PARTS)})\.(\d+)\.", lambda name: f"{name[2]}.{PARTS.index(name[1])}.")
        return {rename(name): tensor for name, tensor in state.items()}

    def restore(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> DraftHead:
        rename = partial(re.sub, r"^(\d+)\.([01])\.", lambda name: f"{PARTS[int(name[2])]}.{name[1]}.")
        return super().restore(config, {rename(name): tensor for name, tensor in tensors.items()})


FAMILY = MedusaFamily("medusa")
