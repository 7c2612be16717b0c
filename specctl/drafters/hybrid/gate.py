"""Gate of hybrid drafts: decides whether a head is worth its passes in addition to a free text drafter.

All estimates are per text, from its committed tokens. Gains are in tokens, costs in rounds of one row per text of the
batch (`Costs`).
"""

from dataclasses import dataclass

from specctl.decoding.records import Sequence
from specctl.drafters.hybrid.candidates import Calibration, Candidates

TEXT, HEAD = 0, 1  # indices of the drafters in claims
# Ratio of outcomes to claims of a text drafter and a head, by eighths of the claimed probability. Greedy texts take the
# likeliest token more often than a head predicts, as it has learned the target's distribution. Measured on development
# prompts of four domains with eagle3 heads (for a store of responses, on two domains). Each text corrects these priors.
TEXT_CALIBRATION = (2.3, 1.9, 1.4, 1.2, 1.1, 1.0, 1.0, 0.95)
STORE_CALIBRATION = (0.85, 1.0, 1.25, 1.3, 1.4, 1.2, 1.0, 0.97)
HEAD_CALIBRATION = (1.8, 1.4, 1.7, 1.5, 1.4, 1.2, 1.2, 1.04)
# A round's kind is a bracket (EDGES) of the tokens that the text drafter is expected to get accepted: the head's gain
# depends on it. GAIN is the prior gain in tokens of each kind, with a weight of GAIN_ROUNDS rounds.
EDGES = (0.05, 0.25, 1.0, 2.5)
GAIN, GAIN_ROUNDS = (1.5, 1.2, 1.0, 0.85, 0.65), 2.0
GAIN_MEMORY = 0.92  # decay per round in which the head was asked, as its gain changes along a text
LEVELS = 4.0  # prior number of levels that a head drafts
LEVELS_MEMORY = 0.8
TOKENS, COST = 6.0, 4.0  # prior tokens and cost of decoding
MEMORY = 0.98  # decay per round of these tokens and costs
PATIENCE = 6  # rounds without the head before it is tried again; doubled after each try


# Drafting goes on while it yields WORTH times as many tokens per cost as plain decoding. The margin covers costs that
# `Costs` leaves out: the text drafter's own time, and the head's reading of the prompt.
WORTH = 1.03
KNOWN = 4.0  # weight, in rounds of one row, of earlier texts in the expected yield of a new text
STREAM_MEMORY = 0.98  # decay of that record per drafting round
# Rounds of plain decoding before drafting is tried again, doubled after each try up to LONGEST_REST.
REST, LONGEST_REST = 16, 256


class GateStatistics:
    """Record of a stream of texts: the yield of drafting, and the current rest from drafting."""

    def __init__(self) -> None:
        self.tokens, self.cost = TOKENS, COST
        self.rested, self.rest = 0, REST

    def learn(self, tokens: int, cost: float) -> None:
        """Record a finished round that drafted."""
        self.tokens = STREAM_MEMORY * self.tokens + tokens
        self.cost = STREAM_MEMORY * self.cost + cost

    def rests(self, pays: bool) -> bool:
        """Whether a round drafts nothing, given whether drafts are expected to pay off. Called once per round."""
        if pays:
            self.rested, self.rest = 0, REST
            return False
        self.rested += 1
        if self.rested <= self.rest:
            return True
        self.rested, self.rest = 0, min(2 * self.rest, LONGEST_REST)
        return False

    def state(self) -> dict[str, float]:
        """Return the values from which `restore` rebuilds the record."""
        return dict(vars(self))

    def restore(self, state: dict[str, float]) -> None:
        """Replace the record by the `state` of another one."""
        vars(self).update(state)


@dataclass
class Pending:
    """Proposed round with an outcome that is not known yet.

    Attributes:
        length: text length before the round.
        passes: rounds that the text has had before.
        cost: cost of the round, in rounds of one row per text.
        kind: kind of the round, by the tokens expected from the text drafter (`Gate.kind`).
        levels: levels that the head has drafted; 0 = it was not asked.
    """

    length: int
    passes: int
    candidates: Candidates
    cost: float
    kind: int
    levels: int


