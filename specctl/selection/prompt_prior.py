"""First opinion of a policy: which drafter suits a prompt, before any round has been played."""

from collections.abc import Sequence
from typing import Protocol

from specctl.distillation.messages import ChatMessage, text_of
from specctl.selection.policies.policy import Array


class PromptPrior(Protocol):
    """A classifier of prompts with one class per drafter of the pool.

    Attributes:
        arms: names of the drafters, in the order of the pool.
    """

    arms: list[str]

    def probabilities(self, texts: Sequence[str]) -> Array:
        """[n, N] probability that each drafter is the right one for each prompt."""


def prompt_text(messages: Sequence[ChatMessage]) -> str:
    """The text of a conversation as a classifier reads it: all messages."""
    return "\n\n".join(text_of(message) for message in messages)
