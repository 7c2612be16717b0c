"""Batch state in device tensors of fixed shape, for rounds that run without the host.

The host's `DecodeState` remains the record of the texts. `DeviceBatch` is loaded from this state, runs up to one round
ahead, and reports the committed tokens of every round in a small tensor.
"""

import copy
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from specctl.decoding.plan import Plan, plan_at
from specctl.decoding.records import DraftTree
from specctl.decoding.sampling import Draws
from specctl.decoding.state import DecodeState


class RoundRecord(NamedTuple):
    """Host-side result of a round for one sequence (see `DecodeState.book`)."""

    committed: list[int]
    depth: int
    rejected: bool
    usable: bool  # the logits that the last token was drawn from are finite


class TargetOutput(NamedTuple):
    """The target's output for the rows of a step: logits [B, 1+n, V], last states [B, 1+n, H], tapped [B, 1+n, F]."""

    logits: Tensor
    hidden: Tensor
    tapped: Tensor | None


@dataclass(frozen=True)
class CommittedSlots:
    """Newly committed slots, for drafters to read. Slot i holds the state of position i and the token after it. There
    are T rows, the most that a round can commit, padded by repeating the last.

    Attributes:
        base, count: [B] the first new slot, and the number of new slots; 0 or less for a finished sequence.
        tokens: [B, T] the token of each row.
        tapped: [B, T, F] the state of each row, from all kept `taps`.
    """

    base: Tensor
    count: Tensor
    tokens: Tensor
    tapped: Tensor
    taps: tuple[int, ...]

    @property
    def last(self) -> Tensor:
        """[B] index of the last new slot's row; arbitrary if there is none."""
        return (self.count - 1).clamp(min=0)

    def plan(self, span: int, dtype: torch.dtype, more: int = 0) -> Plan:
        """Plan of a causal forward over consecutive slots from the first new one on: T rows and `more` beyond them."""
        place = torch.arange(self.tokens.shape[1] + more, device=self.base.device)
        causal = (place <= place.unsqueeze(1)).expand(len(self.base), -1, -1)
        return plan_at(self.base, causal, place, span=span, dtype=dtype, chain=True)


NO_TOKEN = -1
HEAD = 4  # numbers before the tokens in a row of `DeviceBatch.record`: token count, depth, rejected, usable


