"""Hedge over learners with different rates, on quadratic losses."""

import math

import pytest
import torch


def weights_of(losses, epsilon):
    """Return softmax(−ε Σ losses) in plain Python."""
    total = [math.exp(-epsilon * sum(column)) for column in zip(*losses, strict=True)]
    return [value / sum(total) for value in total]


def test_weights_and_mean_by_hand(quadratic, played, chunk):
    """η = ¼, ½, 1 from 2 to c = 0 give w = 1.5, 1, 0, with losses ½ w² on the next chunk."""
    _, learner = quadratic([2.0], algo="ensemble", lr=0.25, epsilon=0.7)
    first = learner.learn(chunk([0.0]))
    assert first.losses == (2.0, 2.0, 2.0) and first.weights == pytest.approx((1 / 3,) * 3)
    assert played(learner).item() == pytest.approx((1.5 + 1 + 0) / 3)
    second = learner.learn(chunk([0.0]))
    assert second.losses == (1.125, 0.5, 0.0)
    assert second.weights == pytest.approx((1 / 3,) * 3), "those the chunk was decoded with"
    assert second.loss == pytest.approx((1.125 + 0.5) / 3)
    p = weights_of([first.losses, second.losses], 0.7)
    assert learner.p.tolist() == pytest.approx(p)
    assert played(learner).item() == pytest.approx(p[0] * 1.125 + p[1] * 0.5)


def test_losses_are_measured_before_the_update(quadratic, chunk):
    """The largest rate jumps to the center of each chunk: measured after the update, its loss would be 0.

    Measured before, on alternating centers, it is the worst member.
    """
    objective, learner = quadratic([0.0], algo="ensemble", lr=0.1, spacing=math.sqrt(10), epsilon=1.0)
    for t in range(12):
        centre = chunk([1.0 if t % 2 else -1.0])
        expected = objective.losses([member.w for member in learner.members], centre)
        assert learner.learn(centre).losses == tuple(expected.tolist())
    assert learner.p.argmin() == 2


def test_each_measure_option_judges_its_batches(quadratic, chunk):
    """Compare the options "first", "chunk" and "batch" of `measure`.

    "first" is the first batch before any step. "chunk" is the whole chunk, in a separate pass unless an epoch is one
    step. "batch" is each batch before its step.
    """

    def first(**options):
        objective, learner = quadratic([2.0], algo="ensemble", lr=0.25, **options)
        passes = []
        measure = objective.losses
        objective.losses = lambda *args: passes.append(0) or measure(*args)
        return learner.learn(chunk([0.0], [2.0])).losses, len(passes)

    assert first(epochs=2) == ((2.0, 2.0, 2.0), 0)
    assert first(measure="chunk") == ((1.0, 1.0, 1.0), 1)
    for measure in ("first", "chunk", "batch"):
        assert first(measure=measure, step="chunk", epochs=2) == ((1.0, 1.0, 1.0), 0)
    # η = ¼, ½, 1 are at 1.5, 1, 0 for the second batch: losses (2 + ½ (w − 2)²) / 2
    assert first(measure="batch", epochs=2) == ((1.0625, 1.25, 2.0), 0)


def test_a_batch_is_prepared_once_for_all_members(quadratic, chunk):
    """Two batches: one pass to measure, then two epochs."""
    objective, learner = quadratic([2.0], algo="ensemble", lr=0.25, epochs=2, measure="chunk")
    prepared = []
    objective.prepare = lambda batch, draw: prepared.append(draw) or batch
    learner.learn(chunk([0.0], [2.0]))
    assert prepared == [0, 1, *range(4)]


def test_held_out_texts_are_prepared_once_and_again_if_half_of_the_way_helps(quadratic, chunk):
    """From 8, a chunk with center 0 leads to 4: better than 8 for a text with center 0, and worse for 10."""
    for centre, times in ((10.0, 1), (0.0, 2)):
        objective, learner = quadratic([8.0], algo="ogd")
        prepared = []
        objective.prepare = lambda batch, draw, prepared=prepared: prepared.append(draw) or batch
        learner.learn(chunk([0.0]), chunk([centre], [centre]))
        assert prepared == [0, *[0, 1] * times]


