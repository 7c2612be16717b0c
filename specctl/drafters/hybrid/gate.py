"""The gate of hybrid drafts: is a head worth its passes, beside what a text drafter proposes for nothing?

All is estimated per text, from what was committed, in tokens and in rounds of one row for each text of the batch
(`Costs`).
"""

from __future__ import annotations

from dataclasses import dataclass

from specctl.decoding.records import Sequence
from specctl.drafters.hybrid.candidates import Candidates, Trust

TEXT, HEAD = 0, 1  # who claims
# Of what a text drafter and a head claim, by eighths of the probability: how many times as often it came true. Greedy
# texts take the likeliest token more often than a head, which has learnt the target's distribution, gives it. Measured
# on development prompts of four domains with eagle3 heads, of a store of responses on those of two; each text corrects
# it.
TEXT_CAME_TRUE = (2.3, 1.9, 1.4, 1.2, 1.1, 1.0, 1.0, 0.95)
STORE_CAME_TRUE = (0.85, 1.0, 1.25, 1.3, 1.4, 1.2, 1.0, 0.97)
HEAD_CAME_TRUE = (1.8, 1.4, 1.7, 1.5, 1.4, 1.2, 1.2, 1.04)
# Texts are told apart by the tokens that the text drafter is expected to get accepted; what a head adds to that depends
# on it. Before anything is known: so many tokens, worth as much as so many rounds.
EDGES = (0.05, 0.25, 1.0, 2.5)
GAIN, GAIN_ROUNDS = (1.5, 1.2, 1.0, 0.85, 0.65), 2.0
GAIN_MEMORY = 0.92  # per round in which the head was asked: what it adds changes along a text
LEVELS = 4.0  # that a head drafts, before it is known
LEVELS_MEMORY = 0.8
TOKENS, COST = 6.0, 4.0  # what decoding yields, before it is known
MEMORY = 0.98  # of it, per round
PATIENCE = 6  # rounds in which a head is not asked before it is tried again; twice as many the next time


# Drafting goes on while it yields so many tokens for the cost of one that is decoded plainly. What `Costs` leaves out,
# the text drafter's own time and that a head reads the prompt, makes the difference.
WORTH = 1.03
KNOWN = 4.0  # rounds of one row that the texts before count as, in what drafting is expected to yield in a text
STREAM_MEMORY = 0.98  # of them, per round that drafts
# Rounds that are decoded plainly before drafting is tried again: twice as many the next time, up to the latter.
REST, LONGEST_REST = 16, 256


class Past:
    """Facts about the texts of one stream, one after the other: what drafting has yielded, and how long it rests."""

    def __init__(self) -> None:
        self.tokens, self.cost = TOKENS, COST
        self.rested, self.rest = 0, REST

    def learn(self, tokens: int, cost: float) -> None:
        """A round that drafted is over."""
        self.tokens = STREAM_MEMORY * self.tokens + tokens
        self.cost = STREAM_MEMORY * self.cost + cost

    def rests(self, pays: bool) -> bool:
        """Whether a round drafts nothing, given whether drafts are expected to pay. Called once a round."""
        if pays:
            self.rested, self.rest = 0, REST
            return False
        self.rested += 1
        if self.rested <= self.rest:
            return True
        self.rested, self.rest = 0, min(2 * self.rest, LONGEST_REST)
        return False

    def state(self) -> dict[str, float]:
        """All that `restore` needs."""
        return dict(vars(self))

    def restore(self, state: dict[str, float]) -> None:
        """Go on from what `state` has told."""
        vars(self).update(state)


@dataclass
class Pending:
    """A round that was proposed, until it is known what the target committed.

    Attributes:
        length: of the text before it.
        passes: rounds that the text has had before it.
        cost: of the round, in rounds of one row for each text.
        kind: by what the text drafter promised (`Gate.kind`).
        levels: that the head has drafted; 0 = it was not asked.
    """

    length: int
    passes: int
    candidates: Candidates
    cost: float
    kind: int
    levels: int


class Gate:
    """Facts about one text: which claims came true, what decoding yields, what the head adds."""

    def __init__(self, came_true: tuple[float, ...] = TEXT_CAME_TRUE, past: Past | None = None) -> None:
        """`came_true`: of what the text drafter claims. `past`: of the texts before; None = there were none."""
        self.past = past or Past()
        # Tokens, and costs, of the rounds that drafted.
        self.yielded, self.paid = KNOWN * self.past.tokens / self.past.cost, KNOWN
        self.trust = Trust(came_true), Trust(HEAD_CAME_TRUE)
        self.tokens, self.cost = TOKENS, COST
        self.added, self.rounds = [0.0] * len(GAIN), [0.0] * len(GAIN)  # tokens, and rounds that the head was asked in
        self.levels = LEVELS
        self.unasked, self.patience = [0] * len(GAIN), [PATIENCE] * len(GAIN)
        self.pending: Pending | None = None

    @property
    def rate(self) -> float:
        """Tokens of this text that decoding yields for the cost of a round of one row for each text: what a cost must
        bring to be worth it."""
        return self.tokens / self.cost

    @property
    def worth(self) -> float:
        """Tokens that drafting yields for the cost of a token that is decoded plainly."""
        return self.yielded / self.paid

    def gain(self, kind: int) -> float:
        """The tokens that the head is expected to add in a round of this kind.

        What is known beforehand is multiplied by how good the head was in rounds of all kinds, then corrected by those
        of this one.
        """
        foreseen = sum(rounds * gain for rounds, gain in zip(self.rounds, GAIN, strict=True))
        quality = (GAIN_ROUNDS + sum(self.added)) / (GAIN_ROUNDS + foreseen)
        return (GAIN_ROUNDS * GAIN[kind] * quality + self.added[kind]) / (GAIN_ROUNDS + self.rounds[kind])

    @staticmethod
    def kind(promised: float) -> int:
        """Rounds told apart by the tokens that the text drafter is expected to get accepted."""
        return sum(promised > edge for edge in EDGES)

    def overdue(self, kind: int) -> bool:
        """Whether the head was not asked for so long that it should be tried. Called once a round."""
        self.unasked[kind] += 1
        return self.unasked[kind] > self.patience[kind]

    def tried(self, kind: int) -> None:
        """Wait twice as long the next time: the head is asked as it was `overdue`."""
        self.patience[kind] *= 2

    def settle(self, text: Sequence) -> None:
        """Learn from the round that was proposed last, now that the text has gone on."""
        done, self.pending = self.pending, None
        if done is None or len(text.ids) == done.length:
            return
        committed = text.ids[done.length :]
        for claim, came_true in done.candidates.outcomes(committed):
            self.trust[claim.drafter].learn(claim.probability, came_true)
        if text.target_passes != done.passes + 1:  # others have drafted since: what it yielded is not known
            return
        self.tokens = MEMORY * self.tokens + len(committed)
        self.cost = MEMORY * self.cost + done.cost
        self.yielded = MEMORY * self.yielded + len(committed)
        self.paid = MEMORY * self.paid + done.cost
        self.past.learn(len(committed), done.cost)
        if done.levels:
            accepted = len(committed) - 1
            added = accepted - min(done.candidates.foreseen(committed, TEXT), accepted)
            self.added = [GAIN_MEMORY * tokens for tokens in self.added]
            self.rounds = [GAIN_MEMORY * rounds for rounds in self.rounds]
            self.added[done.kind] += added
            self.rounds[done.kind] += 1
            self.levels = LEVELS_MEMORY * self.levels + (1 - LEVELS_MEMORY) * done.levels
            self.unasked[done.kind] = 0
