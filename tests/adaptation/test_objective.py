"""Losses of real heads as functions of one vector, and learners on a real head."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from specctl.adaptation.updates.objective import Objective, with_distributions
from specctl.adaptation.updates.registry import make_learner
from specctl.drafters import pool
from specctl.drafters.lm.model import LMBatch
from specctl.errors import RecipeError
from specctl.kernels.distill import Teacher
from specctl.recipe import DrafterRecipe, LearnerRecipe, TrainRecipe
from specctl.training.example import Example
from specctl.training.features import FeatureStore, slot_batch
from tests.drafters.variants import VARIANTS
from tests.toys import mtp

FAMILIES = ["eagle", "eagle3", "peagle", "dflash", "mtp", "hydra", "medusa", "lm"]
SIZES = ((40, 12), (33, 20), (31, 3))
OPTIONS = {"dflash with confidence": {"confidence": True}} | {
    f"eagle3 as {name}": VARIANTS[name] for name in ("paper", "speculators", "layers")
}


class Lesson:
    """A head of a family, batches for it, and a function to run it on a batch."""

    def __init__(self, target, arch, drafter=None, **options):
        torch.manual_seed(1)
        sizes = {"vocab_size": 256} if arch in ("eagle3", "peagle", "dflash", "hydra", "medusa") else {}
        sizes |= {"hidden_size": 48, "num_layers": 1} if arch == "lm" else {}
        recipe = TrainRecipe(arch=arch, ttt_steps=2, drafter=DrafterRecipe(**sizes, **drafter or {}), **options)
        family = pool.load_family(arch)
        random_layer = arch == "mtp"  # the target has no MTP layer
        self.head = mtp.head(target) if random_layer else family.build(recipe, target, lambda size: list(range(size)))
        family.set_training_options(self.head, recipe)
        random = torch.Generator().manual_seed(0)
        tokens = [torch.randint(5, 250, (size,), generator=random).tolist() for size, _ in SIZES]
        examples = [Example(i, str(i), tokens[i], prompt) for i, (_, prompt) in enumerate(SIZES)]
        if arch == "lm":
            width = max(len(row) for row in tokens)
            padded = torch.tensor([row + [0] * (width - len(row)) for row in tokens])
            mask = torch.tensor([[i >= prompt and i < size for i in range(width)] for size, prompt in SIZES])
            self.chunk = [LMBatch(padded, mask)]
            self.run = lambda module, batch: module(batch)
            return
        store, steps = FeatureStore(target, self.head.taps), self.head.steps
        head = self.target_head = target.head_weight[self.head.draft_ids].contiguous()
        self.chunk = [slot_batch(part, store.get(part), steps, self.head.t2d) for part in (examples[:2], examples[2:])]
        self.run = lambda module, batch: module(batch, target.model.embedding, head)
        self.prepare = lambda batch: with_distributions(batch, head, self.head.squash)


@pytest.mark.parametrize("arch", [*FAMILIES, *OPTIONS])
def test_gradients_equal_those_of_the_module(target, arch):
    """Covers custom autograd functions, tied and repeated modules, and `transformers` modules in functional_call.

    The vector differs from the module's weights, so a weight that is not replaced is noticed.
    """
    lesson = Lesson(target, arch.split()[0], OPTIONS.get(arch))
    objective = Objective(lesson.head, lesson.run, seed=5)
    held = objective.start()
    w = held + 0.01 * torch.randn(held.shape, generator=torch.Generator().manual_seed(2))
    total, weight, gradient = objective.gradient(w, lesson.chunk[0], draw=7)
    assert torch.equal(objective.start(), held), "the module itself is left alone"
    again = objective.gradient(w, lesson.chunk[0], draw=7)
    assert torch.equal(again[2], gradient)
    lesson.head.load_state_dict(objective.state(w))
    assert torch.equal(objective.start(), w)
    lesson.head.eval()  # turns off eagle's noise and changes nothing else
    theirs, count, *_ = lesson.run(lesson.head, lesson.chunk[0])
    mean = float(theirs.detach() / count)
    measured = objective.losses([w, held], lesson.chunk[:1])
    assert measured[0].item() == pytest.approx(mean, rel=1e-6)
    assert measured[1].item() != pytest.approx(mean, rel=1e-6)
    if arch == "eagle":
        return
    assert total.item() == pytest.approx(theirs.item()) and weight == count
    theirs.backward()
    expected = torch.cat([p.grad.reshape(-1) for p in lesson.head.parameters() if p.requires_grad])
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("arch", ["eagle", "eagle3", "peagle", "dflash", "mtp", "hydra", "medusa"])
def test_precomputed_distributions_change_no_loss_or_gradient(target, arch):
    """They save a vocabulary product per member and depth."""
    lesson = Lesson(target, arch)
    objective = Objective(lesson.head, lesson.run, prepare=lesson.prepare)
    w, batch = objective.start(), lesson.chunk[0]
    plain, prepared = (objective.gradient(w, batch, 0) for batch in (batch, objective.prepare(batch, 0)))
    for ours, theirs in zip(prepared, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    nothing = Teacher(torch.zeros(batch.teacher.shape[0], len(lesson.head.draft_ids)))
    silent = replace(batch, distributions=nothing)
    assert objective.gradient(w, silent, 0)[0] != prepared[0], "they are what is learnt from"


@pytest.mark.parametrize("arch", ["eagle3", "peagle", "dflash", "hydra"])
def test_a_sample_of_the_vocabulary_is_drawn_once(target, arch):
    """Gradients and losses are of the sample of `prepare`, which depends only on the seed and the draw."""
    lesson = Lesson(target, arch)
    lesson.prepare = partial(with_distributions, target_head=lesson.target_head, squash=lesson.head.squash, sample=40)
    objective = Objective(lesson.head, lesson.run, prepare=lesson.prepare)
    w, batch = objective.start(), lesson.chunk[0]
    generator = torch.get_rng_state()
    one, again, other = (objective.prepare(batch, draw) for draw in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), generator)
    tokens = [prepared.distributions.sample.tokens for prepared in (one, again, other)]
    assert len(tokens[0]) == 40 and torch.equal(tokens[0], tokens[1]) and not torch.equal(tokens[0], tokens[2])
    total, weight, _ = objective.gradient(w, one, 0)
    assert objective.losses([w], [batch]).item() == pytest.approx(float(total / weight), rel=1e-5)
    full = objective.gradient(w, batch, 0)
    assert total != full[0] and weight == full[1]


def test_dropout_depends_only_on_seed_and_draw(target):
    """It needs no generator state to resume, leaves the global generator alone, and is off in measurements."""
    lesson = Lesson(target, "hydra", dropout=0.3)
    objective, other = Objective(lesson.head, lesson.run, seed=0), Objective(lesson.head, lesson.run, seed=1)
    w, batch = objective.start(), lesson.chunk[0]
    generator = torch.get_rng_state()
    first = objective.gradient(w, batch, 3)[0]
    assert torch.equal(torch.get_rng_state(), generator)
    torch.rand(5)
    assert objective.gradient(w, batch, 3)[0] == first
    assert objective.gradient(w, batch, 4)[0] != first
    assert other.gradient(w, batch, 3)[0] != first
    assert torch.equal(*(objective.losses([w], lesson.chunk) for _ in range(2)))


def test_frozen_parameters_are_not_learned(target):
    """An adapter shares its base, which stays frozen."""
    head = Lesson(target, "eagle3").head
    head.fc.requires_grad_(False)
    frozen = Objective(head, lambda module, batch: module(batch)).start()
    assert len(frozen) == sum(p.numel() for p in head.parameters()) - head.fc.weight.numel()
    with pytest.raises(RecipeError, match="no trainable weights"):
        Objective(head.requires_grad_(False), lambda module, batch: module(batch))


@pytest.mark.parametrize(
    ("algo", "optimizer", "lr"),
    [("ogd", "adam", 2e-4), ("ogd", "muon", 2e-3), ("optimistic", "muon", 2e-3), ("ensemble", "adam", 2e-4)],
)
def test_learners_lower_the_loss_of_a_real_head(target, algo, optimizer, lr):
    """By a fifth within three chunks, on the chunk it learns from."""
    lesson = Lesson(target, "eagle3")
    objective = Objective(lesson.head, lesson.run)
    options = LearnerRecipe(algo=algo, lr=lr, optimizer=optimizer, epochs=2).resolved("eagle3", target.hidden_size)
    learner = make_learner(objective, options, objective.start())

    def loss():
        return float(objective.losses([learner.play()], lesson.chunk))

    before = loss()
    for _ in range(3):
        assert learner.learn(lesson.chunk).status == "updated"
    assert loss() < 0.8 * before


def test_a_restored_learner_of_a_real_head_continues_exactly(target):
    """Bit for bit, with dropout, from a state saved with safetensors."""
    from safetensors.torch import load, save

    lesson = Lesson(target, "hydra", dropout=0.1)
    options = LearnerRecipe(algo="opt-ensemble", members=2, optimizer="adam").resolved("hydra", 256)
    objective = Objective(lesson.head, lesson.run, seed=3)
    whole, resumed = (make_learner(objective, options, objective.start()) for _ in range(2))
    whole.learn(lesson.chunk[:1])
    resumed.restore(load(save(whole.state())))
    for learner in (whole, resumed):
        learner.learn(lesson.chunk[1:])
    theirs = whole.state()
    assert all(torch.equal(value, theirs[name]) for name, value in resumed.state().items())
    assert torch.equal(whole.play(), resumed.play())
