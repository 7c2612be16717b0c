"""Gate of hybrid drafts: decides whether a head is worth its passes in addition to a free text drafter.

Estimates come from the committed tokens of a text. The head's gain, in tokens, starts from its gain in earlier texts.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specctl.decoding.records import Sequence
from specctl.drafters.hybrid.candidates import Calibration, Candidates

TEXT, HEAD = 0, 1  # indices of the drafters in claims
# Ratio of outcomes to claims of a text drafter and a head, by eighths of the claimed probability. Greedy texts take the
# likeliest token more often than a head predicts, as it has learned the target's distribution. Measured on development
# prompts of four domains with eagle3 heads, and of five domains for a store of responses. Each text corrects these
# priors.
TEXT_CALIBRATION = (2.3, 1.9, 1.4, 1.2, 1.1, 1.0, 1.0, 0.95)
STORE_CALIBRATION = (0.75, 0.85, 1.0, 1.2, 1.2, 1.0, 0.9, 0.85)
HEAD_CALIBRATION = (1.8, 1.4, 1.7, 1.5, 1.4, 1.2, 1.2, 1.04)
# A round's kind is a bracket (EDGES) of the tokens that the text drafter is expected to get accepted: the head's gain
# depends on it. GAIN is the prior gain in tokens of each kind, with a weight of GAIN_ROUNDS rounds.
EDGES = (0.05, 0.25, 1.0, 2.5)
GAIN, GAIN_ROUNDS = (1.5, 1.2, 1.0, 0.85, 0.65), 2.0
GAIN_MEMORY = 0.92  # decay per round in which the head was asked, as its gain changes along a text
LEVELS = 4.0  # prior number of levels that a head drafts
LEVELS_MEMORY = 0.8
STREAM_MEMORY = 0.98  # decay of the gain of a stream of texts, per round in which the head was asked
# Rounds without the head before it is tried again, doubled after each try up to LONGEST_PATIENCE.
PATIENCE, LONGEST_PATIENCE = 6, 96
# A head is tried only if its expected gain is at least HOPE of its price.
HOPE = 0.6
# A head that has paused reads the tokens that it has missed, at first the whole prompt. It reads them only once, so a
# round is charged a part: the text may get as many more rounds as it has room for REPAID tokens, at most PARTS. Chosen
# on rounds that were played on training prompts of sql, chat and maths, for three heads with stores or lookup and with
# the costs of four machines. Of 16, 32 and 64 tokens, and of 0.4, 0.6 and 0.8, these had the best mean: hybrids had
# 0.98 to 1.14 of the rate of their text drafter, on average 1.01. Without both rules they had 0.94 to 1.17, 1.00.
REPAID, PARTS = 32, 8
# Sampled texts take the likeliest token less often. At temperature 1 a text starts with SAMPLED as the ratio of all
# claims, with SAMPLED_GAIN times the gain in a greedy text, and with SAMPLED_PATIENCE if it has its own record. At
# lower temperatures the square of the temperature interpolates. Chosen on rounds that were played on development
# prompts of five domains (SmolLM2-135M) and three (the built-in target), one eagle3 head each, at temperatures 0.7 and
# 1. At 1 claims came true 0.5 to 1.35 times as often as claimed, mostly 0.65 to 0.95 times, and heads added 0.37 to
# 0.73 times as many tokens as in greedy texts. Of the patiences 12, 24 and 48, 24 lost least in any domain.
SAMPLED, SAMPLED_GAIN, SAMPLED_PATIENCE = 0.7, 0.5, 24
# A head gains less than GAIN if its card (drafter.json) has fewer tokens per pass than GOOD_MAT. Chosen on rounds that
# were played on training prompts of three or four domains, with four pairs of a head and a text drafter. At 3.2 tokens
# per pass a prior of 0.7 of GAIN was the best of six, at 2.2 0.25 to 0.5, at 2.0 0.25 or less.
GOOD_MAT, LEAST_QUALITY = 4.0, 0.1


class Gain:
    """Estimated number of tokens that a head adds in rounds of each kind.

    The prior is scaled by the head's quality in rounds of all kinds, then corrected by its rounds of the kind.
    """

    def __init__(self, prior: tuple[float, ...], memory: float) -> None:
        """`prior`: gain of each kind, with a weight of `GAIN_ROUNDS` rounds. `memory`: decay per round."""
        self.prior, self.memory = prior, memory
        self.added, self.rounds = [0.0] * len(prior), [0.0] * len(prior)

    def __call__(self, kind: int) -> float:
        foreseen = sum(rounds * gain for rounds, gain in zip(self.rounds, self.prior, strict=True))
        quality = (GAIN_ROUNDS + sum(self.added)) / (GAIN_ROUNDS + foreseen)
        return (GAIN_ROUNDS * self.prior[kind] * quality + self.added[kind]) / (GAIN_ROUNDS + self.rounds[kind])

    def learn(self, kind: int, added: float) -> None:
        """Record a round in which the head was asked and has added `added` tokens."""
        self.added = [self.memory * tokens for tokens in self.added]
        self.rounds = [self.memory * rounds for rounds in self.rounds]
        self.added[kind] += added
        self.rounds[kind] += 1


def quality_of(mat: Any) -> float:
    """Prior gain of a head as a share of `GAIN`, by the tokens per pass (`mat`) of each domain in its drafter.json. It
    is 1 if there are none."""
    lengths = [one for one in mat.values() if isinstance(one, int | float)] if isinstance(mat, Mapping) else []
    if not lengths or not all(1 <= one < math.inf for one in lengths):
        return 1.0
    return min(max((statistics.mean(lengths) - 1) / (GOOD_MAT - 1), LEAST_QUALITY), 1.0)


class GateStatistics:
    """Record of a stream of texts: the head's gain, and the rounds since the head was asked, for each kind of round."""

    def __init__(self, quality: float = 1.0, shortest: int = PATIENCE) -> None:
        """`quality`: prior gain of the head as a share of `GAIN`. `shortest`: rounds without a good head before it is
        tried again."""
        self.gain = Gain(tuple(quality * gain for gain in GAIN), STREAM_MEMORY)
        self.shortest = min(round(shortest / quality), LONGEST_PATIENCE)
        self.unasked, self.patience = [0] * len(GAIN), [self.shortest] * len(GAIN)

    def overdue(self, kind: int) -> bool:
        """Whether the head has waited too long and should be tried. Called once per round that has this kind."""
        self.unasked[kind] += 1
        return self.unasked[kind] > self.patience[kind]

    def tried(self, kind: int, pays: bool) -> None:
        """Start the wait before the next try: the shortest if the head is expected to pay off, else twice the last."""
        self.unasked[kind] = 0
        self.patience[kind] = self.shortest if pays else min(2 * self.patience[kind], LONGEST_PATIENCE)

    def state(self) -> dict[str, Any]:
        """Return the values from which `restore` rebuilds the record."""
        return {
            "added": list(self.gain.added),
            "rounds": list(self.gain.rounds),
            "unasked": list(self.unasked),
            "patience": list(self.patience),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the record by the `state` of another one."""
        self.gain.added, self.gain.rounds = list(state["added"]), list(state["rounds"])
        self.unasked, self.patience = list(state["unasked"]), list(state["patience"])


@dataclass
class Pending:
    """Proposed round with an outcome that is not known yet.

    Attributes:
        length: text length before the round.
        passes: rounds that the text has had before.
        kind: kind of the round, by the tokens expected from the text drafter (`Gate.kind`).
        levels: levels that the head has drafted; 0 = it was not asked.
    """

    length: int
    passes: int
    candidates: Candidates
    kind: int
    levels: int


class Gate:
    """Statistics of one text: which claims came true, and the head's gain."""

    def __init__(
        self,
        calibration: tuple[float, ...] = TEXT_CALIBRATION,
        past: GateStatistics | None = None,
        temperature: float = 0.0,
        quality: float = 1.0,
    ) -> None:
        """Start the statistics of a text.

        Args:
            calibration: prior ratios for the text drafter's claims, in greedy texts.
            past: record of earlier texts, of any temperature; a new one by default.
            temperature: temperature at which the text is sampled.
            quality: prior of a new record (`GateStatistics`).
        """
        heat = min(temperature, 1.0) ** 2  # 0 = greedy
        self.past = past or GateStatistics(quality, round(PATIENCE + heat * (SAMPLED_PATIENCE - PATIENCE)))
        text, head = ([r + heat * (SAMPLED - r) for r in ratios] for ratios in (calibration, HEAD_CALIBRATION))
        self.trust = Calibration(text), Calibration(head)
        self.share = 1 + heat * (SAMPLED_GAIN - 1)  # of the gain in a greedy text, which the record of texts holds
        self.gain = Gain(tuple(self.share * self.past.gain(kind) for kind in range(len(GAIN))), GAIN_MEMORY)
        self.levels = LEVELS
        self.pending: Pending | None = None

    @staticmethod
    def kind(promised: float) -> int:
        """Kind of a round, by the number of tokens expected from the text drafter."""
        return sum(promised > edge for edge in EDGES)

    def settle(self, text: Sequence) -> None:
        """Learn from the last proposed round, now that its tokens are committed."""
        done, self.pending = self.pending, None
        if done is None or len(text.ids) == done.length:
            return
        committed = text.ids[done.length :]
        for claim, came_true in done.candidates.outcomes(committed):
            self.trust[claim.drafter].learn(claim.probability, came_true)
        if text.target_passes != done.passes + 1:  # another drafter ran in between, so this draft's share is unknown
            return
        if done.levels:
            accepted = len(committed) - 1
            added = accepted - min(done.candidates.accepted_claims(committed, TEXT), accepted)
            self.gain.learn(done.kind, added)
            self.past.gain.learn(done.kind, added / self.share)
            self.levels = LEVELS_MEMORY * self.levels + (1 - LEVELS_MEMORY) * done.levels
