"""Block divergence: how close a drafter's distributions are to the target's along its own draft.

For every position of a draft, rejected or not, verification has computed p̄ and drafting has computed q̄, both given
the draft tokens before it. So the reward needs no further forward pass (MetaSD, Eq. 4). In a tree the positions are the
chain of first children.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specctl.decoding.plan import plan_rows
from specctl.decoding.records import DraftTree, first_chain, topology
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.verify import MAX_NODES
from specctl.selection.policies.policy import Array


def overlap(draft: DraftTree, b: int, logits: Tensor) -> Array:
    """[d] 1 − TV(p̄, q̄) at the d positions of sequence b's draft, at temperature 1 and unfiltered.

    For a drafter without a distribution, q̄ is one-hot at the drafted token. NaN if a row is no distribution.

    Args:
        logits: [≥ 1 + n, V] the target's rows of the root and the draft's n nodes.
    """
    chain = first_chain(draft.parents[b].tolist())
    return _overlap(draft, b, chain, logits[[0, *(node + 1 for node in chain[:-1])]]) if chain else np.zeros(0)


def _overlap(draft: DraftTree, b: int, chain: list[int], logits: Tensor) -> Array:
    """`overlap`, given the rows [d, V] that predict the d nodes of `chain`."""
    p = logits.float().softmax(-1)
    if draft.q is None:
        shared = p.gather(1, draft.tokens[b, chain, None].to(p.device))[:, 0]
    else:
        q = draft.q.of(b, len(chain)).float().softmax(-1)
        shared = torch.minimum(p if draft.q.ids is None else p[:, draft.q.ids], q).sum(-1)
    return shared.cpu().numpy().astype(float)


def overlaps(target: Target, state: DecodeState, drafts: Sequence[DraftTree]) -> list[Array]:
    """`overlap` of drafts that are not verified, for a state with one sequence. It takes as few steps of the target as
    the room in its cache allows; the cache rows of these steps are overwritten by the next step."""
    read: list[Array] = []
    waiting: list[tuple[DraftTree, list[int]]] = []
    for draft in drafts:
        chain = first_chain(draft.parents[0].tolist())
        if sum(len(other) for _, other in waiting) + len(chain) >= MAX_NODES:
            read += _together(target, state, waiting)
            waiting = []
        waiting.append((draft, chain))
    return read + _together(target, state, waiting)


def _together(target: Target, state: DecodeState, drafts: list[tuple[DraftTree, list[int]]]) -> list[Array]:
    """`overlap` of several drafts, with their chains side by side in one step."""
    tokens = [state.rows[0].ids[-1]]
    parents: list[int] = []
    at: list[list[int]] = []  # rows that predict each chain's tokens
    for draft, chain in drafts:
        nodes = range(len(parents), len(parents) + len(chain))
        at.append([0, *(node + 1 for node in nodes)][: len(nodes)])
        parents += [-1, *nodes][: len(nodes)]
        tokens += draft.tokens[0, chain].tolist()
    if not parents:
        return [np.zeros(0) for _ in drafts]
    depths, seen = topology(parents)
    masks = torch.tensor([1, *(bits << 1 | 1 for bits in seen)])  # bit 0 = the root
    visible = (masks[:, None] >> torch.arange(len(tokens))) & 1 > 0
    plan = plan_rows(
        state.cached,
        len(tokens),
        visible=visible[None].to(state.device),
        depth=torch.tensor([[0, *depths]], device=state.device),
        device=state.device,
        dtype=state.dtype,
    )
    logits = target.step(torch.tensor([tokens], device=state.device), state.cache, plan)[0][0]
    return [_overlap(draft, 0, chain, logits[rows]) for (draft, chain), rows in zip(drafts, at, strict=True)]
