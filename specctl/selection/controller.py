"""Controller of `specctl select`: the game of every text chooses its arm, and learns from the target's verification."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from specctl import processes
from specctl.decoding.controllers import PerSequence
from specctl.decoding.prompt_features import features_of
from specctl.decoding.protocols import Controller, Drafter, Proposer
from specctl.decoding.records import Counts, Label, RoundResult
from specctl.decoding.records import Sequence as Text
from specctl.decoding.state import DecodeState
from specctl.decoding.timing import work_clock
from specctl.drafters.feature.layer import select_taps
from specctl.selection.arms import Arm, TimedDraft, taps_of
from specctl.selection.feedback import Scorer, overlap
from specctl.selection.game.clock import ArmClock
from specctl.selection.game.game import Game, Round
from specctl.selection.game.rewards import Outcome, surplus_lost
from specctl.selection.policies.contextual import Belief, ContextualUcb
from specctl.selection.policies.policy import AnyArray, Array
from specctl.selection.prompt_memory import PromptMemory

GAMES = 256  # games that wait for another text of their key; the oldest is forgotten
LAST = 10_000  # durations that a median is taken over


@dataclass
class Durations:
    """Durations of one kind of work: their number, their sum, and the last ones for a median. A stream has no end."""

    count: int = 0
    total: float = 0.0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))

    def add(self, duration: float) -> None:
        self.count += 1
        self.total += duration
        self.last.append(duration)

    @property
    def mean(self) -> float | None:
        """The mean of all durations, or None without any."""
        return self.total / self.count if self.count else None

    @property
    def median(self) -> float | None:
        """The median of the last durations, or None without any."""
        return median(self.last) if self.last else None


@dataclass
class Tally:
    """Counts and costs of choosing, over all texts of a controller."""

    pulls: Counter[int] = field(default_factory=Counter)
    decide_us: Durations = field(default_factory=Durations)  # per round, learning included
    score_s: Durations = field(default_factory=Durations)  # per scoring
    scored: int = 0  # tokens
    switches: int = 0  # rounds with another arm than the text's round before
    caught_up: int = 0  # missed tokens that the new arms had to read
    switch_s: Durations = field(default_factory=Durations)  # of this reading, per arm and round
    dropped: int = 0  # rewards and losses that were not finite, in finished games


@dataclass(slots=True)
class RoundLine:
    """A line of `rounds.jsonl`. `learnt` is the reward of the arm, or the last losses of all arms, or None."""

    query: str
    domain: str
    seed: int
    round: int
    arm: str
    committed: int
    accepted: int
    drafted: int
    weights: list[float]
    learnt: float | list[float] | None
    regret: float
    decide_us: float
    scored: int


@dataclass
class ActiveText:
    """A text that is being decoded."""

    label: Label
    game: Game
    dropped: int  # the game's count when the text began
    rounds: int = 0
    arm: int | None = None  # the last arm that read the text
    chosen: deque[int] = field(default_factory=deque)  # arms of unfinished rounds, oldest first
    to_score: bool = False  # whether its tokens are to be scored
    open_round: tuple[Round, Counts] | None = None  # the last round, if scores may still come for it
    prompt: Array | None = None  # features of the prompt, and the belief about it, if the policy reads prompts
    belief: Belief | None = None
    seconds: float = 0.0  # all seconds so far, with choosing, catching up and scoring
    tokens: int = 0  # committed in rounds

    @property
    def switches(self) -> bool:
        """Whether the last chosen arm is not the one that read the text last."""
        return self.arm is not None and self.arm != self.chosen[-1]

    @property
    def reader(self) -> ContextualUcb | None:
        """The game's policy, if it reads prompts."""
        return self.game.policy if isinstance(self.game.policy, ContextualUcb) else None


class PolicyInputs(NamedTuple):
    """Observations of a selector's policies, besides the counts and seconds of rounds.

    Attributes:
        scorer: scores the arms' distinct `scored` drafters, in their order (None if no scores are needed).
        overlaps: whether rewards are block divergences, made from the drafts' overlaps with the target.
        score_ends: whether texts of one key follow each other, so that the last tokens of a text are scored, too.
        memory: memory of earlier prompts, for a policy that reads prompts; otherwise None.
        prompt_taps: hidden states of the target that describe a prompt to this memory.
    """

    scorer: Scorer | None
    overlaps: bool = False
    score_ends: bool = False
    memory: PromptMemory | None = None
    prompt_taps: tuple[int, ...] = ()


