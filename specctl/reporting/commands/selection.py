"""Report of `select`: regret of the policies, arms played and their rewards.

Pictures come from `curves`, `policies`, `pool_size` and `rewards` of the result, and from rounds.jsonl, with one line
per round. Missing data is left out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.reporting import bars, curves
from specctl.reporting.bars import Bar
from specctl.reporting.collect import RunRecord, flat
from specctl.reporting.contents import Contents, Picture, ReportTable, add, headline, labeled_rows, numbers, records
from specctl.reporting.curves import Curve, Panel
from specctl.reporting.style import Looks
from specctl.reporting.tables import headings

MOST_ARMS = 1000
BINS = 200
"""Minimal number of points in a picture of weights, given enough rounds; the maximum is twice this number."""


@dataclass
class Rounds:
    """Rounds of one policy, aggregated line by line, because a long run has millions.

    `arms` is extended by arms that are missing in the result of a stopped run. `weights` are sums over stretches of
    `stretch` rounds: sums of the policy's weights or, for a policy without weights, of its plays.
    """

    arms: list[str]
    pulls: dict[str, Counter[int]] = field(default_factory=dict)  # keyed by domain
    weights: list[list[float]] = field(default_factory=list)
    has_weights: bool = False
    stretch: int = 1
    count: int = 0

    def add(self, line: Mapping[str, Any], weights: Sequence[float] | None = None) -> None:
        """Count a round. A policy without plain decoding, the first arm, has one weight less than there are arms."""
        arm, given = self._index(line["arm"]), weights and [0.0] * (len(self.arms) - len(weights)) + list(weights)
        self.pulls.setdefault(str(line.get("domain") or "all"), Counter())[arm] += 1
        self.has_weights |= given is not None
        if self.count % self.stretch == 0:
            if len(self.weights) == 2 * BINS:
                self.weights = [add(*pair) for pair in zip(self.weights[::2], self.weights[1::2], strict=True)]
                self.stretch *= 2
            self.weights.append([])
        self.weights[-1] = add(self.weights[-1], given or [float(index == arm) for index in range(len(self.arms))])
        self.count += 1

    @property
    def shares(self) -> list[list[float]]:
        """Means per stretch [arms, stretches]."""
        sizes = [min(self.stretch, self.count - self.stretch * n) for n in range(len(self.weights))]
        return [
            [(total[arm] if arm < len(total) else 0.0) / size for total, size in zip(self.weights, sizes, strict=True)]
            for arm in range(len(self.arms))
        ]

    @property
    def middles(self) -> list[float]:
        return [(n + 0.5) * self.stretch for n in range(len(self.weights))]

    def _index(self, arm: int | str) -> int:
        if isinstance(arm, int):
            if not 0 <= arm < MOST_ARMS:
                raise ValueError(f"there is no arm {arm}")
            self.arms.extend(f"arm {index}" for index in range(len(self.arms), arm + 1))
            return arm
        if arm not in self.arms:
            self.arms.append(arm)
        return self.arms.index(arm)


OF_A_RUN = ("reset", "seeds", "yardstick", "intervals_over", "speeds", "table_sha256")
SUMMARY = headings(
    *("label", "mat", "oracle_mat", "regret", "best_arm_ratio", "tokens_per_s", "queries", "rounds"),
    *("decide_us_p50", "score_ms_p50", *OF_A_RUN),
    label="policy",
    best_arm_ratio="best arm",
    decide_us_p50="decision µs, median",
    score_ms_p50="scoring ms, median",
    yardstick="best arm by",
    table_sha256="table, sha256",
)
POLICIES = headings(
    *("label", "mat", "mat_low", "mat_high", "share_of_best", "share_low", "share_high", "speedup_at_least"),
    *("over_best_arm_at_least", "regret", "best_arm_ratio", "tokens_per_s", "rounds", "scorings"),
    label="policy",
    mat_low="95 %, low",
    mat_high="95 %, high",
    share_of_best="share of the best arm's",
    share_low="share 95 %, low",
    share_high="share 95 %, high",
    best_arm_ratio="best arm",
    **{key: SUMMARY[key] for key in OF_A_RUN},
)
HEADLINE = ("mat", "oracle_mat", "best_arm_ratio", "regret", "tokens_per_s", "decide_us_p50")
REGRETS = {"loss_regret": "cumulative\nloss regret", "stopping_regret": "cumulative\nstopping-time regret (rounds)"}
SMOOTHED = 9
"""Window of the running mean over plays, which change from round to round."""


def contents(runs: Sequence[RunRecord], looks: Looks) -> Contents:
    played = [read_rounds(run) for run in runs]
    policies = Looks()  # policies are not drafters, so they have separate colors
    made = Contents(headline=headline([run.result for run in runs], {key: SUMMARY[key] for key in HEADLINE}))
    for draw in (_regrets, _best_arm, _compared, _pool_size):
        made.pictures += draw(runs, policies)
    made.pictures += _rewards(runs, looks)
    for run, rounds in zip(runs, played, strict=True):
        made.pictures += _played(run, rounds, looks)
    made.tables = _tables(runs, played)
    return made


def _algo(run: RunRecord) -> str:
    """Name of the run's first policy; while a run is going on, it is read from the recipe's list."""
    algo = run.result.get("algo") or run.keys().get("algo") or "policy"
    return run.named(str(algo[0] if isinstance(algo, list) else algo))


def _curves(runs: Sequence[RunRecord], key: str) -> dict[str, Sequence[Any]]:
    """Collect curves by policy, with labels that distinguish the runs."""
    curves_of = {}
    for run in runs:
        for policy, values in (run.result.get("curves") or {}).items():
            if values.get(key):
                curves_of[run.named(policy)] = values[key]
    return curves_of


def _lines(curves_of: Mapping[str, Sequence[Any]], policies: Looks) -> list[Curve]:
    return [
        Curve(name, list(range(1, len(values) + 1)), numbers(values), policies[name])
        for name, values in curves_of.items()
    ]


def _along(runs: Sequence[RunRecord]) -> str:
    """Axis label: prompts of a stream, or tokens since the reset in replays (means over the games)."""
    replayed = {run.result.get("mode") == "replay" for run in runs}
    return " or ".join(
        name for name, there in (("prompt", False), ("token since the reset", True)) if there in replayed
    )


def _regrets(runs: Sequence[RunRecord], policies: Looks) -> list[Picture]:
    panels = [Panel(label, _lines(_curves(runs, key), policies)) for key, label in REGRETS.items()]
    return curves.picture("regret", "Cumulative regret against the best single arm.", panels, _along(runs))


def _best_arm(runs: Sequence[RunRecord], policies: Looks) -> list[Picture]:
    panel = Panel("share of games", _lines(_curves(runs, "best_arm"), policies), limits=(0, 1.03))
    return curves.picture("best-arm", "Share of games in which the best arm is played.", [panel], _along(runs))


def _compared(runs: Sequence[RunRecord], policies: Looks) -> list[Picture]:
    shown = [
        Bar(run.named(row["algo"]), row["mat"], _interval(row), policies[run.named(row["algo"])])
        for run in runs
        for row in run.result.get("policies") or []
        if row.get("mat") is not None
    ]
    if not shown:
        return []
    figure = bars.bars({"": shown}, "mat (tokens per pass of the target)", reference=1.0)
    over = sorted({str(run.result["intervals_over"]) for run in runs if run.result.get("intervals_over")})
    drawn = f" over {' or '.join(over)}" if over else ""
    return [Picture("policies", f"Policies on the same stream; whiskers: 95 % intervals{drawn}.", figure)]


def _interval(row: Mapping[str, Any]) -> tuple[float, float] | None:
    return tuple(row["mat_interval"]) if row.get("mat_interval") else None


def _pool_size(runs: Sequence[RunRecord], policies: Looks) -> list[Picture]:
    by_policy: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        for row in run.result.get("pool_size") or []:
            by_policy.setdefault(run.named(row["algo"]), []).append(row)
    lines = [
        Curve(name, numbers(row["arms"] for row in rows), numbers(row.get("mat") for row in rows), policies[name])
        for name, rows in ((name, sorted(rows, key=lambda row: row["arms"])) for name, rows in by_policy.items())
    ]
    panel = Panel("mat (tokens per pass of the target)", lines)
    return curves.picture("pool-size", "Mat by number of drafters in the pool.", [panel], "drafters in the pool, N")


def _rewards(runs: Sequence[RunRecord], looks: Looks) -> list[Picture]:
    shown = [
        Bar(run.named(row["arm"]), row["mean"], _spread(row), looks[row["arm"]])
        for run in runs
        for row in run.result.get("rewards") or []
        if row.get("mean") is not None and row.get("reward", "tokens") == "tokens"
    ]
    if not shown:
        return []
    figure = bars.bars({"": shown}, "tokens per round")
    return [Picture("rewards", "Tokens per round of each arm; whiskers: one standard deviation.", figure)]


def _spread(row: Mapping[str, Any]) -> tuple[float, float] | None:
    return None if row.get("std") is None else (row["mean"] - row["std"], row["mean"] + row["std"])


def _played(run: RunRecord, rounds: Rounds, looks: Looks) -> list[Picture]:
    """Plot the arms that one run played: weights over rounds, and pulls by domain."""
    if not rounds.count:
        return []
    arm_looks = [looks[arm] for arm in rounds.arms]
    shares, what = rounds.shares, "weight of each arm"
    if not rounds.has_weights:
        shares, what = [curves.running_mean(row, SMOOTHED) for row in shares], "share of rounds played"
    over_time = curves.stacked(rounds.middles, shares, rounds.arms, arm_looks, "round", what)
    by_domain = bars.shares(_pulls(rounds), rounds.arms, arm_looks, "share of rounds")
    return [
        Picture(run.stem("weights"), f"{_algo(run)}: {what} over the stream.", over_time),
        Picture(run.stem("pulls"), f"{_algo(run)}: which arms are played in which domain.", by_domain),
    ]


def _pulls(rounds: Rounds) -> dict[str, list[int]]:
    return {domain: [pulls[arm] for arm in range(len(rounds.arms))] for domain, pulls in rounds.pulls.items()}


def _tables(runs: Sequence[RunRecord], played: Sequence[Rounds]) -> list[ReportTable]:
    policies = [
        {**{key: run.result.get(key) for key in OF_A_RUN}, **row}
        for run in runs
        for row in labeled_rows([run], "policies", "algo")
    ]
    for row in policies:
        row["mat_low"], row["mat_high"] = _interval(row) or (None, None)
        row["share_low"], row["share_high"] = row.get("share_of_best_interval") or (None, None)
    summary = [{**run.result, "label": _algo(run)} for run in runs if run.result]
    rewards = headings("label", "reward", "mean", "std", "zeros", "n", label="arm")
    sizes = headings("label", "arms", "mat", label="policy", arms="N")
    tables = [
        records("select", "Selection", summary, SUMMARY),
        records("policies", "Policies compared", policies, POLICIES),
        records("rewards", "Rewards", labeled_rows(runs, "rewards", "arm"), rewards),
        records("pool-size", "Pool sizes", labeled_rows(runs, "pool_size", "algo"), sizes),
    ]
    domains = [
        {"label": run.named(row["drafter"]) if "drafter" in row else _algo(run), **row}
        for run in runs
        for row in _per_domain(run)
    ]
    columns = {name: name for row in domains for name in row if name != "drafter"} | {"label": "contender"}
    tables.append(records("domains", "Domains", domains, columns))
    for run, rounds in zip(runs, played, strict=True):
        rows = [[domain, *pulls] for domain, pulls in _pulls(rounds).items()]
        title = run.named("Rounds by domain and arm")
        tables.append(ReportTable(run.stem("pulls"), title, ["domain", *rounds.arms], rows))
    return tables


def _per_domain(run: RunRecord) -> list[dict[str, Any]]:
    """Rows of `per_domain`, given as a list or as `{domain: row}`."""
    given = run.result.get("per_domain") or []
    rows = [{"domain": name, **row} for name, row in given.items()] if isinstance(given, dict) else given
    return [dict(flat(row)) for row in rows]


def read_rounds(run: RunRecord) -> Rounds:
    """Read the rounds of the run's policy. If several policies answer every prompt in turn, only the first is read."""
    named = run.result.get("arms") or []
    rounds = Rounds([str(arm) for arm in named])
    policy = run.result.get("algo")
    for line in run.lines("rounds.jsonl"):
        policy = policy or line.get("algo")
        if line.get("algo") in (None, policy):
            rounds.add(line, line.get("weights") if named else None)  # a stopped run does not name the arms in order
    return rounds
