"""Learners on quadratic losses with iterates computed by hand; the gradient of f at w is w − c."""

import pytest
import torch

from specctl.adaptation.updates.registry import feedback
from specctl.errors import CheckpointError
from specctl.recipe import LearnerRecipe

ALGOS = ["static", "ogd", "osd", "optimistic", "momentum", "ensemble", "opt-ensemble"]


def follow(learner, played, chunk, centres):
    """Return w_1, w_2, … for chunks of one batch."""
    path = [played(learner).tolist()]
    for centre in centres:
        learner.learn(chunk(centre))
        path.append(played(learner).tolist())
    return path


def test_ogd_by_hand(quadratic, played, chunk):
    """w ← w − ½ (w − c) goes half of the way to c."""
    _, learner = quadratic([8.0, 0.0], algo="ogd")
    path = follow(learner, played, chunk, [[0.0, 0.0], [0.0, 4.0], [2.0, 2.0]])
    assert path == [[8.0, 0.0], [4.0, 0.0], [2.0, 2.0], [2.0, 2.0]]


def test_optimistic_by_hand(quadratic, played, chunk):
    """ŵ: 8, 8 − ½·8 = 4, 4 − ½·0 = 4, 4 + ½·4 = 6;  w = ŵ − ½ h: 8, 4 − ½·8 = 0, 4 − ½·0 = 4, 6 + ½·4 = 8.

    Unlike in OGD, g_t is the gradient at w_t and not at ŵ_t.
    """
    _, learner = quadratic([8.0], algo="optimistic", hint="last")
    # c: 0 → g_1 = 8;  0 → g_2 = w_2 − 0 = 0;  8 → g_3 = 4 − 8 = −4
    path = follow(learner, played, chunk, [[0.0], [0.0], [8.0]])
    assert path == [[8.0], [0.0], [4.0], [8.0]]


def test_the_mean_hint_by_hand(quadratic, played, chunk):
    """g_1 = 8, h_2 = 8: ŵ = 4, w = 0;  g_2 = 0, h_3 = 4: ŵ = 4, w = 2."""
    _, learner = quadratic([8.0], algo="optimistic", hint="mean")
    assert follow(learner, played, chunk, [[0.0], [0.0]]) == [[8.0], [0.0], [2.0]]


def test_without_a_hint_optimistic_is_ogd(quadratic, played, chunk):
    centres = [[1.0, 3.0], [-2.0, 0.3], [0.7, 0.1]]
    paths = [
        follow(quadratic([8.0, 1.0], algo=algo, hint="none")[1], played, chunk, centres)
        for algo in ("ogd", "optimistic")
    ]
    assert paths[0] == paths[1]


def test_momentum_by_hand(quadratic, played, chunk):
    """With μ = ½, η = ½: w = 8 → 4 → 4 − ½(4 + 4) = 0 → 0 − ½(0 + 4) = −2."""
    _, learner = quadratic([8.0], algo="momentum", momentum=0.5)
    assert follow(learner, played, chunk, [[0.0]] * 3) == [[8.0], [4.0], [0.0], [-2.0]]
    _, matched = quadratic([8.0], algo="momentum", momentum=0.5, matched=True)
    assert follow(matched, played, chunk, [[0.0]]) == [[8.0], [6.0]], "η (1 − μ) is the first step"


def test_optimistic_beats_ogd_on_slowly_changing_gradients(quadratic, chunk):
    """The last gradient is then a good hint. Both use the same η, on a center that moves at a constant speed."""
    suffered = {}
    for algo in ("ogd", "optimistic"):
        _, learner = quadratic([0.0, 0.0], algo=algo, lr=0.05)
        losses = [learner.learn(chunk([0.1 * t, -0.2 * t])).loss for t in range(60)]
        suffered[algo] = sum(losses)
    assert suffered["optimistic"] < 0.98 * suffered["ogd"]


