"""Definitions of metrics, on examples computed by hand."""

import numpy as np
import pytest

from specctl.decoding import metrics
from specctl.decoding.records import Decoded
from specctl.decoding.sampling import GREEDY
from tests.toys.decoding import decode


def sequence(output=(), *, passes=0, accepted=(), offered=(), prefill_s=0.0, decode_s=0.0, drafted=0) -> Decoded:
    """A finished sequence; `accepted` and `offered` are by depth and imply the rejections."""
    return Decoded(
        prompt_ids=[1, 2],
        output_ids=list(output),
        stop="length",
        target_passes=passes,
        accepted=sum(accepted),
        rejections=sum(offered) - sum(accepted),
        drafted=drafted,
        accepted_by_depth=list(accepted),
        offered_by_depth=list(offered),
        prefill_s=prefill_s,
        decode_s=decode_s,
    )


# 9 tokens, the first from the prefill: 8 in 3 passes (2 accepted + bonus, 3 accepted + bonus, bonus only).
FIRST = sequence(range(9), passes=3, accepted=(2, 2, 1), offered=(3, 2, 2), decode_s=2.0, prefill_s=0.5)
# 3 tokens, 2 in 2 passes.
SECOND = sequence(range(3), passes=2, accepted=(), offered=(2,), decode_s=0.5, prefill_s=0.1)


def test_mat_is_a_ratio_of_sums_and_macro_a_mean_of_ratios():
    assert metrics.mat([FIRST, SECOND]) == 10 / 5
    assert metrics.mat_macro([FIRST, SECOND]) == pytest.approx((8 / 3 + 1) / 2)


def test_acceptance_counts_verified_positions():
    assert metrics.accept_rate([FIRST, SECOND]) == 5 / 9
    assert metrics.acceptance_by_position([FIRST, SECOND]) == [2 / 5, 2 / 2, 1 / 2]


def test_tokens_per_s_leaves_out_the_prefill():
    assert metrics.tokens_per_s([FIRST, SECOND]) == 10 / 2.5
    assert metrics.prefill_s([FIRST, SECOND]) == pytest.approx(0.3)


def test_speedup_is_a_ratio_of_rates_not_of_times():
    """Sampling can give texts of different lengths, and a shorter text is not a faster one."""
    plain = [sequence(range(5), passes=4, decode_s=4.0)]
    assert metrics.speedup([FIRST], plain) == 4.0


def test_a_sequence_that_ends_in_the_prefill_does_not_count():
    ended = sequence([3], passes=0)
    assert metrics.mat([FIRST, ended]) == metrics.mat([FIRST])
    assert metrics.mat_macro([FIRST, ended]) == metrics.mat_macro([FIRST])


def test_metrics_without_measurements_are_none():
    ended = [sequence([3])]
    assert metrics.mat(ended) is metrics.mat_macro(ended) is metrics.accept_rate(ended) is None
    assert metrics.tokens_per_s([]) is metrics.speedup([], []) is metrics.prefill_s([]) is None
    assert metrics.acceptance_by_position(ended) == []
    assert metrics.mat_interval(["a", "b"], ended * 2) is None


def test_plain_decoding_has_mat_one(target):
    prompts = [[5, 6, 7], [9] * 20]
    decoded = decode(target, prompts, sampling=GREEDY, max_new_tokens=[7, 12], seeds=[0, 0])
    assert metrics.mat(decoded) == 1.0
    assert metrics.mat_macro(decoded) == 1.0
    assert metrics.accept_rate(decoded) is None


def test_speedup_intervals_are_paired_by_prompt():
    """Each prompt is three times as fast, although prompts differ by a factor of a hundred: the paired interval has no
    width."""
    slow = [sequence(range(11), passes=10, decode_s=seconds) for seconds in (0.1, 1.0, 10.0)]
    fast = [sequence(range(11), passes=4, decode_s=plain.decode_s / 3) for plain in slow]
    assert metrics.speedup_interval("abc", fast, slow) == pytest.approx((3.0, 3.0))


def test_intervals_of_differences_are_paired_by_prompt():
    """By hand: drawing `a` twice gives 2 − 1, `b` twice gives 5 − 2. Each has probability ¼, so these are the ends. The
    ends of an unpaired interval would be 2 − 2 and 5 − 1."""
    ours = [sequence(range(11), passes=5, decode_s=5.0), sequence(range(11), passes=2, decode_s=2.0)]
    theirs = [sequence(range(11), passes=10, decode_s=10.0), sequence(range(11), passes=5, decode_s=5.0)]
    assert metrics.difference_interval("mat", "ab", ours, theirs) == pytest.approx((1.0, 3.0))
    plain = [sequence(range(11), passes=10, decode_s=20.0)] * 2  # 0.5 tokens/s
    assert metrics.difference_interval("speedup", "ab", ours, theirs, plain) == pytest.approx((2.0, 6.0))


def test_the_interval_of_a_difference_of_acceptance_by_hand():
    """`a` gives 3/4 − 1/4, `b` gives 1/2 − 1/2."""
    high, low = sequence(passes=1, accepted=(3,), offered=(4,)), sequence(passes=1, accepted=(1,), offered=(4,))
    even = sequence(passes=1, accepted=(2,), offered=(4,))
    assert metrics.difference_interval("accept_rate", "ab", [high, even], [low, even]) == pytest.approx((0.0, 0.5))
    assert metrics.difference_interval("accept_rate", "a", [high], [low]) is None


def test_repeats_of_a_prompt_are_one_draw():
    """Seeds of one prompt are not independent: two prompts stay two, however often they are repeated."""
    two = [sequence(range(11), passes=5), sequence(range(11), passes=10)]
    assert metrics.mat_interval(["a", "b"], two) == metrics.mat_interval(["a", "b"] * 10, two * 10)
    assert metrics.mat_interval(["a"] * 2, two) is None


def test_the_bootstrap_interval_agrees_with_the_normal_approximation():
    """The interval of a mean agrees with the normal approximation: both ends within a tenth of its width (n = 400)."""
    values = np.random.default_rng(1).normal(5.0, 2.0, size=400)
    interval = metrics.bootstrap(lambda counts: (counts @ values) / counts.sum(1), len(values))
    assert interval is not None
    half = 1.96 * values.std() / 20
    assert interval == pytest.approx((values.mean() - half, values.mean() + half), abs=0.2 * half)


@pytest.mark.parametrize(
    ("speedup", "interval", "mat", "reason"),
    [
        (2.53, (2.4, 2.6), 1.46, "above its mat"),  # a demo on a busy machine
        (1.46, None, 1.46, None),  # drafts without cost
        (1.70, (1.5, 1.9), 3.36, None),
        (0.9, (0.2, 1.2), 3.36, "its interval is wider than the figure"),
        (0.9, (0.2, 1.0), None, None),
        (1.0, (1.0, 1.0), 1.0, None),  # plain decoding
        (None, None, 2.0, None),
    ],
)
def test_implausible_speedups_are_unusable(speedup, interval, mat, reason):
    assert metrics.why_unusable(speedup, interval, mat) == reason
