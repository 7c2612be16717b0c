"""Split the tokens of a text into reasoning steps, and detect texts that repeat themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from specctl.decoding.target import Target

End = Literal["delimiter", "final", "limit"]


@dataclass(frozen=True)
class Step:
    """Reasoning step: its writer's tokens, with delimiter or end-of-sequence token, and its text without the latter.

    `end` tells whether the step ended with the delimiter, with the end of the text ("final"), or at the length limit.
    """

    ids: list[int]
    text: str
    end: End


class StepSplitter:
    """Cuts the tokens of one model into steps.

    A step ends with the token that completes the delimiter, so no text is ever tokenized again. Other characters of
    this token ("\\n   ") also belong to the step.

    Attributes:
        ends: ids of the tokens that contain the delimiter; a decoder may stop there. A delimiter that spans two
            tokens is found only by `first`.
    """

    def __init__(self, model: Target, delimiter: str, limit: int):
        """`limit`: maximal number of tokens per step."""
        self.tokenizer, self.eos_ids = model.tokenizer, model.eos_ids
        self.delimiter, self.limit = delimiter, limit
        self.ends = _holding(self.tokenizer, delimiter)

    def text(self, ids: list[int]) -> str:
        """Decode ids to text, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def first(self, ids: list[int]) -> Step:
        """Return the first step of `ids` (at least one token)."""
        for count, token in enumerate(ids[: self.limit], 1):
            if token in self.eos_ids:
                return Step(ids[:count], self.text(ids[:count]), "final")
            if token in self.ends or (count > 1 and self._completed(ids[:count])):
                return Step(ids[:count], self.text(ids[:count]), "delimiter")
        cut = ids[: self.limit]
        return Step(cut, self.text(cut), "limit")

    def _completed(self, ids: list[int]) -> bool:
        """Whether the last token completes a delimiter that spans several tokens."""
        return len(self.delimiter) > 1 and self.delimiter in self.text(ids[-len(self.delimiter) :])


@lru_cache(maxsize=4)
def _holding(tokenizer: Any, delimiter: str) -> frozenset[int]:
    """Ids of the tokens that contain the delimiter; this takes a second for a large vocabulary."""
    tokens = list(tokenizer.get_vocab().values())  # the ids may have gaps
    pieces = tokenizer.batch_decode([[token] for token in tokens])
    return frozenset(token for token, piece in zip(tokens, pieces, strict=True) if delimiter in piece)


def repeats_itself(steps: Sequence[Step], repeats: int) -> bool:
    """Whether the text ends with `repeats` repetitions of its last step, or of its last two: an endless loop."""
    texts = [step.text.strip().casefold() for step in steps]
    for period in (1, 2):
        tail = texts[-period * repeats :]
        if len(tail) == period * repeats and tail == tail[-period:] * repeats:
            return True
    return False
