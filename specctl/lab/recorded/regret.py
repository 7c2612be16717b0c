"""Measures of replays: mat, shares of the best arm in hindsight, regrets over tokens, bootstrap intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.lab.recorded.hindsight import Hindsight, Ints, PlayedGame
from specctl.lab.recorded.replay import Replay
from specctl.selection.game.rules import Rules
from specctl.selection.policies.policy import Array

Interval = tuple[float, float]


@dataclass(frozen=True)
class Summary:
    """The replays of one policy with several seeds, in numbers: sums over seeds and games.

    Attributes:
        games: G, number of games from reset to reset.
        tokens, rounds, seconds, scoring_s: [S, G] of every seed and game.
        mat: tokens ÷ rounds.
        oracle_mat: mat of the best single arm of every game.
        best, policy: [S, G] rounds (by throughput: seconds) of the best arm of each game, and of the policy.
        oracle_share: Σ best ÷ Σ own.
        regret: stopping-time regret, rounds − the best arm's rounds, mean over games.
        best_arm_ratio: rounds that the game's best arm played ÷ rounds.
        pulls: [N] rounds of each arm.
        scorings: number of rounds after which idle arms were scored.
        tokens_per_s: by the table's cost model.
        *_interval: see `bootstrap_ratio`.
    """

    algo: str
    games: int
    tokens: Array
    rounds: Array
    seconds: Array
    scoring_s: Array
    mat: float
    mat_interval: Interval | None
    oracle_mat: float
    best: Array
    policy: Array
    oracle_share: float
    oracle_share_interval: Interval | None
    regret: float
    best_arm_ratio: float | None
    pulls: list[int]
    scorings: int
    tokens_per_s: float
    tokens_per_s_interval: Interval | None
    decide_us_p50: float | None
    dropped: int


def bootstrap_ratio(
    top: Array, bottom: Array, seed: int = 0, draws: int = 1000, level: float = 0.95
) -> Interval | None:
    """Percentile interval of Σ top ÷ Σ bottom, [S, G] each, or None for a single cell. Seeds and games are both drawn
    with replacement, so the interval covers other draws of the policy as well as other prompts (the pigeonhole
    bootstrap, Owen 2007; if seeds differ between games by chance alone, it is a little too wide)."""
    seeds, games = top.shape
    if seeds == games == 1:
        return None
    draw = np.random.default_rng(seed)
    rows, columns = (draw.multinomial(n, np.full(n, 1 / n), size=draws).astype(float) for n in (seeds, games))
    with np.errstate(divide="ignore", invalid="ignore"):  # games without a round
        ratios = ((rows @ top) * columns).sum(axis=1) / ((rows @ bottom) * columns).sum(axis=1)
    low, high = np.quantile(ratios[np.isfinite(ratios)], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def per_game(values: Array | Ints, games: list[list[int]]) -> Array:
    """[Q] values of traces → [G] sums over each game."""
    return np.array([values[queries].sum() for queries in games], dtype=float)


def summarize(replays: Sequence[Replay], hindsight: Hindsight, seed: int = 0) -> Summary:
    """Summarize a policy's replays, one per seed; `seed` is for the bootstrap."""
    games = replays[0].games

    def cells(name: str) -> Array:
        return np.array([per_game(getattr(run, name), games) for run in replays])

    rounds, seconds = cells("rounds"), cells("seconds")
    tokens = np.tile(per_game(hindsight.tokens, games), (len(replays), 1))
    arms = [hindsight.best(queries) for queries in games]
    best = np.array([hindsight.single_arm_cost[queries, arm].sum() for queries, arm in zip(games, arms, strict=True)])
    passes = np.array([hindsight.rounds[queries, arm].sum() for queries, arm in zip(games, arms, strict=True)])
    own = rounds if hindsight.by == "mat" else seconds
    best = np.tile(best, (len(replays), 1))
    played = [part for run in replays for part in run.played]
    pulled = np.concatenate([part.arms for part in played] or [np.zeros(0, int)])
    chosen = len(pulled) > 0
    return Summary(
        algo=replays[0].name,
        games=len(games),
        tokens=tokens,
        rounds=rounds,
        seconds=seconds,
        scoring_s=cells("scoring_s"),
        mat=float(tokens.sum() / rounds.sum()),
        mat_interval=bootstrap_ratio(tokens, rounds, seed),
        oracle_mat=float(tokens[0].sum() / passes.sum()),
        best=best,
        policy=own,
        oracle_share=float(best.sum() / own.sum()),
        oracle_share_interval=bootstrap_ratio(best, own, seed),
        regret=float((rounds - passes).mean()),
        best_arm_ratio=sum(int((part.arms == part.best).sum()) for part in played) / len(pulled) if chosen else None,
        pulls=np.bincount(pulled, minlength=len(hindsight.table.arms)).tolist(),
        scorings=sum(int((part.scored > 0).sum()) for part in played),
        tokens_per_s=float(tokens.sum() / seconds.sum()),
        tokens_per_s_interval=bootstrap_ratio(tokens, seconds, seed),
        decide_us_p50=float(np.median(np.concatenate([part.decide_us for part in played]))) if chosen else None,
        dropped=sum(part.dropped for part in played),
    )


def mat_by_domain(replays: Sequence[Replay], hindsight: Hindsight) -> dict[str, float]:
    """Tokens ÷ rounds over the traces of each domain, in the order of the stream, all seeds together."""
    domains: dict[str, list[int]] = {}
    for index, trace in enumerate(hindsight.table.traces):
        domains.setdefault(trace.domain, []).append(index)
    tokens, rounds = len(replays) * hindsight.tokens, np.sum([run.rounds for run in replays], axis=0)
    return {name: float(tokens[of].sum() / rounds[of].sum()) for name, of in domains.items() if rounds[of].any()}


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
