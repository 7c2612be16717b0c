"""Delayed feedback: the loss of a position is known only once the tokens of a whole draft from there are known."""

import numpy as np

from specctl.selection.game.losses import (
    beyond_the_end,
    extrapolated_depths,
    geometric_length,
    length_loss,
    settled_positions,
)
from specctl.selection.game.rules import Rules
from specctl.selection.policies.policy import AnyArray, Array


class Delay:
    """Queue that turns scored tokens into loss vectors, first in, first out (QFI-D; HedgeSpec's delayed feedback).

    With one vector per token, a vector waits for the K − 1 tokens after it, or until all arms have missed
    (`Rules.settled`). With one vector per round (chunk), it only waits for the tokens of its round. The first
    `hybrid_rounds` vectors do not wait: they are 1 − γ at depth 1, or the mean of this over the tokens of a chunk.

    The throughput loss compares tokens with the seconds of a whole round, so they must be the tokens of a whole draft.
    If fewer depths are scored, the scores of the following tokens take the place of the missing ones
    (`extrapolated_depths`). If tokens are not known yet, their mean acceptance does (`geometric_length`). With 1 − γ,
    or with the length of a cut draft, an arm would look worse the longer its rounds are, however much it accepts.
    """

    def __init__(self, count: int, rules: Rules):
        self.rules = rules
        self._count = count
        self._reach = np.array(rules.reach or [rules.longest] * count)
        self._depth = rules.horizon
        self._hybrid_left = rules.hybrid_rounds
        self._pending = np.zeros((count, 0, self._depth))  # acceptance of the tokens with waiting vectors
        self._chunks: list[int] = []  # tokens of each round that is not scored yet

    def committed(self, tokens: int) -> int:
        """Record a played round; return the number of vectors that its tokens will give."""
        if self.rules.unit == "token":
            return tokens
        self._chunks.append(tokens)
        return 1

    def scored(self, gamma: AnyArray, hit: AnyArray) -> Array:
        """[M, N] vectors that these tokens complete, in text order; gamma, hit: [N, S, K]."""
        product = self.rules.estimator == "product"
        values = np.asarray(gamma if product else hit, dtype=np.float64)
        first = gamma[:, :, 0] if product or self.rules.loss != "throughput" else (hit[:, :, 0] > 0)
        if values.shape[2] < self._depth:
            values = extrapolated_depths(values, self._reach, self._depth)
        if self.rules.unit == "chunk":
            return self._of_chunks(first, values)
        tokens = gamma.shape[1]
        at_once = tokens if self.rules.loss == "acceptance" else min(self._hybrid_left, tokens)
        self._hybrid_left = max(self._hybrid_left - at_once, 0)
        self._pending = np.concatenate([self._pending, values[:, at_once:]], axis=1)
        return np.concatenate([self._of_first(first[:, :at_once]), self._complete()])

    def _of_first(self, first: AnyArray) -> Array:
        """[M, N] losses of tokens from their acceptance [N, M] at depth 1 alone."""
        if self.rules.loss != "throughput" or not first.shape[1]:
            return 1 - first.T
        return np.tile(self._of_mean(first), (first.shape[1], 1))

    def _of_mean(self, first: AnyArray) -> Array:
        """[N] loss of a draft with the mean acceptance of these tokens [N, M]."""
        return 1 - geometric_length(first.mean(axis=1), self._reach) / (self._depth + 1)

    def flush(self) -> Array:
        """[M, N] vectors of the waiting positions, from the tokens that are known."""
        vectors = self._lengths(self._pending.shape[1])
        self._pending = self._pending[:, :0]
        return vectors

    def complete_at_once(self, tokens: int) -> None:
        """Complete the vectors of the next `tokens` tokens, and `hybrid_rounds` more, at once; later ones wait."""
        self._hybrid_left = tokens + self.rules.hybrid_rounds

    def ended(self) -> Array:
        """[M, N] vectors of the waiting positions: the text is over, and nothing is accepted beyond its end."""
        vectors = self.flush()
        self._chunks.clear()
        return vectors

    def _complete(self) -> Array:
        """[M, N] vectors of the first positions that enough is known about; these positions stop waiting."""
        estimator, depth, below = self.rules.estimator, self._depth, self.rules.settled
        if below is None:
            ready = max(self._pending.shape[1] - depth + 1, 0)
        else:
            ready = settled_positions(self._pending, estimator, below)
        vectors = self._lengths(ready)
        self._pending = self._pending[:, ready:]
        return vectors

    def _lengths(self, count: int) -> Array:
        """[count, N] losses of the first positions, as if nothing were accepted after the known tokens."""
        if not count:
            return np.zeros((0, self._count))
        known = beyond_the_end(self._pending)[:, : count + self._depth - 1]
        return length_loss(known, self.rules.estimator)

    def _of_chunks(self, first: AnyArray, values: Array) -> Array:
        """[M, N] one vector per round, over its k ≤ K committed tokens: 1 − AL/(k + 1). Acceptance beyond them is not
        observed (censored; HedgeSpec, B.3). For throughput, AL is the length of K draft tokens with this mean
        acceptance."""
        N, tokens, K = values.shape
        vectors = []
        start = 0
        while start < tokens:
            known = self._chunks.pop(0)
            if self.rules.loss == "throughput":
                vectors.append(self._of_mean(first[:, start : start + known]))
            elif self.rules.loss == "acceptance" or self._hybrid_left:
                self._hybrid_left = max(self._hybrid_left - 1, 0)
                vectors.append(1 - first[:, start : start + known].mean(axis=1))
            else:
                k = min(known, K)
                vectors.append(length_loss(values[:, start : start + k, :k], self.rules.estimator)[0])
            start += known
        return np.array(vectors).reshape(-1, N)
