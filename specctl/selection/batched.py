"""The controller of `choice=batch`: one arm a round for all texts, by a game for each load.

What a draft is worth depends on how many texts share its step, not on which: at a few texts the target has rows to
spare, at many every row is paid for (BanditSpec, section 6.2, where one draft length is chosen for the batch).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from specctl import processes
from specctl.decoding.protocols import Controller, Proposer
from specctl.decoding.records import DraftTree, Label, Verdict
from specctl.decoding.records import Sequence as Text
from specctl.decoding.state import DecodeState
from specctl.selection.controller import RoundLine, Tally
from specctl.selection.game.game import Game
from specctl.selection.game.rewards import Outcome
from specctl.selection.guarded import Guarded, taps_of


def load(texts: int) -> int:
    """The least power of two that so many texts do not exceed."""
    return 1 << (texts - 1).bit_length()


class BatchSelector(Controller):
    """Plays a game for every load, until it is told to forget.

    Args:
        arms: what can be chosen, in the order of the policy's arms.
        new_game: a fresh game, for the load that the label names.
        on_round: told every round when it is over.
    """

    def __init__(
        self,
        arms: Sequence[Guarded],
        new_game: Callable[[Label], Game],
        on_round: Callable[[RoundLine], None] | None = None,
    ):
        self.arms, self.new_game, self.on_round = arms, new_game, on_round
        self.taps = taps_of(arms)
        self.forget()

    def forget(self) -> None:
        """Forget all games and counts."""
        self.tally = Tally()
        self.games: dict[int, Game] = {}  # by load
        self._arm: int | None = None  # of the last round
        self._seed: int | None = None  # of the texts
        for arm in self.arms:
            arm.forget()

    @property
    def failures(self) -> int:
        """Rounds whose drafter raised: they were decoded plainly."""
        return sum(arm.failures for arm in self.arms)

    def begin(self, text: Text) -> None:
        """Begin anew with the first text of another seed: the same prompts come once more."""
        seed = text.request.label.seed if text.request.label else 0
        if seed != self._seed:
            self.games.clear()
            self._seed = seed

    def choose(self, state: DecodeState) -> Proposer:
        self._lengths = {b: len(state.rows[b].ids) for b in state.live}
        self._load = load(len(self._lengths))
        if self._load not in self.games:
            label = Label(f"load {self._load}", seed=self._seed or 0)
            self.games[self._load] = self.new_game(label)
        number = self.games[self._load].choose()
        arm = self.arms[number]
        self.tally.pulls[number] += 1
        if self._arm not in (None, number):
            self.tally.switches += 1
            self.tally.caught_up += sum(arm.drafter.behind(state))
            self.tally.switch_s.append(arm.catch_up(state))
        self._arm = number
        self._began = time.perf_counter()  # that it had been idle is not what a round of it costs
        return arm

    def observe(self, state: DecodeState, draft: DraftTree, verdict: Verdict) -> None:
        seconds = processes.agree(time.perf_counter() - self._began)
        assert self._arm is not None
        arm, texts = self.arms[self._arm], len(self._lengths)
        assert arm.made is not None
        committed = {b: len(state.rows[b].ids) - before for b, before in self._lengths.items()}
        accepted = sum(min(len(verdict.paths[b]), count) for b, count in committed.items())
        tokens = sum(committed.values())
        game = self.games[self._load]
        game.played(
            self._arm,
            Outcome(tokens, accepted, failed=arm.made.failed, seconds=seconds, texts=texts),
        )
        entry = game.log[-1]
        self.tally.decide_us.append(entry.decide_us)
        self.tally.dropped += game.dropped
        game.dropped = 0
        if self.on_round is not None:
            depth = max(verdict.depths[b] for b in committed)
            line = (f"{texts} texts", "", self._seed or 0, len(game.log), arm.name, tokens, accepted, depth)
            self.on_round(RoundLine(*line, entry.weights, entry.reward, 0.0, entry.decide_us, 0))
