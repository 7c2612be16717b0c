"""A round of the decoding loop that runs on the device alone: draft, target step, rule and commit without the host.

Every shape is fixed and nothing is read back, so that a CUDA graph can replay a whole round (graphs.py). The host
launches round r + 1 before it reads what round r committed: it learns of a finished text one round late, in which that
text commits nothing more. Texts change places only when no round is under way.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from specctl.decoding.attention import by_kernel
from specctl.decoding.catch_up import RECOMPUTE
from specctl.decoding.device import graphs
from specctl.decoding.device.resident import Resident, Said, ancestors, bookings, widest_ends
from specctl.decoding.plan import plan_at
from specctl.decoding.protocols import DeviceDraft, OnCommit, OnDevice, Proposer
from specctl.decoding.records import PADDING, DraftTree
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.verify import judge, last_rows, not_finite, usable


def device_rounds(
    target: Target,
    state: DecodeState,
    drafter: Proposer,
    budget: Callable[[], int],
    on_commit: OnCommit | None = None,
) -> DeviceRounds | None:
    """Rounds on the device where they are of use: on a GPU, for the lean step and a drafter that knows how.

    `budget`: draft nodes of a sequence; it may change only with the size of the batch, as all shapes do. `on_commit` is
    told when the host has read what a round committed.

    The environment variable SPECCTL_GRAPHS: `0` leaves every round to the host; `eager` runs the device's rounds
    without graphs, on any device.
    """
    mode = os.environ.get("SPECCTL_GRAPHS", "1")
    if not isinstance(drafter, OnDevice):
        return None
    wanted = mode == "eager" or (mode != "0" and graphs.available(state.device, shape_of(drafter, state)))
    if not wanted or target.path != "lean" or state.exact_rows:
        return None
    if state.catch_up != RECOMPUTE:  # the masks of plan_at know of no slots that were skipped
        return None
    if _draft_for(state, drafter, budget()) is None:
        return None
    return DeviceRounds(target, state, drafter, budget, capture=mode != "eager", on_commit=on_commit)


def _draft_for(state: DecodeState, drafter: OnDevice, budget: int) -> DeviceDraft | None:
    """The drafter's part of the rounds of a batch; None where it has none, or needs more slots than there are behind a
    text."""
    draft = drafter.on_device(state, budget)
    return None if draft is None or draft.reach > state.spare else draft


def shape_of(drafter: OnDevice, state: DecodeState) -> graphs.Shape:
    """A kind of rounds, by the batch that they begin with: what may be too much for a device."""
    return type(drafter).__name__, state.batch


class DeviceRounds:
    """Runs rounds ahead of the host's `state`, and keeps that up to date."""

    sequences: Resident
    draft: DeviceDraft
    graphs: graphs.Graphs

    def __init__(
        self,
        target: Target,
        state: DecodeState,
        drafter: OnDevice,
        budget: Callable[[], int],
        *,
        capture: bool,
        on_commit: OnCommit | None = None,
    ):
        self.target, self.state, self.drafter, self.budget, self.capture = target, state, drafter, budget, capture
        self.on_commit = on_commit
        self.shape = shape_of(drafter, state)
        self.store: Tensor | None = None  # the cache's, for which all was made
        self.loaded = self.failed = False
        self.under_way: deque[graphs.Readback] = deque()

    def advance(self) -> bool:
        """Launch a round and book the one before. False where this device cannot: this round and all others are the
        host's. Where a text has finished, no round is under way afterwards and the host may change the batch.
        """
        if self.failed:
            return False
        if self.state.draws.penalised:
            self.settle()
            return False
        try:
            if not self.loaded and not self.load():
                self.failed = True
                return False
            self._launch()
        except Exception as error:  # whatever a driver raises: the host's rounds need nothing of this one
            if not self.capture:
                raise
            self._give_up(error)
            return False
        if len(self.under_way) > 1 and self._book():
            self.settle()
        return True

    def load(self) -> bool:
        """Begin where the host's state stands. False where the drafter cannot draft for this batch on the device: a
        smaller one has larger drafts."""
        if not self._fits() and not self._place():
            return False
        self.sequences.load(self.state)
        self.draft.load(self.state)
        self.loaded = True
        return True

    def _fits(self) -> bool:
        """Whether what was made is for the texts that there are: their caches, their ends and how they are drawn."""
        if self.store is not self.state.cache.place or not self.draft.fits(self.state):
            return False
        sequences = self.sequences
        return sequences.draws.greedy != self.state.sampled and sequences.ends >= widest_ends(self.state)

    def _place(self) -> bool:
        """Make everything anew, for a batch of another size or in another place; False where that cannot be."""
        draft = _draft_for(self.state, self.drafter, self.budget())
        if draft is None:
            return False
        self.draft, self.store = draft, self.state.cache.place
        self.sequences = Resident(self.state, draft.depth + 1)
        carried = [self.sequences.length, self.sequences.finished, *draft.carried]
        self.graphs = graphs.Graphs(carried, self.sequences.record)
        return True

    def _launch(self) -> None:
        """Start a round."""
        span = self._span()
        if self.capture:
            self.state.replays += self.graphs.play(self.round, span)
        else:
            self.round(span)
        self.under_way.append(graphs.Readback(self.sequences.record))

    def _span(self) -> int:
        """Cache slots that attention reads: all there are where a kernel knows how long the texts are. The host knows
        it but for the rounds under way."""
        if by_kernel(self.state.device):
            return self.state.capacity
        unread = len(self.under_way) * self.sequences.widest
        longest = max(min(len(row.ids) + unread, row.limit) for row in self.state.rows if row.stop is None)
        return graphs.span_for(longest - 1 + self.draft.reach, self.state.capacity)

    def round(self, span: int) -> None:
        """One round over caches of which attention reads `span` slots."""
        sequences = self.sequences
        before = sequences.length.clone()
        draft = self.draft.propose(sequences, span)
        said, positions, deep = self.step(draft, span)
        path, accepted, bonus = judge(sequences.draws, draft, said.logits, positions + 1)
        sequences.commit(draft, path, accepted, bonus, said, deep, usable(last_rows(said.logits, path, accepted)))
        self.draft.advance(sequences, before, span)

    def step(self, draft: DraftTree, span: int) -> tuple[Said, Tensor, Tensor]:
        """The target over the last committed tokens and their drafts: what it says, the positions [B, 1+n] of these
        tokens, and how deep each draft is [B]."""
        sequences = self.sequences
        rows = torch.arange(draft.size + 1, device=sequences.device)
        if draft.chain:
            visible = (rows <= rows.unsqueeze(1)).expand(sequences.batch, -1, -1)
            offset, deep = rows.expand(sequences.batch, -1), (draft.parents != PADDING).sum(1)
        else:
            tree = ancestors(draft.parents)
            visible = torch.nn.functional.pad(tree, (1, 0, 1, 0)) | (rows == 0)  # the root is everybody's ancestor
            offset = torch.nn.functional.pad(tree.sum(-1), (1, 0))
            deep = torch.where(draft.parents == PADDING, 0, tree.sum(-1)).amax(1)
        plan = plan_at(sequences.length - 1, visible, offset, span=span, dtype=sequences.dtype, chain=draft.chain)
        tokens = torch.cat((sequences.last, draft.tokens), 1)
        said = Said(*self.target.step(tokens, sequences.cache, plan, self.state.taps))
        return said, plan.positions, deep

    def _book(self) -> bool:
        """Read what the oldest round under way committed; whether a text has finished with it."""
        found = bookings(self.under_way.popleft().tolist())
        live = self.state.live
        for row, booking in zip(self.state.rows, found, strict=True):
            if row.stop is not None:
                continue
            if booking.usable:
                self.state.book(row, booking.committed, booking.depth, booking.rejected)
            else:
                row.fail(not_finite(self.target))
        if self.on_commit is not None:
            self.on_commit(self.state)
        return len(self.state.live) < len(live)

    def settle(self) -> None:
        """Wait for all rounds, and hand the drafter's memory back: the host may do as it likes."""
        if not self.loaded:
            return
        while self.under_way:
            self._book()
        self.draft.store(self.state)
        self.loaded = False

    def _give_up(self, error: Exception) -> None:
        """Leave the rest to the host. What a round that failed has changed lies behind the committed text, except in
        the drafter's memory, which is made anew."""
        while self.under_way:
            self._book()
        self.drafter.invalidate(self.state)
        self.failed, self.loaded = True, False
        graphs.refuse(self.state.device, self.shape)
        reason = [type(error).__name__, *str(error).strip().splitlines()][-1]
        warnings.warn(f"decoding on {self.state.device} runs without CUDA graphs: {reason}", stacklevel=2)
