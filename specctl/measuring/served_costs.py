"""Draft lengths for an engine's loads, and what better drafters are worth, by a sweep of `eval --server`.

The model. A round drafts k tokens for each of b texts, and the target verifies k + 1 positions of each. It takes

    t(k, b) = s₀ + s₁ b + k (d₀ + d₁ b)   seconds,

linear in the batch and in the length: s of a plain step, d of one more token, drafted and verified. It yields
1 + Σ_{j≤k} Π_{i≤j} αᵢ tokens of each text (Leviathan et al. 2023, equation 1, where all α are equal), αᵢ the chance
that the i-th token of a draft is accepted once those before it are. Texts that are decoded together share the round, so
the best k of a load is that of the most tokens per second of a text.

Its inputs. Plain steps are the baseline server's times between tokens. Rounds are the server's times between tokens, by
mat tokens each. Batches are the requests in flight, on the average over the pass. α are pooled over all loads. Loads
between measured ones, and lengths between 0 and the one that the server drafted, are the model's; others are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import mul
from pathlib import Path
from typing import Any

from specctl import regular
from specctl.errors import DataError
from specctl.formats.head import LengthRange

NEAR = 0.05
"""Lengths that lose no more than this share of the best one's tokens per second are about as good."""
ROUGH = 0.15
"""Relative error of a modelled time from which on a user is told."""
LARGEST = 1e18  # that a number of a result document is believed
SWEEP = "specctl eval --server URL --baseline-server URL --concurrency 1,4,16,64"


@dataclass(frozen=True)
class Load:
    """One measured load: both servers with so many requests in flight, all domains together.

    Attributes:
        concurrency: requests that were kept in flight.
        batch, plain_batch: that were, on the average, with and without drafts.
        step_s: a plain step.
        round_s: a round.
        mat: tokens of it.
    """

    concurrency: int
    batch: float
    plain_batch: float
    step_s: float
    round_s: float
    mat: float


@dataclass(frozen=True)
class Sweep:
    """Measured loads, ascending.

    Attributes:
        drafted: tokens of a draft.
        acceptance: α of each of them.
    """

    loads: list[Load]
    drafted: int
    acceptance: list[float]


@dataclass(frozen=True)
class RoundCosts:
    """s₀, s₁, d₀ and d₁, in seconds."""

    step: float
    step_per_text: float
    token: float
    token_per_text: float

    def seconds(self, length: int, batch: float) -> float:
        """t(k, b)."""
        return self.step + self.step_per_text * batch + length * (self.token + self.token_per_text * batch)


@dataclass(frozen=True)
class Fit:
    """A measured load beside the model's times of it."""

    concurrency: int
    batch: float
    step_s: float
    modelled_step_s: float
    round_s: float
    modelled_round_s: float

    @property
    def error(self) -> float:
        """The larger of both relative errors."""
        pairs = ((self.step_s, self.modelled_step_s), (self.round_s, self.modelled_round_s))
        return max(abs(modelled / measured - 1) for measured, modelled in pairs)


@dataclass(frozen=True)
class TunedRange:
    """A range of batches and the draft length that pays there.

    Attributes:
        mat: tokens of a round, by the model.
        speedup: over plain decoding, of the first and of the last batch, by the model.
        near: lengths that lose little at both ends of the range, the chosen one among them.
        measured: loads that were measured in the range; none where it is the model's alone.
    """

    first: int
    last: int
    tokens: int
    mat: float
    speedup: tuple[float, float]
    near: list[int]
    measured: list[int]


@dataclass(frozen=True)
class Tuning:
    """Draft lengths by load, and what they were derived from."""

    sweep: str
    ranges: list[TunedRange]
    acceptance: list[float]
    drafted: int
    costs: RoundCosts
    fits: list[Fit]
    notes: list[str]

    @property
    def schedule(self) -> list[LengthRange]:
        """The ranges, as engines are told."""
        return [LengthRange(one.first, one.last, one.tokens, tuple(one.near)) for one in self.ranges]


@dataclass(frozen=True)
class Worth:
    """The speed of other drafters at a measured load, of which a round takes what it took with the one measured.

    Attributes:
        break_even: mat from which on drafting is faster than plain decoding.
        mats: tokens of a round, of drafters that may not exist yet.
        tokens_per_s: of all texts together, while they are decoded.
        speedups: over plain decoding.
    """

    concurrency: int
    step_s: float
    round_s: float
    mat: float
    break_even: float
    mats: list[float]
    tokens_per_s: list[float]
    speedups: list[float]


def worth(load: Load, mats: Sequence[float]) -> Worth:
    """mat ÷ t(K, b) tokens a second of each text, over 1 ÷ t(0, b); equal at mat = t(K, b) ÷ t(0, b)."""
    return Worth(
        concurrency=load.concurrency,
        step_s=load.step_s,
        round_s=load.round_s,
        mat=load.mat,
        break_even=load.round_s / load.step_s,
        mats=list(mats),
        tokens_per_s=[load.batch * mat / load.round_s for mat in mats],
        speedups=[mat * load.step_s / load.round_s for mat in mats],
    )


