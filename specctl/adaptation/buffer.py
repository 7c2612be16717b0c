"""The replay buffer: what verification says about committed tokens, kept as training data.

Training needs the target's states of a text: tapped features of its positions, and the final hidden states that its
distributions come from. Decoding has computed all of them, so learning from it needs no further pass of the target
(the interactive feedback of online speculative decoding). `feedback="rerun"` is that further pass,
to compare with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from specctl import kernels
from specctl.decoding.records import Label
from specctl.decoding.state import DecodeState, PerText
from specctl.decoding.target import Target
from specctl.drafters.feature.head import SlotBatch
from specctl.drafters.feature.layer import own_features
from specctl.drafters.lm.model import LMBatch
from specctl.training.example import Example
from specctl.training.feature_files import Features
from specctl.training.features import FeatureStore

ID_BYTES = 8


@dataclass
class _Open:
    """A text that is being decoded: at which of its tokens from the second of the response on, up to `end`, a draft was
    rejected."""

    rejected: list[int] = field(default_factory=list)
    rejections: int = 0
    end: int | None = None


@dataclass(frozen=True)
class BufferedText:
    """A finished text.

    Attributes:
        rejected: at which of the tokens after the response's first one a draft was rejected.
        drawn: whether `best` of its features holds committed tokens that were drawn at random.
    """

    example: Example
    rejected: list[int]
    drawn: bool = False

    def facts(self) -> dict[str, Any]:
        """The text as JSON has it."""
        example = {name: getattr(self.example, name) for name in Example.__slots__}
        return example | {"rejected": self.rejected, "drawn": self.drawn}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> BufferedText:
        """Out of its `facts`."""
        fields = dict(facts)
        rejected, drawn = fields.pop("rejected"), fields.pop("drawn", False)
        return cls(Example(**fields), rejected, drawn)


class ReplayBuffer(FeatureStore):
    """Finished texts with their features, as a trainee's `store` knows them; the oldest make room for new ones.

    `observe` is the loop's `on_commit`, with the other options of `listening`. A text comes in when it ends; one whose
    decoding is broken off leaves nothing.

    Attributes:
        texts: by the index of their examples, oldest first.
        bytes: of all texts and their features, at most `max_bytes`. Texts being decoded are not among them: of these
            the loop keeps the states of the tokens so far, where the target is.
        dropped: texts that had to go, or were too large to come in.
        passes: tokens that the target was run over again; 0 while all feedback comes from verdicts.
    """

    kept: dict[int, Features]

    def __init__(
        self,
        target: Target,
        taps: tuple[int, ...],
        *,
        max_bytes: int,
        feedback: Literal["verdict", "rerun"] = "verdict",
        device: torch.device | None = None,
    ):
        """
        Args:
            taps: of the drafters that learn; those that the loop retains include them.
            device: where features are kept; None = in the memory of the host, pinned where the target is on a GPU.
        """
        super().__init__(target, taps)
        self.max_bytes, self.feedback = max_bytes, feedback
        self.place = device or torch.device("cpu")
        self.pinned = self.place.type == "cpu" and target.device.type == "cuda"
        self.texts: dict[int, BufferedText] = {}
        self.bytes = self.dropped = 0
        self._next = 0

    def examples(self, only: Literal["all", "rejected"] = "all") -> list[Example]:
        """Examples to learn from, oldest first; with "rejected" of texts in which a draft was rejected."""
        return [text.example for text in self.texts.values() if text.rejected or only == "all"]

    @property
    def listening(self) -> dict[str, Any]:
        """The options of a decoding that fills the buffer."""
        return {"on_commit": self.observe, "keeps": self.feedback == "verdict"}

    def observe(self, state: DecodeState) -> None:
        """Take in what a round has committed; to be called after every commit of a decoding."""
        memory: PerText[_Open] | None = state.memory.get(self)
        if memory is None:
            memory = state.memory[self] = PerText(_Open, state.batch)
        counts = []
        for text, row in zip(memory.rows, state.rows, strict=True):
            counts.append(len(row.ids) - (text.end or row.prompt_length + 1))  # the prefill's token is of no round
            text.end = len(row.ids)
        for b, (text, row, count) in enumerate(zip(memory.rows, state.rows, counts, strict=True)):
            if not count:  # a slot that stands idle
                continue
            if row.rejections > text.rejections:
                text.rejections = row.rejections
                text.rejected.append(len(row.ids) - row.prompt_length - 2)  # the last token, which is the target's own
            if row.stop is not None:
                self._add(state, b, text)
                memory.rows[b] = _Open(end=len(row.ids))

    def _add(self, state: DecodeState, b: int, text: _Open) -> None:
        row = state.rows[b]
        label = row.request.label or Label(str(row.index))
        example = Example(self._next, label.query, list(row.ids), row.prompt_length)
        self._next += 1
        features, drawn = None, False
        if self.feedback == "verdict" and self.size(example) <= self.max_bytes:
            assert state.hidden is not None, "the loop keeps no states: pass it `listening`"
            teacher = state.hidden[b, row.prompt_length : len(row.ids) - 1]
            slots = len(row.ids) - 2
            taps = teacher.new_empty(slots, 0)
            if self.taps:
                assert state.features is not None, "the loop retains no features: pass it the drafter's taps"
                taps = own_features(state.features[b, :slots], state.taps, self.taps)
            committed = torch.tensor(row.ids[row.prompt_length + 1 :], dtype=torch.int32, device=teacher.device)
            features = Features(taps, teacher, best=committed)
            sampling = row.request.sampling
            drawn = sampling.temperature > 0 or sampling.repetition_penalty != 1
        self.take(BufferedText(example, text.rejected, drawn), features)

    def take(self, text: BufferedText, features: Features | None) -> None:
        """Take in a finished text, with its features unless the target is to be run again; the oldest make room."""
        index, size = text.example.index, self.size(text.example)
        if size > self.max_bytes:
            self.dropped += 1
            return
        if features is not None:
            self.kept[index] = self._stored(features)
        self.texts[index] = text
        self.bytes += size
        while self.bytes > self.max_bytes:
            self._drop(next(iter(self.texts)))

    def size(self, example: Example) -> int:
        """Bytes that a text and its features take."""
        return self.estimate([example]) + ID_BYTES * len(example.tokens)

    def _drop(self, index: int) -> None:
        self._forget(index)
        self.dropped += 1

    def _forget(self, index: int) -> None:
        self.bytes -= self.size(self.texts.pop(index).example)
        self.kept.pop(index, None)

    def keep(self, only: Sequence[int]) -> None:
        """Forget all texts but those of these indices."""
        for index in self.texts.keys() - set(only):
            self._forget(index)

    def clear(self) -> None:
        """Forget all texts."""
        self.texts.clear()
        self.kept.clear()
        self.bytes = 0

    def _stored(self, features: Features) -> Features:
        """A copy that holds no tensor of the decoding alive."""

        def copy(x: Tensor) -> Tensor:
            return torch.empty(x.shape, dtype=x.dtype, device=self.place, pin_memory=self.pinned).copy_(x)

        return Features(*(copy(x) for x in vars(features).values()))

    def get(self, examples: list[Example]) -> list[Features]:
        """Features of `examples`, in order, on the target's device. A text that has been dropped is run again, and so
        is, the first time, every text with `feedback="rerun"`."""
        fresh = [example for example in examples if example.index in self.texts and example.index not in self.kept]
        for group in self._groups(fresh):
            for example, features in zip(group, self.compute(group), strict=True):
                self.kept[example.index] = self._stored(features)
        return [self._with_best(e, features) for e, features in zip(examples, super().get(examples), strict=True)]

    def _with_best(self, example: Example, features: Features) -> Features:
        """The features with the target's most probable tokens. They are computed here, because most texts are in no
        lesson."""
        text = self.texts.get(example.index)
        if text is None or not text.drawn:
            return features
        return replace(features, best=kernels.argmax(self.target.model.logits(features.teacher)).int())

    def only_rejected(self, batch: Any, examples: list[Example]) -> Any:
        """A trainee's batch of `examples` that counts only tokens at which a draft was rejected, at every draft depth
        (Liu et al. 2024, Online Speculative Decoding). Fully accepted rounds teach nothing. Heads must learn from
        distributions (any objective but "ce"). Raises KeyError where a text is gone.
        """
        masks = []
        for example in examples:
            counted = torch.zeros(example.response_length - 1, dtype=torch.bool)
            counted[self.texts[example.index].rejected] = True
            masks.append(counted)
        if isinstance(batch, SlotBatch):
            inside = batch.inside.clone()
            rows = torch.cat(masks).to(inside.device)
            inside[: len(rows)] &= rows
            return replace(batch, inside=inside)
        assert isinstance(batch, LMBatch)
        mask = torch.zeros_like(batch.mask)
        for row, example, counted in zip(mask, examples, masks, strict=True):
            row[example.prompt_length + 1 : len(example.tokens)] = counted.to(mask.device)
        teacher = None if batch.teacher is None else batch.teacher[mask[batch.mask]]
        return LMBatch(batch.tokens, mask & batch.mask, teacher)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(what JSON can say, tensors): all that `restore` needs."""
        texts = [text.facts() for text in self.texts.values()]
        tensors = {f"{i}.{name}": x for i, features in self.kept.items() for name, x in vars(features).items()}
        return {"next": self._next, "dropped": self.dropped, "texts": texts}, tensors

    def restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state` has told."""
        self.clear()
        self._next, self.dropped = facts["next"], facts["dropped"]
        for text in map(BufferedText.of, facts["texts"]):
            example = text.example
            self.texts[example.index] = text
            self.bytes += self.size(example)
            if f"{example.index}.teacher" in tensors:
                parts = (tensors[f"{example.index}.{name}"] for name in ("taps", "teacher", "best"))
                self.kept[example.index] = self._stored(Features(*parts))
