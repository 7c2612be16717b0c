"""Cost model of a serving engine, fitted to a sweep of `eval-server`: best draft lengths, value of better drafters.

The model. A round drafts k tokens for each of b sequences, and the target verifies k + 1 positions per sequence. It
takes

    t(k, b) = s₀ + s₁ b + k (d₀ + d₁ b)   seconds,

which is linear in batch size and draft length. A plain step costs s₀ + s₁ b; each further token, drafted and verified,
costs d₀ + d₁ b. A head that drafts a block at once pays its pass for any length, so its rounds take

    t(k, b) = s₀ + s₁ b + c₀ + c₁ b + k v b,   k > 0.

One measured length gives the sum of pass and verification. A verified token is assumed to cost what a text adds to a
plain step, v = s₁, or less if that is more than the sum.

A round yields 1 + Σ_{j≤k} Π_{i≤j} αᵢ tokens per sequence (Leviathan et al. 2023, equation 1, if all α are equal). Here
αᵢ is the probability that draft token i is accepted, given that all earlier ones were. All sequences of a batch share a
round, so the best k of a load is the length with the most tokens per second of one sequence.

The inputs. The time of a plain step is the baseline server's time between tokens. The time of a round is the server's
time between tokens × mat. The batch size is the average number of requests in flight during the pass. The α are pooled
over all loads. Prompts of each bracket of lengths have times, mat and α of their own, at the loads of the whole sweep.
The model covers loads between the measured ones, and lengths from 0 to the server's draft length; it does not
extrapolate beyond them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np

from specctl import regular_files
from specctl.errors import DataError
from specctl.formats.head import LengthRange

NEAR_BEST = 0.05
"""Lengths that lose at most this share of the best tokens per second count as about as good."""
WARN_ERROR = 0.15
"""Relative error of a modeled time above which the user is warned."""
MAX_NUMBER = 1e18  # upper limit for numbers in a result document
Row = Mapping[str, Any]  # of the result of `eval-server`
SWEEP = "specctl eval-server --server URL --baseline-server URL --concurrency 1,4,16,64"


@dataclass(frozen=True)
class Load:
    """One measured load: both servers with the same number of requests in flight, all domains pooled.

    Attributes:
        concurrency: requests that the client keeps in flight.
        batch, plain_batch: average requests in flight, with and without drafts.
        step_s: seconds per plain step.
        round_s: seconds per round.
        mat: tokens per round and sequence.
    """

    concurrency: int
    batch: float
    plain_batch: float
    step_s: float
    round_s: float
    mat: float


@dataclass(frozen=True)
class Sweep:
    """Measured loads, in ascending order.

    Attributes:
        drafted: draft length in tokens.
        acceptance: α of each draft position.
    """

    loads: list[Load]
    drafted: int
    acceptance: list[float]


Bracket = tuple[int, int, int]
"""Prompts of a sweep by length: `over` < tokens ≤ `up_to`, and the number of their answers at every load."""


@dataclass(frozen=True)
class RoundCosts:
    """Costs s₀, s₁, d₀ and d₁ (of a block head: 0 and v), c₀ and c₁, in seconds."""

    step: float
    step_per_text: float
    token: float
    token_per_text: float
    block: float = 0.0
    block_per_text: float = 0.0

    def seconds(self, length: int, batch: float) -> float:
        """Seconds per round, t(k, b)."""
        drafts = length * (self.token + self.token_per_text * batch)
        if length:
            drafts += self.block + self.block_per_text * batch
        return self.step + self.step_per_text * batch + drafts


@dataclass(frozen=True)
class Fit:
    """Measured and modeled times of one load."""

    concurrency: int
    batch: float
    step_s: float
    modelled_step_s: float
    round_s: float
    modelled_round_s: float

    @property
    def error(self) -> float:
        """The larger relative error of the two times."""
        pairs = ((self.step_s, self.modelled_step_s), (self.round_s, self.modelled_round_s))
        return max(abs(modelled / measured - 1) for measured, modelled in pairs)


@dataclass(frozen=True)
class TunedRange(LengthRange):
    """A range of batch sizes, and the draft length that is best there: at both ends of the range, the lengths `near`
    lose little.

    Attributes:
        mat: tokens per round, by the model.
        speedup: over plain decoding, at the first and at the last batch size, by the model.
        measured: concurrencies of the measured loads in the range; empty if the range rests on the model alone.
    """

    mat: float
    speedup: tuple[float, float]
    measured: list[int]


@dataclass(frozen=True)
class TunedContext:
    """Draft lengths by load for prompts of `over` < tokens ≤ `up_to`, from `requests` answers at every load."""

    over: int
    up_to: int
    requests: int
    ranges: list[TunedRange]
    acceptance: list[float]


@dataclass(frozen=True)
class Tuning:
    """Draft lengths by load, of all prompts and by prompt length, and the inputs of their derivation.

    `contexts` is empty if all prompts of the sweep are in one bracket of lengths.
    """

    sweep: str
    ranges: list[TunedRange]
    acceptance: list[float]
    drafted: int
    costs: RoundCosts
    fits: list[Fit]
    notes: list[str]
    contexts: list[TunedContext]


@dataclass(frozen=True)
class DrafterSpeeds:
    """Speed of other drafters at a measured load, if their rounds take as long as the measured drafter's.

    Attributes:
        break_even: mat above which drafting is faster than plain decoding.
        mats: assumed tokens per round, of drafters that may not exist yet.
        tokens_per_s: throughput of all sequences together, during decoding.
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


