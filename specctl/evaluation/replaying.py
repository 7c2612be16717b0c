"""`specctl select --record` and `--replay`: the table of a pool, written once, and policies played on it in seconds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from specctl.decoding.draft import Drafter
from specctl.decoding.target import Target
from specctl.evaluation.measure import Case, filters
from specctl.evaluation.policy_rows import LONG_ENOUGH, PolicyRow
from specctl.recipe import SelectRecipe
from specctl.selection import record, regret
from specctl.selection.arms import chosen, reach
from specctl.selection.combined import Guarded
from specctl.selection.hindsight import Hindsight
from specctl.selection.lengths import shortened
from specctl.selection.replay import Replay, draft_all, oracle, replay, rules_on
from specctl.selection.table_file import read_table
from specctl.selection.trace import Table

SUBSETS = 6  # of each pool size


@dataclass(frozen=True)
class PoolSize:
    """Replays on `arms` of the arms, mean over some subsets of them."""

    arms: int
    algo: str
    mat: float
    share_of_best: float


@dataclass(frozen=True)
class Replayed:
    """What the policies of a recipe do on a recorded table."""

    table: Table
    rows: list[PolicyRow]
    curves: dict[str, dict[str, list[float]]]
    per_domain: dict[str, dict[str, float]]
    pool_size: list[PoolSize]
    oracle_mat: float


def record_table(
    recipe: SelectRecipe,
    target: Target,
    stream: Sequence[Sequence[Case]],
    drafters: dict[str, Drafter],
    made_of: dict[str, object],
) -> tuple[Table, dict[str, int]]:
    """Record the pool on the stream, into `recipe.record`: the table, and how often each drafter raised meanwhile.

    Raises as `selection.record.record`.
    """
    arms = [Guarded(name, drafter) for name, drafter in drafters.items()]
    queries = [
        record.Query(case.prompt.id, case.prompt.domain, case.ids, case.room, case.seed(recipe.sampling.seed), number)
        for number, session in enumerate(stream)
        for case in session
    ]
    table = record.record(
        target,
        arms,
        queries,
        filters(recipe.sampling),
        max(1, *map(reach, drafters.values())),
        exact=recipe.sampling.exact,
        path=recipe.record,
        made_of=made_of,
        resume=recipe.resume,
        overwrite=recipe.overwrite,
    )
    return table, {arm.name: arm.failures for arm in arms}


def replay_table(recipe: SelectRecipe) -> Replayed:
    """Play the recipe's policies on `recipe.replay`, beside every arm, the oracle and draft-all.

    Raises CheckpointError where the table cannot be read, DataError where it is empty.
    """
    assert recipe.replay is not None
    table = read_table(recipe.replay)
    table = of_arms(table, [table.arms.index(name) for name in chosen(recipe, table.arms)])
    if recipe.arms.draft_nodes:
        table = shortened(table, recipe.arms.draft_nodes)
    yardstick = Hindsight(table)
    played = {name: _played(recipe, name, yardstick) for name in recipe.algo}
    fixed = {arm: _played(recipe, "fixed", yardstick, arm=n) for n, arm in enumerate(table.arms)}
    resets = recipe.reset, recipe.session
    others = {"oracle": oracle(yardstick, *resets), "draft-all": draft_all(yardstick, *resets)}
    alone = {name: regret.summarize(one, yardstick).tokens_per_s for name, one in fixed.items()}
    fastest = max(alone.values())
    rows = [_row(name, "policy", one, yardstick, fastest) for name, one in played.items()]
    rows += [_row(name, "arm", one, yardstick, fastest) for name, one in fixed.items()]
    rows += [_row(name, "baseline", one, yardstick, fastest) for name, one in others.items()]
    return Replayed(
        table=table,
        rows=rows,
        curves={name: _curves(recipe, name, one, yardstick) for name, one in played.items()},
        per_domain={name: regret.mat_by_domain(one, yardstick) for name, one in {**played, **others}.items()},
        pool_size=[size for n in recipe.pool_sizes for size in _sizes(recipe, table, n)],
        oracle_mat=regret.summarize(others["oracle"], yardstick).mat,
    )


def _played(recipe: SelectRecipe, name: str, yardstick: Hindsight, **options: int) -> Replay:
    policy = recipe.policy.model_copy(update=options)
    return replay(name, yardstick, policy, recipe.game, recipe.reset, recipe.session, recipe.sampling.seed)


def _row(name: str, kind: str, played: Replay, yardstick: Hindsight, fastest: float) -> PolicyRow:
    """A replay in the columns of a live run; seconds are those of the table's cost model, without scoring."""
    found = regret.summarize(played, yardstick)
    tokens = regret.per_game(yardstick.tokens, played.games)
    rounds = regret.per_game(played.rounds, played.games)
    best = np.array([yardstick.rounds[queries].sum(axis=0).min() for queries in played.games], dtype=float)
    long = tokens >= LONG_ENOUGH
    return PolicyRow(
        algo=name,
        kind=kind,
        mat=found.mat,
        mat_interval=found.mat_interval,
        tokens_per_s=found.tokens_per_s,
        speedup=found.tokens_per_s * float(yardstick.table.step_s[0]),
        speedup_interval=None,
        over_best_arm=found.tokens_per_s / fastest,
        over_best_arm_interval=None,
        share_of_best=found.oracle_share,
        share_of_best_interval=found.oracle_share_interval,
        share_of_best_256=float(best[long].sum() / rounds[long].sum()) if long.any() else None,
        regret=int(rounds.sum() - best.sum()),
        best_arm_ratio=found.best_arm_ratio,
        rounds=found.rounds,
        pulls={arm: count for arm, count in zip(yardstick.table.arms, found.pulls, strict=True) if count},
        switches=None,
        caught_up=None,
        switch_ms=None,
        decide_us_p50=found.decide_us_p50 if kind == "policy" else None,
        score_ms_p50=None,
        score_share=None,
        failures=0,
        dropped=found.dropped,
    )


