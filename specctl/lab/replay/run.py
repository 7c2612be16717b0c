"""`specctl replay`: play policies on a recorded table in seconds, without a model."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from specctl.errors import UsageError
from specctl.lab.recorded import hindsight, regret
from specctl.lab.recorded.hindsight import Hindsight, arm_rewards
from specctl.lab.recorded.replay import Replay, draft_all, oracle, replay, rules_on
from specctl.lab.recorded.table_file import read_table
from specctl.lab.recorded.trace import Table, of_arms, shortened, with_plain
from specctl.lab.replay.recipe import ReplayRecipe
from specctl.measuring.lossless import Losslessness
from specctl.measuring.select_result import PoolSize, SelectResult, top_fields
from specctl.runs import Run
from specctl.selection.arms import PLAIN, chosen_names
from specctl.selection.certificate import certified, explanation
from specctl.selection.game.rules import log_overridden_options
from specctl.threads import counted

SUBSETS = 6  # of arms, per pool size


def play_table(recipe: ReplayRecipe, run: Run) -> SelectResult:
    """Play the policies of a recipe on its table. Raises as `replay_table`."""
    log_overridden_options(recipe.algo, recipe.game)
    return replay_table(recipe)


def replay_table(recipe: ReplayRecipe) -> SelectResult:
    """Play the recipe's policies on `recipe.replay`, once per seed, together with every arm, the oracle and draft-all.

    Raises CheckpointError if the table cannot be read, DataError if it is empty, UsageError if it has fewer arms than
    one of the `pool_sizes`.
    """
    table = arms_of(recipe)
    yardstick = _hindsight(recipe, table)
    played = {name: _replays(recipe, name, yardstick) for name in recipe.algo}
    # A contender without random draws gives the same result for every seed.
    times = len(recipe.seeds)
    fixed = {arm: times * _replays(recipe, "fixed", yardstick, [0], arm=n) for n, arm in enumerate(table.arms)}
    others = {"oracle": times * [oracle(yardstick)], "draft-all": times * [draft_all(yardstick)]}
    kinds = {name: kind for kind, named in (("arm", fixed), ("baseline", others)) for name in named}
    fastest = min(fixed.values(), key=lambda replays: replays[0].seconds.sum())
    rows = {
        name: regret.row(name, kinds.get(name, "policy"), replays, yardstick, fastest)
        for name, replays in {**played, **fixed, **others}.items()
    }
    rows |= {name: replace(rows[name], **_certificates(played[name], fixed, yardstick)) for name in played}
    shown, unit = rows[recipe.algo[0]], {"query": "queries", "session": "sessions", "stream": "streams"}[recipe.reset]
    return SelectResult(
        **top_fields(shown),
        mode="replay",
        arms=table.arms,
        reset=recipe.reset,
        seeds=times,
        yardstick=recipe.game.yardstick,
        intervals_over=f"{counted(times, 'seed')} × {len(yardstick.games)} {unit}",
        speeds=f"modeled: rounds{', catching up and scoring' if table.overheads else ' alone'}",
        queries=times * len(table.traces),
        sessions=len(hindsight.games(table.traces, "session", recipe.session)),
        oracle_mat=rows["oracle"].mat,
        per_domain=[
            row
            for name, runs in {**played, **fixed, **others}.items()
            for row in regret.by_domain(name, runs, yardstick)
        ],
        policies=list(rows.values()),
        curves={name: _curves(recipe, name, replays, yardstick) for name, replays in played.items()},
        rewards=arm_rewards(yardstick),
        pool_size=[size for n in recipe.pool_sizes for size in _replay_subsets(recipe, table, n)],
        lossless=Losslessness(),
        rejected=0,
        table=str(recipe.replay),
        table_sha256=table.digest,
        at_least=explanation(sum(trace.tokens > 0 for trace in table.traces)),
    )


def arms_of(recipe: ReplayRecipe) -> Table:
    """The recipe's table, with the arms that play. Raises CheckpointError if it cannot be read, UsageError if it has
    too few arms."""
    table = read_table(recipe.table)
    table = of_arms(table, chosen_names(recipe.arms, table.arms))
    count = len(table.arms)
    if max(recipe.pool_sizes, default=0) > count:
        raise UsageError(
            f"pool_sizes names {max(recipe.pool_sizes)} arms, but the table has {count}", hint=f"1 to {count}"
        )
    if recipe.arms.draft_nodes:
        table = shortened(table, recipe.arms.draft_nodes)
    return with_plain(table) if recipe.arms.plain and PLAIN not in table.arms else table


def _hindsight(recipe: ReplayRecipe, table: Table) -> Hindsight:
    return Hindsight(table, recipe.game.yardstick, recipe.reset, recipe.session)


def _replays(
    recipe: ReplayRecipe, name: str, yardstick: Hindsight, seeds: Sequence[int] | None = None, **options: int
) -> list[Replay]:
    """Replay a policy once per seed; the seeds are the same as in live decoding."""
    policy = recipe.policy.model_copy(update=options)
    return [replay(name, yardstick, policy, recipe.game, recipe.sampling.seed + seed) for seed in seeds or recipe.seeds]


def _certificates(replays: Sequence[Replay], fixed: dict[str, list[Replay]], yardstick: Hindsight) -> dict[str, Any]:
    """Lower bounds of a policy's speed, by the table's cost model. Seeds repeat the same texts."""
    answered = yardstick.tokens > 0
    seconds = np.mean([replay.seconds for replay in replays], axis=0)[answered]
    plain_s = yardstick.tokens[answered] * yardstick.table.step_s[0]
    alone = [seconds / replays[0].seconds[answered] for replays in fixed.values()]
    return certified((seconds / plain_s).tolist(), [one.tolist() for one in alone])._asdict()


def _curves(recipe: ReplayRecipe, name: str, replays: Sequence[Replay], yardstick: Hindsight) -> dict[str, list[float]]:
    """Curves of a policy by token since the reset, as means over games and seeds."""
    rules = rules_on(yardstick.table, name, recipe.game)
    played = [game for replayed in replays for game in replayed.played]
    stopping = [regret.stopping_regret(game, yardstick).astype(float) for game in played]
    losses = [regret.loss_regret(game, yardstick, rules) for game in played]
    on_best = [np.repeat(game.arms == game.best, game.committed).astype(float) for game in played]
    return {
        "stopping_regret": regret.mean_curve(stopping).tolist(),
        "loss_regret": regret.mean_curve(losses).tolist(),
        "best_arm": regret.mean_curve(on_best).tolist(),
    }


def _replay_subsets(recipe: ReplayRecipe, table: Table, count: int) -> list[PoolSize]:
    """Replay every policy on a few subsets of `count` arms; all policies get the same subsets."""
    draw = random.Random(recipe.sampling.seed)
    arms = range(len(table.arms))
    subsets = {tuple(sorted(draw.sample(arms, count))) for _ in range(SUBSETS)}
    parts = [of_arms(table, [table.arms[arm] for arm in subset]) for subset in sorted(subsets)]
    yardsticks = [_hindsight(recipe, part) for part in parts]
    sizes = []
    for name in recipe.algo:
        done = [regret.row(name, "policy", _replays(recipe, name, yardstick), yardstick) for yardstick in yardsticks]
        sizes.append(PoolSize(count, name, _mean(row.mat for row in done), _mean(row.share_of_best for row in done)))
    best = [yardstick.tokens.sum() / oracle(yardstick).rounds.sum() for yardstick in yardsticks]
    return [*sizes, PoolSize(count, "oracle", fmean(best), 1.0)]


def _mean(values: Iterable[float | None]) -> float:
    return fmean(value for value in values if value is not None)
