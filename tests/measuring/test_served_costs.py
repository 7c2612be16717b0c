"""Draft lengths by load: the cost model on numbers computed by hand, and the input it refuses."""

import itertools
import json

import pytest

from specctl.errors import DataError
from specctl.measuring import served_costs
from specctl.measuring.served_costs import Load, RoundCosts, Sweep

FREE = RoundCosts(step=0.01, step_per_text=0.0, token=0.0, token_per_text=0.0)
STEEP = RoundCosts(step=0.010, step_per_text=0.0001, token=0.001, token_per_text=0.0005)
LENGTHS = range(6)


def row(server, concurrency, token_s, *, domain="sql", shares=(), requests=None, tokens=1000, **fields):
    """Return a row of `eval-server` with the fields that are read, with all requests in flight all the time."""
    mat = 1 + sum(shares) if shares else None
    seconds = tokens * token_s / (requests or concurrency)
    return {
        **{"server": server, "domain": domain, "concurrency": concurrency, "tokens": tokens, "token_s": token_s},
        **{"request_tokens_per_s": 1 / token_s, "seconds": seconds, "mat": mat},
        **{"acceptance_by_position": list(shares)},
    } | fields


def rows(costs, shares, loads=(1, 8, 32)):
    """Return a sweep without noise for a server with these costs."""
    mat = 1 + sum(shares)
    return [
        made
        for load in loads
        for made in (
            row("server", load, costs.seconds(len(shares), load) / mat, shares=shares),
            row("baseline", load, costs.seconds(0, load)),
        )
    ]


def test_conditional_acceptance_by_hand():
    assert served_costs.conditional_acceptance([0.8, 0.4, 0.1, 0.0, 0.0]) == pytest.approx([0.8, 0.5, 0.25, 0, 0])


def test_expected_tokens_by_hand():
    """1 + 0.8 + 0.8 · 0.5 + 0.8 · 0.5 · 0.25."""
    found = [served_costs.expected_tokens([0.8, 0.5, 0.25], length) for length in range(4)]
    assert found == pytest.approx([1, 1.8, 2.2, 2.3])


def test_expected_tokens_at_a_constant_rate_match_leviathan():
    a, k = 0.7, 5
    assert served_costs.expected_tokens([a] * k, k) == pytest.approx((1 - a ** (k + 1)) / (1 - a))


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_best_length_in_limiting_cases(batch):
    assert served_costs.best_length([0.0] * 5, STEEP, batch, LENGTHS) == 0
    assert served_costs.best_length([0.0] * 5, FREE, batch, LENGTHS) == 0, "the shortest of equals"
    assert served_costs.best_length([1.0] * 5, FREE, batch, LENGTHS) == 5
    assert served_costs.best_length([0.1] * 5, FREE, batch, LENGTHS) == 5, "what costs nothing is taken"
    assert served_costs.best_length([1.0, 1.0, 0.0, 1.0, 1.0], STEEP, 1, LENGTHS) == 2


def test_the_best_length_by_hand():
    """t(k, 1) = 10.1 + 1.5 k and t(k, 32) = 13.2 + 17 k ms; with α = 0.8, 0.5, 0.25 the rates by k are

    1/10.1, 1.8/11.6, 2.2/13.1, 2.3/14.6 = 0.099, 0.155, 0.168, 0.158 and 1/13.2, 1.8/30.2 = 0.076, 0.060.
    """
    chances = [0.8, 0.5, 0.25]
    assert served_costs.sequence_rate(chances, STEEP, 2, 1) == pytest.approx(2.2 / 0.0131)
    assert served_costs.best_length(chances, STEEP, 1, range(4)) == 2
    assert served_costs.best_length(chances, STEEP, 32, range(4)) == 0


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([3, 5, 9], (1, 2)),
        ([4, 4, 4], (4, 0)),
        ([9, 5, 3], (17 / 3, 0)),
        ([-3, -1, 3], (0, 7 / 21)),
        ([-1, -2, -3], (0, 0)),
    ],
)
def test_fitted_lines_have_no_negative_coefficients(values, line):
    """At x = 1, 2, 4: an exact line, a constant, a falling line (its mean), a line through the origin, and zero."""
    assert served_costs.fit_line([1, 2, 4], values, [1, 1, 1]) == pytest.approx(line)


