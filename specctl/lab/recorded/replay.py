"""Replaying recorded tables: the exact rounds that a policy would have played, without a model."""

from dataclasses import dataclass, replace

import numpy as np

from specctl.lab.recorded.hindsight import Hindsight, Ints, PlayedGame
from specctl.lab.recorded.trace import Table, Trace
from specctl.progress import interrupts
from specctl.recipe.select import GameRecipe, PolicyRecipe
from specctl.selection.arms import PLAIN
from specctl.selection.game.clock import ArmClock
from specctl.selection.game.game import Game
from specctl.selection.game.rewards import Outcome, surplus_lost
from specctl.selection.game.rules import Rules, rules_for
from specctl.selection.policies.contextual import ContextualUcb
from specctl.selection.policies.policy import Arms, Array, seed_of
from specctl.selection.policies.registry import build, contextual
from specctl.selection.prompt_memory import PromptMemory

CATCH_UP_TOKENS = 16  # missed tokens that an idle arm has to read, about


@dataclass(frozen=True)
class Replay:
    """One policy, or yardstick, on a whole table.

    Attributes:
        name: of the policy; `oracle` and `draft-all` are yardsticks.
        rounds, seconds: [Q] of every trace; seconds by the table's cost model.
        scoring_s: [Q] seconds in which idle drafters were scored, a part of `seconds`; 0 if the table does not say.
        played: the games; empty for `draft-all`, which chooses nothing.
    """

    name: str
    rounds: Ints
    seconds: Array
    scoring_s: Array
    played: list[PlayedGame]


def replay(name: str, hindsight: Hindsight, policy: PolicyRecipe, game: GameRecipe, seed: int = 0) -> Replay:
    """Play a policy on every trace, with a fresh one at every reset. Raises UsageError if no policy has that name,
    Interrupted if a signal has arrived."""
    table = hindsight.table
    rules = rules_on(table, name, game)
    plain = table.arms.index(PLAIN) if PLAIN in table.arms else None
    clock, played = ArmClock.of(len(table.arms)), []
    memory = PromptMemory(len(table.arms), trained_on=table.trained_on) if contextual(name) else None
    for queries in hindsight.games:
        arms = Arms(len(table.arms), rules.depth, seed_of(seed, table.traces[queries[0]].query), plain)
        made = Game(build(name, arms, policy), rules, arms, clock)
        made.keeps_log = True
        played.append(_play(made, hindsight, queries, hindsight.reset != "query" and rules.score_ends, memory))
    return _measured(name, hindsight, played, rules.depth)


def rules_on(table: Table, name: str, recipe: GameRecipe) -> Rules:
    """The rules of a policy's game on a table, with the table's declared costs. UsageError if no policy has the
    name."""
    costs = (table.draft_s + table.step_s[1:]).tolist()
    rules = rules_for(name, recipe, table.depth, tuple(table.reach.tolist()), table.greedy)
    return replace(rules, costs=tuple(costs), step=float(table.step_s[0]))


def _play(game: Game, hindsight: Hindsight, queries: list[int], ends: bool, memory: PromptMemory | None) -> PlayedGame:
    """Play a game over these traces, in order; `ends` and `memory` as in a `Selector`."""
    query: list[int] = []
    overheads, count = hindsight.table.overheads, game.arms.count
    reading = [0.0] * count if overheads is None else overheads.reading(np.full(count, CATCH_UP_TOKENS)).tolist()
    for index in queries:
        interrupts.check()
        before = len(game.log)
        trace = hindsight.table.traces[index]
        if memory is None or not isinstance(game.policy, ContextualUcb):
            _answer(game, trace, hindsight.cost.tolist(), ends)
        else:
            prompt = np.zeros(1) if trace.context is None else trace.context  # all alike if no features are recorded
            belief = memory.belief(prompt)
            game.policy.begin_text(belief, memory.should_try_drafts)
            if game.rules.reward == "surplus":
                game.policy.switch_cost = surplus_lost(reading, game.clock.rate, game.rules.depth)
            _answer(game, trace, hindsight.cost.tolist(), ends)
            memory.learn(prompt, belief, game.policy.shown(), game.time_cost)
        query += [index] * (len(game.log) - before)
    return PlayedGame(
        queries=queries,
        best=hindsight.best(queries),
        arms=np.array([entry.arm for entry in game.log], dtype=int),
        committed=np.array([entry.committed for entry in game.log], dtype=int),
        query=np.array(query, dtype=int),
        decide_us=np.array([entry.decide_us for entry in game.log]),
        scored=np.array([entry.scored for entry in game.log], dtype=int),
        dropped=game.dropped,
    )


def _answer(game: Game, trace: Trace, cost: list[float], ends: bool) -> None:
    """Play the rounds of one text, as in live decoding."""
    T = trace.tokens
    accepted, drafted = trace.accepted.tolist(), trace.drafted.tolist()
    at = scored = 0

    def score(count: int) -> None:
        nonlocal scored
        if count:
            span = slice(scored, scored + count)
            game.scored(trace.gamma[:, span, : game.rules.depth], trace.hit[:, span, : game.rules.depth])
            scored += count

    while at < T:
        arm = game.choose()
        length = accepted[arm][at] + 1
        outcome = Outcome(
            committed=min(length, T - at),
            accepted=min(length - 1, T - at),
            complete=length <= T - at,
            failed=drafted[arm][at] < 0,
            overlap=np.trim_zeros(trace.overlap[arm, at].astype(float), "b"),  # 0 after the end of the draft
            seconds=cost[arm],
        )
        game.round_finished(arm, outcome)
        at += min(length, T - at)
        score(game.due())
    if ends:
        score(game.unscored)
    game.ended()


def _measured(name: str, hindsight: Hindsight, played: list[PlayedGame], depth: int = 1) -> Replay:
    """Rounds and seconds of every trace, from the rounds that were played; `depth`: number of scored draft depths."""
    query = np.concatenate([part.query for part in played])
    cost = hindsight.cost[np.concatenate([part.arms for part in played])]
    count = len(hindsight.tokens)
    seconds = np.bincount(query, cost, minlength=count).astype(float)
    reading, scoring = hindsight.overheads(played, depth)
    return Replay(name, np.bincount(query, minlength=count), seconds + reading + scoring, scoring, played)


def oracle(hindsight: Hindsight) -> Replay:
    """The best arm in hindsight plays each game alone. No single choice per game can beat it."""
    played = []
    for queries in hindsight.games:
        best = hindsight.best(queries)
        begins = [np.flatnonzero(hindsight.begins[index][best]) for index in queries]
        query = np.repeat(queries, [len(starts) for starts in begins])
        committed = [
            np.diff(starts, append=hindsight.tokens[index]) for index, starts in zip(queries, begins, strict=True)
        ]
        arms, nothing = np.full(len(query), best), np.zeros(len(query), int)
        played.append(
            PlayedGame(queries, best, arms, np.concatenate(committed), query, nothing.astype(float), nothing, 0)
        )
    return _measured("oracle", hindsight, played)


def draft_all(hindsight: Hindsight) -> Replay:
    """Every arm drafts in every round, all drafts are verified, and the longest accepted one is committed."""
    rounds = hindsight.draft_all_rounds
    seconds = rounds * hindsight.draft_all_cost + hindsight.reading.sum(axis=1)
    return Replay("draft-all", rounds, seconds, np.zeros(len(rounds)), played=[])
