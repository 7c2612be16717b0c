"""Assembly of a selector: arms, a policy by name, the rules of its game, and the scorer of idle drafters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from specctl import processes
from specctl.decoding.plan import plan_rows
from specctl.decoding.prompt_features import PromptClusters
from specctl.decoding.records import Label
from specctl.decoding.target import Target
from specctl.decoding.timing import medians
from specctl.recipe import GameRecipe
from specctl.selection.arms import Arm, longest_draft, prompt_taps
from specctl.selection.batched import BatchSelector
from specctl.selection.controller import PolicyInputs, RoundLine, Selector
from specctl.selection.feedback import Scorer
from specctl.selection.game.clock import ArmClock
from specctl.selection.game.game import Game
from specctl.selection.game.rules import Rules, rules_for
from specctl.selection.policies import registry
from specctl.selection.policies.policy import Arms, Policy, seed_of
from specctl.selection.prompt_memory import PromptMemory

CONTEXT, REPEATS = 192, 20  # context tokens and repetitions of the timed steps

NewPolicy = Callable[[Arms, Label], Policy]
"""Makes a fresh policy for the game that begins with a text; the arms' seed and the text decide its draws."""


@dataclass(frozen=True)
class Decoding:
    """The decoding that a selector takes part in.

    Attributes:
        step: returns `plain_step` for the batches that are decoded; called only if tokens per second are played for.
            All selectors of a run get the same figure, as a common unit.
        seed: of the policies' draws.
        on_round: called with every finished round.
        within_query: whether every game is one text.
        greedy: whether the texts are decoded at temperature 0.
    """

    step: Callable[[], float]
    seed: int
    on_round: Callable[[RoundLine], None] | None
    within_query: bool = True
    greedy: bool = False


def make_selector(
    target: Target, arms: Sequence[Arm], name: str, recipe: GameRecipe, new_policy: NewPolicy, decoding: Decoding
) -> Selector:
    """Build a `Selector` for the policy `name`."""
    learns = registry.learns(name)
    rules = _rules(arms, name, recipe, decoding)
    clock = ArmClock.of(len(arms))
    drafters = list(dict.fromkeys(arm.scored for arm in arms))
    scorer = Scorer(target, drafters, rules.depth) if learns == "losses" else None
    reads = registry.contextual(name)
    inputs = PolicyInputs(
        scorer,
        overlaps=learns == "reward" and rules.reward == "bd",
        score_ends=not decoding.within_query and rules.score_ends,
        memory=PromptMemory(len(arms), trained_on=[_known_kinds(arm) for arm in arms]) if reads else None,
        prompt_taps=prompt_taps(arms, target) if reads else (),
    )
    return Selector(
        arms, partial(_game, rules, arms, new_policy, decoding.seed, clock), clock, inputs, decoding.on_round
    )


def make_batch_selector(
    arms: Sequence[Arm], name: str, recipe: GameRecipe, new_policy: NewPolicy, decoding: Decoding
) -> BatchSelector:
    """Build a `BatchSelector` for the policy `name`, which must pass `check_batch`."""
    rules = _rules(arms, name, recipe, decoding)
    # The time of a round depends on the load, so the games of different loads share no clock.
    return BatchSelector(arms, partial(_game, rules, arms, new_policy, decoding.seed, None), decoding.on_round)


def _known_kinds(arm: Arm) -> PromptClusters:
    """The kinds of prompts that an arm is known for. A hybrid has none: it hardly differs from its text drafter if its
    head is wrong."""
    return arm.trained_on if arm.scored is arm.drafter else PromptClusters.none()


def plays_for_seconds(arms: Sequence[Arm], name: str, recipe: GameRecipe) -> bool:
    """Whether the feedback of the policy `name` counts the seconds of a round. Without seconds, plain decoding is
    always the worst arm."""
    return _played_for(_rules_of(arms, name, recipe), name) in ("throughput", "surplus")


def _played_for(rules: Rules, name: str) -> str | None:
    """The reward, or the loss, that the policy `name` is told, or None if it learns nothing."""
    return {"reward": rules.reward, "losses": rules.loss}.get(registry.learns(name))


def _rules(arms: Sequence[Arm], name: str, recipe: GameRecipe, decoding: Decoding) -> Rules:
    rules = _rules_of(arms, name, recipe, decoding.greedy)
    if _played_for(rules, name) == "throughput":
        rules = replace(rules, step=processes.broadcast_value(decoding.step()))
    return rules


def _rules_of(arms: Sequence[Arm], name: str, recipe: GameRecipe, greedy: bool = False) -> Rules:
    reaches = tuple(map(_longest_draft, arms))
    rules = rules_for(name, recipe, max(1, *reaches), reach=reaches, greedy=greedy)
    if any(arm.scored is not arm.drafter for arm in arms) and "loss" not in recipe.model_fields_set:
        # In a hybrid a bad head seldom drafts: by its seconds it would be the best.
        rules = replace(rules, loss="length" if rules.loss == "throughput" else rules.loss)
    return rules


def _game(
    rules: Rules, arms: Sequence[Arm], new_policy: NewPolicy, seed: int, clock: ArmClock | None, text: Label
) -> Game:
    plain = next((number for number, arm in enumerate(arms) if arm.plain), None)
    seeded = Arms(len(arms), rules.depth, seed_of(seed + text.seed, text.query), plain)
    return Game(new_policy(seeded, text), rules, seeded, clock)


def step_seconds(target: Target, rows: Sequence[int], batch: int = 1) -> list[float]:
    """Median seconds of a target step with each number of `rows`, after each of `batch` texts of `CONTEXT` tokens."""
    context = min(CONTEXT, target.context_length - max(rows))
    cache = target.model.new_cache(batch, context + max(rows))
    text = torch.arange(context) % target.vocab_size
    target.prefill([text.tolist()] * batch, cache)

    def step(count: int) -> object:
        plan = plan_rows([context] * batch, count, device=target.device, dtype=target.dtype)
        return target.step(torch.zeros(batch, count, dtype=torch.long, device=target.device), cache, plan)

    timed = medians({str(count): partial(step, count) for count in rows}, REPEATS, target.device)
    return [timed[str(count)] for count in rows]


def plain_step(target: Target, batch: int) -> float:
    """Seconds of a plain decoding step, divided by the texts of the batch: the unit of throughput."""
    return step_seconds(target, [1], batch)[0] / batch


def _longest_draft(arm: Arm) -> int:
    """The longest draft of an arm, in tokens."""
    deep = longest_draft(arm.drafter)
    return deep if arm.nodes is None else min(deep, arm.nodes)
