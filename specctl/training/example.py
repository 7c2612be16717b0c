"""A training example: one distilled text, or a piece of a text that is too long for a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Example:
    """One distilled response with its prompt. Only tokens from `prompt_length` on are trained on.

    `adapter`: directory of the target's LoRA adapter that wrote the response, in a training for several adapters. None:
    the target as it is loaded.
    """

    index: int
    prompt_id: str
    tokens: Sequence[int]
    prompt_length: int
    adapter: str | None = field(default=None, kw_only=True)

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def text(self) -> Sequence[int]:
        """Tokens of the whole text."""
        return self.tokens

    @property
    def start(self) -> int:
        """Position of the first token in the whole text."""
        return 0

    @property
    def stop(self) -> int:
        """Position after the last token in the whole text."""
        return self.start + len(self.tokens)

    @property
    def draw(self) -> tuple[int, int]:
        """Index of the text, and number of earlier response slots in the text. Both select the slots of later steps."""
        return self.index, 0

    @property
    def idle(self) -> int:
        """Number of response slots at the end that are not trained. Later steps of earlier slots read their tokens."""
        return 0

    @property
    def trained_tokens(self) -> int:
        """Number of response tokens, without the tokens that the next piece trains."""
        return self.response_length


@dataclass(frozen=True, slots=True)
class TextPiece(Example):
    """A piece of a longer text. Its first `prompt_length` tokens are not trained: they are context.

    Attributes:
        whole: tokens of the whole text.
        first: position of the first token in the whole text.
        number: index of the whole text.
        done: response slots of the text that earlier pieces train.
        shared: tokens at the end that the next piece trains; 0 in the last piece.
    """

    whole: Sequence[int]
    first: int
    number: int
    done: int
    shared: int

    @property
    def text(self) -> Sequence[int]:
        return self.whole

    @property
    def start(self) -> int:
        return self.first

    @property
    def draw(self) -> tuple[int, int]:
        return self.number, self.done

    @property
    def idle(self) -> int:
        return max(0, self.shared - 1)

    @property
    def trained_tokens(self) -> int:
        return self.response_length - self.shared
