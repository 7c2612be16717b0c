"""Presence and frequency penalties and logit bias, as OpenAI's API defines them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Adjustment:
    """Numbers that are added to the logits of a text, after its repetition penalty.

    Attributes:
        presence: is subtracted for every token that the answer has.
        frequency: is subtracted as often as the answer has the token. The prompt does not count.
        bias: is added, by token id.
    """

    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)

    def added(self, answer: list[int], parents: list[int], tokens: list[int], vocab: int) -> Tensor:
        """Numbers [1 + n, V] to add to the logits after an answer and at the n nodes of its draft. A node counts the
        tokens of its path. Parents precede their children; a parent of −1 or less is the answer."""
        counts = torch.zeros(1 + len(tokens), vocab)
        if self.presence or self.frequency:
            counts[0] = torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=vocab)
            for node, (parent, token) in enumerate(zip(parents, tokens, strict=True), 1):
                counts[node] = counts[max(parent, -1) + 1]
                counts[node, token] += 1
        total = -self.frequency * counts - self.presence * (counts > 0)
        total[:, list(self.bias)] += torch.tensor([*self.bias.values()])
        return total