def conditional(shares: Sequence[float]) -> list[float]:
    """αᵢ from the shares of rounds of which the i-th token was accepted, and so all before it."""
    before = [1.0, *shares]
    return [min(1.0, share / last) if last > 0 else 0.0 for share, last in zip(shares, before, strict=False)]


def expected_tokens(acceptance: Sequence[float], length: int) -> float:
    """1 + Σ_{j≤k} Π_{i≤j} αᵢ: tokens of a round that drafts k, the target's own included."""
    return 1.0 + sum(accumulate(acceptance[:length], mul))


def text_rate(acceptance: Sequence[float], costs: RoundCosts, length: int, batch: float) -> float:
    """Tokens a second of one text in a batch."""
    return expected_tokens(acceptance, length) / costs.seconds(length, batch)


def best_length(acceptance: Sequence[float], costs: RoundCosts, batch: float, lengths: Sequence[int]) -> int:
    """The length of the most tokens a second; the shortest of several."""
    return max(lengths, key=lambda k: (text_rate(acceptance, costs, k, batch), -k))


def line(at: Sequence[float], values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """The a, c ≥ 0 of the least Σ w (a + c·at − value)²; of a single place c is 0."""

    def error(a: float, c: float) -> float:
        return sum(w * (a + c * x - y) ** 2 for x, y, w in zip(at, values, weights, strict=True))

    total = sum(weights)
    x_mean = sum(w * x for x, w in zip(at, weights, strict=True)) / total
    y_mean = sum(w * y for y, w in zip(values, weights, strict=True)) / total
    spread = sum(w * (x - x_mean) ** 2 for x, w in zip(at, weights, strict=True))
    joint = sum(w * (x - x_mean) * (y - y_mean) for x, y, w in zip(at, values, weights, strict=True))
    slope = joint / spread if spread > 0 else 0.0
    steep = sum(w * x * y for x, y, w in zip(at, values, weights, strict=True)) / sum(
        w * x * x for x, w in zip(at, weights, strict=True)
    )
    # Where the free minimum has a negative part, the constrained one is on an edge.
    edges = [(y_mean, 0.0), (0.0, steep), (0.0, 0.0)]
    possible = [pair for pair in [(y_mean - slope * x_mean, slope), *edges] if min(pair) >= 0]
    return min(possible, key=lambda pair: error(*pair))


def fit(sweep: Sweep) -> RoundCosts:
    """Costs of the least squared relative errors of plain steps, then of rounds."""
    loads = sweep.loads
    step, step_per_text = line(
        [load.plain_batch for load in loads], [load.step_s for load in loads], [load.step_s**-2 for load in loads]
    )
    over = [(load.round_s - step - step_per_text * load.batch) / sweep.drafted for load in loads]
    token, token_per_text = line([load.batch for load in loads], over, [load.round_s**-2 for load in loads])
    return RoundCosts(step, step_per_text, token, token_per_text)


def ranges(sweep: Sweep, costs: RoundCosts, lengths: Sequence[int]) -> list[TunedRange]:
    """The best of `lengths` for every batch from 1 to the largest that was measured."""
    largest = max(1, round(max(load.batch for load in sweep.loads)))
    made = []
    for tokens, some in groupby(
        range(1, largest + 1), key=lambda batch: best_length(sweep.acceptance, costs, batch, lengths)
    ):
        batches = list(some)
        ends = (batches[0], batches[-1])

        def rate(length: int, batch: int) -> float:
            return text_rate(sweep.acceptance, costs, length, batch)

        near = [k for k in lengths if all(rate(k, b) >= (1 - NEAR) * rate(tokens, b) for b in ends)]
        made.append(
            TunedRange(
                first=ends[0],
                last=ends[1],
                tokens=tokens,
                mat=expected_tokens(sweep.acceptance, tokens),
                speedup=(rate(tokens, ends[0]) / rate(0, ends[0]), rate(tokens, ends[1]) / rate(0, ends[1])),
                near=near,
                measured=[load.concurrency for load in sweep.loads if ends[0] <= round(load.batch) <= ends[1]],
            )
        )
    return made


def tune(path: Path, *, whole: bool = False) -> Tuning:
    """Draft lengths by load from the result of `eval --server`; `whole`: drafts come in blocks, or not at all.

    Raises DataError where the file is none, or was not measured beside a baseline at several loads.
    """
    sweep = read_sweep(path)
    if len({round(load.batch) for load in sweep.loads}) < 2:
        there = ", ".join(f"{load.batch:.1f} of {load.concurrency}" for load in sweep.loads)
        raise DataError(
            f"{path} has one load (in flight on the average: {there}): what a larger batch costs is not known",
            f"measure several, with as many prompts at least: {SWEEP}",
        )
    costs = fit(sweep)
    chosen = ranges(sweep, costs, [0, sweep.drafted] if whole else range(sweep.drafted + 1))
    fits = [
        Fit(
            load.concurrency,
            load.batch,
            load.step_s,
            costs.seconds(0, load.plain_batch),
            load.round_s,
            costs.seconds(sweep.drafted, load.batch),
        )
        for load in sweep.loads
    ]
    return Tuning(
        str(path), chosen, sweep.acceptance, sweep.drafted, costs, fits, doubts(sweep, fits, chosen, whole=whole)
    )


def doubts(sweep: Sweep, fits: Sequence[Fit], chosen: Sequence[TunedRange], *, whole: bool) -> list[str]:
    """Notes for a user, to be read before a schedule is believed."""
    notes = [f"batches above {chosen[-1].last} were not measured: engines go on with the last range"]
    guessed = [f"{one.first}–{one.last}" for one in chosen if not one.measured]
    if guessed:
        notes.append(f"no load was measured at batches {', '.join(guessed)}: their lengths are the model's alone")
    if not whole and any(0 < one.tokens < sweep.drafted for one in chosen):
        notes.append(f"lengths between 0 and {sweep.drafted} were not measured: their times are taken from a line")
    if any(one.tokens == sweep.drafted for one in chosen) and not whole:
        notes.append(f"the longest drafts measured, {sweep.drafted}, pay: longer ones may, too")
    rough = [f"{one.error:.0%} at {one.concurrency} in flight" for one in fits if one.error > ROUGH]
    if rough:
        notes.append(f"the model is off by {', '.join(rough)}: measure loads in between, or more prompts")
    idle = [load for load in sweep.loads if load.batch < 0.75 * load.concurrency]
    if idle:
        said = ", ".join(f"{load.concurrency} were {load.batch:.0f}" for load in idle)
        notes.append(f"requests in flight on the average: {said}; more prompts (--limit) keep more there")
    return notes


def read_sweep(path: Path) -> Sweep:
    """The sweep in a result document of `eval --server`, or in the run directory that holds one. Raises DataError."""
    file = path / "result.json" if path.is_dir() else path
    try:
        document = regular.document(file)
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}", f"the result.json of {SWEEP}") from error
    except ValueError as error:
        raise DataError(f"{file} is no JSON document", f"the result.json of {SWEEP}") from error
    try:
        for row in document["servers"]:
            _check_numbers(row)
        return sweep_of(document["servers"])
    except DataError as error:
        raise DataError(f"{file}: {error.message}", error.hint) from error
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise DataError(f"{file} is no result of eval --server ({type(error).__name__}: {error})", SWEEP) from error


