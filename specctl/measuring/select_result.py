"""Result document of `select`, `record`, `replay` and `train-router`."""

from dataclasses import dataclass
from typing import Any, Literal

from specctl.measuring.drafter_rows import Row
from specctl.measuring.lossless import Losslessness
from specctl.measuring.policy_rows import ArmReward, PolicyRow

TOP_FIELDS = (
    *("algo", "rounds", "mat", "tokens_per_s", "regret", "best_arm_ratio", "pulls"),
    *("decide_us_p50", "score_ms_p50"),
)
"""Fields of the first policy's row that are repeated at the top of the document."""


@dataclass(frozen=True)
class DomainMat:
    """Replay: a contender's mat in a domain, and its modeled speed relative to plain decoding."""

    drafter: str
    domain: str
    mat: float
    speedup: float


@dataclass(frozen=True)
class PoolSize:
    """Replay: mean results on subsets of `arms` arms."""

    arms: int
    algo: str
    mat: float
    share_of_best: float


@dataclass(frozen=True)
class SelectResult:
    """The result document of `select`: the first policy's numbers, then all contenders side by side.

    The commands `record`, `replay` and `train-router` have the same document.

    Attributes:
        mode: live, replay or record.
        seeds: number of repetitions, each with other random draws.
        yardstick: measure that decides the best arm of a game: mat or throughput.
        intervals_over: unit that is resampled for the intervals.
        speeds: whether speeds are measured, or modeled from the costs in the table.
        oracle_mat: mat of playing each game's best arm. Like `regret` and `best_arm_ratio` it needs the baseline
            `fixed`, which a replay always has.
        curves: by policy; live by prompt, in a replay by token since the reset, as means over its games.
        table, table_sha256: the table that was recorded or replayed.
        router: report of a router that was trained for the run.
        rounds_on: where the rounds of drafting contenders ran; both = a device has handed some back to the host.
        beside: the text drafter that heads draft with in one tree.
        at_least: meaning and assumptions of the rows' bounds `speedup_at_least` and `over_best_arm_at_least`.
        store_s: seconds spent on adding texts to its store.
    """

    mode: str
    algo: str
    arms: list[str]
    reset: str
    seeds: int
    yardstick: str
    intervals_over: str
    speeds: str
    queries: int
    sessions: int
    rounds: int
    mat: float | None
    tokens_per_s: float | None
    oracle_mat: float | None
    regret: int | None
    best_arm_ratio: float | None
    pulls: dict[str, int]
    decide_us_p50: float | None
    score_ms_p50: float | None
    per_domain: list[Row] | list[DomainMat]
    policies: list[PolicyRow]
    curves: dict[str, dict[str, list[float]]]
    rewards: list[ArmReward]
    pool_size: list[PoolSize]
    lossless: Losslessness
    rejected: int
    table: str | None = None
    table_sha256: str | None = None
    router: Any = None
    rounds_on: Literal["host", "device", "both"] = "host"
    beside: str | None = None
    store_s: float | None = None
    at_least: str | None = None


def top_fields(row: PolicyRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in TOP_FIELDS}
