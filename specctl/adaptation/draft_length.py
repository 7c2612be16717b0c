"""Adaptive draft length: longer drafts while they are accepted, none while they do not pay."""

from collections import Counter

from specctl.decoding.protocols import Controller, Drafter, Proposer
from specctl.decoding.records import DraftTree, RoundResult, empty_draft
from specctl.decoding.state import DecodeState
from specctl.decoding.timing import synchronise, work_clock
from specctl.drafters.tree import TreeDrafter
from specctl.recipe import DraftingRecipe

DEFAULT_MAX_LENGTH = 15  # K of a drafter without a shape
DECAY = 0.98  # decay of rates and times, per round
TRIAL_EVERY = 16  # rounds after which an unused drafter gets a trial


def tokens_per_cost(a: float, k: int, alpha: float) -> float:
    """(1 − a^{k+1}) / ((1 − a)(α k + 1)): expected tokens of a round, bonus token included, per cost of a target step.

    OnlineSpec (Qian et al. 2026), Corollary 4, without its Taylor expansion, which drops the bonus token. (Leviathan et
    al. 2023, theorem 3.8, is the same quotient.)

    Args:
        a: probability that a draft token is accepted if all before it were.
        alpha: α, cost of drafting one token ÷ cost of a target step.
    """
    expected = k + 1.0 if a == 1 else (1 - a ** (k + 1)) / (1 - a)
    return expected / (alpha * k + 1)


def best_length(a: float, alpha: float, longest: int) -> int:
    """The k in 0 … `longest` with the most tokens per cost; the shortest one in a tie."""
    return max(range(longest + 1), key=lambda k: (tokens_per_cost(a, k, alpha), -k))


class AutoLength(Controller, Proposer):
    """Controller that drafts with one drafter, at the depth that pays best at the moment.

    a is the running share of accepted draft tokens among the verified ones (accepted and rejected). α is the running
    quotient of the seconds per draft token and the seconds per target step. On a CPU both are the thread's CPU time:
    seconds in which other processes run would look like costs of drafting.
    """

    def __init__(self, drafter: Drafter, alpha: float | None = None):
        """`alpha`: a fixed cost ratio; if None it is measured, which makes a run depend on the clock."""
        self._declared = alpha
        self.rounds: Counter[int] = Counter()  # number of rounds, by k
        self.forget()
        self.use(drafter)

    def forget(self) -> None:
        self.accepted = self.verified = 0.0
        self.draft_s = self.draft_tokens = self.step_s = self.steps = 0.0
        self.rounds.clear()
        self.unused = 0

    def use(self, drafter: Drafter) -> None:
        """Draft with this drafter from now on; it has new weights, not another family."""
        self.drafter, self.taps, self._shaped = drafter, drafter.taps, {}
        self.longest = drafter.shape.depth if hasattr(drafter, "shape") else DEFAULT_MAX_LENGTH

    _shaped: dict[int, Drafter]

    @property
    def alpha(self) -> float:
        if self._declared is not None:
            return self._declared
        if not self.draft_tokens or not self.steps:
            return 0.0
        return (self.draft_s / self.draft_tokens) / (self.step_s / self.steps)

    def length(self) -> int:
        """k of the next round: the longest until a draft was verified. While drafting does not pay, 0, with a trial of
        one token in every `TRIAL_EVERY`-th round."""
        if not self.verified:
            return self.longest
        k = best_length(self.accepted / self.verified, self.alpha, self.longest)
        if k:
            self.unused = 0
            return k
        self.unused += 1
        return 1 if self.unused % TRIAL_EVERY == 0 else 0

    def choose(self, state: DecodeState) -> Proposer:
        self._k = self.length()
        self.rounds[self._k] += 1
        return self

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        clock = work_clock(state.device)
        began = clock()
        if self._k == 0:
            draft = empty_draft(state.batch, state.device)
        elif isinstance(self.drafter, TreeDrafter):
            if self._k not in self._shaped:
                self._shaped[self._k] = self.drafter.shaped(DraftingRecipe(depth=self._k))
            draft = self._shaped[self._k].propose(state, budget)
        else:
            draft = self.drafter.propose(state, min(budget, self._k))
        synchronise(state.device)
        self._seconds = clock() - began
        self._before = [(row.accepted, row.rejections) for row in state.rows]
        return draft

    def observe(self, state: DecodeState, result: RoundResult) -> None:
        if result.verdict is None:  # no draft could be made
            return
        self.step_s = DECAY * self.step_s + result.seconds - self._seconds
        self.steps = DECAY * self.steps + 1
        rows = zip(state.rows, self._before, strict=True)
        changes = [(row.accepted - accepted, row.rejections - rejections) for row, (accepted, rejections) in rows]
        accepted, rejected = (sum(column) for column in zip(*changes, strict=True))
        if self._k:
            self.draft_s = DECAY * self.draft_s + self._seconds
            self.draft_tokens = DECAY * self.draft_tokens + max(result.verdict.depths)  # a drafter may stop early
            self.accepted = DECAY * self.accepted + accepted
            self.verified = DECAY * self.verified + accepted + rejected

    def invalidate(self, state: DecodeState) -> None:
        """Let the drafter, at each of its depths, forget its memory of the texts."""
        for drafter in {self.drafter, *self._shaped.values()}:
            drafter.invalidate(state)

    def pop_mean_length(self) -> float | None:
        """Mean k of the rounds since the last call, or None without rounds."""
        rounds = sum(self.rounds.values())
        mean = sum(k * count for k, count in self.rounds.items()) / rounds if rounds else None
        self.rounds.clear()
        return mean

    def state(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in KEPT}

    def restore(self, state: dict[str, float]) -> None:
        for name in KEPT:
            setattr(self, name, state[name])


KEPT = ("accepted", "verified", "draft_s", "draft_tokens", "step_s", "steps", "unused")
