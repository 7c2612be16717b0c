"""Adaptive draft depth for lookahead reasoning: number of steps drafted per round, zero if they do not pay off."""

from specctl.adaptation.draft_length import DECAY, TRIAL_EVERY, best_length

TRIED = 8  # rounds at the start that alternate between zero and one drafted step


class AutoDepth:
    """Chooses the depth with the most steps per second.

    The acceptance rate a is the running share of drafted steps that were kept, among the steps judged in sequence. The
    relative cost α is the cost of a drafted step (drafting, its row in the target's batch, the judge) divided by a
    round of the target alone. Both are measured, so depths depend on the clock. Texts depend on it only if the judge
    accepts different steps.
    """

    def __init__(self, longest: int):
        self.longest = longest
        self.forget()

    def forget(self) -> None:
        """Reset all measurements."""
        self.rounds = 0
        self.accepted, self.judged = 1.0, 2.0  # prior: one of two steps was kept
        self.alone_s = self.alone = 0.0
        self.drafting_s = self.drafting = self.drafted = 0.0

    @property
    def alpha(self) -> float:
        """Relative cost α of a drafted step; 0 until both kinds of rounds were seen."""
        if not self.alone or not self.drafted:
            return 0.0
        alone = self.alone_s / self.alone
        return max(0.0, self.drafting_s - self.drafting * alone) / (self.drafted * alone)

    def next(self) -> int:
        """Number of steps to draft next: the best depth, or now and then the alternative (0 or 1) to measure it."""
        self.rounds += 1
        if self.rounds <= TRIED:
            return self.rounds % 2
        k = best_length(self.accepted / self.judged, self.alpha, self.longest)
        if self.rounds % TRIAL_EVERY == 0:
            return 0 if k else 1
        return k

    def observe(self, drafted: int, accepted: int, judged: int, seconds: float) -> None:
        """Record a round: steps drafted, kept, judged (up to the first that differed), and its duration in seconds."""
        if not drafted:
            self.alone_s, self.alone = DECAY * self.alone_s + seconds, DECAY * self.alone + 1
            return
        self.drafting_s, self.drafting = DECAY * self.drafting_s + seconds, DECAY * self.drafting + 1
        self.drafted = DECAY * self.drafted + drafted
        self.accepted, self.judged = DECAY * self.accepted + accepted, DECAY * self.judged + judged
