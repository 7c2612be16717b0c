"""A training example: one distilled text, or a piece of a text that is too long for a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Author(NamedTuple):
    """The model that wrote a distilled directory: the target, or the target with an adapter.

    Attributes:
        adapter: directory of the target's LoRA adapter. None: no adapter, or one that only engines have.
        model: name of the model at the engines that compute features. None: the engine's default model.
    """

    adapter: str | None = None
    model: str | None = None

    def __str__(self) -> str:
        return self.adapter or f"the engine's model {self.model}"


@dataclass(frozen=True, slots=True)
class Example:
    """One distilled response with its prompt. Only tokens from `prompt_length` on are trained on.

    Attributes:
        adapter: directory of the target's LoRA adapter that wrote the response, in a training for several adapters.
            None: the target as it is loaded.
        model: name of the model that wrote the response, at the engines that compute features, in such a training.
        whole: tokens of the whole text, for a piece of it. The first `prompt_length` tokens of a piece are context.
        number: index of the whole text.
        start: position of the first token in the whole text.
        done: response slots of the text that earlier pieces train.
        shared: tokens at the end that the next piece trains; 0 in the last piece.
    """

    index: int
    prompt_id: str
    tokens: Sequence[int]
    prompt_length: int
    adapter: str | None = field(default=None, kw_only=True)
    model: str | None = field(default=None, kw_only=True)
    whole: Sequence[int] | None = field(default=None, kw_only=True)
    number: int = field(default=0, kw_only=True)
    start: int = field(default=0, kw_only=True)
    done: int = field(default=0, kw_only=True)
    shared: int = field(default=0, kw_only=True)

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def is_piece(self) -> bool:
        return self.whole is not None

    @property
    def text(self) -> Sequence[int]:
        """Tokens of the whole text."""
        return self.tokens if self.whole is None else self.whole

    @property
    def stop(self) -> int:
        """Position after the last token in the whole text."""
        return self.start + len(self.tokens)

    @property
    def draw(self) -> tuple[int, int]:
        """Index of the text, and number of earlier response slots in the text. Both select the slots of later steps."""
        return self.number if self.is_piece else self.index, self.done

    @property
    def idle(self) -> int:
        """Number of response slots at the end that are not trained. Later steps of earlier slots read their tokens."""
        return max(0, self.shared - 1)

    @property
    def trained_tokens(self) -> int:
        """Number of response tokens, without the tokens that the next piece trains."""
        return self.response_length - self.shared