class Gate:
    """Statistics of one text: which claims came true, the yield of decoding, and the head's gain."""

    def __init__(self, calibration: tuple[float, ...] = TEXT_CALIBRATION, past: GateStatistics | None = None) -> None:
        """Start the statistics of a text.

        Args:
            calibration: prior ratios for the text drafter's claims.
            past: record of earlier texts; a new one by default.
        """
        self.past = past or GateStatistics()
        # Tokens and costs of the rounds that drafted.
        self.yielded, self.paid = KNOWN * self.past.tokens / self.past.cost, KNOWN
        self.trust = Calibration(calibration), Calibration(HEAD_CALIBRATION)
        self.tokens, self.cost = TOKENS, COST
        # Tokens that the head has added, and rounds in which it was asked, per kind of round.
        self.added, self.rounds = [0.0] * len(GAIN), [0.0] * len(GAIN)
        self.levels = LEVELS
        self.unasked, self.patience = [0] * len(GAIN), [PATIENCE] * len(GAIN)
        self.pending: Pending | None = None

    @property
    def rate(self) -> float:
        """Recent tokens per cost of this text, the price of a unit of cost.

        The unit is a round of one row per text.
        """
        return self.tokens / self.cost

    @property
    def worth(self) -> float:
        """Tokens that drafting yields at the cost of one plainly decoded token."""
        return self.yielded / self.paid

    def gain(self, kind: int) -> float:
        """Expected number of tokens that the head adds in a round of this kind.

        The prior is scaled by the head's quality in rounds of all kinds, then corrected by its rounds of this kind.
        """
        foreseen = sum(rounds * gain for rounds, gain in zip(self.rounds, GAIN, strict=True))
        quality = (GAIN_ROUNDS + sum(self.added)) / (GAIN_ROUNDS + foreseen)
        return (GAIN_ROUNDS * GAIN[kind] * quality + self.added[kind]) / (GAIN_ROUNDS + self.rounds[kind])

    @staticmethod
    def kind(promised: float) -> int:
        """Kind of a round, by the number of tokens expected from the text drafter."""
        return sum(promised > edge for edge in EDGES)

    def overdue(self, kind: int) -> bool:
        """Whether the head has not been asked for too long and should be tried. Called once per round."""
        self.unasked[kind] += 1
        return self.unasked[kind] > self.patience[kind]

    def double_patience(self, kind: int) -> None:
        """Double the wait before the next try, after the head was asked because it was `overdue`."""
        self.patience[kind] *= 2

    def settle(self, text: Sequence) -> None:
        """Learn from the last proposed round, now that its tokens are committed."""
        done, self.pending = self.pending, None
        if done is None or len(text.ids) == done.length:
            return
        committed = text.ids[done.length :]
        for claim, came_true in done.candidates.outcomes(committed):
            self.trust[claim.drafter].learn(claim.probability, came_true)
        if text.target_passes != done.passes + 1:  # another drafter ran in between, so this round's yield is unknown
            return
        self.tokens = MEMORY * self.tokens + len(committed)
        self.cost = MEMORY * self.cost + done.cost
        self.yielded = MEMORY * self.yielded + len(committed)
        self.paid = MEMORY * self.paid + done.cost
        self.past.learn(len(committed), done.cost)
        if done.levels:
            accepted = len(committed) - 1
            added = accepted - min(done.candidates.accepted_claims(committed, TEXT), accepted)
            self.added = [GAIN_MEMORY * tokens for tokens in self.added]
            self.rounds = [GAIN_MEMORY * rounds for rounds in self.rounds]
            self.added[done.kind] += added
            self.rounds[done.kind] += 1
            self.levels = LEVELS_MEMORY * self.levels + (1 - LEVELS_MEMORY) * done.levels
            self.unasked[done.kind] = 0
