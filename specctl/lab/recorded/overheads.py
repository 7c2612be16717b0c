"""Costs of choosing in addition to the rounds: idle drafters catch up, and score committed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specctl.selection.policies.policy import Array


@dataclass(frozen=True)
class Overheads:
    """Seconds of N drafters on the machine of a recording, as lines in the number of tokens n: a + b·n.

    Attributes:
        read: [N, 2] a and b of reading n tokens, also of a prompt.
        score: [N, 2, 2] a and b of scoring n tokens that were read, at draft depth 1 and at the drafter's `reach`;
            depths in between are interpolated. Each drafter is timed alone, although adapters of one base would share a
            pass.
        reach: [N] tokens of the longest draft.
    """

    read: Array
    score: Array
    reach: NDArray[np.int64]

    def of_arms(self, arms: Sequence[int]) -> Overheads:
        """The overheads of some of the drafters, by index."""
        chosen = list(arms)
        return Overheads(self.read[chosen], self.score[chosen], self.reach[chosen])

    def reading(self, tokens: NDArray[np.int64]) -> Array:
        """[N] seconds in which each drafter reads its number of `tokens` [N]; 0 without tokens."""
        return np.where(tokens > 0, self.read[:, 0] + self.read[:, 1] * tokens, 0.0)

    def scoring(self, tokens: int, depth: int) -> float:
        """Seconds in which all drafters score this number of tokens at draft depths 1 … `depth`."""
        part = (np.minimum(depth, self.reach) - 1) / np.maximum(self.reach - 1, 1)
        line = self.score[:, 0] + (self.score[:, 1] - self.score[:, 0]) * part[:, None]
        return float((line[:, 0] + line[:, 1] * tokens).sum())

    def of_text(
        self, prompt: int, arms: Sequence[int], committed: Sequence[int], scored: Sequence[int], depth: int
    ) -> tuple[float, float]:
        """Seconds of catching up before rounds, and of scoring after rounds, in one text.

        A drafter reads nothing until it is played or scored. Then it reads all tokens it has missed, at first the
        prompt. The reading of an arm that also played the round before is part of its drafts.

        Args:
            prompt: number of its tokens.
            arms, committed, scored: [R] of each round: its arm, its tokens, and the tokens scored after the round.
            depth: number of draft depths that are scored.
        """
        read = np.full(len(self.reach), -prompt)  # tokens of the answer that each drafter has read
        read_s = score_s = 0.0
        stands = known = 0  # committed tokens of the answer; scored ones
        before = None
        for arm, more, count in zip(arms, committed, scored, strict=True):
            if arm != before:
                read_s += float(self.reading(stands - read)[arm])
            read[arm] = max(read[arm], stands)
            stands, before = stands + more, arm
            if count:
                known += count
                score_s += float(self.reading(np.maximum(known - read, 0)).sum()) + self.scoring(count, depth)
                read = np.maximum(read, known)
        return read_s, score_s
