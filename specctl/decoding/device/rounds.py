"""Decoding rounds that run entirely on the device: draft, target step, acceptance rule and commit without the host.

All shapes are fixed and nothing is read back, so a CUDA graph can replay a whole round (graphs.py). The host launches
round r + 1 before it reads the tokens of round r. It therefore learns one round late that a sequence has finished, and
in that extra round the sequence commits nothing. Sequences change slots, and drafters take turns, only while no round
is pending. Drafters that copy from text (`DeviceDraft.reads_text`) draft on the host between two rounds: the device
waits for them, but the target's step is still one graph.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl import kernels
from specctl.decoding.device import graphs
from specctl.decoding.device.device_batch import DeviceBatch, TargetOutput, ancestors, parse_record, widest_ends
from specctl.decoding.models.lean import LeanModel
from specctl.decoding.plan import plan_at
from specctl.decoding.protocols import DeviceDraft, Proposer
from specctl.decoding.records import PADDING, Counts, DraftTree, RoundResult
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.verify import judge, not_finite

Report = Callable[[DecodeState, RoundResult], None]
IDLE_SHARE = 1 / 16  # largest fraction of a GPU's memory for the caches of an engine without sequences


def idle_bytes(device: torch.device) -> float:
    """Most bytes of the caches of an engine without sequences."""
    if device.type != "cuda":
        return float("inf")
    return IDLE_SHARE * torch.cuda.get_device_properties(device).total_memory


def possible(target: Target) -> bool:
    """Whether rounds of a target can run on its device: with the lean model, on a GPU.

    The environment variable SPECCTL_GRAPHS: `0` runs every round from the host; `eager` runs device rounds without
    graphs, on any device.
    """
    mode = os.environ.get("SPECCTL_GRAPHS", "1")
    if target.path != "lean" or mode == "0":
        return False
    return mode == "eager" or graphs.may_capture(target.device, ("any", 0))


@dataclass
class Track:
    """Tensors and graphs for the rounds of one drafter. `sequences` shares its tensors with the other tracks."""

    draft: DeviceDraft
    sequences: DeviceBatch
    graphs: graphs.Graphs


class DeviceRounds:
    """Runs rounds ahead of the host's `state`, and keeps this state up to date.

    One drafter plays at a time. The tensors and graphs of each drafter and batch size are kept for their next turn. All
    share the state's cache and features.

    Args:
        target: a target for which rounds on its device are `possible`.
        budget: returns the draft nodes per sequence. It may change only with the batch size, like all shapes.
        report: called with every round once the host has read its tokens.

    Attributes:
        active_drafter: the drafter of the pending or last rounds.
        batch: initial batch size.
        capture: whether rounds become CUDA graphs.
    """

    active_drafter: Proposer

    def __init__(
        self, target: Target, state: DecodeState, budget: Callable[[DecodeState, Proposer], int], report: Report
    ):
        self.target, self.state, self.budget, self.report = target, state, budget, report
        self.batch, self.capture = state.batch, os.environ.get("SPECCTL_GRAPHS") != "eager"
        self.tracks: dict[tuple[Proposer, int], Track] = {}  # by drafter and batch size
        self.refused: set[tuple[Proposer, int]] = set()  # drafters and batch sizes with rounds that the host must run
        self.failed: set[Proposer] = set()  # drafters with rounds that the device could not run
        self.batches: dict[int, DeviceBatch] = {}  # by batch size
        self.store: Tensor | None = None  # the cache tensor that everything was built for
        self.in_sync = False  # the device knows everything that the host knows
        self._loaded_batch = 0  # batch size of the last rounds
        self.pending: deque[graphs.Readback] = deque()

    @property
    def active(self) -> Track:
        """Tensors and graphs of the active drafter at the present batch size."""
        return self.tracks[self.active_drafter, self.state.batch]

    @property
    def worth_keeping(self) -> bool:
        """Whether an engine without sequences keeps the caches, because graphs were made for them and they take little
        memory."""
        return bool(self.tracks) and self.state.nbytes <= idle_bytes(self.state.device)

    @property
    def draft(self) -> DeviceDraft:
        return self.active.draft

    @property
    def sequences(self) -> DeviceBatch:
        return self.active.sequences

    def supports(self, drafter: Proposer) -> bool:
        """Whether rounds of this drafter can run here. Rounds of another drafter may, even if these cannot."""
        key = drafter, self.state.batch
        if key in self.tracks:
            return True
        if not drafter.fixed_shape or drafter in self.failed or key in self.refused:
            return False
        capturable = not self.capture or graphs.may_capture(self.state.device, (drafter.kind, self.batch))
        if capturable and self._draft_of(drafter) is not None:
            return True
        self.refused.add(key)
        return False

    def _draft_of(self, drafter: Proposer) -> DeviceDraft | None:
        """The drafter's device part for this batch, or None if there is none or it needs more than the spare slots
        after a text."""
        draft = drafter.on_device(self.state, self.budget(self.state, drafter))
        return None if draft is None or draft.reach > self.state.spare else draft

    def play(self, drafter: Proposer) -> bool:
        """Launch a round of `drafter` and book the previous round. Returns False if that is impossible: then no round
        is pending, and the host must run this round if a sequence is left. When a sequence has finished, no round is
        pending afterwards, so that the host may change the batch."""
        if self.state.needs_host or not self.supports(drafter):
            self.drain()
            return False
        live = len(self.state.live)
        if not self.state.at_rest and (drafter is not self.active_drafter or self.draft.reads_text):
            self._hand_back()
            if not self.state.unfinished:
                self.drain()
                return False
        try:
            if self.state.at_rest and not self.load(drafter):
                return False
            self._launch()
        except Exception as error:  # a driver may raise anything; the host's rounds do not depend on this one
            if not self.capture:
                raise
            self._give_up(error)
            return False
        if len(self.pending) > 1:
            self.report(self.state, self._book())
        if len(self.state.live) < live:
            self.drain()
        return True

    def load(self, drafter: Proposer) -> bool:
        """Start rounds of `drafter` from the host's state. Returns False if the host must run the round: the drafter
        cannot draft for this batch on the device, as smaller batches have larger drafts, or it fails on a text."""
        self.active_drafter = drafter
        if not self._fits():
            self.tracks.clear()
            self.batches.clear()
            self.store, self.in_sync = self.state.cache.captured_tensor, False
        track = self.tracks.get((self.active_drafter, self.state.batch))
        if (track is None or not track.draft.fits(self.state)) and not self._build_track():
            self.refused.add((self.active_drafter, self.state.batch))
            self.in_sync = False
            return False
        if self.state.batch != self._loaded_batch:
            self._loaded_batch = self.state.batch
            for (_, batch), other in self.tracks.items():
                if batch == self._loaded_batch:
                    other.graphs.check_again()
        if not self.in_sync:
            self.sequences.load(self.state)
        try:
            self.draft.load(self.state)
        except Exception:
            if not self.draft.reads_text:
                raise
            self.in_sync = False  # a text made the drafter fail; the host's round fails that text alone
            self.active_drafter.invalidate(self.state)
            return False
        self.in_sync, self.state.at_rest = True, False
        return True

    def _fits(self) -> bool:
        """Whether the tensors and graphs fit the current sequences: same caches, enough end ids, same kind of
        sampling."""
        state, resident = self.state, self.batches.get(self.state.batch)
        if self.store is not state.cache.captured_tensor:
            return False
        if resident is None:
            return True
        unmoved = resident.features is state.features and resident.hidden is state.hidden
        return unmoved and resident.draws.greedy != state.any_sampled and resident.ends >= widest_ends(state)

    def _build_track(self) -> bool:
        """Build the active drafter's track for this batch size. Returns False if it has no device part for it."""
        key, draft = (self.active_drafter, self.state.batch), self._draft_of(self.active_drafter)
        if draft is None:
            self.tracks.pop(key, None)
            return False
        if self.state.batch not in self.batches:
            self.batches[self.state.batch] = DeviceBatch(self.state)
        sequences = self.batches[self.state.batch].recording(draft.depth + 1)
        carried = [sequences.length, sequences.finished, *draft.carried]
        self.tracks[key] = Track(draft, sequences, graphs.Graphs(carried, sequences.record))
        return True

    def _launch(self) -> None:
        """Launch a round."""
        span, state = self._span(), self.state
        if self.capture:
            state.replays += self.active.graphs.play(self.round, span)
            began = self.active.graphs.began
        else:
            began = graphs.DeviceTime(state.device)
            self.round(span)
        state.rounds, state.ahead = state.rounds + 1, state.ahead + 1
        self.pending.append(graphs.Readback(self.sequences.record, began, self.draft.host_seconds))
        state.pending = len(self.pending)

    def _span(self) -> int:
        """Number of cache slots that attention reads: the whole capacity if a kernel reads the lengths itself.
        Otherwise an upper bound from the host's lengths and the pending rounds."""
        if isinstance(self.target.model, LeanModel) and self.target.model.by_kernel:
            return self.state.capacity
        unread = len(self.pending) * self.sequences.widest
        longest = max(min(len(row.ids) + unread, row.limit) for row in self.state.rows if row.stop is None)
        return graphs.span_for(longest - 1 + self.draft.reach, self.state.capacity)

    def round(self, span: int) -> None:
        """Run one round; attention reads `span` slots of the cache."""
        sequences = self.sequences
        before = sequences.length.clone()
        draft = self.draft.propose(sequences, span)
        output, positions, draft_depths = self.step(draft, span)
        path, accepted, bonus = judge(sequences.draws, draft, output.logits, positions + 1)
        finite = kernels.finite_rows(_last_rows(output.logits, path, accepted))
        sequences.commit(draft, path, accepted, bonus, output, draft_depths, finite)
        self.draft.advance(sequences, before, span)

    def step(self, draft: DraftTree, span: int) -> tuple[TargetOutput, Tensor, Tensor | None]:
        """Run the target over the last committed tokens and their drafts. Returns its output, the positions [B, 1+n] of
        these tokens, and the depth of each draft [B] (None if nothing is drafted)."""
        sequences = self.sequences
        rows = torch.arange(draft.size + 1, device=sequences.device)
        draft_depths: Tensor | None
        if draft.chain:
            visible = (rows <= rows.unsqueeze(1)).expand(sequences.batch, -1, -1)
            offset = rows.expand(sequences.batch, -1)
            draft_depths = (draft.parents != PADDING).sum(1) if draft.size else None
        else:
            tree = ancestors(draft.parents)
            visible = torch.nn.functional.pad(tree, (1, 0, 1, 0)) | (rows == 0)  # the root is an ancestor of every node
            offset = torch.nn.functional.pad(tree.sum(-1), (1, 0))
            draft_depths = torch.where(draft.parents == PADDING, 0, tree.sum(-1)).amax(1)
        plan = plan_at(sequences.length - 1, visible, offset, span=span, dtype=sequences.dtype, chain=draft.chain)
        tokens = torch.cat((sequences.last, draft.tokens), 1) if draft.size else sequences.last
        output = TargetOutput(*self.target.step(tokens, sequences.cache, plan, self.state.taps))
        return output, plan.positions, draft_depths

    def _book(self) -> RoundResult:
        """Read the tokens committed by the oldest pending round."""
        round = self.pending.popleft()
        self.state.pending = len(self.pending)
        counts = {}
        for b, (row, booking) in enumerate(zip(self.state.rows, parse_record(round.tolist()), strict=True)):
            if row.stop is not None:
                continue
            if booking.usable:
                counts[b] = self.state.book(row, booking.committed, booking.depth, booking.rejected)
            else:
                row.fail(not_finite(self.target))
                counts[b] = Counts(0, 0, booking.depth, False)
        return RoundResult(counts, round.seconds)

    def wait(self) -> None:
        """Book all pending rounds. If a sequence has finished, the host may change the batch afterwards."""
        live = len(self.state.live)
        self._hand_back()
        if len(self.state.live) < live:
            self.drain()

    def drain(self) -> None:
        """Wait for pending rounds and hand the drafter's memory back, so that the host may change the batch."""
        self._hand_back()
        self.in_sync = False

    def _hand_back(self) -> None:
        """Wait for pending rounds and return the drafter's memory to the host; the batch is unchanged."""
        if not self.state.at_rest:
            self._rest(lambda: self.draft.store(self.state))

    def _rest(self, finish: Callable[[], None]) -> None:
        """Report all pending rounds. `finish` runs before the last report, so that this one finds the state at rest."""
        while len(self.pending) > 1:
            self.report(self.state, self._book())
        last = self._book() if self.pending else None
        finish()
        self.state.at_rest = True
        if last is not None:
            self.report(self.state, last)

    def _give_up(self, error: Exception) -> None:
        """Leave this drafter's rounds to the host. A failed round has changed only data after the committed text,
        except in the drafter's memory, which is rebuilt."""
        drafter = self.active_drafter
        self.in_sync = False
        self.failed.add(drafter)
        for key in [key for key in self.tracks if key[0] is drafter]:
            del self.tracks[key]
        self._rest(lambda: drafter.invalidate(self.state))
        graphs.refuse(self.state.device, (drafter.kind, self.batch))
        reason = [type(error).__name__, *str(error).strip().splitlines()][-1]
        advice = "restart if it fails again: an interrupted capture may keep GPU memory allocated"
        warnings.warn(
            f"decoding on {self.state.device} runs without CUDA graphs: {reason} ({advice})",
            stacklevel=2,
        )


def _last_rows(logits: Tensor, path: Tensor, accepted: Tensor) -> Tensor:
    """As `verify.last_rows`, without reading the paths [B, n] and the accepted lengths [B] back to the host."""
    if not path.shape[1]:
        return logits[:, 0]
    last = path.gather(1, (accepted - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    row = torch.where(accepted > 0, last + 1, 0)
    return logits[torch.arange(len(row), device=row.device), row]
