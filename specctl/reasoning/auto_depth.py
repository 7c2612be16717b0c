"""How many steps a draft LM thinks ahead, where that follows what they are worth: none while they are rejected."""

from __future__ import annotations

from specctl.adaptation.draft_length import MEMORY, TRY_EVERY, best_length

TRIED = 8  # rounds at the beginning that take turns without and with one drafted step


class AutoDepth:
    """The depth of most steps per second.

    a is the running share of drafted steps that were kept among those that were judged one after the other; α what a
    drafted step costs (drafting, its row in the target's batch, the judge) ÷ a round of the target alone. Both are
    measured, so depths depend on the clock; texts do so only as far as the judge lets other steps pass.
    """

    def __init__(self, longest: int):
        self.longest = longest
        self.forget()

    def forget(self) -> None:
        """As new: nothing is known."""
        self.rounds = 0
        self.accepted, self.judged = 1.0, 2.0  # as if one of two had been kept
        self.alone_s = self.alone = 0.0
        self.drafting_s = self.drafting = self.drafted = 0.0

    @property
    def alpha(self) -> float:
        """α; 0 until both kinds of round were seen."""
        if not self.alone or not self.drafted:
            return 0.0
        alone = self.alone_s / self.alone
        return max(0.0, self.drafting_s - self.drafting * alone) / (self.drafted * alone)

    def next(self) -> int:
        """Steps to draft in the next round: what pays; now and then the other, to see whether it still does not."""
        self.rounds += 1
        if self.rounds <= TRIED:
            return self.rounds % 2
        k = best_length(self.accepted / self.judged, self.alpha, self.longest)
        if self.rounds % TRY_EVERY == 0:
            return 0 if k else 1
        return k

    def observe(self, drafted: int, accepted: int, judged: int, seconds: float) -> None:
        """A round is over: steps drafted, kept, judged up to the first that differed; and what all of it took."""
        if not drafted:
            self.alone_s, self.alone = MEMORY * self.alone_s + seconds, MEMORY * self.alone + 1
            return
        self.drafting_s, self.drafting = MEMORY * self.drafting_s + seconds, MEMORY * self.drafting + 1
        self.drafted = MEMORY * self.drafted + drafted
        self.accepted, self.judged = MEMORY * self.accepted + accepted, MEMORY * self.judged + judged
