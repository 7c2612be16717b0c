"""What the target says about training sequences: tapped hidden states, and the states its distributions come from.

The target's pass over a sequence is paid once: features are kept when all fit the budget, and
recomputed for every batch otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.decoding.cache import plan_rows
from specctl.decoding.target import Target
from specctl.drafters.head import SlotBatch
from specctl.drafters.ttt_attention import Layout, ranges
from specctl.progress import interrupts, track
from specctl.training.data import Example

PASS_TOKENS = 4096  # padded tokens of one target forward


@dataclass(frozen=True)
class Features:
    """Of one sequence of S tokens with a prompt of P: S−2 slots (slot i also needs tokens i+1 and i+2).

    Attributes:
        taps: [S−2, F] tapped states of positions 0 .. S−3.
        teacher: [S−P−1, Ht] final hidden states of positions P .. S−2: they predict tokens P+1 .. S−1.
        best: [S−P−1] int32 the target's most probable token after each of them.
    """

    taps: Tensor
    teacher: Tensor
    best: Tensor


class FeatureStore:
    """Features by example: kept in memory once `prepare`d, else computed for every batch."""

    def __init__(self, target: Target, taps: tuple[int, ...]):
        self.target, self.taps = target, taps
        self.kept: dict[int, Features] = {}
        self.passes = 0  # target tokens run, padding excluded

    def estimate(self, examples: list[Example]) -> int:
        """Bytes that the features of `examples` take."""
        width, size = self.target.hidden_size, self.target.dtype.itemsize
        slots = sum(len(e.tokens) - 2 for e in examples)
        asked = sum(e.response_length - 1 for e in examples)
        return slots * len(self.taps) * width * size + asked * (width * size + 4)

    def prepare(self, examples: list[Example]) -> None:
        """Compute and keep the features of all `examples`.

        Sequences are grouped by length over the whole set, so that a resumed run, whatever its place in an epoch, gets
        bitwise the same features.
        """
        with track("target features", total=len(examples), unit="responses") as bar:
            for group in _groups(examples):
                interrupts.check()
                for example, features in zip(group, self._compute(group), strict=True):
                    self.kept[example.index] = features
                bar.update(len(group), tokens=self.passes)

    def get(self, examples: list[Example]) -> list[Features]:
        """Features of `examples`, in order."""
        if self.kept:
            return [self.kept[e.index] for e in examples]
        found = {e.index: f for group in _groups(examples) for e, f in zip(group, self._compute(group), strict=True)}
        return [found[e.index] for e in examples]

    @torch.inference_mode()
    def _compute(self, examples: list[Example]) -> list[Features]:
        target = self.target
        width = max(len(e.tokens) for e in examples) - 1  # nothing needs the state of the last token
        tokens = torch.tensor([e.tokens[:width] + [0] * (width - len(e.tokens)) for e in examples])
        cache = target.model.new_cache(len(examples), width)
        plan = plan_rows([0] * len(examples), width, device=target.device, dtype=target.dtype)
        hidden, tapped = target.model.forward(tokens.to(target.device), cache, plan, self.taps)
        self.passes += sum(len(e.tokens) - 1 for e in examples)
        result = []
        for row, example in enumerate(examples):
            length = len(example.tokens)
            teacher = hidden[row, example.prompt_length : length - 1].clone()
            best = target.model.logits(teacher).float().argmax(-1).int()
            taps = hidden.new_empty(length - 2, 0) if tapped is None else tapped[row, : length - 2].clone()
            result.append(Features(taps, teacher, best))
        return result


def _groups(examples: list[Example]) -> Iterator[list[Example]]:
    """Examples of similar length, each group at most `PASS_TOKENS` padded tokens (or one example)."""
    group: list[Example] = []
    for example in sorted(examples, key=lambda e: (len(e.tokens), e.index)):
        if group and len(example.tokens) * (len(group) + 1) > PASS_TOKENS:
            yield group
            group = []
        group.append(example)
    if group:
        yield group


def slot_batch(
    examples: list[Example], features: list[Features], steps: int, inside: Tensor, stride: int = 1, phase: int = 0
) -> SlotBatch:
    """Pack examples for the training-time test of `steps` steps.

    Args:
        inside: [V] bool membership in the draft vocabulary; slots whose teacher prefers a token outside are not valid.
        stride, phase: every `stride`-th response slot goes on to steps 1, 2, … ; which ones depends on the example and
            `phase` alone, not on the batch, so that several processes choose what one would.
    """
    slots = [len(e.tokens) - 2 for e in examples]
    queries = [e.response_length - 1 for e in examples]
    slot_ranges, query_ranges = ranges(slots), ranges(queries)
    token_rows: list[int] = []
    query_rows: list[int] = []
    labels: list[int] = []
    left: list[int] = []
    at: list[int] = []
    for example, (first, end), count in zip(examples, slot_ranges, queries, strict=True):
        slots_of = end - first
        token_rows += example.tokens[1 : slots_of + 1]
        query_rows += range(end - count, end)
        labels += example.tokens[example.prompt_length + 1 :]
        left += range(count, 0, -1)
        at += range(slots_of - count, slots_of)
    later = [
        [first + place for place in range(count - 1) if (place + example.index + phase) % stride == 0]
        for example, (first, _), count in zip(examples, query_ranges, queries, strict=True)
    ]  # the last slot of a response has nothing to predict at step 1
    later_rows = [row for rows in later for row in rows]
    device = features[0].taps.device
    teacher = torch.cat([f.teacher for f in features])
    best = torch.cat([f.best for f in features]).long()
    tail = steps  # the last document's later steps read past the end; those slots are not valid
    return SlotBatch(
        features=torch.cat([f.taps for f in features]),
        key_tokens=torch.tensor(token_rows, device=device),
        key_positions=torch.cat([torch.arange(count, device=device) for count in slots]),
        query_rows=torch.tensor(query_rows, device=device),
        later_rows=torch.tensor(later_rows, dtype=torch.long, device=device),
        teacher=torch.cat((teacher, teacher.new_zeros(tail, teacher.shape[1]))),
        inside=torch.cat((inside[best], inside.new_zeros(tail))),
        labels=torch.tensor(labels + [0] * tail, device=device),
        left=torch.tensor(left, device=device),
        layout=Layout(slot_ranges, query_ranges, at),
        later_layout=Layout(slot_ranges, ranges([len(rows) for rows in later]), [at[row] for row in later_rows]),
    )
