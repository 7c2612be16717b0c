"""Sampling of tokens: temperature, top-k, top-p, penalties, logit bias and counter-based random streams."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specctl import kernels
from specctl.recipe.sections import SamplingRecipe

ACCEPT, TARGET, DRAFT = 0, 1, 2  # random streams; shared noise between them would bias the distribution


@dataclass(frozen=True)
class Sampling:
    """Sampling filters in the order of `transformers`: the repetition penalty for tokens that occur in the text before
    (Keskar et al. 2019, section 4.1; 1 = off), temperature (0 = greedy), top-k (0 = off), top-p (1 = off). As in vLLM,
    min-p comes between temperature and top-k: no token is drawn that is less likely than `min_p` times the likeliest
    one (Nguyen et al. 2024; 0 = off)."""

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, recipe: SamplingRecipe) -> Sampling:
        """The filters of a recipe."""
        return cls(recipe.temperature, recipe.top_k, recipe.top_p)


GREEDY = Sampling(0.0, 0, 1.0)


class Draws:
    """Sampling parameters and seeds of a batch; makes distributions, uniforms and drawn tokens for it.

    Attributes:
        floors: [B, 1, 1] how far below the largest logit a token can be drawn, at most 0; None if no text has min-p.
    """

    def __init__(self, samplings: list[Sampling], seeds: list[int], device: torch.device):
        self.samplings, self.device = samplings, device
        self.greedy = all(sampling.temperature == 0 for sampling in samplings)
        self.seeds = torch.tensor(seeds, dtype=torch.int64)
        self.device_seeds = self.seeds.to(device)
        self.temperature = torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=device)
        self.top_k = torch.tensor([s.top_k for s in samplings], device=device)
        self.top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float32, device=device)
        self.penalised = any(s.repetition_penalty != 1 for s in samplings)
        self.floors: Tensor | None = None
        if any(s.min_p for s in samplings):
            floors = [s.temperature * math.log(s.min_p) if s.min_p else -math.inf for s in samplings]
            self.floors = torch.tensor(floors, dtype=torch.float32, device=device).view(-1, 1, 1)

    def rows(self, logits: Tensor) -> kernels.Rows:
        """Distributions of logits [B, T, V] after the filters, as B·T rows."""
        return kernels.row_params(*kernels.as_rows(self._above_floors(logits), self.filters))

    def _above_floors(self, logits: Tensor) -> Tensor:
        """Logits [B, T, V] with −inf at the tokens that min-p excludes."""
        if self.floors is None:
            return logits
        return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + self.floors, -torch.inf)

    @property
    def filters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Temperature, top-k and top-p [B]."""
        return self.temperature, self.top_k, self.top_p

    def uniform(self, positions: Tensor, stream: int) -> Tensor:
        """Uniforms [B, T] for the tokens at absolute `positions` [B, T]. They are computed on the device of
        `positions`."""
        seeds = self.device_seeds if positions.device.type == self.device.type else self.seeds
        return kernels.uniform(seeds, positions, stream).to(self.device)

    def uniform_of_round(self, start: Tensor, depths: int) -> Tensor:
        """Acceptance uniforms [B, depths] of a round; `start` [B, 1] is the position of the first token to commit.

        A rule that decides about the whole draft also reads the uniforms of tokens it then rejects. The next round must
        not read those again, so they are keyed by round and depth: the rounds of one sequence start at different
        positions. The depth, counted from 1, fills the upper 32 bits of the position, which no text reaches.
        """
        depth = torch.arange(1, depths + 1, device=start.device)
        return self.uniform(start + (depth << 32), ACCEPT)

    def follow(
        self, logits: Tensor, positions: Tensor, tokens: Tensor, parents: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Follow the drawn tokens through the tree `tokens`, `parents` [B, n], from its root on (the match rule).

        `logits` [B, 1 + n, V] belong to the root and the nodes; `positions` [B, 1 + n] are the absolute positions of
        the tokens drawn from them. Returns the path [B, n] of accepted nodes, the accepted length [B] and the bonus
        token [B].
        """
        if self.greedy:
            return kernels.walk_tree(kernels.argmax(logits), tokens, parents)
        uniforms = self.uniform(positions, TARGET)
        return kernels.sample_tree(self._above_floors(logits), self.filters, uniforms, tokens, parents)

    def penalise(self, logits: Tensor, texts: list[list[int]], parents: list[list[int]], tokens: Tensor) -> Tensor:
        """Logits [B, 1 + n, V] with the repetition penalty applied. A row's penalized tokens are the committed `texts`
        and the draft's `tokens` [B, n] on the path to its node. Parents precede their children; a parent of −1 or less
        is the text."""
        if not self.penalised:
            return logits
        batch, rows, vocab = logits.shape
        seen = torch.zeros(batch, rows, vocab, dtype=torch.bool, device=logits.device)
        for b, text in enumerate(texts):
            seen[b, :, torch.tensor(sorted(set(text)), device=logits.device)] = True
            for node, parent in enumerate(parents[b], 1):
                if parent >= 0:
                    seen[b, node] |= seen[b, parent + 1]
                seen[b, node, tokens[b, node - 1]] = True
        penalty = [s.repetition_penalty for s in self.samplings]
        factor = torch.tensor(penalty, dtype=logits.dtype, device=logits.device).view(batch, 1, 1)
        return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)

    def select(self, index: list[int]) -> Draws:
        return Draws([self.samplings[i] for i in index], self.seeds[index].tolist(), self.device)


@dataclass(frozen=True)
class Adjustment:
    """Numbers that are added to the logits of a text, after its repetition penalty, as OpenAI's API defines them, with
    vLLM's minimum length.

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