def test_fit_line_uses_weights():
    assert served_costs.fit_line([1, 1], [2, 5], [2, 1]) == pytest.approx((3, 0))


def test_costs_are_recovered_from_a_sweep_without_noise():
    sweep = served_costs.sweep_of(rows(STEEP, (0.8, 0.4, 0.1)))
    assert (sweep.drafted, sweep.acceptance) == (3, pytest.approx([0.8, 0.5, 0.25]))
    assert [load.batch for load in sweep.loads] == pytest.approx([1, 8, 32])
    costs = served_costs.fit_costs(sweep)
    for length, batch in ((0, 1), (0, 32), (2, 20), (3, 8)):
        assert costs.seconds(length, batch) == pytest.approx(STEEP.seconds(length, batch))


def test_domains_are_pooled_by_their_tokens():
    """500 rounds of 20 ms and 100 of 30 ms give 21.67 ms; 1000 steps of 10 ms and 500 of 16 ms give 12 ms."""
    sweep = served_costs.sweep_of(
        [
            row("server", 4, 0.010, domain="sql", shares=(0.7, 0.3)),
            row("server", 4, 0.020, domain="math", shares=(0.5,), tokens=150),
            row("baseline", 4, 0.010, domain="sql"),
            row("baseline", 4, 0.016, domain="math", tokens=500),
        ]
    )
    (load,) = sweep.loads
    assert (load.round_s, load.step_s) == pytest.approx((13 / 600, 0.018 / 1.5))
    assert load.mat == pytest.approx(1150 / 600)
    assert sweep.acceptance == pytest.approx([400 / 600, 150 / 400])


def test_the_batch_is_the_number_of_requests_in_flight():
    """64 were requested, but there were only enough prompts for 16."""
    made = [row("server", 64, 0.01, shares=(0.5,), requests=16), row("baseline", 64, 0.01, requests=20)]
    (load,) = served_costs.sweep_of(made).loads
    assert (load.batch, load.plain_batch) == pytest.approx((16, 20))


def written(tmp_path, rows):
    (tmp_path / "result.json").write_text(json.dumps({"servers": rows}))
    return tmp_path


def test_ranges_cover_every_batch_once_and_lengths_shrink_with_load(tmp_path):
    tuning = served_costs.tune(written(tmp_path, rows(STEEP, (0.8, 0.4, 0.1), loads=(1, 32))))
    found = tuning.ranges
    assert [found[0].first, found[-1].last] == [1, 32]
    assert all(one.last + 1 == other.first for one, other in itertools.pairwise(found))
    assert [one.tokens for one in found] == sorted((one.tokens for one in found), reverse=True)
    for one in found:
        for batch in (one.first, one.last):
            assert one.tokens == served_costs.best_length([0.8, 0.5, 0.25], STEEP, batch, range(4))
        assert one.tokens in one.near and min(one.speedup) >= 1
    assert [load for one in found for load in one.measured] == [1, 32]
    assert found[-1].tokens == 0 and found[-1].speedup == (1.0, 1.0)
    assert all(fit.error == pytest.approx(0, abs=1e-9) for fit in tuning.fits)
    unmeasured = [f"{one.first}–{one.last}" for one in found if not one.measured]
    assert unmeasured and any(
        "no load was measured at batches " + ", ".join(unmeasured) in note for note in tuning.notes
    )
    assert any("above 32 were not measured" in note for note in tuning.notes)


def test_a_block_is_cut_where_its_last_tokens_do_not_pay(tmp_path):
    """A plain step takes 10 + 0.1 b ms, the pass over the block 2 ms, and a verified token 0.1 ms per text.

    Rates of one to three tokens are 1.8 / (12 + 0.2 b), 2.2 / (12 + 0.3 b) and 2.3 / (12 + 0.4 b). The third token pays
    below 6.3 texts, where 0.1 (12 + 0.3 b) > 0.22 b, and the second below 48, where 0.4 (12 + 0.2 b) > 0.18 b.
    """
    costs = RoundCosts(step=0.010, step_per_text=0.0001, token=0.0, token_per_text=0.0001, block=0.002)
    tuning = served_costs.tune(written(tmp_path, rows(costs, (0.8, 0.4, 0.1), loads=(1, 8, 64))), block=True)
    for name, value in vars(costs).items():
        assert getattr(tuning.costs, name) == pytest.approx(value, abs=1e-9)
    assert [(one.first, one.last, one.tokens) for one in tuning.ranges] == [(1, 6, 3), (7, 47, 2), (48, 64, 1)]
    assert any("with fewer slots, a block that is not causal drafts other tokens" in note for note in tuning.notes)


