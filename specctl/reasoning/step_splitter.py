"""Reasoning steps: where the tokens of a text fall apart into them, and when a text goes round in circles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from specctl.decoding.target import Target

End = Literal["delimiter", "final", "limit"]


@dataclass(frozen=True)
class Step:
    """A step as its writer's tokens, delimiter or end-of-sequence token included, and as text without the latter.

    `end`: the delimiter came, the text is over ("final"), or the step was cut because it became too long.
    """

    ids: list[int]
    text: str
    end: End

    @property
    def empty(self) -> bool:
        """It says nothing: white space and, at most, the end of the text."""
        return not self.text.strip()


class Stepper:
    """Cuts the tokens of one model into steps.

    A step ends with the token that completes the delimiter, so that no text is ever tokenised again; what else such a
    token holds ("\\n   ") belongs to the step that it ends.

    Attributes:
        ends: ids of the tokens that hold the delimiter: a decoder may stop there. A delimiter of two tokens is found by
            `first` only.
    """

    def __init__(self, model: Target, delimiter: str, limit: int):
        """`limit`: tokens of the longest step."""
        self.tokenizer, self.eos_ids = model.tokenizer, model.eos_ids
        self.delimiter, self.limit = delimiter, limit
        self.ends = _holding(self.tokenizer, delimiter)

    def text(self, ids: list[int]) -> str:
        """Text of ids, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def first(self, ids: list[int]) -> Step:
        """The step that `ids` (at least one) begin with."""
        for count, token in enumerate(ids[: self.limit], 1):
            if token in self.eos_ids:
                return Step(ids[:count], self.text(ids[:count]), "final")
            if token in self.ends or (count > 1 and self._completed(ids[:count])):
                return Step(ids[:count], self.text(ids[:count]), "delimiter")
        cut = ids[: self.limit]
        return Step(cut, self.text(cut), "limit")

    def _completed(self, ids: list[int]) -> bool:
        """Several tokens make up the delimiter, the last of them at the end."""
        return len(self.delimiter) > 1 and self.delimiter in self.text(ids[-len(self.delimiter) :])

    def split(self, ids: list[int]) -> list[Step]:
        """All steps of a text."""
        steps = []
        while ids:
            steps.append(self.first(ids))
            ids = ids[len(steps[-1].ids) :]
        return steps


@lru_cache(maxsize=4)
def _holding(tokenizer: Any, delimiter: str) -> frozenset[int]:
    """Ids of the tokens that hold the delimiter; a second's work for a large vocabulary."""
    pieces = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return frozenset(token for token, piece in enumerate(pieces) if delimiter in piece)


def going_round(steps: Sequence[Step], repeats: int) -> bool:
    """The last step, or the last two in turn, came `repeats` times at the end: a loop that nothing will break."""
    texts = [step.text.strip().casefold() for step in steps]
    for period in (1, 2):
        tail = texts[-period * repeats :]
        if len(tail) == period * repeats and tail == tail[-period:] * repeats:
            return True
    return False
