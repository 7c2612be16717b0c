"""`specctl select --record` and `--replay`: write the table of a pool once, then play policies on it in seconds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from specctl.decoding.metrics import Interval
from specctl.decoding.prompt_features import PromptClusters
from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target
from specctl.errors import UsageError
from specctl.measuring.contenders import Case, sampling_of
from specctl.measuring.measured import Measured, columns
from specctl.measuring.policy_rows import LONG_GAME_TOKENS, PolicyRow
from specctl.recipe import SelectRecipe
from specctl.selection.arm import Arm
from specctl.selection.arms import PLAIN, chosen_names, longest_draft
from specctl.selection.recorded import recorder, regret
from specctl.selection.recorded.cut_drafts import shortened, with_plain
from specctl.selection.recorded.hindsight import Hindsight
from specctl.selection.recorded.regret import Summary
from specctl.selection.recorded.replay import Replay, draft_all, oracle, replay, rules_on
from specctl.selection.recorded.table_file import read_table
from specctl.selection.recorded.trace import Table, of_arms

SUBSETS = 6  # of arms, per pool size


@dataclass(frozen=True)
class PoolSize:
    """Mean of replays on subsets of `arms` arms."""

    arms: int
    algo: str
    mat: float
    share_of_best: float


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


def record_table(
    recipe: SelectRecipe,
    target: Target,
    stream: Sequence[Sequence[Case]],
    drafters: dict[str, Drafter],
    made_of: dict[str, object],
    kinds: Mapping[str, PromptClusters],
) -> tuple[Table, dict[str, int]]:
    """Record the pool on the stream into `recipe.record`; return the table, and how often each drafter raised.

    `kinds`: kinds of prompts that each drafter was trained on, by name. Raises as `selection.recorded.recorder.record`.
    """
    arms = [Arm(name, drafter, trained_on=kinds.get(name)) for name, drafter in drafters.items()]
    queries = [
        recorder.Query(
            case.prompt.id, case.prompt.domain, case.ids, case.max_new_tokens, case.seed(recipe.sampling.seed), number
        )
        for number, session in enumerate(stream)
        for case in session
    ]
    table = recorder.record(
        target,
        arms,
        queries,
        sampling_of(recipe.sampling),
        max(1, *map(longest_draft, drafters.values())),
        exact=recipe.sampling.exact,
        path=recipe.record,
        made_of=made_of,
        resume=recipe.resume,
        overwrite=recipe.overwrite,
    )
    # Failures before a resumption are known from the table alone, and only failures to draft.
    raised = [sum(int((trace.drafted[n] < 0).sum()) for trace in table.traces) for n in range(len(arms))]
    return table, {arm.name: max(arm.failures, known) for arm, known in zip(arms, raised, strict=True)}


def replay_table(recipe: SelectRecipe) -> Replayed:
    """Play the recipe's policies on `recipe.replay`, once per seed, together with every arm, the oracle and draft-all.

    Raises CheckpointError if the table cannot be read, DataError if it is empty, UsageError if it has fewer arms than
    one of the `pool_sizes`.
    """
    assert recipe.replay is not None
    table = read_table(recipe.replay)
    table = of_arms(table, chosen_names(recipe, table.arms))
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
            _row(name, kinds.get(name, "policy"), runs[name], summary, yardstick, fastest)
            for name, summary in summaries.items()
        ],
        curves={name: _curves(recipe, name, replays, yardstick) for name, replays in played.items()},
        per_domain={name: regret.mat_by_domain(replays, yardstick) for name, replays in {**played, **others}.items()},
        pool_size=[size for n in recipe.pool_sizes for size in _replay_subsets(recipe, table, n)],
        oracle_mat=summaries["oracle"].mat,
        games=summaries["oracle"].games,
    )


def _replays(
    recipe: SelectRecipe, name: str, yardstick: Hindsight, seeds: Sequence[int] | None = None, **options: int
) -> list[Replay]:
    """Replay a policy once per seed; the seeds are the same as in live decoding."""
    policy = recipe.policy.model_copy(update=options)
    return [
        replay(name, yardstick, policy, recipe.game, recipe.reset, recipe.session, recipe.sampling.seed + seed)
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


def scaled(interval: Interval | None, factor: float) -> Interval | None:
    return None if interval is None else (factor * interval[0], factor * interval[1])


def _curves(recipe: SelectRecipe, name: str, replays: Sequence[Replay], yardstick: Hindsight) -> dict[str, list[float]]:
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


def _replay_subsets(recipe: SelectRecipe, table: Table, count: int) -> list[PoolSize]:
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
