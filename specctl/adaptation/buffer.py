"""Replay buffer: committed tokens with the target's states, kept as training data.

Training needs the target's states of a text: the tapped hidden states of its positions, and the final hidden states
that its distributions are computed from. Decoding has already computed both, so learning needs no further pass of the
target (the interactive feedback of online speculative decoding). With `feedback="rerun"` the target makes that further
pass, for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from specctl import kernels
from specctl.decoding.records import Label
from specctl.decoding.state import DecodeState, per_text
from specctl.decoding.target import Target
from specctl.drafters.feature.head import SlotBatch
from specctl.drafters.feature.layer import select_taps
from specctl.drafters.lm.model import LMBatch
from specctl.training.example import Example
from specctl.training.feature_files import Features
from specctl.training.features import FeatureStore

ID_BYTES = 8


@dataclass
class _UnfinishedText:
    """A text that is being decoded. `rejected` lists the tokens at which a draft was rejected, counted from the second
    token of the response; `end` is the length up to which the text was read."""

    rejected: list[int] = field(default_factory=list)
    rejections: int = 0
    end: int | None = None


@dataclass(frozen=True)
class BufferedText:
    """A finished text.

    Attributes:
        rejected: indices, among the response tokens after the first one, at which a draft was rejected.
        sampled: whether `best` of its features holds committed tokens instead of the target's most probable ones.
    """

    example: Example
    rejected: list[int]
    sampled: bool = False

    def to_json(self) -> dict[str, Any]:
        example = {name: getattr(self.example, name) for name in Example.__slots__}
        return example | {"rejected": self.rejected, "drawn": self.sampled}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> BufferedText:
        fields = dict(facts)
        rejected, sampled = fields.pop("rejected"), fields.pop("drawn")
        return cls(Example(**fields), rejected, sampled)


class ReplayBuffer(FeatureStore):
    """Finished texts with their features, usable as the `store` of a `TrainableDrafter`; the oldest make room for new
    ones.

    `observe` takes in the texts of an engine, which must keep the target's hidden states if `keeps_hidden`. A text
    enters when it ends; if its decoding is interrupted, nothing of it is kept.

    Attributes:
        texts: finished texts by the index of their examples, oldest first.
        bytes: size of all texts and their features, at most `max_bytes`. Texts that are being decoded do not count: the
            loop keeps the states of their tokens, on the target's device.
        dropped: number of texts that were dropped, or too large to enter.
        passes: number of tokens that the target was run over again; 0 while all feedback comes from verdicts.
    """

    kept: dict[int, Features]

    def __init__(
        self,
        target: Target,
        taps: tuple[int, ...],
        *,
        max_bytes: int,
        feedback: Literal["verdict", "rerun"] = "verdict",
    ):
        """`taps`: hidden states that the learning drafters read; the loop must retain at least these."""
        super().__init__(target, taps)
        self.max_bytes, self.feedback = max_bytes, feedback
        self.texts: dict[int, BufferedText] = {}
        self.bytes = self.dropped = 0
        self._next = 0

    def examples(self, only: Literal["all", "rejected"] = "all") -> list[Example]:
        """Examples to learn from, oldest first; with "rejected", only texts in which a draft was rejected."""
        return [text.example for text in self.texts.values() if text.rejected or only == "all"]

    @property
    def keeps_hidden(self) -> bool:
        """Whether `observe` reads the target's hidden states of a text."""
        return self.feedback == "verdict"

    def observe(self, state: DecodeState) -> None:
        """Take in the tokens that a round has committed. To be called after every round of an engine."""
        texts, counts = per_text(state, self, _UnfinishedText), []
        for text, row in zip(texts, state.rows, strict=True):
            counts.append(len(row.ids) - (text.end or row.prompt_length + 1))  # the prefill's token belongs to no round
            text.end = len(row.ids)
        for b, (text, row, count) in enumerate(zip(texts, state.rows, counts, strict=True)):
            if not count:  # an idle slot
                continue
            if row.rejections > text.rejections:
                text.rejections = row.rejections
                text.rejected.append(len(row.ids) - row.prompt_length - 2)  # the last token is the target's own
            if row.stop is not None:
                self.take_in(state, b, text)
                texts[b] = _UnfinishedText(end=len(row.ids))

    def take_in(self, state: DecodeState, b: int, text: _UnfinishedText) -> None:
        """Take in the finished text in slot b."""
        row = state.rows[b]
        label = row.request.label or Label(str(row.index))
        example = Example(self._next, label.query, list(row.ids), row.prompt_length)
        self._next += 1
        features, drawn = None, False
        if self.feedback == "verdict" and self.size(example) <= self.max_bytes:
            assert state.hidden is not None, "the engine keeps no hidden states: set `EngineOptions.keeps_hidden`"
            teacher = state.hidden[b, row.prompt_length : len(row.ids) - 1]
            slots = len(row.ids) - 2
            taps = teacher.new_empty(slots, 0)
            if self.taps:
                assert state.features is not None, (
                    "the engine keeps no features: its controller needs the drafter's taps"
                )
                taps = select_taps(state.features[b, :slots], state.taps, self.taps)
            committed = torch.tensor(row.ids[row.prompt_length + 1 :], dtype=torch.int32, device=teacher.device)
            features = Features(taps, teacher, best=committed)
            drawn = row.request.sampling.temperature > 0 or row.request.edits_logits
        self.add(BufferedText(example, text.rejected, drawn), features)

    def add(self, text: BufferedText, features: Features | None) -> None:
        """Take in a finished text; the oldest texts make room. `features` is None if the target is to be run again."""
        index, size = text.example.index, self.size(text.example)
        if size > self.max_bytes:
            self.dropped += 1
            return
        if features is not None:
            self.kept[index] = self._stored(features)
        self.texts[index] = text
        self.bytes += size
        while self.bytes > self.max_bytes:
            self._forget(next(iter(self.texts)))
            self.dropped += 1

    def size(self, example: Example) -> int:
        """Bytes of a text and its features."""
        return self.estimate([example]) + ID_BYTES * len(example.tokens)

    def _forget(self, index: int) -> None:
        self.bytes -= self.size(self.texts.pop(index).example)
        self.kept.pop(index, None)

    def keep(self, only: Sequence[int]) -> None:
        """Forget all texts except these indices."""
        for index in self.texts.keys() - set(only):
            self._forget(index)

    def take(self) -> list[tuple[BufferedText, Features | None]]:
        """Take out all texts with their features, oldest first."""
        taken = [(text, self.kept.get(index)) for index, text in self.texts.items()]
        self.clear()
        return taken

    def clear(self) -> None:
        """Forget all texts."""
        self.texts.clear()
        self.kept.clear()
        self.bytes = 0

    def _stored(self, features: Features) -> Features:
        """Copy features into host memory, pinned if the target is on a GPU. A reference would keep tensors of the
        decoding alive."""
        pinned = self.target.device.type == "cuda"
        empty = partial(torch.empty, device="cpu", pin_memory=pinned)
        return Features(*(empty(x.shape, dtype=x.dtype).copy_(x) for x in vars(features).values()))

    def get(self, examples: list[Example]) -> list[Features]:
        """Features of `examples`, in order, on the target's device. The target is run again for every text that was
        dropped, and with `feedback="rerun"` once for each text."""
        fresh = [example for example in examples if example.index in self.texts and example.index not in self.kept]
        for group in self._groups(fresh):
            for example, features in zip(group, self.compute(group), strict=True):
                self.kept[example.index] = self._stored(features)
        return [self._with_best(e, features) for e, features in zip(examples, super().get(examples), strict=True)]

    @torch.no_grad()  # the target may be a policy in training, with weights that ask for gradients
    def _with_best(self, example: Example, features: Features) -> Features:
        """Features with the target's most probable tokens in `best`. They are computed only here, because most texts
        are never learned from."""
        text = self.texts.get(example.index)
        if text is None or not text.sampled:
            return features
        return replace(features, best=kernels.argmax(self.target.model.logits(features.teacher)).int())

    def only_rejected(self, batch: Any, examples: list[Example]) -> Any:
        """Restrict a training batch of `examples` to the tokens at which a draft was rejected, at every draft depth
        (Liu et al. 2024, Online Speculative Decoding). Fully accepted rounds teach nothing. Heads must learn from
        distributions (any objective except "ce"). Raises KeyError if a text was dropped."""
        masks = []
        for example in examples:
            counted = torch.zeros(example.response_length - 1, dtype=torch.bool)
            counted[self.texts[example.index].rejected] = True
            masks.append(counted)
        if isinstance(batch, SlotBatch):
            inside = batch.in_draft_vocab.clone()
            rows = torch.cat(masks).to(inside.device)
            inside[: len(rows)] &= rows
            return replace(batch, in_draft_vocab=inside)
        assert isinstance(batch, LMBatch)
        mask = torch.zeros_like(batch.mask)
        for row, example, counted in zip(mask, examples, masks, strict=True):
            row[example.prompt_length + 1 : len(example.tokens)] = counted.to(mask.device)
        teacher = None if batch.teacher is None else batch.teacher[mask[batch.mask]]
        return LMBatch(batch.tokens, mask & batch.mask, teacher)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(JSON-able facts, tensors) that `restore` needs."""
        texts = [text.to_json() for text in self.texts.values()]
        tensors = {f"{i}.{name}": x for i, features in self.kept.items() for name, x in vars(features).items()}
        return {"next": self._next, "dropped": self.dropped, "texts": texts}, tensors

    def restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.clear()
        self._next, self.dropped = facts["next"], facts["dropped"]
        for text in map(BufferedText.from_json, facts["texts"]):
            example = text.example
            self.texts[example.index] = text
            self.bytes += self.size(example)
            if f"{example.index}.teacher" in tensors:
                parts = (tensors[f"{example.index}.{name}"] for name in ("taps", "teacher", "best"))
                self.kept[example.index] = self._stored(Features(*parts))
