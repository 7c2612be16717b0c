"""Metrics of a drafter (mat, acceptance rate, speed-up, intervals), computed from `Decoded` records.

"Tokens" means tokens of the decode phase: the token from the prefill belongs to no decode step and is left out, as is
everything after the end-of-sequence token. Rates are ratios of sums, which gives long sequences more weight. A rate
with a zero denominator is None.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import zip_longest
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specctl.decoding.records import Decoded

RESAMPLES = 2000
LEVEL = 0.95

Metric = Literal["mat", "speedup", "accept_rate"]
Interval = tuple[float, float]
Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Maps counts [resamples, prompts], how often each prompt was drawn, to one value per resample."""


def ratio(numerator: float, denominator: float) -> float | None:
    """numerator ÷ denominator, or None if the denominator is zero."""
    return numerator / denominator if denominator else None


def mat(decoded: Sequence[Decoded]) -> float | None:
    """Tokens per pass of the target over all sequences: Σ tokens ÷ Σ passes. Plain decoding has exactly 1."""
    return ratio(sum(d.decoded_tokens for d in decoded), sum(d.target_passes for d in decoded))


def mat_macro(decoded: Sequence[Decoded]) -> float | None:
    """Mean over sequences of tokens ÷ target passes. Sequences that ended with the prefill's token do not count."""
    each = [d.decoded_tokens / d.target_passes for d in decoded if d.target_passes]
    return ratio(sum(each), len(each))


def accept_rate(decoded: Sequence[Decoded]) -> float | None:
    """Accepted draft tokens ÷ verified positions (accepted + rejections), or None without drafts."""
    accepted = sum(d.accepted for d in decoded)
    return ratio(accepted, accepted + sum(d.rejections for d in decoded))


def acceptance_by_position(decoded: Sequence[Decoded]) -> list[float | None]:
    """Acceptance rate per draft depth. Entry k is accepted ÷ offered at depth k+1; a token is offered if all shallower
    tokens of its round were accepted."""
    accepted = _add_up(d.accepted_by_depth for d in decoded)
    offered = _add_up(d.offered_by_depth for d in decoded)
    return [ratio(hits, rounds) for hits, rounds in zip_longest(accepted, offered, fillvalue=0)]


def tokens_per_s(decoded: Sequence[Decoded]) -> float | None:
    """Σ tokens ÷ Σ wall-clock of the decode phase, for sequences decoded one at a time."""
    return ratio(sum(d.decoded_tokens for d in decoded), sum(d.decode_s for d in decoded))


def prefill_s(decoded: Sequence[Decoded]) -> float | None:
    """Mean seconds of the prefill, from the call to the first token."""
    return ratio(sum(d.prefill_s for d in decoded), len(decoded))


def speedup(decoded: Sequence[Decoded], baseline: Sequence[Decoded]) -> float | None:
    """Ratio of tokens_per_s to a baseline's tokens_per_s, on the same prompts in the same run."""
    ours, theirs = tokens_per_s(decoded), tokens_per_s(baseline)
    return None if ours is None or theirs is None else ratio(ours, theirs)


def why_unusable(speedup: float | None, interval: Interval | None, mat: float | None = None) -> str | None:
    """Explain why a speed-up over plain decoding is meaningless, or return None if it can be used.

    A round costs at least as much as one pass of plain decoding and yields `mat` tokens. So speed-up ≤ mat, with
    equality for a draft that costs nothing. A speed-up above its mat, or with a confidence interval wider than itself,
    has measured other work on the machine.
    """
    if speedup is None:
        return None
    if mat is not None and speedup > mat:
        return "above its mat"
    if interval is not None and interval[1] - interval[0] > speedup:
        return "its interval is wider than the figure"
    return None


def mat_interval(prompts: Sequence[Hashable], decoded: Sequence[Decoded]) -> Interval | None:
    """Bootstrap interval of `mat` over prompts; `prompts[i]` names the prompt of `decoded[i]`."""
    return bootstrap(_mat(prompts, decoded), len(set(prompts)))


def speedup_interval(
    prompts: Sequence[Hashable], decoded: Sequence[Decoded], baseline: Sequence[Decoded]
) -> Interval | None:
    """Bootstrap interval of `speedup`, paired: `decoded[i]` and `baseline[i]` both answer `prompts[i]`."""
    ours, theirs = _rate(prompts, decoded), _rate(prompts, baseline)
    return bootstrap(lambda counts: ours(counts) / theirs(counts), len(set(prompts)))


def difference_interval(
    metric: Metric,
    prompts: Sequence[Hashable],
    ours: Sequence[Decoded],
    theirs: Sequence[Decoded],
    plain: Sequence[Decoded] = (),
) -> Interval | None:
    """Bootstrap interval of metric(ours) − metric(theirs), paired: both answer `prompts[i]`. So does `plain[i]`, which
    only "speedup" needs."""
    if metric == "speedup":
        fast, slow, base = _rate(prompts, ours), _rate(prompts, theirs), _rate(prompts, plain)
        return bootstrap(lambda counts: (fast(counts) - slow(counts)) / base(counts), len(set(prompts)))
    kind = _mat if metric == "mat" else _accept_rate
    own, other = kind(prompts, ours), kind(prompts, theirs)
    return bootstrap(lambda counts: own(counts) - other(counts), len(set(prompts)))


def bootstrap(statistic: Statistic, prompts: int) -> Interval | None:
    """Percentile interval at LEVEL over prompts drawn with replacement (Efron & Tibshirani 1993, chapter 13).

    Repeats of one prompt (seeds) are drawn together. Returns None for fewer than two prompts.
    """
    if prompts < 2:
        return None
    counts = np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(counts.astype(np.float64))
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _mat(prompts: Sequence[Hashable], decoded: Sequence[Decoded]) -> Statistic:
    return ratio_of_sums(prompts, [d.decoded_tokens for d in decoded], [d.target_passes for d in decoded])


def _rate(prompts: Sequence[Hashable], decoded: Sequence[Decoded]) -> Statistic:
    return ratio_of_sums(prompts, [d.decoded_tokens for d in decoded], [d.decode_s for d in decoded])


def _accept_rate(prompts: Sequence[Hashable], decoded: Sequence[Decoded]) -> Statistic:
    return ratio_of_sums(prompts, [d.accepted for d in decoded], [d.accepted + d.rejections for d in decoded])


def ratio_of_sums(prompts: Sequence[Hashable], tops: Sequence[float], bottoms: Sequence[float]) -> Statistic:
    """Σ tops ÷ Σ bottoms, for `bootstrap`; `prompts[i]` names the prompt that `tops[i]` and `bottoms[i]` belong to."""
    top, bottom = _per_prompt(prompts, tops), _per_prompt(prompts, bottoms)
    return lambda counts: (counts @ top) / (counts @ bottom)


def _per_prompt(prompts: Sequence[Hashable], values: Sequence[float]) -> Floats:
    """Sum of the values per distinct prompt, in order of appearance."""
    sums: dict[Hashable, float] = {}
    for prompt, value in zip(prompts, values, strict=True):
        sums[prompt] = sums.get(prompt, 0.0) + value
    return np.array(list(sums.values()), dtype=np.float64)


def _add_up(columns: Iterable[list[int]]) -> list[int]:
    """Element-wise sum of lists of different lengths."""
    return [sum(values) for values in zip_longest(*columns, fillvalue=0)]
