"""`specctl select --record` and `--replay`: the table of a pool, written once, and policies played on it in seconds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target
from specctl.evaluation.measure import Case, filters
from specctl.evaluation.metrics import Interval
from specctl.evaluation.policy_rows import LONG_ENOUGH, PolicyRow
from specctl.recipe import SelectRecipe
from specctl.selection import record, regret
from specctl.selection.arms import chosen, reach
from specctl.selection.combined import Guarded
from specctl.selection.hindsight import Hindsight
from specctl.selection.lengths import shortened
from specctl.selection.regret import Summary
from specctl.selection.replay import Replay, draft_all, oracle, replay, rules_on
from specctl.selection.table_file import read_table
from specctl.selection.trace import Table, of_arms

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
    """What the policies of a recipe do on a recorded table, all seeds of the recipe together.

    `games` are those from reset to reset, G of them, which every seed plays.
    """

    table: Table
    rows: list[PolicyRow]
    curves: dict[str, dict[str, list[float]]]
    per_domain: dict[str, dict[str, float]]
    pool_size: list[PoolSize]
    oracle_mat: float
    games: int


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
    """Play the recipe's policies on `recipe.replay`, once for each seed, beside every arm, the oracle and draft-all.

    Raises CheckpointError where the table cannot be read, DataError where it is empty.
    """
    assert recipe.replay is not None
    table = read_table(recipe.replay)
    table = of_arms(table, chosen(recipe, table.arms))
    if recipe.arms.draft_nodes:
        table = shortened(table, recipe.arms.draft_nodes)
    yardstick = Hindsight(table, recipe.game.yardstick)
    played = {name: _played(recipe, name, yardstick) for name in recipe.algo}
    # What draws nothing does the same for every seed.
    times, resets = len(recipe.seeds), (recipe.reset, recipe.session)
    fixed = {arm: times * _played(recipe, "fixed", yardstick, [0], arm=n) for n, arm in enumerate(table.arms)}
    others = {"oracle": times * [oracle(yardstick, *resets)], "draft-all": times * [draft_all(yardstick, *resets)]}
    kinds = {name: kind for kind, named in (("arm", fixed), ("baseline", others)) for name in named}
    found = {name: regret.summarize(replays, yardstick) for name, replays in {**played, **fixed, **others}.items()}
    fastest = max((found[arm] for arm in fixed), key=lambda one: one.tokens_per_s)
    rows = [_row(name, kinds.get(name, "policy"), one, yardstick, fastest) for name, one in found.items()]
    rows = [replace(row, share_after_256=_late(played.get(row.algo), yardstick)) for row in rows]
    return Replayed(
        table=table,
        rows=rows,
        curves={name: _curves(recipe, name, one, yardstick) for name, one in played.items()},
        per_domain={name: regret.mat_by_domain(one, yardstick) for name, one in {**played, **others}.items()},
        pool_size=[size for n in recipe.pool_sizes for size in _sizes(recipe, table, n)],
        oracle_mat=found["oracle"].mat,
        games=found["oracle"].games,
    )


def _played(
    recipe: SelectRecipe, name: str, yardstick: Hindsight, seeds: Sequence[int] | None = None, **options: int
) -> list[Replay]:
    """One replay for each seed, which are those of live decoding."""
    policy = recipe.policy.model_copy(update=options)
    return [
        replay(name, yardstick, policy, recipe.game, recipe.reset, recipe.session, recipe.sampling.seed + seed)
        for seed in seeds or recipe.seeds
    ]


def _late(played: Sequence[Replay] | None, yardstick: Hindsight) -> float | None:
    """Of a policy, by mat."""
    return regret.late_share(played, yardstick, LONG_ENOUGH) if played and yardstick.by == "mat" else None


def _row(name: str, kind: str, found: Summary, yardstick: Hindsight, fastest: Summary) -> PolicyRow:
    """Replays in the columns of a live run; seconds are those of the table's cost model."""
    long = found.tokens[0] >= LONG_ENOUGH
    plain_s = float(yardstick.table.step_s[0])
    scoring = found.scoring_s.sum() / found.seconds.sum()
    return PolicyRow(
        algo=name,
        kind=kind,
        mat=found.mat,
        mat_interval=found.mat_interval,
        tokens_per_s=found.tokens_per_s,
        speedup=found.tokens_per_s * plain_s,
        speedup_interval=scaled(found.tokens_per_s_interval, plain_s),
        over_best_arm=found.tokens_per_s / fastest.tokens_per_s,
        over_best_arm_interval=regret.bootstrap_ratio(fastest.seconds, found.seconds),
        share_of_best=found.oracle_share,
        share_of_best_interval=found.oracle_share_interval,
        share_of_best_256=float(found.best[:, long].sum() / found.own[:, long].sum()) if long.any() else None,
        share_after_256=None,
        regret=round(found.regret * found.rounds.size) if yardstick.by == "mat" else None,
        best_arm_ratio=found.best_arm_ratio,
        rounds=int(found.rounds.sum()),
        pulls={arm: count for arm, count in zip(yardstick.table.arms, found.pulls, strict=True) if count},
        switches=None,
        caught_up=None,
        switch_ms=None,
        decide_us_p50=found.decide_us_p50 if kind == "policy" else None,
        scorings=found.scorings if kind == "policy" else None,
        score_ms_p50=None,
        score_share=float(scoring) or None,
        failures=0,
        dropped=found.dropped,
    )


def scaled(interval: Interval | None, factor: float) -> Interval | None:
    return None if interval is None else (factor * interval[0], factor * interval[1])


def _curves(recipe: SelectRecipe, name: str, replays: Sequence[Replay], yardstick: Hindsight) -> dict[str, list[float]]:
    """Means over games and seeds, by token since the reset."""
    rules = rules_on(yardstick.table, name, recipe.game)
    played = [game for one in replays for game in one.played]
    stopping = [regret.stopping_regret(game, yardstick).astype(float) for game in played]
    losses = [regret.loss_regret(game, yardstick, rules) for game in played]
    on_best = [np.repeat(game.arms == game.best, game.committed).astype(float) for game in played]
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
    parts = [of_arms(table, [table.arms[arm] for arm in subset]) for subset in sorted(subsets)]
    yardsticks = [Hindsight(part, recipe.game.yardstick) for part in parts]
    found = []
    for name in recipe.algo:
        done = [regret.summarize(_played(recipe, name, one), one) for one in yardsticks]
        shares = fmean(one.oracle_share for one in done)
        found.append(PoolSize(count, name, fmean(one.mat for one in done), shares))
    return [*found, PoolSize(count, "oracle", fmean(one.oracle_mat for one in done), 1.0)]
