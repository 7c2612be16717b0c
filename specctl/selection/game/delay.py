"""Delayed feedback: the loss of a position is known only once the tokens that a draft there would have are known."""

from __future__ import annotations

import numpy as np

from specctl.selection.game.losses import beyond_the_end, continued, geometric_length, length_loss, settled
from specctl.selection.game.rules import Rules
from specctl.selection.policies.policy import AnyArray, Array


class Delay:
    """Scored tokens go in, loss vectors come out, first in, first out (QFI-D; HedgeSpec's delayed feedback).

    A vector per token waits for the K − 1 tokens after it, or until all arms have missed (`Rules.settled`); a vector
    per round (chunk) only for those of its round. The first `hybrid_rounds` vectors do not wait: they are 1 − γ at
    depth 1, of a chunk in the mean over its tokens.

    The loss of throughput sets tokens against the seconds of a whole round, so the tokens are those of a whole draft.
    Where fewer depths are scored, the scores of the tokens that follow stand for the missing ones (`continued`); where
    tokens are not known yet, their mean acceptance does (`geometric_length`). 1 − γ, or the length of a cut draft,
    would be the less the longer a round takes, whatever it accepts.
    """

    def __init__(self, count: int, rules: Rules):
        self.rules = rules
        self._count = count
        self._reach = np.array(rules.reach or [rules.longest] * count)
        self._depth = rules.horizon
        self._hybrid_left = rules.hybrid_rounds
        self._pending = np.zeros((count, 0, self._depth))  # acceptance of the tokens whose vectors wait
        self._chunks: list[int] = []  # tokens of each round that was not scored

    def committed(self, tokens: int) -> int:
        """Note a round that was played; returns the number of vectors that will come of its tokens."""
        if self.rules.unit == "token":
            return tokens
        self._chunks.append(tokens)
        return 1

    def scored(self, gamma: AnyArray, hit: AnyArray) -> Array:
        """[M, N] vectors that these tokens complete, in the order of the text; gamma, hit: [N, S, K]."""
        product = self.rules.estimator == "product"
        values = np.asarray(gamma if product else hit, dtype=np.float64)
        first = gamma[:, :, 0] if product or self.rules.loss != "throughput" else (hit[:, :, 0] > 0)
        if values.shape[2] < self._depth:
            values = continued(values, self._reach, self._depth)
        if self.rules.unit == "chunk":
            return self._of_chunks(first, values)
        tokens = gamma.shape[1]
        at_once = tokens if self.rules.loss == "acceptance" else min(self._hybrid_left, tokens)
        self._hybrid_left = max(self._hybrid_left - at_once, 0)
        self._pending = np.concatenate([self._pending, values[:, at_once:]], axis=1)
        return np.concatenate([self._of_first(first[:, :at_once]), self._complete()])

    def _of_first(self, first: AnyArray) -> Array:
        """[M, N] losses of tokens by their acceptance [N, M] at depth 1 alone."""
        if self.rules.loss != "throughput" or not first.shape[1]:
            return 1 - first.T
        return np.tile(self._of_mean(first), (first.shape[1], 1))

    def _of_mean(self, first: AnyArray) -> Array:
        """[N] loss of a draft whose tokens are accepted as these [N, M] were in the mean."""
        return 1 - geometric_length(first.mean(axis=1), self._reach) / (self._depth + 1)

    def given_up(self) -> Array:
        """[M, N] vectors of the positions that wait, by the tokens that are known."""
        vectors = self._lengths(self._pending.shape[1])
        self._pending = self._pending[:, :0]
        return vectors

    def hurry(self, tokens: int) -> None:
        """Let the vectors of the next tokens, and of `hybrid_rounds` more, not wait; no others do."""
        self._hybrid_left = tokens + self.rules.hybrid_rounds

    def ended(self) -> Array:
        """[M, N] vectors of the positions that wait: the text is over, nothing is accepted beyond its end."""
        vectors = self.given_up()
        self._chunks.clear()
        return vectors

    def _complete(self) -> Array:
        """[M, N] vectors of the first positions of which enough is known; these positions wait no longer."""
        estimator, depth, below = self.rules.estimator, self._depth, self.rules.settled
        if below is None:
            ready = max(self._pending.shape[1] - depth + 1, 0)
        else:
            ready = settled(self._pending, estimator, below)
        vectors = self._lengths(ready)
        self._pending = self._pending[:, ready:]
        return vectors

    def _lengths(self, count: int) -> Array:
        """[count, N] losses of the first positions, behind whose known tokens nothing is accepted any more."""
        if not count:
            return np.zeros((0, self._count))
        known = beyond_the_end(self._pending)[:, : count + self._depth - 1]
        return length_loss(known, self.rules.estimator)

    def _of_chunks(self, first: AnyArray, values: Array) -> Array:
        """[M, N] one vector per round over the k ≤ K tokens it committed, 1 − AL/(k + 1): acceptance beyond them is not
        seen (censored; HedgeSpec, B.3). Of throughput AL is that of K tokens, accepted as these are in the mean."""
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
