"""Schedule for scoring idle drafters: often while little is known, then ever more seldom."""

from specctl.selection.game.rules import Rules


class ScoringSchedule:
    """Counts the rounds of a game, and says after which of them to score: all of the warm-up, then ever fewer.

    With `batch_growth` 1 the intervals stay equal, as in HedgeSpec (B.5).

    Attributes:
        rounds: number of rounds played.
    """

    def __init__(self, rules: Rules):
        self.rules = rules
        self.rounds = 0
        self.begin(rules.warmup_rounds)

    def begin(self, warmup: int) -> None:
        """Begin anew: score all of the next `warmup` rounds, then after intervals that grow from the shortest."""
        self._warm_until = self.rounds + warmup
        self._interval = float(self.rules.batch_rounds)
        self._next = self._warm_until + self.rules.batch_rounds

    def hurry(self) -> None:
        """Make scoring due after this round; the intervals do not change."""
        self._next = min(self._next, self.rounds)

    @property
    def warm(self) -> bool:
        """Whether the last round was one of the warm-up."""
        return self.rounds <= self._warm_until

    def due(self) -> bool:
        """Whether scoring is due after the last round; to be called once per round."""
        if self.warm:
            return True
        if self.rounds < self._next:
            return False
        self._interval *= self.rules.batch_growth
        self._next = self.rounds + round(self._interval)
        return True
