"""Controller of the gateway's engine: one drafter, or a policy that chooses among a pool."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from specctl import progress
from specctl.decoding.controllers import PLAIN
from specctl.decoding.prompt_features import PromptClusters
from specctl.decoding.protocols import Controller, Drafter, Proposer
from specctl.decoding.records import Label, RoundResult, Sequence
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.gateway.faults import where
from specctl.recipe.serve import ServeRecipe
from specctl.selection.arms import Arm, plain_arm
from specctl.selection.assembly import Decoding, make_selector, plain_step, plays_for_seconds
from specctl.selection.controller import RoundLine, Selector
from specctl.selection.policies import registry
from specctl.selection.policies.policy import Arms, Policy

OnDrafterRound = Callable[[str, str, int, int, int], None]
"""Called with the query, the drafter's name, and the numbers of committed and accepted tokens and of draft depths."""


class GuardedController(Controller):
    """A selector that costs its opinion if it raises: the round is decoded without a draft, and it starts anew.

    Attributes:
        failures: number of times that the selector raised.
    """

    def __init__(self, selector: Selector):
        self.selector = selector
        self.on_failure: Callable[[], None] = lambda: None
        self.taps, self.keeps_hidden = selector.taps, selector.keeps_hidden
        self.accepts_late_counts = False  # rounds run on the host: the texts of a batch have different drafters
        self.failures = 0
        self._texts: list[Sequence] = []
        self._played_plain = False

    def report_to(self, note: OnDrafterRound, on_failure: Callable[[], None], on_text: Callable[[float], None]) -> None:
        """Call `note` with every finished round, `on_failure` when the selector raises, and `on_text` with the seconds
        of every text, as a multiple of plain decoding's."""

        def on_round(line: RoundLine) -> None:
            note(line.query, line.arm, line.committed, line.accepted, line.drafted)

        self.selector.on_round, self.selector.on_text, self.on_failure = on_round, on_text, on_failure

    def drafter(self, arm: str) -> Drafter:
        """The drafter of the arm with this name."""
        return next(one.drafter for one in self.selector.arms if one.name == arm)

    def begin(self, text: Sequence) -> None:
        self._texts.append(text)
        self._guarded(partial(self.selector.begin, text))

    def end(self, text: Sequence) -> None:
        if text in self._texts:
            self._texts.remove(text)
            self._guarded(partial(self.selector.end, text))

    def choose(self, state: DecodeState) -> Proposer | None:
        try:
            self._played_plain = False
            return self.selector.choose(state)
        except Exception as error:
            self._start_anew(error)
            self._played_plain = True
            return PLAIN

    def observe(self, state: DecodeState, result: RoundResult) -> None:
        if not self._played_plain:
            self._guarded(partial(self.selector.observe, state, result))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._start_anew(error)

    def _start_anew(self, error: Exception) -> None:
        """Let the selector forget everything, and begin the texts of the batch again."""
        self.failures += 1
        self.on_failure()
        if self.failures == 1:
            progress.warn(f"the policy that chooses drafters failed, and starts anew: {where(error)}")
        self.selector.forget()
        for text in self._texts:
            with suppress(Exception):  # a text that cannot begin is decoded plainly, and tried again in every round
                self.selector.begin(text)


def controller_for(
    target: Target,
    drafters: Mapping[str, Drafter],
    kinds: Mapping[str, PromptClusters],
    recipe: ServeRecipe,
) -> GuardedController:
    """Controller that plays the policy of a recipe for every text, with the drafters as arms.

    `kinds`: kinds of prompts that drafters were trained on. Raises UsageError for a policy that cannot play.
    """
    arms = [Arm(name, drafter, trained_on=kinds.get(name)) for name, drafter in drafters.items()]
    if plays_for_seconds(arms, recipe.choose, recipe.game):
        arms = [plain_arm(), *arms]

    def new_policy(seeded: Arms, text: Label) -> Policy:
        return registry.build(recipe.choose, seeded, recipe.policy)

    selector = make_selector(
        target,
        arms,
        recipe.choose,
        recipe.game,
        new_policy,
        Decoding(lambda: plain_step(target, 1), seed=recipe.seed, on_round=None),
    )
    return GuardedController(selector)
