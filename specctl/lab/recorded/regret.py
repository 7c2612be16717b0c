"""Measures of replays: mat, shares of the best arm in hindsight, regrets over tokens, bootstrap intervals."""

from collections.abc import Sequence

import numpy as np

from specctl.decoding.metrics import LEVEL, Interval
from specctl.lab.recorded.hindsight import Hindsight, Ints, PlayedGame
from specctl.lab.recorded.replay import Replay
from specctl.measuring.measured import Measured, columns
from specctl.measuring.policy_rows import LONG_GAME_TOKENS, PolicyRow
from specctl.measuring.select_result import DomainMat
from specctl.selection.game.rules import Rules
from specctl.selection.policies.policy import Array


def bootstrap_ratio(top: Array, bottom: Array) -> Interval | None:
    """Percentile interval at LEVEL of Σ top ÷ Σ bottom, [S, G] each, or None for a single cell.

    Seeds and games are both drawn with replacement, so the interval covers other draws of the policy as well as other
    prompts (the pigeonhole bootstrap, Owen 2007; if seeds differ between games by chance alone, it is a little too
    wide).
    """
    seeds, games = top.shape
    if seeds == games == 1:
        return None
    draw = np.random.default_rng(0)
    rows, columns = (draw.multinomial(n, np.full(n, 1 / n), size=1000).astype(float) for n in (seeds, games))
    with np.errstate(divide="ignore", invalid="ignore"):  # games without a round
        ratios = ((rows @ top) * columns).sum(axis=1) / ((rows @ bottom) * columns).sum(axis=1)
    low, high = np.quantile(ratios[np.isfinite(ratios)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def per_game(values: Array | Ints, games: list[list[int]]) -> Array:
    """[Q] values of traces → [G] sums over each game."""
    return np.array([values[queries].sum() for queries in games], dtype=float)


def row(
    name: str, kind: str, replays: Sequence[Replay], hindsight: Hindsight, fastest: Sequence[Replay] = ()
) -> PolicyRow:
    """The row of a contender, with the columns of a live run, from its replays, one per seed. Ratios are of sums over
    seeds and games, [S, G]; seconds come from the table's cost model.

    `fastest`: replays of the fastest arm alone.
    """
    games, plain_s = hindsight.games, float(hindsight.table.step_s[0])

    def cells(field: str, runs: Sequence[Replay] = replays) -> Array:
        return np.array([per_game(getattr(run, field), games) for run in runs])

    rounds, seconds = cells("rounds"), cells("seconds")
    tokens = np.tile(per_game(hindsight.tokens, games), (len(replays), 1))
    best_arms = [(queries, hindsight.best(queries)) for queries in games]
    best = np.tile([hindsight.single_arm_cost[queries, arm].sum() for queries, arm in best_arms], (len(replays), 1))
    passes = np.array([hindsight.rounds[queries, arm].sum() for queries, arm in best_arms])
    by_mat, chooses = hindsight.by == "mat", kind == "policy"
    own = rounds if by_mat else seconds
    long = tokens[0] >= LONG_GAME_TOKENS
    played = [part for run in replays for part in run.played]
    pulled = np.concatenate([part.arms for part in played] or [np.zeros(0, int)])
    pulls = np.bincount(pulled, minlength=len(hindsight.table.arms)).tolist()
    on_best = sum(int((part.arms == part.best).sum()) for part in played)
    return PolicyRow(
        algo=name,
        kind=kind,
        tokens_per_s=float(tokens.sum() / seconds.sum()),
        share_of_best_256=float(best[:, long].sum() / own[:, long].sum()) if long.any() else None,
        share_after_256=late_share(replays, hindsight, LONG_GAME_TOKENS) if chooses and by_mat else None,
        regret=round(float((rounds - passes).sum())) if by_mat else None,
        best_arm_ratio=on_best / len(pulled) if len(pulled) else None,
        rounds=int(rounds.sum()),
        pulls={arm: count for arm, count in zip(hindsight.table.arms, pulls, strict=True) if count},
        decide_us_p50=float(np.median(np.concatenate([part.decide_us for part in played]))) if chooses else None,
        scorings=sum(int((part.scored > 0).sum()) for part in played) if chooses else None,
        score_share=float(cells("scoring_s").sum() / seconds.sum()) or None,
        dropped=sum(part.dropped for part in played),
        **columns(
            mat=_ratio(tokens, rounds),
            speedup=_ratio(tokens * plain_s, seconds),
            over_best_arm=_ratio(cells("seconds", fastest), seconds) if fastest else Measured(),
            share_of_best=_ratio(best, own),
        ),
    )


def _ratio(top: Array, bottom: Array) -> Measured:
    return Measured(float(top.sum() / bottom.sum()), bootstrap_ratio(top, bottom))


def by_domain(name: str, replays: Sequence[Replay], hindsight: Hindsight) -> list[DomainMat]:
    """A contender's rows for the domains of the stream, in their order, all seeds together."""
    domains: dict[str, list[int]] = {}
    for index, trace in enumerate(hindsight.table.traces):
        domains.setdefault(trace.domain, []).append(index)
    tokens = len(replays) * hindsight.tokens
    rounds, seconds = (np.sum([getattr(run, field) for run in replays], axis=0) for field in ("rounds", "seconds"))
    plain_s = tokens * hindsight.table.step_s[0]
    return [
        DomainMat(
            name, domain, float(tokens[of].sum() / rounds[of].sum()), float(plain_s[of].sum() / seconds[of].sum())
        )
        for domain, of in domains.items()
        if rounds[of].any()
    ]


def stopping_regret(played: PlayedGame, hindsight: Hindsight) -> Ints:
    """[tokens of the game] rounds until each token is committed, minus the rounds of the game's best arm."""
    own = np.repeat(np.arange(1, len(played.arms) + 1), played.committed)
    return own - _rounds_of_best(played, hindsight)


def _rounds_of_best(played: PlayedGame, hindsight: Hindsight) -> Ints:
    """[tokens of the game] rounds of the game's best arm until each token is committed."""
    return np.concatenate([hindsight.begins[index][played.best] for index in played.queries]).cumsum()


def loss_regret(played: PlayedGame, hindsight: Hindsight, rules: Rules) -> Array:
    """[tokens of the game] Σ losses of the arms that played − the least Σ losses of a single arm until that token."""
    losses = np.concatenate([hindsight.losses(index, rules) for index in played.queries])
    owners = np.repeat(played.arms, played.committed)
    return losses[np.arange(len(owners)), owners].cumsum() - losses.cumsum(axis=0).min(axis=1)


def late_share(replays: Sequence[Replay], hindsight: Hindsight, tokens: int) -> float | None:
    """Share of the best arm's mat after the first `tokens` tokens since the reset, or None if no game is that long."""
    own = best = 0
    for part in (part for run in replays for part in run.played):
        rounds = _rounds_of_best(part, hindsight)
        if len(rounds) > tokens:
            best += int(rounds[-1] - rounds[tokens])
            own += len(part.arms) - int(np.searchsorted(part.committed.cumsum(), tokens, side="right") + 1)
    return best / own if own else None


def mean_curve(curves: list[Array]) -> Array:
    """[longest] mean at every position (first axis) over the curves that reach it."""
    longest = max(len(curve) for curve in curves)
    total = np.zeros((longest, *curves[0].shape[1:]))
    count = np.zeros(longest)
    for curve in curves:
        total[: len(curve)] += curve
        count[: len(curve)] += 1
    return total / count.reshape(-1, *[1] * (total.ndim - 1))