def _curves(recipe: SelectRecipe, name: str, played: Replay, yardstick: Hindsight) -> dict[str, list[float]]:
    """Means over the games, by token since the reset."""
    rules = rules_on(yardstick.table, name, recipe.game)
    stopping = [regret.stopping_regret(game, yardstick).astype(float) for game in played.played]
    losses = [regret.loss_regret(game, yardstick, rules) for game in played.played]
    on_best = [np.repeat(game.arms == game.best, game.committed).astype(float) for game in played.played]
    return {
        "stopping_regret": regret.mean_curve(stopping).tolist(),
        "loss_regret": regret.mean_curve(losses).tolist(),
        "best_arm": regret.mean_curve(on_best).tolist(),
    }


def _sizes(recipe: SelectRecipe, table: Table, count: int) -> list[PoolSize]:
    """Every policy on some subsets of `count` arms, the same for all."""
    draw = random.Random(recipe.sampling.seed)
    arms = range(len(table.arms))
    subsets = {tuple(sorted(draw.sample(arms, min(count, len(arms))))) for _ in range(SUBSETS)}
    yardsticks = [Hindsight(of_arms(table, subset)) for subset in sorted(subsets)]
    found = []
    for name in recipe.algo:
        done = [regret.summarize(_played(recipe, name, one), one) for one in yardsticks]
        shares = fmean(one.oracle_share for one in done)
        found.append(PoolSize(count, name, fmean(one.mat for one in done), shares))
    return [*found, PoolSize(count, "oracle", fmean(one.oracle_mat for one in done), 1.0)]


def of_arms(table: Table, arms: Sequence[int]) -> Table:
    """The table of some of the arms."""
    chosen = list(arms)
    traces = [
        replace(t, **{name: getattr(t, name)[chosen] for name in ("accepted", "drafted", "gamma", "overlap", "hit")})
        for t in table.traces
    ]
    step_s = table.step_s[[0, *(1 + arm for arm in chosen)]]
    return Table([table.arms[arm] for arm in chosen], table.depth, traces, table.draft_s[chosen], step_s)