def test_a_costly_pass_over_a_block_drafts_all_or_nothing():
    """A short draft costs as much as the whole block."""
    sweep = served_costs.sweep_of(
        rows(RoundCosts(0.01, 0.0, 0.0, 0.0, block=0.008, block_per_text=0.002), (0.8, 0.4, 0.1))
    )
    costs = served_costs.fit_costs(sweep, block=True)
    assert {one.tokens for one in served_costs.tuned_ranges(sweep, costs, range(4))} == {0, 3}


def test_the_cost_of_a_verified_block_token_is_bounded_by_the_measurement():
    """A plain step grows by 1 ms per text and a round by 0.3 ms more, so a token costs a third of that."""
    costs = served_costs.fit_costs(
        served_costs.sweep_of(
            rows(RoundCosts(0.01, 0.001, 0.0, 0.0, block=0.002, block_per_text=0.0003), (0.8, 0.4, 0.1))
        ),
        block=True,
    )
    assert (costs.token_per_text, costs.block_per_text) == pytest.approx((0.0001, 0.0))


def by_length(costs, shares, up_to, loads=(1, 8, 32), **fields):
    """Return rows for prompts up to a length, as `eval-server` writes them."""
    over = up_to // 2
    return [one | {"over": over, "up_to": up_to, "requests": 20} | fields for one in rows(costs, shares, loads)]


def test_long_prompts_get_their_own_draft_lengths(tmp_path):
    """Their drafts are accepted less and cost more, so they are shorter at every load."""
    slow = RoundCosts(step=0.02, step_per_text=0.001, token=0.004, token_per_text=0.001)
    lengths = by_length(slow, (0.4, 0.1, 0.02), 8192) + by_length(STEEP, (0.8, 0.4, 0.1), 1024)
    document = {"servers": rows(STEEP, (0.8, 0.4, 0.1)), "lengths": lengths}
    (tmp_path / "result.json").write_text(json.dumps(document))
    tuning = served_costs.tune(tmp_path)
    short, long = tuning.contexts
    assert [(one.over, one.up_to, one.requests) for one in (short, long)] == [(512, 1024, 20), (4096, 8192, 20)]
    assert short.ranges == tuning.ranges and short.acceptance == pytest.approx([0.8, 0.5, 0.25])
    for batch in (1, 8, 32):
        (ours,) = (one.tokens for one in long.ranges if one.first <= batch <= one.last)
        assert ours == served_costs.best_length([0.4, 0.25, 0.2], slow, batch, range(4))
    assert long.ranges[0].tokens < short.ranges[0].tokens


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: [one for one in found if one["server"] == "server"],
        lambda found: [one | {"mat": None} for one in found],
        lambda found: [one | {"acceptance_by_position": []} for one in found],
        lambda found: [one | {"token_s": None} for one in found],
        lambda found: [one for one in found if one["concurrency"] == 8],
    ],
)
def test_a_prompt_length_without_two_loads_is_left_out(tmp_path, spoil):
    lengths = by_length(STEEP, (0.8, 0.4, 0.1), 1024) + spoil(by_length(STEEP, (0.5,), 8192))
    (tmp_path / "result.json").write_text(json.dumps({"servers": rows(STEEP, (0.8, 0.4, 0.1)), "lengths": lengths}))
    assert [one.up_to for one in served_costs.tune(tmp_path).contexts] == [1024]


def test_lengths_with_nearly_the_same_rate_are_near(tmp_path):
    """With α = 0.02 at the second position, two tokens are 1.5 % better than one if tokens are free."""
    costs = RoundCosts(0.01, 0.001, 0.0, 0.0)
    (only,) = served_costs.tune(written(tmp_path, rows(costs, (0.8, 0.02)))).ranges
    assert (only.tokens, only.near) == (2, (1, 2))


