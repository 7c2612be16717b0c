"""What finished sequences say about a drafter: pure functions over `Decoded` records.

"Tokens" are those of the decode phase: the token that the prefill yields belongs to no decode step and is left out,
everything behind the end-of-sequence token too. Rates are ratios of sums (long sequences weigh more), and None where
the denominator is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from specctl.decoding.loop import Decoded

RESAMPLES = 2000
LEVEL = 0.95

Interval = tuple[float, float]
Floats = NDArray[np.float64]


def ratio(numerator: float, denominator: float) -> float | None:
    """numerator ÷ denominator, None when there is nothing to divide by."""
    return numerator / denominator if denominator else None


def mat(decoded: Sequence[Decoded]) -> float | None:
    """Mean accepted tokens (micro): Σ tokens ÷ Σ target passes, bonus tokens included; plain decoding is exactly 1."""
    return ratio(sum(d.decoded_tokens for d in decoded), sum(d.target_passes for d in decoded))


def mat_macro(decoded: Sequence[Decoded]) -> float | None:
    """Mean over sequences of tokens ÷ target passes; sequences that ended with the prefill's token have none."""
    each = [d.decoded_tokens / d.target_passes for d in decoded if d.target_passes]
    return ratio(sum(each), len(each))


def accept_rate(decoded: Sequence[Decoded]) -> float | None:
    """Accepted draft tokens ÷ verified positions (accepted + rejections); None without drafts."""
    accepted = sum(d.accepted for d in decoded)
    return ratio(accepted, accepted + sum(d.rejections for d in decoded))


def acceptance_by_position(decoded: Sequence[Decoded]) -> list[float | None]:
    """Entry k: accepted ÷ offered at draft depth k+1, over the rounds whose shallower tokens were all accepted."""
    accepted = _add_up(d.accepted_by_depth for d in decoded)
    offered = _add_up(d.offered_by_depth for d in decoded)
    return [ratio(hits, rounds) for hits, rounds in zip_longest(accepted, offered, fillvalue=0)]


def tokens_per_s(decoded: Sequence[Decoded]) -> float | None:
    """Σ tokens ÷ Σ wall-clock of the decode phase, for sequences decoded one at a time."""
    return ratio(sum(d.decoded_tokens for d in decoded), sum(d.decode_s for d in decoded))


def prefill_s(decoded: Sequence[Decoded]) -> float | None:
    """Mean seconds from the call to the first token."""
    return ratio(sum(d.prefill_s for d in decoded), len(decoded))


def speedup(decoded: Sequence[Decoded], baseline: Sequence[Decoded]) -> float | None:
    """tokens_per_s relative to that of a baseline on the same prompts in the same run."""
    ours, theirs = tokens_per_s(decoded), tokens_per_s(baseline)
    return None if ours is None or theirs is None else ratio(ours, theirs)


def mat_interval(prompts: Sequence[Hashable], decoded: Sequence[Decoded]) -> Interval | None:
    """Bootstrap interval of `mat` over prompts; `prompts[i]` names the prompt of `decoded[i]`."""
    tokens = _per_prompt(prompts, [d.decoded_tokens for d in decoded])
    passes = _per_prompt(prompts, [d.target_passes for d in decoded])
    return bootstrap(lambda counts: (counts @ tokens) / (counts @ passes), len(tokens))


def speedup_interval(
    prompts: Sequence[Hashable], decoded: Sequence[Decoded], baseline: Sequence[Decoded]
) -> Interval | None:
    """Bootstrap interval of `speedup`, paired: `decoded[i]` and `baseline[i]` both answer `prompts[i]`."""
    tokens, others = (_per_prompt(prompts, [d.decoded_tokens for d in side]) for side in (decoded, baseline))
    seconds, waited = (_per_prompt(prompts, [d.decode_s for d in side]) for side in (decoded, baseline))
    return bootstrap(lambda n: (n @ tokens) / (n @ seconds) * (n @ waited) / (n @ others), len(tokens))


def bootstrap(statistic: Callable[[Floats], Floats], prompts: int, *, seed: int = 0) -> Interval | None:
    """Percentile interval at LEVEL over prompts drawn with replacement (Efron & Tibshirani 1993, chapter 13).

    `statistic` maps counts [resamples, prompts], how often each prompt was drawn, to one value a resample. Repeats of
    one prompt (seeds) are drawn together. None for fewer than two prompts.
    """
    if prompts < 2:
        return None
    counts = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(counts.astype(np.float64))
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _per_prompt(prompts: Sequence[Hashable], values: Sequence[float]) -> Floats:
    """Sums of the values of each distinct prompt, in order of appearance."""
    sums: dict[Hashable, float] = {}
    for prompt, value in zip(prompts, values, strict=True):
        sums[prompt] = sums.get(prompt, 0.0) + value
    return np.array(list(sums.values()), dtype=np.float64)


def _add_up(columns: Iterable[list[int]]) -> list[int]:
    """Element-wise sum of lists of different lengths."""
    return [sum(values) for values in zip_longest(*columns, fillvalue=0)]