class DeviceBatch:
    """Device-side state of B sequences. No tensor ever moves: captured graphs read and write these addresses.

    Attributes:
        ids: [B, capacity]; length, limit: [B]. The last of the `length` committed tokens is not cached.
        finished: [B] bool; a finished sequence commits nothing more.
        eos: [B, 1, ends] end-of-sequence ids, padded with `NO_TOKEN`.
        record: [B, HEAD + widest]: the tokens committed by the last round, untrimmed. Rows of sequences that had
            finished before it are zero.
        cache, features, taps, hidden: the same objects as in the host's state.
        widest: most tokens that a round commits.
    """

    widest: int
    record: Tensor

    def __init__(self, state: DecodeState):
        """Allocate the tensors. `recording` adds `widest` and `record`, which differ between drafters."""
        batch, device = state.batch, state.device
        self.batch, self.device = batch, device
        self.cache, self.features, self.taps, self.dtype = state.cache, state.features, state.taps, state.dtype
        self.hidden = state.hidden
        self.ids = torch.zeros(batch, state.capacity, dtype=torch.long, device=device)
        self.length, self.limit = (torch.zeros(batch, dtype=torch.long, device=device) for _ in range(2))
        self.finished = torch.zeros(batch, dtype=torch.bool, device=device)
        self.ones, self.zeros = torch.ones_like(self.length), torch.zeros_like(self.length)
        self.ends = widest_ends(state)
        self.eos = torch.zeros(batch, 1, self.ends, dtype=torch.long, device=device)
        self.sequences = torch.arange(batch, device=device).unsqueeze(1)
        self.draws = Draws([row.request.sampling for row in state.rows], [0] * batch, device)
        # A graph holds one code path: greedy sampling only if all requests are greedy.
        self.draws.greedy = not state.any_sampled
        self.draws.floors = None  # of a text that has ended: with min-p, the host runs the rounds

    def recording(self, widest: int) -> Self:
        """A view of these sequences for rounds that commit at most `widest` tokens. It shares all tensors except the
        record."""
        own = copy.copy(self)
        own.widest = widest
        own.record = torch.zeros(self.batch, HEAD + widest, dtype=torch.long, device=self.device)
        return own

    def load(self, state: DecodeState) -> None:
        """Load the host's state."""
        width = max(len(row.ids) for row in state.rows)
        ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in state.rows])
        self.ids[:, :width].copy_(ids)
        self.length.copy_(torch.tensor([len(row.ids) for row in state.rows]))
        self.limit.copy_(torch.tensor([row.limit for row in state.rows]))
        self.finished.copy_(torch.tensor([row.stop is not None for row in state.rows]))
        eos = [(sorted(row.eos_ids) + [NO_TOKEN] * self.ends)[: self.ends] for row in state.rows]
        self.eos.copy_(torch.tensor(eos).unsqueeze(1))
        for name in ("device_seeds", "temperature", "top_k", "top_p"):
            getattr(self.draws, name).copy_(getattr(state.draws, name))

    @property
    def draft_room(self) -> Tensor:
        """[B] number of draft tokens that can still be committed (see `Sequence.draft_room`)."""
        return torch.where(self.finished, 0, self.limit - self.length - 1).clamp(min=0)

    @property
    def last(self) -> Tensor:
        """[B, 1] the last committed token of each sequence."""
        return self.ids.gather(1, self.length.unsqueeze(1) - 1)

    def committed_slots(self, before: Tensor, most: int) -> CommittedSlots:
        """Slots committed after the first `before` [B] tokens, padded to `most` rows."""
        assert self.features is not None
        place = torch.arange(most, device=before.device)
        base, end = before - 1, self.length - 2
        slots = torch.minimum(base.unsqueeze(1) + place, end.unsqueeze(1))
        tokens, tapped = self.ids.gather(1, slots + 1), self.features[self.sequences, slots]
        return CommittedSlots(base, self.length - before, tokens, tapped, self.taps)

    def commit(
        self,
        draft: DraftTree,
        path: Tensor,
        accepted: Tensor,
        bonus: Tensor,
        output: TargetOutput,
        draft_depths: Tensor | None,
        usable: Tensor,
    ) -> None:
        """Commit a round on the device, as `DecodeState.commit` does: ids, cache rows and states of the accepted `path`
        [B, n], and the record.

        `draft_depths` [B] is the depth of each draft, or None if nothing was drafted. `usable` [B]: see `RoundRecord`.
        The other arguments are as in a verdict.
        """
        if draft_depths is None:
            self._commit_one(bonus, output, usable)
            return
        place = torch.arange(self.widest, device=self.device)
        nodes = path[:, : self.widest - 1]
        taken = place[1:] <= accepted.unsqueeze(1)
        source = torch.where(taken, nodes, place[:-1])  # rows after the path stay in place
        base = self.length - 1
        if not draft.chain:
            self.cache.compact_at(base, source)
        kept = torch.nn.functional.pad(source + 1, (1, 0))  # row 0 is the root
        positions = base.unsqueeze(1) + place
        for home, rows in ((self.features, output.tapped), (self.hidden, output.hidden)):
            if home is not None and rows is not None:
                home[self.sequences, positions] = rows.gather(1, kept.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
        tokens = torch.nn.functional.pad(draft.tokens.gather(1, source), (0, 1))
        tokens = torch.where(place == accepted.unsqueeze(1), bonus.unsqueeze(1), tokens)
        last = source.gather(1, (accepted - 1).clamp(min=0).unsqueeze(1))
        last = torch.where(accepted.unsqueeze(1) > 0, last, -1)
        refused = (draft.parents == last).any(1)
        self.record.copy_(torch.cat((torch.stack((accepted + 1, draft_depths, refused, usable), 1), tokens), 1))
        self._forget_ended()
        self._extend(tokens, accepted + 1)

    def _commit_one(self, token: Tensor, output: TargetOutput, usable: Tensor) -> None:
        """Commit one token [B] per sequence when nothing was drafted. It uses few operations, as each costs a launch on
        a GPU."""
        for home, rows in ((self.features, output.tapped), (self.hidden, output.hidden)):
            if home is not None and rows is not None:
                home[self.sequences, self.length.unsqueeze(1) - 1] = rows
        torch.stack((self.ones, self.zeros, self.zeros, usable.long(), token), 1, out=self.record)
        self._forget_ended()
        self.ids[self.sequences, self.length.unsqueeze(1)] = token.unsqueeze(1)
        self.length += ~self.finished
        self.finished |= (token.unsqueeze(1) == self.eos[:, 0]).any(1)
        self.finished |= self.length >= self.limit

    def _forget_ended(self) -> None:
        """Zero the records of sequences that had finished before this round. Rows without a sequence all write to one
        page, in an order that a GPU does not define. Two runs of a round may differ there, and `graphs` compares
        records."""
        self.record.masked_fill_(self.finished.unsqueeze(1), 0)

    def _extend(self, tokens: Tensor, count: Tensor) -> None:
        """Append the first `count` [B] of `tokens` [B, widest], up to an end-of-sequence token or the limit."""
        place = torch.arange(self.widest, device=self.device)
        self.ids[self.sequences, self.length.unsqueeze(1) + place] = tokens  # entries after `length` may hold anything
        ends = (tokens.unsqueeze(-1) == self.eos).any(-1)
        until_end = torch.where(ends, place, self.widest).amin(1) + 1
        kept = torch.minimum(torch.minimum(count, until_end), self.limit - self.length)
        kept = torch.where(self.finished, 0, kept)
        self.length += kept
        self.finished |= (until_end <= kept) | (self.length >= self.limit)


def widest_ends(state: DecodeState) -> int:
    """Largest number of end-of-sequence ids of any sequence, at least 1."""
    return max(1, *(len(row.eos_ids) for row in state.rows))


def parse_record(record: list[list[int]]) -> list[RoundRecord]:
    """Convert a record that was read back, row by row."""
    return [RoundRecord(row[HEAD : HEAD + row[0]], row[1], bool(row[2]), bool(row[3])) for row in record]


def ancestors(parents: Tensor) -> Tensor:
    """[B, n, n] bool: node i is node j or a descendant of node j. Device version of `records.topology`: padding sees
    only itself."""
    nodes = torch.arange(parents.shape[1], device=parents.device)
    seen = ((parents.unsqueeze(-1) == nodes) | (nodes.unsqueeze(-1) == nodes)).float()
    reached = 1
    while reached < len(nodes):  # covers paths of up to `reached` edges; each product doubles this
        seen = (seen @ seen).clamp(max=1)
        reached *= 2
    return seen > 0
