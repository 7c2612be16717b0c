"""Presence and frequency penalties and logit bias, as OpenAI's API defines them, and vLLM's minimum length."""

from collections import Counter
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
        least: number of tokens that the answer has before one of the `ends` can be drawn.
    """

    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    least: int = 0
    ends: frozenset[int] = frozenset()

    def added(self, answer: list[int], parents: list[int], tokens: list[int], vocab: int) -> Tensor:
        """Numbers [1 + n, V] to add to the logits after an answer and at the n nodes of its draft. A node counts the
        tokens of its path. Parents precede their children; a parent of −1 or less is the answer."""
        # Few tokens of a large vocabulary are changed, and this runs in every round.
        counted = {*answer, *tokens} if self.presence or self.frequency else set()
        ids = sorted({*counted, *self.bias, *self.ends})
        column = {token: place for place, token in enumerate(ids)}
        counts = torch.zeros(1 + len(tokens), len(ids))
        if self.presence or self.frequency:
            known = Counter(answer)
            counts[0] = torch.tensor([known[token] for token in ids])
            for node, (parent, token) in enumerate(zip(parents, tokens, strict=True), 1):
                counts[node] = counts[max(parent, -1) + 1]
                counts[node, column[token]] += 1
        changes = -self.frequency * counts - self.presence * (counts > 0)
        changes[:, [column[token] for token in self.bias]] += torch.tensor([*self.bias.values()])
        lengths = [len(answer)]
        for parent in parents:
            lengths.append(lengths[max(parent, -1) + 1] + 1)
        for row, length in enumerate(lengths):
            if length < self.least:
                changes[row, [column[token] for token in self.ends]] = -torch.inf
        return torch.zeros(len(counts), vocab).index_copy_(1, torch.tensor(ids, dtype=torch.long), changes)
