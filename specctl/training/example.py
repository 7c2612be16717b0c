"""A training example: one distilled text."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    """One distilled response with its prompt. Only tokens from `prompt_length` on are trained on."""

    index: int
    prompt_id: str
    tokens: Sequence[int]
    prompt_length: int

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length