class Selector(Controller):
    """Plays one game for all texts with the same label key, which are decoded one after the other, and one game for
    each text without a key. Games share no knowledge.

    Unless rewards are block divergences, rounds can run on the device (`accepts_late_counts`), and the controller hears
    of each round one round late. There are four exceptions, in which it waits for all pending rounds: a round that an
    arm plays for the first time in a bandit's game, a round of arms that take turns, a round after which idle arms are
    scored, and a round in which a text switches to another arm.

    Args:
        arms: the choices, in the order of the policy's arms.
        new_game: makes a fresh game for its first text.
        clock: seconds per round of each arm, which the games share.
        inputs: what the policies observe besides counts and seconds.
        on_round: called with every finished round.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        new_game: Callable[[Label], Game],
        clock: ArmClock,
        inputs: PolicyInputs,
        on_round: Callable[[RoundLine], None] | None = None,
    ):
        self.arms, self.new_game, self.clock, self.on_round = arms, new_game, clock, on_round
        self.on_text: Callable[[float], None] | None = None  # called with the `relative_seconds` of a text that ends
        self.scorer, self.overlaps, self.score_ends, self.memory = inputs[:4]
        self.accepts_late_counts, self.keeps_hidden = not inputs.overlaps, inputs.scorer is not None
        self._number_drafters()
        self.prompt_taps = inputs.prompt_taps
        self.taps = tuple(sorted({*taps_of(arms), *inputs.prompt_taps}))
        self.catch_up_clock = ArmClock.of(len(arms))  # seconds in which an arm reads the tokens it has missed
        self.forget()

    def _number_drafters(self) -> list[Drafter]:
        """Number the drafters that are scored, and return them."""
        drafters = list(dict.fromkeys(arm.scored for arm in self.arms))
        self.drafter_of = [drafters.index(arm.scored) for arm in self.arms]
        return drafters

    def exchange(self, drafters: Mapping[str, Drafter]) -> None:
        """Draft with other drafters that read the same hidden states, by name of the arm. The policy keeps
        its estimates. To be called while no round is pending."""
        for arm in self.arms:
            if (new := drafters.get(arm.name)) is not None:
                arm.exchange(new)
        numbered = self._number_drafters()
        if self.scorer is not None:
            self.scorer.use(numbered)

    def forget(self) -> None:
        """Forget all games, counts and measurements."""
        self.tally = Tally()
        self.clock.forget()
        self.catch_up_clock.forget()
        self.games: OrderedDict[str, Game] = OrderedDict()  # by key; the game of the last text comes last
        self.plays: dict[Text, ActiveText] = {}
        self._seed: int | None = None  # seed of the texts in memory
        if self.memory is not None:
            self.memory.forget()
        for arm in self.arms:
            arm.forget()
        if self.scorer is not None:
            self.scorer.forget()

    @property
    def failures(self) -> int:
        """Number of times that a drafter raised: rounds decoded plainly, and scorings in which it counted as silent."""
        return sum(arm.failures for arm in self.arms) + (sum(self.scorer.failures) if self.scorer is not None else 0)

    def begin(self, text: Text) -> None:
        """Find the game of a text. Raises ValueError if another text of its key is being decoded."""
        label = text.request.label or Label(str(text.index))
        if label.key is None:
            game = self.new_game(label)
        else:
            if any(play.label.key == label.key for play in self.plays.values()):
                raise ValueError("sequences with the same key must be decoded one after the other")
            game = self.games.pop(label.key) if label.key in self.games else self.new_game(label)
            self.games[label.key] = game
            while len(self.games) > max(GAMES, len(self.plays) + 1):
                self.games.popitem(last=False)
        self.plays[text] = ActiveText(label, game, game.dropped)

    def end(self, text: Text) -> None:
        play = self.plays.pop(text)
        self._withdraw(play)
        self.tally.dropped += play.game.dropped - play.dropped
        if self.on_text is not None and (relative := self.relative_seconds(play)) is not None:
            self.on_text(relative)
        if self.memory is not None and play.reader is not None and play.prompt is not None:
            self.memory.learn(play.prompt, play.belief, play.reader.shown(), play.game.time_cost)

    def relative_seconds(self, play: ActiveText) -> float | None:
        """Return the seconds of a text divided by the seconds of plain decoding, which takes one round per token. None
        if no plain round was timed."""
        plain = next((n for n, arm in enumerate(self.arms) if arm.plain), None)
        if plain is None or not play.tokens or not self.clock.mean[plain] > 0:
            return None
        return play.seconds / (play.tokens * self.clock.mean[plain])

    def choose(self, state: DecodeState) -> Proposer | None:
        plays = [self.plays[state.rows[b]] for b in state.live]
        if not state.at_rest and any(play.to_score or play.game.awaits_reward for play in plays):
            return None
        for b, play in zip(state.live, plays, strict=True):
            if play.prompt is None and self.memory is not None and play.reader is not None:
                self._begin_prompt(state, b, play, play.reader, self.memory)
            if len(play.chosen) == state.pending:  # otherwise it has chosen before a wait
                play.chosen.append(play.game.choose())
        if any(play.switches for play in plays):
            if not state.at_rest:  # the new arm must read the whole text
                return None
            self._switch(state)
        for play in plays:
            play.arm = play.chosen[-1]
        first = plays[0].chosen[-1]  # also drafts for rows that have ended; these drafts are never used
        chosen = {b: play.chosen[-1] for b, play in zip(state.live, plays, strict=True)}
        arms = [self.arms[chosen.get(b, first)] for b in range(state.batch)]
        return arms[0] if len(set(arms)) == 1 else PerSequence(arms)

    def _switch(self, state: DecodeState) -> None:
        """Let the new arms of all texts that switch read the missed tokens. This does not count as time of a round."""
        new: set[int] = set()
        for b in state.live:
            play = self.plays[state.rows[b]]
            if play.switches:
                arm = play.chosen[-1]
                self.tally.switches += 1
                self.tally.caught_up += self.arms[arm].drafter.lag(state)[b]
                new.add(arm)
        for arm in sorted(new):
            seconds = self.arms[arm].catch_up(state)
            self.tally.switch_s.add(seconds)
            self.catch_up_clock.record(arm, seconds)
            for b in state.live:  # all of the batch wait
                self.plays[state.rows[b]].seconds += seconds / len(state.live)

    @torch.inference_mode()
    def observe(self, state: DecodeState, result: RoundResult) -> None:
        for b in state.live:
            if b not in result.counts:  # no draft could be made
                self._take_back(self.plays[state.rows[b]])
        if result.verdict is not None and self.scorer is not None:
            self.scorer.keep(state, result.verdict, result.counts)
        seconds = self._seconds(state, result)
        for b, counts in result.counts.items():
            play = self.plays[state.rows[b]]
            if play.open_round is not None:
                self._finish_round(play, *play.open_round, over=False)
            failed, overlaps = False, None
            if result.verdict is not None:
                made = self._made(play.chosen[0])
                failed = made.failed
                overlaps = overlap(made.draft, b, result.verdict.logits[b]) if self.overlaps else None
            play.open_round = self._record_round(play, counts, seconds, failed, overlaps), counts
        if self.scorer is None or state.at_rest:
            self._finish_open_rounds(state)

    def _finish_open_rounds(self, state: DecodeState) -> None:
        """Score the tokens that are due, and finish the last round of every text."""
        plays = {b: self.plays[row] for b, row in enumerate(state.rows) if row in self.plays}
        slots = [b for b, play in plays.items() if play.open_round is not None]
        scored = self._score(state, slots) if state.at_rest else {}
        for b in slots:
            if (round := plays[b].open_round) is not None:
                self._finish_round(plays[b], *round, state.rows[b].stop is not None, scored.get(b, 0))

    def _record_round(
        self, play: ActiveText, counts: Counts, seconds: dict[int, float], failed: bool, overlaps: AnyArray | None
    ) -> Round:
        """Report the text's oldest unfinished round to the game; `seconds` by arm."""
        arm = play.chosen.popleft()
        self.tally.pulls[arm] += 1
        outcome = Outcome(counts.committed, counts.accepted, counts.untrimmed, failed, overlaps, seconds[arm])
        entry = play.game.round_finished(arm, outcome)
        play.seconds += seconds[arm]
        play.tokens += counts.committed
        play.to_score |= play.game.due() > 0  # asked also for the last round of a text: the schedule counts all
        return entry

    @staticmethod
    def _take_back(play: ActiveText) -> None:
        """Undo a text's last choice."""
        play.chosen.pop()
        play.game.withdraw()

    def _withdraw(self, play: ActiveText) -> None:
        """Undo all unfinished rounds of a text that is over."""
        while play.chosen:
            self._take_back(play)

    def _begin_prompt(
        self, state: DecodeState, b: int, play: ActiveText, policy: ContextualUcb, memory: PromptMemory
    ) -> None:
        """Begin a text: compute its prompt's features, and tell the policy the belief and the costs of switching."""
        clock = work_clock(state.device)
        began = clock()
        if play.label.seed != self._seed:  # the same prompts come again
            memory.forget()
            self._seed = play.label.seed
        assert state.features is not None
        states = state.features[b, : state.rows[b].prompt_length]
        play.prompt = features_of(select_taps(states, state.taps, self.prompt_taps))
        play.belief = memory.belief(play.prompt)
        policy.begin_text(play.belief, memory.should_try_drafts)
        if play.game.rules.reward == "surplus":
            policy.switch_cost = surplus_lost(self.catch_up_clock.mean, self.clock.rate, play.game.rules.depth)
        play.seconds += clock() - began

    def _made(self, arm: int) -> TimedDraft:
        made = self.arms[arm].made
        assert made is not None
        return made

    def _seconds(self, state: DecodeState, result: RoundResult) -> dict[int, float]:
        """Seconds of a text's round, by arm: the seconds of its draft, shared by the texts it was made for, and a
        text's share of the rest, which is the verification."""
        texts = Counter(self.plays[state.rows[b]].chosen[0] for b in result.counts)
        total = result.seconds if result.verdict is None else processes.broadcast_value(result.seconds)
        if len(texts) < 2:
            return {arm: total / count for arm, count in texts.items()}
        drafts = {arm: self._made(arm).seconds for arm in texts}
        rest = (total - sum(drafts.values())) / len(result.counts)
        return {arm: drafts[arm] / count + rest for arm, count in texts.items()}

    def _score(self, state: DecodeState, slots: Sequence[int]) -> dict[int, int]:
        """Score the tokens that the games in `slots` ask for, and the rest of finished texts. Returns the number of
        scored tokens by slot."""
        wanted = [0] * state.batch
        for b in slots:
            row, play = state.rows[b], self.plays[state.rows[b]]
            wanted[b] = play.game.unscored if play.to_score or (self.score_ends and row.stop is not None) else 0
            play.to_score = False
        if self.scorer is None or not any(wanted):
            return {}
        clock = work_clock(state.device)
        began = clock()
        scores = self.scorer.score(state, wanted)
        seconds = clock() - began
        self.tally.score_s.add(seconds)
        for b in slots:  # all of the batch wait
            self.plays[state.rows[b]].seconds += seconds / len(slots)
        self.tally.scored += sum(wanted)
        # A draft is no deeper than its number of nodes, which is limited by the batch's budget and by the arm.
        played = self.plays[state.rows[slots[0]]].arm
        assert played is not None
        budget = self.arms[played].budget
        nodes = np.array([budget if arm.nodes is None else min(budget, arm.nodes) for arm in self.arms])
        within = np.arange(self.scorer.depth) < nodes[:, None, None]
        for b, feedback in enumerate(scores):
            if wanted[b]:
                gamma, hit = (np.where(within, part[self.drafter_of], 0.0) for part in (feedback.gamma, feedback.hit))
                self.plays[state.rows[b]].game.scored(gamma, hit)
        return {b: wanted[b] for b in slots}

    def _finish_round(self, play: ActiveText, entry: Round, counts: Counts, over: bool, scored: int = 0) -> None:
        """Finish a round, and perhaps its text."""
        game, label, play.open_round = play.game, play.label, None
        if over:
            self._withdraw(play)
            game.ended()
        self.tally.decide_us.add(entry.decide_us)
        play.seconds += entry.decide_us / 1e6
        play.rounds += 1
        if self.on_round is None:
            return
        learnt = entry.losses[-1][-1].tolist() if entry.losses else entry.reward
        self.on_round(
            RoundLine(
                label.query,
                label.domain,
                label.seed,
                play.rounds,
                self.arms[entry.arm].name,
                entry.committed,
                counts.accepted,
                counts.depth,
                entry.weights,
                learnt,
                entry.regret,
                entry.decide_us,
                scored,
            )
        )