def _check_numbers(row: Mapping[str, Any]) -> None:
    """DataError for a number that nobody has measured: negative, not finite, or absurdly large."""
    for key, value in row.items():
        numbers = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int | float)]
        if not all(0 <= one < LARGEST for one in numbers):
            raise DataError(f"{key} of a row is no measurement", f"measure again: {SWEEP}")


def sweep_of(rows: Sequence[Mapping[str, Any]]) -> Sweep:
    """The loads in rows of `eval --server`, domains pooled: plain steps by tokens, rounds by rounds.

    Raises DataError where there is no baseline, no draft, or no time between tokens.
    """
    loads, shares, weights = [], [], []
    for concurrency in sorted({row["concurrency"] for row in rows}):
        drafting, plain = (
            [row for row in rows if row["concurrency"] == concurrency and row["server"] == name]
            for name in ("server", "baseline")
        )
        if not plain:
            raise DataError("it has no baseline, so what a plain step takes is not known", f"measure one: {SWEEP}")
        untold = [row["domain"] for row in drafting if not row["mat"] or not row["acceptance_by_position"]]
        if untold:
            raise DataError(
                f"the server does not say what it accepted of drafts ({', '.join(untold)})",
                "it has to draft; SGLang tells it of requests, vLLM by /metrics",
            )
        if any(row["token_s"] is None for row in [*drafting, *plain]):
            raise DataError("answers of one token have no time between tokens", "raise --max-new-tokens")
        tokens = sum(row["tokens"] for row in plain)
        rounds = [row["tokens"] / row["mat"] for row in drafting]
        loads.append(
            Load(
                concurrency,
                batch=in_flight(drafting),
                plain_batch=in_flight(plain),
                step_s=sum(row["tokens"] * row["token_s"] for row in plain) / tokens,
                round_s=sum(row["tokens"] * row["token_s"] for row in drafting) / sum(rounds),
                mat=sum(row["tokens"] for row in drafting) / sum(rounds),
            )
        )
        shares += [row["acceptance_by_position"] for row in drafting]
        weights += rounds
    if not loads:
        raise DataError("it has no rows", SWEEP)
    drafted = max(map(len, shares))
    pooled = [
        sum(weight * one[place] for weight, one in zip(weights, shares, strict=True) if place < len(one)) / sum(weights)
        for place in range(drafted)
    ]
    return Sweep(loads, drafted, conditional(pooled))


def in_flight(rows: Sequence[Mapping[str, Any]]) -> float:
    """Requests in flight on the average: seconds of all requests over those of the passes."""
    return float(sum(row["tokens"] / row["request_tokens_per_s"] for row in rows) / sum(row["seconds"] for row in rows))
