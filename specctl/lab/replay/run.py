"""`specctl replay`: play policies on a recorded table in seconds, without a model."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from specctl import progress
from specctl.decoding.metrics import Interval
from specctl.errors import UsageError
from specctl.lab.recorded import hindsight, regret
from specctl.lab.recorded.cut_drafts import shortened, with_plain
from specctl.lab.recorded.hindsight import Hindsight
from specctl.lab.recorded.regret import Summary
from specctl.lab.recorded.replay import Replay, Resets, draft_all, oracle, replay, rules_on
from specctl.lab.recorded.table_file import read_table
from specctl.lab.recorded.trace import Table, of_arms
from specctl.lab.replay.recipe import ReplayRecipe
from specctl.measuring.lossless import Losslessness
from specctl.measuring.measured import Measured, columns
from specctl.measuring.policy_rows import LONG_GAME_TOKENS, PolicyRow
from specctl.measuring.select_result import DomainMat, PoolSize, SelectResult, top_fields
from specctl.runs import Run
from specctl.selection.arms import PLAIN, chosen_names
from specctl.selection.certificate import certified, explanation
from specctl.selection.game.rules import overridden_options

SUBSETS = 6  # of arms, per pool size


@dataclass(frozen=True)
class Replayed:
    """Results of a recipe's policies on a recorded table, over all seeds of the recipe.

    `games`: number of games, each from one reset to the next. Every seed plays all games.
    """

    table: Table
    rows: list[PolicyRow]
    curves: dict[str, dict[str, list[float]]]
    per_domain: dict[str, dict[str, float]]
    pool_size: list[PoolSize]
    oracle_mat: float
    games: int


def play_table(recipe: ReplayRecipe, run: Run) -> SelectResult:
    """Play the policies of a recipe on its table.

    Raises as `replay_table`.
    """
    for line in overridden_options(recipe.algo, recipe.game):
        progress.log(line)
    return result_of(recipe, replay_table(recipe))


def result_of(recipe: ReplayRecipe, done: Replayed) -> SelectResult:
    shown = done.rows[0]
    games = hindsight.games(done.table.traces, "session", recipe.session)
    unit = {"query": "queries", "session": "sessions", "stream": "streams"}[recipe.reset]
    overheads = ", catching up and scoring" if done.table.overheads else " alone"
    return SelectResult(
        **top_fields(shown),
        mode="replay",
        arms=done.table.arms,
        reset=recipe.reset,
        seeds=len(recipe.seeds),
        yardstick=recipe.game.yardstick,
        intervals_over=f"{len(recipe.seeds)} seed{'s' * (len(recipe.seeds) > 1)} × {done.games} {unit}",
        speeds=f"modeled: rounds{overheads}",
        queries=len(recipe.seeds) * len(done.table.traces),
        sessions=len(games),
        oracle_mat=done.oracle_mat,
        per_domain=[DomainMat(domain, mat) for domain, mat in done.per_domain.get(shown.algo, {}).items()],
        policies=done.rows,
        curves=done.curves,
        rewards=[],
        pool_size=done.pool_size,
        lossless=Losslessness(),
        rejected=0,
        table=str(recipe.replay),
        table_sha256=done.table.digest,
        at_least=explanation(sum(trace.tokens > 0 for trace in done.table.traces)),
    )


def replay_table(recipe: ReplayRecipe) -> Replayed:
    """Play the recipe's policies on `recipe.replay`, once per seed, together with every arm, the oracle and draft-all.

    Raises CheckpointError if the table cannot be read, DataError if it is empty, UsageError if it has fewer arms than
    one of the `pool_sizes`.
    """
    table = read_table(recipe.table)
    table = of_arms(table, chosen_names(recipe.arms, table.arms))
    count = len(table.arms)
    if max(recipe.pool_sizes, default=0) > count:
        raise UsageError(
            f"pool_sizes names {max(recipe.pool_sizes)} arms, but the table has {count}", hint=f"1 to {count}"
        )
    if recipe.arms.draft_nodes:
        table = shortened(table, recipe.arms.draft_nodes)
    if recipe.arms.plain and PLAIN not in table.arms:
        table = with_plain(table)
    yardstick = Hindsight(table, recipe.game.yardstick)
    played = {name: _replays(recipe, name, yardstick) for name in recipe.algo}
    # A contender without random draws gives the same result for every seed.
    times, resets = len(recipe.seeds), (recipe.reset, recipe.session)
    fixed = {arm: times * _replays(recipe, "fixed", yardstick, [0], arm=n) for n, arm in enumerate(table.arms)}
    others = {"oracle": times * [oracle(yardstick, *resets)], "draft-all": times * [draft_all(yardstick, *resets)]}
    kinds = {name: kind for kind, named in (("arm", fixed), ("baseline", others)) for name in named}
    runs = {**played, **fixed, **others}
    summaries = {name: regret.summarize(replays, yardstick) for name, replays in runs.items()}
    fastest = max((summaries[arm] for arm in fixed), key=lambda summary: summary.tokens_per_s)
    return Replayed(
        table=table,
        rows=[
            replace(
                _row(name, kinds.get(name, "policy"), runs[name], summary, yardstick, fastest),
                **(_certificates(runs[name], fixed, yardstick) if name in played else {}),
            )
            for name, summary in summaries.items()
        ],
        curves={name: _curves(recipe, name, replays, yardstick) for name, replays in played.items()},
        per_domain={name: regret.mat_by_domain(replays, yardstick) for name, replays in {**played, **others}.items()},
        pool_size=[size for n in recipe.pool_sizes for size in _replay_subsets(recipe, table, n)],
        oracle_mat=summaries["oracle"].mat,
        games=summaries["oracle"].games,
    )


def _replays(
    recipe: ReplayRecipe, name: str, yardstick: Hindsight, seeds: Sequence[int] | None = None, **options: int
) -> list[Replay]:
    """Replay a policy once per seed; the seeds are the same as in live decoding."""
    policy = recipe.policy.model_copy(update=options)
    return [
        replay(name, yardstick, policy, recipe.game, Resets(recipe.reset, recipe.session), recipe.sampling.seed + seed)
        for seed in seeds or recipe.seeds
    ]


def _row(
    name: str, kind: str, replays: Sequence[Replay], summary: Summary, yardstick: Hindsight, fastest: Summary
) -> PolicyRow:
    """Row of replays, with the columns of a live run. Seconds come from the table's cost model."""
    long, late = summary.tokens[0] >= LONG_GAME_TOKENS, kind == "policy" and yardstick.by == "mat"
    plain_s = float(yardstick.table.step_s[0])
    scoring = summary.scoring_s.sum() / summary.seconds.sum()
    return PolicyRow(
        algo=name,
        kind=kind,
        tokens_per_s=summary.tokens_per_s,
        share_of_best_256=float(summary.best[:, long].sum() / summary.policy[:, long].sum()) if long.any() else None,
        share_after_256=regret.late_share(replays, yardstick, LONG_GAME_TOKENS) if late else None,
        regret=round(summary.regret * summary.rounds.size) if yardstick.by == "mat" else None,
        best_arm_ratio=summary.best_arm_ratio,
        rounds=int(summary.rounds.sum()),
        pulls={arm: count for arm, count in zip(yardstick.table.arms, summary.pulls, strict=True) if count},
        decide_us_p50=summary.decide_us_p50 if kind == "policy" else None,
        scorings=summary.scorings if kind == "policy" else None,
        score_share=float(scoring) or None,
        dropped=summary.dropped,
        **columns(
            mat=Measured(summary.mat, summary.mat_interval),
            speedup=Measured(summary.tokens_per_s * plain_s, scaled(summary.tokens_per_s_interval, plain_s)),
            over_best_arm=Measured(
                summary.tokens_per_s / fastest.tokens_per_s, regret.bootstrap_ratio(fastest.seconds, summary.seconds)
            ),
            share_of_best=Measured(summary.oracle_share, summary.oracle_share_interval),
        ),
    )


def _certificates(replays: Sequence[Replay], fixed: dict[str, list[Replay]], yardstick: Hindsight) -> dict[str, Any]:
    """Lower bounds of a policy's speed, by the table's cost model. Seeds repeat the same texts."""
    told = yardstick.tokens > 0
    seconds = np.mean([replay.seconds for replay in replays], axis=0)[told]
    plain_s = yardstick.tokens[told] * yardstick.table.step_s[0]
    alone = [seconds / replays[0].seconds[told] for replays in fixed.values()]
    return certified((seconds / plain_s).tolist(), [one.tolist() for one in alone])._asdict()


def scaled(interval: Interval | None, factor: float) -> Interval | None:
    return None if interval is None else (factor * interval[0], factor * interval[1])


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
    yardsticks = [Hindsight(part, recipe.game.yardstick) for part in parts]
    sizes = []
    for name in recipe.algo:
        done = [regret.summarize(_replays(recipe, name, yardstick), yardstick) for yardstick in yardsticks]
        shares = fmean(summary.oracle_share for summary in done)
        sizes.append(PoolSize(count, name, fmean(summary.mat for summary in done), shares))
    return [*sizes, PoolSize(count, "oracle", fmean(summary.oracle_mat for summary in done), 1.0)]