def test_the_loss_is_per_token(quadratic, chunk):
    """A chunk with ten times as many tokens must not count ten times as much."""
    short, long = (quadratic([2.0], algo="ensemble")[1] for _ in range(2))
    for _ in range(2):
        assert short.learn(chunk([0.0], tokens=1)).losses == long.learn(chunk([0.0], tokens=10)).losses


def test_discount_shrinks_earlier_losses(quadratic, chunk):
    _, learner = quadratic([2.0], algo="ensemble", lr=0.25, discount=0.5)
    learner.learn(chunk([0.0]))
    learner.learn(chunk([0.0]))
    assert learner.L.tolist() == pytest.approx([1 + 1.125, 1 + 0.5, 1.0])


def test_collapse_is_reported(quadratic, chunk):
    _, learner = quadratic([4.0], algo="ensemble", lr=0.1, epsilon=10.0)
    outcomes = [learner.learn(chunk([0.0])) for _ in range(6)]
    assert not outcomes[0].collapsed and outcomes[0].effective == pytest.approx(3.0)
    assert outcomes[-1].collapsed and outcomes[-1].effective == pytest.approx(1.0, abs=0.05)


def test_resync_moves_all_members_to_their_mean(quadratic, chunk):
    """Every second chunk; between resyncs the members stay apart."""
    _, learner = quadratic([4.0], algo="ensemble", lr=0.1, epsilon=0.5, resync=2)
    learner.learn(chunk([0.0]))
    assert len({member.w.item() for member in learner.members}) == 3
    learner.learn(chunk([0.0]))
    twin = quadratic([4.0], algo="ensemble", lr=0.1, epsilon=0.5)[1]
    twin.learn(chunk([0.0]))
    twin.learn(chunk([0.0]))
    mean = float(sum(p * member.w for p, member in zip(twin.p, twin.members, strict=True)))
    assert [member.w.item() for member in learner.members] == pytest.approx([mean] * 3)
    assert learner.L.tolist() == twin.L.tolist(), "what was learnt about the rates is kept"


def test_a_diverging_member_loses_its_weight(quadratic, chunk, played):
    """η = 32 overflows after some chunks and is refused; resync takes the member back."""
    for resync in (0, 40):
        _, learner = quadratic([1.0], algo="ensemble", lr=0.02, spacing=40.0, resync=resync)
        outcomes = [learner.learn(chunk([0.0])) for _ in range(40)]
        assert outcomes[-1].refused == (2,) and outcomes[-1].status == "updated"
        assert outcomes[-1].weights[2] == 0 and math.isfinite(outcomes[-1].loss)
        assert abs(played(learner).item()) < 0.1
        assert learner.L.isfinite().all() == bool(resync)


def test_opt_ensemble_without_hints_is_the_ensemble(quadratic, chunk):
    learners = [quadratic([2.0, -1.0], algo=algo, hint="none")[1] for algo in ("ensemble", "opt-ensemble")]
    for t in range(5):
        outcomes = [learner.learn(chunk([0.3 * t, 0.0])) for learner in learners]
        assert outcomes[0] == outcomes[1]
    assert torch.equal(*(learner.play() for learner in learners))


def test_the_optimistic_meta_learner_counts_the_last_losses_twice(quadratic, chunk):
    """p ∝ exp(−ε (L + last losses))."""
    _, learner = quadratic([2.0], algo="opt-ensemble", lr=0.1, epsilon=0.2)
    rounds = [learner.learn(chunk([0.0])).losses for _ in range(3)]
    assert learner.p.tolist() == pytest.approx(weights_of([*rounds, rounds[-1]], 0.2))


def test_an_ensemble_is_within_the_hedge_bound_of_its_best_member(quadratic, chunk):
    """Σ Σ_i p_i f_i ≤ min_i Σ f_i + ln N/ε + ε/8 Σ (range of losses)²."""
    random = torch.Generator().manual_seed(0)
    _, learner = quadratic([3.0, 3.0], algo="ensemble", lr=0.02, spacing=5.0, epsilon=0.5)
    outcomes = [learner.learn(chunk(torch.randn(2, generator=random).tolist())) for _ in range(100)]
    suffered = sum(outcome.loss for outcome in outcomes)
    best = min(map(sum, zip(*(outcome.losses for outcome in outcomes), strict=True)))
    ranges = sum((max(outcome.losses) - min(outcome.losses)) ** 2 for outcome in outcomes)
    assert suffered <= best + math.log(3) / 0.5 + 0.5 / 8 * ranges
