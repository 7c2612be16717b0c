"""Controller of `choice=batch`: one arm per round for all texts, chosen by a separate game for each load.

The worth of a draft depends on how many texts share its step, not on which ones. With a few texts the target has rows
to spare; with many texts every row costs time (BanditSpec, section 6.2, which chooses one draft length for the batch).
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specctl import processes
from specctl.decoding.protocols import Controller, Proposer
from specctl.decoding.records import Counts, Label, RoundResult
from specctl.decoding.records import Sequence as Text
from specctl.decoding.state import DecodeState
from specctl.selection.arms import Arm, taps_of
from specctl.selection.controller import RoundLine, Tally
from specctl.selection.game.game import Game
from specctl.selection.game.rewards import Outcome


def load_bucket(texts: int) -> int:
    """The least power of two that is not below the number of texts."""
    return 1 << (texts - 1).bit_length()


class Chosen(NamedTuple):
    """An unfinished round: its arm, and the game that has chosen it."""

    arm: int
    game: Game


class BatchSelector(Controller):
    """Plays one game per load until it is told to forget. Rounds run on the device if the arm can.

    On the device, the load counts the texts that had not ended one round ago, as far as the host knew.

    Args:
        arms: the choices, in the order of the policy's arms.
        new_game: makes a fresh game for the load that the label names.
        on_round: called with every finished round.
    """

    accepts_late_counts = True

    def __init__(
        self,
        arms: Sequence[Arm],
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
        self._arm: int | None = None  # the last arm that read the texts
        self._chosen: deque[Chosen] = deque()  # unfinished rounds, oldest first
        self._seed: int | None = None  # seed of the texts
        self._texts: set[Text] = set()  # texts that are being decoded
        for arm in self.arms:
            arm.forget()

    @property
    def failures(self) -> int:
        """Rounds that were decoded plainly because their drafter raised."""
        return sum(arm.failures for arm in self.arms)

    def begin(self, text: Text) -> None:
        """Start over with the first text of another seed, when the same prompts come again."""
        seed = text.request.label.seed if text.request.label else 0
        if seed != self._seed:
            self.games.clear()
            self._seed = seed
        self._texts.add(text)

    def end(self, text: Text) -> None:
        self._texts.remove(text)
        while self._chosen and not self._texts:
            self._withdraw()

    def choose(self, state: DecodeState) -> Proposer | None:
        if not state.at_rest and any(chosen.game.awaits_reward for chosen in self._chosen):
            return None
        if len(self._chosen) == state.pending:  # otherwise it has chosen before a wait
            game = self._game(load_bucket(len(state.live)))
            self._chosen.append(Chosen(game.choose(), game))
        number = self._chosen[-1].arm
        if self._arm not in (None, number):
            if not state.at_rest:  # the new arm must read all texts
                return None
            self.tally.switches += 1
            self.tally.caught_up += sum(self.arms[number].drafter.lag(state))
            self.tally.switch_s.add(self.arms[number].catch_up(state))
        self._arm = number
        return self.arms[number]

    def _game(self, load: int) -> Game:
        if load not in self.games:
            self.games[load] = self.new_game(Label(f"load {load}", seed=self._seed or 0))
        return self.games[load]

    def observe(self, state: DecodeState, result: RoundResult) -> None:
        if not result.counts:  # no draft could be made, or all texts had ended before the round
            self._withdraw()
        elif result.verdict is None:
            self._finish_round([*result.counts.values()], result.seconds)
        else:
            made = self.arms[self._chosen[0].arm].made
            assert made is not None
            seconds = processes.broadcast_value(result.seconds)
            self._finish_round([*result.counts.values()], seconds, made.failed)

    def _withdraw(self) -> None:
        """Undo the last choice: it was not played."""
        self._chosen.pop().game.withdraw()

    def _finish_round(self, counts: Sequence[Counts], seconds: float, failed: bool = False) -> None:
        """Finish the oldest round; `counts` has one entry per text."""
        number, game = self._chosen.popleft()
        self.tally.pulls[number] += 1
        texts, tokens = len(counts), sum(one.committed for one in counts)
        accepted, depth = sum(one.accepted for one in counts), max(one.depth for one in counts)
        entry = game.round_finished(number, Outcome(tokens, accepted, failed=failed, seconds=seconds, texts=texts))
        self.tally.decide_us.add(entry.decide_us)
        self.tally.dropped += game.dropped
        game.dropped = 0
        if self.on_round is not None:
            arm = self.arms[number].name
            line = (f"{texts} texts", "", self._seed or 0, game.rounds, arm, tokens, accepted, depth)
            self.on_round(RoundLine(*line, entry.weights, entry.reward, 0.0, entry.decide_us, 0))
