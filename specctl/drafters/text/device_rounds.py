"""Device-side rounds (decoding/device/rounds.py) of drafters that copy their drafts from text."""

import time

import torch
from torch import Tensor

from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.protocols import DeviceDraft, Proposer
from specctl.decoding.records import PADDING, DraftTree
from specctl.decoding.state import DecodeState


class TextRounds(DeviceDraft):
    """Rounds in which the host drafts and the device verifies. The draft has no memory on the device.

    Attributes:
        draft: [2, B, n] int64, tokens and parents of the next round's nodes, padded to n nodes.
    """

    reads_text = True

    def __init__(self, drafter: Proposer, state: DecodeState, nodes: int, depth: int, *, chain: bool):
        """`depth`: longest path of a draft; `chain`: drafts never branch."""
        self.drafter, self.nodes, self.chain = drafter, nodes, chain
        self.depth, self.reach = min(depth, nodes), nodes + 1
        self.draft = torch.zeros(2, state.batch, nodes, dtype=torch.long, device=state.device)

    def load(self, state: DecodeState) -> None:
        """Draft on the host, and copy the draft to the device."""
        began = time.perf_counter()
        proposed = self.drafter.propose(state, self.nodes)
        self.draft[1].fill_(PADDING)
        self.draft[:, :, : proposed.size].copy_(torch.stack((proposed.tokens, proposed.parents)))
        self.host_seconds = time.perf_counter() - began

    def propose(self, sequences: DeviceBatch, span: int) -> DraftTree:
        return DraftTree(self.draft[0], self.draft[1], chain=self.chain)


def union(first: DraftTree, second: DraftTree, levels: int) -> DraftTree:
    """The trees of all nodes of two drafts. A node of `second` with the same path in `first` becomes padding, and its
    children become children of the node in `first`.

    Args:
        levels: greatest depth of a node of `first`.
    """
    size = first.size
    same_token = first.tokens[:, None] == second.tokens[..., None]  # [B, m, n]
    roots = (first.parents[:, None] == -1) & (second.parents[..., None] == -1)
    inner = (first.parents[:, None] >= 0) & (second.parents[..., None] >= 0)
    above = second.parents.clamp(min=0)[..., None].expand_as(same_token)
    beside = first.parents.clamp(min=0)[:, None].expand_as(same_token)
    same = same_token & roots  # node j of `second` and node i of `first` have the same path from the root
    for _ in range(levels - 1):
        same = same_token & (roots | inner & same.gather(1, above).gather(2, beside))
    found, place = same.any(2), same.int().argmax(2)
    links: Tensor = torch.where(found, place, torch.arange(size, size + second.size, device=place.device))
    parents = torch.where(second.parents >= 0, links.gather(1, second.parents.clamp(min=0)), second.parents)
    return DraftTree(
        torch.cat((first.tokens, second.tokens), 1),
        torch.cat((first.parents, parents.masked_fill(found, PADDING)), 1),
        chain=False,
    )
