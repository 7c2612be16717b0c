"""Plan of one forward: positions, cache slots and attention mask of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specctl.decoding.attention import by_kernel
from specctl.kernels import Ancestry

MINUS_INF = float("-inf")
PADDED = 64  # padding slots that cost a CPU as much as the overhead of one more attention call


BITS = 64  # most rows after the committed ones that an ancestry can distinguish
EMPTY_RANGE = range(0)


Block = tuple[int, Tensor | None, range]
"""One attention call: number of slots it reads, mask [1 or B, 1, rows, slots] for them, and a range of slots to leave
out."""


@dataclass
class Plan:
    """Positions of the T rows of one forward and the slots they may attend. Made once, shared by all layers.

    Attributes:
        base: cached rows of each sequence before this forward (length B); [] if only the device knows them (`plan_at`).
        positions: [B, T] absolute positions (RoPE, learned embeddings).
        span: number of cache slots that attention reads.
        mask: additive mask [1 or B, 1, T, span], or None if plain causal attention (`causal`) or no mask is needed.
        causal: the T rows start at slot 0 and attend each other causally (prefill).
        contiguous: the positions are base .. base+T−1 (no tree).
        slots: [B, T] cache slots to write the rows to, if only the device knows them.
        skipped: ranges of slots, one per sequence, that hold nothing (empty if there are no such slots). The mask hides
            them.
        ancestry: replaces the mask if attention is a kernel (`attention.by_kernel`). `mask` is then None; code that
            needs a mask calls `masked`.
    """

    base: list[int]
    positions: Tensor
    span: int
    mask: Tensor | None
    causal: bool
    contiguous: bool
    slots: Tensor | None = None
    skipped: Sequence[range] = ()
    ancestry: Ancestry | None = None
    _masked: Plan | None = field(default=None, init=False, repr=False)
    _blocks: dict[int, list[Block]] = field(default_factory=dict, init=False, repr=False)

    def blocks(self, groups: int) -> list[Block]:
        """Attention calls for folded queries: one for the whole batch, or one per sequence.

        Folding turns the `groups` query heads of a key head into rows, group by group, so that the keys are read once.
        A CPU runs sequences one after another anyway; with one call per sequence it need not read the padding of
        shorter ones.
        """
        if groups not in self._blocks:
            alone = len(self.skipped) == 1 or self._wasteful()
            self._blocks[groups] = (
                self._alone(groups) if alone else [(self.span, _repeat(self.mask, groups), EMPTY_RANGE)]
            )
        return self._blocks[groups]

    def _wasteful(self) -> bool:
        batch, rows = len(self.base), self.positions.shape[1]
        if self.mask is None or batch == 1 or self.mask.device.type != "cpu":
            return False
        return batch * (self.span - rows - PADDED) > sum(self.base)

    def _alone(self, groups: int) -> list[Block]:
        assert self.mask is not None
        rows = self.positions.shape[1]
        ends = [start + rows for start in self.base]
        gaps = self.skipped or [EMPTY_RANGE] * len(ends)
        if rows == 1 and self.contiguous:
            return [(end, None, gap) for end, gap in zip(ends, gaps, strict=True)]
        masks = [
            unskipped(self.mask[b : b + 1], 3, end, gap) for b, (end, gap) in enumerate(zip(ends, gaps, strict=True))
        ]
        return [(end, _repeat(mask, groups), gap) for end, mask, gap in zip(ends, masks, gaps, strict=True)]

    def masked(self, dtype: torch.dtype) -> Plan:
        """This plan with a mask in place of the ancestry; the mask is made once."""
        if self.ancestry is None:
            return self
        if self._masked is None:
            mask = additive_mask(self.ancestry.allowed(self.positions.shape[1], self.span), dtype)
            contiguous = self.contiguous and self.ancestry.first is None
            self._masked = replace(self, mask=mask, contiguous=contiguous, ancestry=None)
        return self._masked

    def row(self, index: Tensor) -> Plan:
        """This plan for a single row of each sequence, `index` [B]."""
        rows, positions = self.positions.shape[1], self.positions.gather(1, index.view(-1, 1))
        if self.ancestry is not None:
            return replace(self, positions=positions, ancestry=self.ancestry.row(index, rows))
        assert self.mask is not None
        mask = self.mask.gather(2, index.view(-1, 1, 1, 1).expand(-1, 1, 1, self.span))
        return replace(self, positions=positions, mask=mask)

    def with_window(self, window: int | None, dtype: torch.dtype) -> Plan:
        """This plan with a sliding window: a row attends its own position and the window − 1 before it (None = no
        window).

        Draft nodes count by their positions. A plan with an ancestry, or for a place that only the device knows, hides
        only slots of committed tokens: all later rows must lie within the window.
        """
        if window is None or self.span <= window:
            return self
        if self.ancestry is not None:
            first = self.positions - (window - 1)
            return replace(self, ancestry=self.ancestry._replace(first=first))
        rows, device = self.positions.shape[1], self.positions.device
        mask = self.mask
        if mask is None:
            empty = torch.zeros(1, 1, rows, self.span, dtype=dtype, device=device)
            mask = _staircase(0, rows, device, dtype) if self.causal else empty
        places = torch.arange(self.span, device=device)
        if self.base and not self.contiguous:
            own = torch.tensor(self.base, device=device).unsqueeze(1) + torch.arange(rows, device=device)
            places = places.repeat(len(own), 1).scatter_(1, own, self.positions)
        far = places.unsqueeze(-2) <= (self.positions - window).unsqueeze(-1)
        # Not contiguous: otherwise `_alone` would give a single row no mask.
        return replace(self, mask=mask.masked_fill(far.unsqueeze(1), MINUS_INF), causal=False, contiguous=False)

    def without_slots(self, skipped: Sequence[range], dtype: torch.dtype) -> Plan:
        """This plan with the `skipped` slots of each sequence masked."""
        if not any(skipped):
            return self
        assert not self.causal, "a plan with rows from slot 0 on has no skipped slots"
        plan = self.masked(dtype)
        shape = (len(skipped), 1, self.positions.shape[1], self.span)
        mask = torch.zeros(shape, dtype=dtype, device=self.positions.device)
        if plan.mask is not None:
            mask += plan.mask
        for b, slots in enumerate(skipped):
            mask[b, ..., slots.start : slots.stop] = MINUS_INF
        return replace(plan, mask=mask, skipped=skipped)


def unskipped(x: Tensor, dim: int, span: int, skipped: range) -> Tensor:
    """The first `span` slots of x along dimension `dim`, without the skipped ones."""
    if not skipped:
        return x.narrow(dim, 0, span)
    return torch.cat((x.narrow(dim, 0, skipped.start), x.narrow(dim, skipped.stop, span - skipped.stop)), dim)


def _repeat(mask: Tensor | None, groups: int) -> Tensor | None:
    return mask if mask is None or mask.shape[2] == 1 else mask.repeat(1, 1, groups, 1)


def plan_rows(
    base: list[int],
    rows: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    visible: Tensor | None = None,
    depth: Tensor | None = None,
    span: int | None = None,
) -> Plan:
    """Plan a forward of `rows` rows after `base` cached ones.

    Args:
        visible: [B, T, T] bool, row t may attend row s of this step (tree ancestors, itself included). The default is
            causal.
        depth: [B, T] distance from row 0 (tree). The default is 0 .. T−1.
        span: number of slots to read, independent of the lengths (`exact` mode keeps shapes fixed). The default is as
            few as possible.
    """
    batch = len(base)
    contiguous = depth is None
    starts = None
    if batch == 1 and depth is None:
        positions = torch.arange(base[0], base[0] + rows, device=device).unsqueeze(0)
    else:
        steps = torch.arange(rows, device=device).unsqueeze(0) if depth is None else depth
        starts = torch.tensor(base, device=device)
        positions = starts.unsqueeze(1) + steps
    fixed = span is not None
    width = span if span is not None else max(base) + rows
    staircase = not fixed and visible is None and (batch == 1 or min(base) == max(base))
    causal = staircase and base[0] == 0 and rows > 1  # a prefill
    mask: Tensor | None = None
    ancestry: Ancestry | None = None
    if not causal and by_kernel(device) and (visible is None or rows <= BITS):
        at = torch.full((batch,), base[0], device=device) if starts is None else starts
        ancestry = Ancestry(at, rows, None if visible is None else packed(visible), fixed_order=fixed)
    elif staircase:
        if rows > 1 and not causal:
            mask = _staircase(base[0], rows, device, dtype)
    elif not fixed and batch == 1 and visible is not None:
        mask = torch.zeros(1, 1, rows, width, dtype=dtype, device=device)
        mask[0, 0, :, base[0] :].masked_fill_(~visible[0], MINUS_INF)
    else:
        starts = torch.tensor(base, device=device) if starts is None else starts
        allowed = Ancestry(starts, rows).allowed(rows, width) if visible is None else _allowed(starts, visible, width)
        mask = additive_mask(allowed, dtype)
    return Plan(base, positions, width, mask, causal, contiguous, ancestry=ancestry)


def plan_at(
    base: Tensor, visible: Tensor, offset: Tensor | int, *, span: int, dtype: torch.dtype, chain: bool = False
) -> Plan:
    """Plan a forward at a place that only the device knows. It reads no tensor back to the host, and all shapes are
    fixed.

    Args:
        base: [B] number of cached rows of each sequence that all rows of the forward may attend.
        visible: [B, T, R] bool. R rows follow `base`, and this forward computes the last T. Row t may attend row r if
            set (itself included).
        offset: [B, T], [T] or one number: position of the rows in the text, relative to `base`.
        span: cache slots that attention reads, at least the largest base + R.
        chain: every row sees all rows up to itself, so rows need no ancestry bits.
    """
    rows, reach = visible.shape[1:]
    start = base.unsqueeze(1)
    slots = start + torch.arange(reach - rows, reach, device=base.device)
    positions = (start + offset).expand_as(slots)
    if by_kernel(base.device) and (chain or reach <= BITS):
        ancestry = Ancestry(base, reach, None if chain else packed(visible))
        return Plan([], positions, span, None, False, False, slots, ancestry=ancestry)
    mask = additive_mask(_allowed(base, visible, span), dtype)
    return Plan([], positions, span, mask, False, False, slots)


def packed(visible: Tensor) -> Tensor:
    """`visible` [..., R] bool as int64 [...]: bit r stands for row r, R ≤ 64."""
    return (visible.long() << torch.arange(visible.shape[-1], device=visible.device)).sum(-1)


def _allowed(base: Tensor, visible: Tensor, span: int) -> Tensor:
    """[B, T, span]: slot j may be attended when j < base, or j = base + r with row r visible."""
    reach = visible.shape[2]
    relative = (torch.arange(span, device=base.device) - base[:, None, None]).expand(-1, visible.shape[1], -1)
    inside = (relative >= 0) & (relative < reach)
    return (relative < 0) | (inside & visible.gather(2, relative.clamp(0, reach - 1)))


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, T, span] for attention scores."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, MINUS_INF).unsqueeze(1)


def _staircase(base: int, rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[1, 1, rows, base + rows]: row t attends everything up to itself (bottom-right aligned causal mask)."""
    mask = torch.zeros(rows, base + rows, dtype=dtype, device=device)
    mask[:, base:] = torch.full((rows, rows), MINUS_INF, dtype=dtype, device=device).triu_(1)
    return mask.view(1, 1, rows, base + rows)