def predict_speeds(load: Load, mats: Sequence[float]) -> DrafterSpeeds:
    """Predict the speed of drafters with these `mats` at one load.

    A sequence decodes mat ÷ t(K, b) tokens per second with drafts, and 1 ÷ t(0, b) without. Both are equal at mat =
    t(K, b) ÷ t(0, b).
    """
    return DrafterSpeeds(
        concurrency=load.concurrency,
        step_s=load.step_s,
        round_s=load.round_s,
        mat=load.mat,
        break_even=load.round_s / load.step_s,
        mats=list(mats),
        tokens_per_s=[load.batch * mat / load.round_s for mat in mats],
        speedups=[mat * load.step_s / load.round_s for mat in mats],
    )


def conditional_acceptance(shares: Sequence[float]) -> list[float]:
    """Conditional acceptance αᵢ, from the shares of rounds that accepted token i, and so every token before it."""
    before = [1.0, *shares]
    return [min(1.0, share / last) if last > 0 else 0.0 for share, last in zip(shares, before, strict=False)]


def expected_tokens(acceptance: Sequence[float], length: int) -> float:
    """Expected tokens per round with k draft tokens, bonus token included: 1 + Σ_{j≤k} Π_{i≤j} αᵢ."""
    return 1.0 + sum(accumulate(acceptance[:length], mul))


def sequence_rate(acceptance: Sequence[float], costs: RoundCosts, length: int, batch: float) -> float:
    """Tokens per second of one sequence in a batch."""
    return expected_tokens(acceptance, length) / costs.seconds(length, batch)


def best_length(acceptance: Sequence[float], costs: RoundCosts, batch: float, lengths: Sequence[int]) -> int:
    """The draft length with the most tokens per second; the shortest one in a tie."""
    return max(lengths, key=lambda k: (sequence_rate(acceptance, costs, k, batch), -k))