def test_a_bad_fit_is_reported(tmp_path):
    """Plain steps of 10, 40 and 11 ms at 1, 8 and 32 texts are on no line."""
    made = rows(RoundCosts(0.01, 0.0, 0.001, 0.0), (0.8,))
    for one in made:
        if one["server"] == "baseline" and one["concurrency"] == 8:
            one["token_s"] = 0.04
    tuning = served_costs.tune(written(tmp_path, made))
    assert any("the cost model is off by" in note and "at 8 in flight" in note for note in tuning.notes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda made: [one for one in made if one["server"] == "server"], "no baseline"),
        (lambda made: [one | {"mat": None} for one in made], "reports no acceptance of drafts"),
        (lambda made: [one | {"token_s": None} for one in made], "no time between tokens"),
        (lambda made: made[:2], "has only one load"),
        (lambda made: [], "it has no rows"),
        (lambda made: [{"server": "server"}], "is not a result of eval-server"),
    ],
)
def test_unusable_sweeps_are_refused(tmp_path, change, says):
    made = change(rows(STEEP, (0.8, 0.4)))
    with pytest.raises(DataError, match=says):
        served_costs.tune(written(tmp_path, made))


def test_files_that_are_not_a_sweep_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        served_costs.tune(tmp_path / "nothing.json")
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        served_costs.tune(tmp_path)
    (tmp_path / "result.json").write_text('{"rows": []}')
    with pytest.raises(DataError, match="is not a result of eval-server"):
        served_costs.tune(tmp_path)


def test_predicted_speedups_of_better_drafters_by_hand():
    """A round costs 2.4 plain steps: mat 2.4 breaks even, 3.6 gives 1.5 times, and 1 gives 1 / 2.4 times the speed."""
    found = served_costs.predict_speeds(Load(8, 8.0, 8.0, step_s=0.010, round_s=0.024, mat=2.0), [1.0, 2.4, 3.6])
    assert found.break_even == pytest.approx(2.4)
    assert found.speedups == pytest.approx([1 / 2.4, 1, 1.5])
    assert found.tokens_per_s == pytest.approx([8 / 0.024, 800, 1200])


def test_the_measured_drafter_is_predicted_exactly():
    """Its own mat gives its measured speedup."""
    made = rows(STEEP, (0.8, 0.4, 0.1))
    for load in served_costs.sweep_of(made).loads:
        ours, plain = (row["token_s"] for row in made if row["concurrency"] == load.concurrency)
        assert served_costs.predict_speeds(load, [load.mat]).speedups == pytest.approx([plain / ours])


def test_a_single_load_gives_costs_without_slopes():
    costs = served_costs.fit_costs(Sweep([Load(4, 4.0, 4.0, 0.01, 0.02, 2.0)], 2, [0.5, 0.5]))
    assert costs == RoundCosts(0.01, 0.0, pytest.approx(0.005), 0.0)


@pytest.mark.parametrize(
    "spoil",
    [
        *({"tokens": -1}, {"token_s": float("nan")}, {"mat": 10**400}, {"seconds": 0}, {"request_tokens_per_s": 0}),
        *({"acceptance_by_position": [float("inf")]}, {"token_s": "1"}, {"acceptance_by_position": 3}, {"tokens": 0}),
    ],
)
def test_a_sweep_with_impossible_numbers_is_refused(tmp_path, spoil):
    made = rows(STEEP, (0.8, 0.4, 0.1))
    (tmp_path / "result.json").write_text(json.dumps({"servers": [row | spoil for row in made]}))
    with pytest.raises(DataError, match=str(tmp_path / "result.json")):
        served_costs.read_sweep(tmp_path)


def test_malformed_sweep_files_are_refused(tmp_path, pipe):
    for name, content in {"deep": "[" * 100_000, "list": "[]", "text": '{"servers": ["x"]}'}.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=name):
            served_costs.read_sweep(tmp_path / name)
    with pytest.raises(DataError, match="a named pipe"):
        served_costs.read_sweep(pipe(tmp_path / "pipe"))