def test_regret_of_ogd_is_within_its_bound(quadratic, played, chunk):
    """Σ f_t(w_t) − Σ f_t(u) ≤ D²/2η + η/2 Σ ‖g_t‖² for every u in the ball (Zinkevich 2003), with projection."""
    random = torch.Generator().manual_seed(3)
    centres = torch.randn(200, 3, generator=random) + torch.tensor([2.0, 0.0, -1.0])
    radius, eta = 1.5, 0.1
    _, learner = quadratic([0.0, 0.0, 0.0], algo="ogd", lr=eta, radius=radius)
    suffered, squares = 0.0, 0.0
    for centre in centres:
        w = played(learner)
        assert w.norm() <= radius * 1.00001
        squares += float((w - centre).square().sum())
        suffered += learner.learn(chunk(centre.tolist())).loss
    mean = centres.mean(0)
    best = mean * min(1.0, radius / float(mean.norm()))
    regret = suffered - 0.5 * float((centres - best).square().sum())
    assert 0 < regret <= float(best.norm()) ** 2 / (2 * eta) + eta / 2 * squares


def test_steps_per_batch_per_chunk_and_per_epoch(quadratic, played, chunk):
    """Per batch: 8 → 4 → 2. Per chunk, on the mean over tokens: c = (0 + 2·3)/3 = 2, so 8 → 5."""
    _, by_batch = quadratic([8.0], algo="ogd")
    assert by_batch.learn(chunk([0.0], [0.0])).steps == 2 and played(by_batch).tolist() == [2.0]
    _, by_chunk = quadratic([8.0], algo="ogd", step="chunk")
    by_chunk.learn(chunk([0.0], tokens=1) + chunk([3.0], tokens=2))
    assert played(by_chunk).tolist() == [5.0]
    _, epochs = quadratic([8.0], algo="ogd", step="chunk", epochs=3)
    epochs.learn(chunk([0.0]))
    assert played(epochs).tolist() == [1.0]


def test_an_optimistic_learner_updates_its_hint_at_every_inner_step(quadratic, played, chunk):
    """ŵ = 8, g = 8: ŵ = 4, w = 4 − 4 = 0; there g = 0: ŵ = 4, w = 4.

    With the whole displacement as a hint after the loop, w would be 2 − 6 = −4.
    """
    _, learner = quadratic([8.0], algo="optimistic", epochs=2)
    learner.learn(chunk([0.0]))
    assert played(learner).tolist() == [4.0]


def test_the_played_point_is_projected_too(quadratic, played, chunk):
    """ŵ = 4 lies in the ball around 8 with D = 5, but w = ŵ − 4 does not."""
    _, learner = quadratic([8.0], algo="optimistic", radius=5.0)
    learner.learn(chunk([0.0]))
    assert played(learner).tolist() == [3.0]


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_restored_learner_continues_exactly(quadratic, chunk, algo, optimizer):
    """A state saved after four of eight chunks contains all that matters."""
    random = torch.Generator().manual_seed(1)
    chunks = [chunk(*torch.randn(2, 3, generator=random).tolist()) for _ in range(8)]
    options = dict(algo=algo, optimizer=optimizer, lr=0.07, epochs=2, radius=1.3, hint="mean", discount=0.9, resync=3)
    _, whole = quadratic([0.5, -0.5, 2.0], seed=4, **options)
    for part in chunks[:4]:
        whole.learn(part)
    state = {name: value.clone() for name, value in whole.state().items()}
    _, resumed = quadratic([0.0, 0.0, 0.0], seed=4, **options)
    if algo == "static":  # static learners have no state
        assert state == {}
        return
    resumed.restore(state)
    for part in chunks[4:]:
        assert torch.equal(resumed.play(), whole.play())
        assert resumed.learn(part) == whole.learn(part)
    theirs = whole.state()
    assert all(torch.equal(value, theirs[name]) for name, value in resumed.state().items())


def test_a_state_of_another_learner_is_refused(quadratic):
    """Otherwise it would fail later or continue with half of a state."""
    _, ogd = quadratic([0.0], algo="ogd")
    for other in (dict(algo="ensemble"), dict(algo="optimistic"), dict(algo="ogd", optimizer="adam")):
        with pytest.raises(CheckpointError, match="does not fit its recipe"):
            quadratic([0.0], **other)[1].restore(ogd.state())
    with pytest.raises(CheckpointError, match="does not fit its recipe"):
        quadratic([0.0, 0.0], algo="ogd")[1].restore(ogd.state())