def fit_line(at: Sequence[float], values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Coefficients a, c ≥ 0 that minimize Σ w (a + c·at − value)²; c is 0 if all `at` are equal."""
    x, y, w = np.array([at, values, weights], dtype=float)
    x_mean, y_mean = np.average(x, weights=w), np.average(y, weights=w)
    spread = (w * (x - x_mean) ** 2).sum()
    slope = (w * (x - x_mean) * (y - y_mean)).sum() / spread if spread > 0 else 0.0
    # If the unconstrained minimum has a negative coefficient, the constrained minimum is on an edge.
    edges = [(y_mean, 0.0), (0.0, (w * x * y).sum() / (w * x * x).sum()), (0.0, 0.0)]
    possible = [pair for pair in [(y_mean - slope * x_mean, slope), *edges] if min(pair) >= 0]
    a, c = min(possible, key=lambda pair: (w * (pair[0] + pair[1] * x - y) ** 2).sum())
    return float(a), float(c)


def fit_costs(sweep: Sweep, block: bool = False) -> RoundCosts:
    """Fit the costs by least squares of the relative errors: first of plain steps, then of rounds. `block`: the drafter
    drafts a block at once."""
    loads = sweep.loads
    step, step_per_text = fit_line(
        [load.plain_batch for load in loads], [load.step_s for load in loads], [load.step_s**-2 for load in loads]
    )
    over = [(load.round_s - step - step_per_text * load.batch) / sweep.drafted for load in loads]
    token, token_per_text = fit_line([load.batch for load in loads], over, [load.round_s**-2 for load in loads])
    if not block:
        return RoundCosts(step, step_per_text, token, token_per_text)
    verified = min(step_per_text, token_per_text)
    rest = sweep.drafted * token, sweep.drafted * (token_per_text - verified)
    return RoundCosts(step, step_per_text, 0.0, verified, *rest)


def tuned_ranges(sweep: Sweep, costs: RoundCosts, lengths: Sequence[int]) -> list[TunedRange]:
    """Find the best of `lengths` for every batch size from 1 to the largest measured one, and join equal neighbors."""
    largest = max(1, round(max(load.batch for load in sweep.loads)))
    made = []
    for tokens, some in groupby(
        range(1, largest + 1), key=lambda batch: best_length(sweep.acceptance, costs, batch, lengths)
    ):
        batches = list(some)
        ends = batches[0], batches[-1]

        def rate(length: int, batch: int) -> float:
            return sequence_rate(sweep.acceptance, costs, length, batch)

        made.append(
            TunedRange(
                *ends,
                tokens,
                near=tuple(k for k in lengths if all(rate(k, b) >= (1 - NEAR_BEST) * rate(tokens, b) for b in ends)),
                mat=expected_tokens(sweep.acceptance, tokens),
                speedup=(rate(tokens, ends[0]) / rate(0, ends[0]), rate(tokens, ends[1]) / rate(0, ends[1])),
                measured=[load.concurrency for load in sweep.loads if ends[0] <= round(load.batch) <= ends[1]],
            )
        )
    return made


def tune(path: Path, *, block: bool = False) -> Tuning:
    """Derive draft lengths by load, and by prompt length and load, from a result of `eval-server`.

    `block`: the drafter drafts a block at once, of which an engine may take fewer tokens. Raises DataError if the file
    is no such result, has no baseline, or has a single load.
    """
    sweep, contexts = read_sweep(path)
    if len({round(load.batch) for load in sweep.loads}) < 2:
        there = ", ".join(f"{load.batch:.1f} of {load.concurrency}" for load in sweep.loads)
        raise DataError(
            f"{path} has only one load (average in flight: {there}), so the cost of larger batches is unknown",
            f"measure several loads, each with at least as many prompts: {SWEEP}",
        )
    costs = fit_costs(sweep, block)
    chosen = tuned_ranges(sweep, costs, range(sweep.drafted + 1))
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
    tuned = [
        TunedContext(*bracket, tuned_ranges(part, fit_costs(part, block), range(part.drafted + 1)), part.acceptance)
        for bracket, part in contexts.items()
    ]
    notes = caveats(sweep, fits, chosen, block=block)
    return Tuning(str(path), chosen, sweep.acceptance, sweep.drafted, costs, fits, notes, tuned)


def caveats(sweep: Sweep, fits: Sequence[Fit], chosen: Sequence[TunedRange], *, block: bool) -> list[str]:
    """Caveats that a user should read before trusting the schedule."""
    notes = [f"batches above {chosen[-1].last} were not measured: engines use the last range for them"]
    guessed = [f"{one.first}–{one.last}" for one in chosen if not one.measured]
    if guessed:
        notes.append(f"no load was measured at batches {', '.join(guessed)}: their lengths are predicted")
    if any(0 < one.tokens < sweep.drafted for one in chosen):
        how = "their times are interpolated linearly"
        if block:
            how = (
                "the pass over the block is assumed to cost the same, and a verified token what a text adds to a plain "
                "step; with fewer slots, a block that is not causal drafts other tokens"
            )
        notes.append(f"lengths between 0 and {sweep.drafted} were not measured: {how}")
    if any(one.tokens == sweep.drafted for one in chosen) and not block:
        notes.append(f"the longest drafts measured, {sweep.drafted} tokens, pay off: longer ones may pay off, too")
    rough = [f"{one.error:.0%} at {one.concurrency} in flight" for one in fits if one.error > WARN_ERROR]
    if rough:
        notes.append(f"the cost model is off by {', '.join(rough)}: measure loads in between, or more prompts")
    idle = [load for load in sweep.loads if load.batch < 0.75 * load.concurrency]
    if idle:
        shortfalls = ", ".join(f"{load.batch:.0f} instead of {load.concurrency}" for load in idle)
        notes.append(f"average requests in flight: {shortfalls}; more prompts (--limit) keep more in flight")
    return notes


def read_sweep(path: Path) -> tuple[Sweep, dict[Bracket, Sweep]]:
    """Read a sweep, and its parts by prompt length, from a result document of `eval-server` or from its run directory.
    Raises DataError."""
    file = path / "result.json" if path.is_dir() else path
    try:
        document = regular_files.read_json(file)
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}", f"name the result.json of {SWEEP}") from error
    except ValueError as error:
        raise DataError(f"{file} is not JSON", f"name the result.json of {SWEEP}") from error
    try:
        for row in [*document["servers"], *document.get("lengths", [])]:
            _check_numbers(row)
        sweep = sweep_of(document["servers"])
        return sweep, context_sweeps(document.get("lengths", []), sweep)
    except DataError as error:
        raise DataError(f"{file}: {error.message}", error.hint) from error
    except KeyError as error:
        raise DataError(f"{file} is not a result of eval-server: it has no key {error.args[0]!r}", SWEEP) from error
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise DataError(f"{file} is not a result of eval-server ({type(error).__name__}: {error})", SWEEP) from error


def _check_numbers(row: Row) -> None:
    """Raise DataError for a number that cannot be a measurement: negative, not finite, or absurdly large."""
    for key, value in row.items():
        numbers = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int | float)]
        if not all(0 <= one < MAX_NUMBER for one in numbers):
            raise DataError(f"{key} of a row is not a measurement", f"measure again: {SWEEP}")


def sweep_of(rows: Sequence[Row]) -> Sweep:
    """Extract the loads from rows of `eval-server`.

    Domains are pooled: plain steps are weighted by tokens, rounds by their number. Raises DataError if there is no
    baseline, no draft, or no time between tokens.
    """
    loads, drafts = [], []
    for concurrency in sorted({row["concurrency"] for row in rows}):
        drafting, plain = rows_of(rows, concurrency)
        if not plain:
            raise DataError("it has no baseline, so the time of a plain step is unknown", f"measure one: {SWEEP}")
        unreported = [row["domain"] for row in drafting if not row["mat"] or not row["acceptance_by_position"]]
        if unreported:
            raise DataError(
                f"the server reports no acceptance of drafts ({', '.join(unreported)})",
                "it must run with a drafter; SGLang reports acceptance per request, vLLM in /metrics",
            )
        if any(row["token_s"] is None for row in [*drafting, *plain]):
            raise DataError("answers of one token have no time between tokens", "raise --max-new-tokens")
        loads.append(load_of(concurrency, drafting, plain, in_flight(drafting), in_flight(plain)))
        drafts += drafting
    if not loads:
        raise DataError("it has no rows", SWEEP)
    return Sweep(loads, *pooled_acceptance(drafts))


def rows_of(rows: Sequence[Row], concurrency: int) -> tuple[list[Row], list[Row]]:
    """The rows of one load: with drafts, and of the baseline."""
    here = [row for row in rows if row["concurrency"] == concurrency]
    return [row for row in here if row["server"] == "server"], [row for row in here if row["server"] == "baseline"]


def context_sweeps(rows: Sequence[Row], sweep: Sweep) -> dict[Bracket, Sweep]:
    """The parts of a sweep by prompt length, from the rows of `eval-server`, the shortest prompts first.

    A load counts if the drafts and the plain steps of its prompts were measured; a bracket needs two of them. Requests
    of all lengths are in flight together, so the number in flight is the whole sweep's.
    """
    found = {}
    for over, up_to in sorted({(row["over"], row["up_to"]) for row in rows}):
        here = [row for row in rows if row["up_to"] == up_to]
        loads, drafts, requests = [], [], []
        for load in sweep.loads:
            drafting, plain = rows_of(here, load.concurrency)
            reported = all(row["mat"] and row["acceptance_by_position"] for row in drafting)
            if not (drafting and plain and reported) or any(row["token_s"] is None for row in [*drafting, *plain]):
                continue
            loads.append(load_of(load.concurrency, drafting, plain, load.batch, load.plain_batch))
            drafts += drafting
            requests.append(sum(row["requests"] for row in drafting))
        if len({round(load.batch) for load in loads}) > 1:
            found[over, up_to, min(requests)] = Sweep(loads, *pooled_acceptance(drafts))
    return found


def load_of(concurrency: int, drafting: Sequence[Row], plain: Sequence[Row], batch: float, plain_batch: float) -> Load:
    """A load from the rows of both servers; `batch` and `plain_batch` as in `Load`."""
    tokens = sum(row["tokens"] for row in plain)
    rounds = sum(row["tokens"] / row["mat"] for row in drafting)
    return Load(
        concurrency,
        batch,
        plain_batch,
        step_s=sum(row["tokens"] * row["token_s"] for row in plain) / tokens,
        round_s=sum(row["tokens"] * row["token_s"] for row in drafting) / rounds,
        mat=sum(row["tokens"] for row in drafting) / rounds,
    )


def pooled_acceptance(rows: Sequence[Row]) -> tuple[int, list[float]]:
    """Draft length, and α of each position, from the acceptance of rows weighted by their rounds."""
    weighted = [(row["tokens"] / row["mat"], row["acceptance_by_position"]) for row in rows]
    drafted = max(len(shares) for _, shares in weighted)
    rounds = sum(weight for weight, _ in weighted)
    pooled = [
        sum(weight * shares[place] for weight, shares in weighted if place < len(shares)) / rounds
        for place in range(drafted)
    ]
    return drafted, conditional_acceptance(pooled)


def in_flight(rows: Sequence[Row]) -> float:
    """Average number of requests in flight: summed request seconds ÷ summed pass seconds."""
    return float(sum(row["tokens"] / row["request_tokens_per_s"] for row in rows) / sum(row["seconds"] for row in rows))
