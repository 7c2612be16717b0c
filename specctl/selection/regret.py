"""What replays are judged by: mat, shares of the best arm in hindsight, regrets over tokens, bootstrap intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specctl.selection.hindsight import Hindsight, Ints
from specctl.selection.policy import Array
from specctl.selection.replay import Played, Replay
from specctl.selection.rules import Rules

Interval = tuple[float, float]


@dataclass(frozen=True)
class Summary:
    """A replay in numbers.

    Attributes:
        mat, mat_macro: tokens ÷ rounds over all traces; mean over traces.
        oracle_mat: mat of the best single arm of every game.
        oracle_share: mat ÷ oracle_mat, and its interval over games.
        regret: stopping-time regret, rounds − the best arm's rounds, mean of a game.
        best_arm_ratio: rounds that the game's best arm played ÷ rounds.
        pulls: [N] rounds of each arm.
        tokens_per_s: by the table's cost model.
    """

    algo: str
    queries: int
    games: int
    tokens: int
    rounds: int
    mat: float
    mat_interval: Interval
    mat_macro: float
    oracle_mat: float
    oracle_share: float
    oracle_share_interval: Interval
    regret: float
    best_arm_ratio: float | None
    pulls: list[int]
    tokens_per_s: float
    decide_us_p50: float | None
    dropped: int


def bootstrap_ratio(
    numerator: Array, denominator: Array, seed: int, draws: int = 1000, level: float = 0.95
) -> Interval:
    """Percentile interval of Σ numerator ÷ Σ denominator over games [G] drawn with replacement."""
    top, bottom = _draw([numerator, denominator], denominator > 0, seed, draws)
    return _percentiles(top / bottom, level)


def bootstrap_difference(
    tokens: Array, rounds: Array, other_rounds: Array, seed: int, draws: int = 1000, level: float = 0.95
) -> Interval:
    """Interval of the difference of two policies' mat, paired: both are measured on the same drawn games [G]."""
    total, own, other = _draw([tokens, rounds, other_rounds], tokens > 0, seed, draws)
    return _percentiles(total / own - total / other, level)


def _draw(values: list[Array], played: NDArray[np.bool_], seed: int, draws: int) -> list[Array]:
    """[draws] sums of each of the values [G] over games drawn with replacement from those that had a round."""
    games = np.flatnonzero(played)
    pick = games[np.random.default_rng(seed).integers(len(games), size=(draws, len(games)))]
    return [value[pick].sum(axis=1) for value in values]


def _percentiles(values: Array, level: float) -> Interval:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def per_game(values: Array | Ints, games: list[list[int]]) -> Array:
    """[Q] of traces → [G] their sums over each game."""
    return np.array([values[queries].sum() for queries in games], dtype=float)


def summarize(replay: Replay, hindsight: Hindsight, seed: int = 0) -> Summary:
    """The numbers of a replay; `seed` is that of the bootstrap."""
    tokens = per_game(hindsight.tokens, replay.games)
    rounds = per_game(replay.rounds, replay.games)
    best = np.array([hindsight.rounds[queries].sum(axis=0).min() for queries in replay.games], dtype=float)
    pulled = np.concatenate([part.arms for part in replay.played] or [np.zeros(0, int)])
    on_best = sum(int((part.arms == part.best).sum()) for part in replay.played)
    chosen = len(pulled) > 0
    decoded = hindsight.tokens > 0  # an answer may end at once
    return Summary(
        algo=replay.name,
        queries=len(hindsight.tokens),
        games=len(replay.games),
        tokens=int(tokens.sum()),
        rounds=int(rounds.sum()),
        mat=float(tokens.sum() / rounds.sum()),
        mat_interval=bootstrap_ratio(tokens, rounds, seed),
        mat_macro=float((hindsight.tokens[decoded] / replay.rounds[decoded]).mean()),
        oracle_mat=float(tokens.sum() / best.sum()),
        oracle_share=float(best.sum() / rounds.sum()),
        oracle_share_interval=bootstrap_ratio(best, rounds, seed),
        regret=float((rounds - best).mean()),
        best_arm_ratio=on_best / len(pulled) if chosen else None,
        pulls=np.bincount(pulled, minlength=len(hindsight.table.arms)).tolist(),
        tokens_per_s=float(tokens.sum() / replay.seconds.sum()),
        decide_us_p50=float(np.median(np.concatenate([part.decide_us for part in replay.played]))) if chosen else None,
        dropped=sum(part.dropped for part in replay.played),
    )


def mat_by_domain(replay: Replay, hindsight: Hindsight) -> dict[str, float]:
    """Tokens ÷ rounds over the traces of each domain, in the order of the stream."""
    domains: dict[str, list[int]] = {}
    for index, trace in enumerate(hindsight.table.traces):
        domains.setdefault(trace.domain, []).append(index)
    tokens, rounds = hindsight.tokens, replay.rounds
    return {name: float(tokens[of].sum() / rounds[of].sum()) for name, of in domains.items() if rounds[of].any()}


def stopping_regret(played: Played, hindsight: Hindsight) -> Ints:
    """[tokens of the game] rounds until each token stands, less those of the game's best arm."""
    own = np.repeat(np.arange(1, len(played.arms) + 1), played.committed)
    return own - _rounds_of_best(played, hindsight)


def _rounds_of_best(played: Played, hindsight: Hindsight) -> Ints:
    """[tokens of the game] rounds of the game's best arm until each token stands."""
    return np.concatenate([hindsight.begins[index][played.best] for index in played.queries]).cumsum()


def loss_regret(played: Played, hindsight: Hindsight, rules: Rules) -> Array:
    """[tokens of the game] Σ losses of the arms that played − those of the arm with the least up to that token."""
    losses = np.concatenate([hindsight.losses(index, rules) for index in played.queries])
    owners = np.repeat(played.arms, played.committed)
    return losses[np.arange(len(owners)), owners].cumsum() - losses.cumsum(axis=0).min(axis=1)


def late_share(replay: Replay, hindsight: Hindsight, tokens: int) -> float | None:
    """Share of the best arm's mat once so many tokens were seen since the reset; None if no game is that long."""
    own = best = 0
    for part in replay.played:
        rounds = _rounds_of_best(part, hindsight)
        if len(rounds) > tokens:
            best += int(rounds[-1] - rounds[tokens])
            own += len(part.arms) - int(np.searchsorted(part.committed.cumsum(), tokens, side="right") + 1)
    return best / own if own else None


def mean_curve(curves: list[Array]) -> Array:
    """[longest] mean at every position over those of the curves (first axis) that reach it."""
    longest = max(len(curve) for curve in curves)
    total = np.zeros((longest, *curves[0].shape[1:]))
    count = np.zeros(longest)
    for curve in curves:
        total[: len(curve)] += curve
        count[: len(curve)] += 1
    return total / count.reshape(-1, *[1] * (total.ndim - 1))