@pytest.mark.parametrize("algo", ["ogd", "momentum", "optimistic", "ensemble", "opt-ensemble"])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_loss_changes_nothing(quadratic, chunk, algo, at, bad):
    """Weights and optimizer state stay, even if earlier steps on the same chunk were sound."""
    _, learner = quadratic([1.0, 2.0], algo=algo, optimizer="adam", lr=0.1, epochs=1)
    learner.learn(chunk([0.0, 0.0]))
    before = {name: value for name, value in learner.state().items() if name != "t"}
    before_play = learner.play()
    centres = [[0.0, 0.0], [0.0, 0.0]]
    centres[at] = [bad, 0.0]
    outcome = learner.learn(chunk(*centres))
    assert outcome.status == "refused" and outcome.refused == tuple(range(3 if "ensemble" in algo else 1))
    after = learner.state()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(before_play, learner.play())
    assert learner.learn(chunk([0.0, 0.0])).status == "updated", "it goes on afterwards"


def test_an_overflowing_gradient_norm_is_refused(quadratic, played, chunk):
    """Clipping by an infinite norm would give 0, and the chunk would pass as learned."""
    _, learner = quadratic([1e25], algo="ogd", clip=0.5)
    assert learner.learn(chunk([0.0])).status == "refused"
    assert played(learner).item() == pytest.approx(1e25)


def test_an_ensemble_with_all_members_refused_keeps_its_weights(quadratic, chunk):
    """The losses before the inner loop are finite, but the loop overflows."""
    _, learner = quadratic([8.0], algo="ensemble", lr=1e30, epochs=3)
    assert learner.learn(chunk([0.0])).status == "refused"
    assert learner.L.tolist() == [0.0, 0.0, 0.0]


def test_a_chunk_without_tokens_changes_nothing(quadratic, played, chunk):
    """Happens with OSD if every draft was accepted; 0/0 would poison the weights."""
    for algo in ("osd", "ensemble"):
        _, learner = quadratic([1.0], algo=algo)
        for nothing in ([], chunk([0.0], tokens=0)):
            assert learner.learn(nothing).status == "empty"
        assert played(learner).tolist() == [1.0]


def test_static_never_changes(quadratic, played, chunk):
    _, learner = quadratic([1.0], algo="static")
    assert learner.learn(chunk([0.0])).status == "static"
    assert played(learner).tolist() == [1.0]


def test_osd_learns_from_rejected_positions_by_the_rule_of_ogd(quadratic, played, chunk):
    assert [feedback(algo) for algo in ("ogd", "osd", "ensemble")] == ["all", "rejected", "all"]
    paths = [follow(quadratic([3.0], algo=algo)[1], played, chunk, [[0.0], [5.0]]) for algo in ("ogd", "osd")]
    assert paths[0] == paths[1]


def test_default_settings_of_each_family():
    """The values of the papers; values in the recipe win."""
    eagle3 = LearnerRecipe().resolved("eagle3", 4096)
    assert (eagle3.optimizer, eagle3.lr, eagle3.epochs, eagle3.clip) == ("muon", 2.5e-4, 1, 0.5)
    assert LearnerRecipe().resolved("eagle3", 256).lr == pytest.approx(4e-3), "narrow heads take larger steps"
    hydra = LearnerRecipe().resolved("hydra", 256)
    assert (hydra.optimizer, hydra.lr, hydra.dropout, hydra.clip) == ("adam", pytest.approx(2.4e-3), 0.1, 0.0)
    adam = LearnerRecipe(optimizer="adam").resolved("eagle3", 256)
    assert adam.lr == pytest.approx(9.6e-4), "the rate belongs to the optimizer"
    assert LearnerRecipe(algo="ensemble").resolved("eagle3", 256).lr == pytest.approx(2e-3), "rates around the family's"
    assert LearnerRecipe(algo="momentum").resolved("eagle", 4096).lr == 0.1, "the heavy ball takes no rate of Adam's"
    own = LearnerRecipe(lr=0.3, clip=0.0, epochs=4, dropout=0.0).resolved("eagle3", 256)
    assert (own.lr, own.clip, own.epochs, own.dropout) == (0.3, 0.0, 4, 0.0)
