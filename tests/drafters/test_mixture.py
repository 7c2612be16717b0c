"""Heads that draft together."""

import pytest
import torch

from specctl.decoding.sampling import GREEDY
from specctl.drafters import pool
from specctl.drafters.feature.mixture import Mixture
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe
from tests.toys.decoding import decode

SHAPES = {"chain": DraftingRecipe(depth=4, width=1, children=1, nodes=4), "tree": DraftingRecipe(depth=3, width=2)}


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def heads(request, target):
    """`heads(seed, shape)`"""
    family = pool.load_family(request.param)

    def make(seed, shape="chain"):
        torch.manual_seed(seed)
        sizes = {"vocab_size": 512} if request.param == "eagle3" else {}
        recipe = TrainRecipe(arch=request.param, drafter=DrafterRecipe(**sizes))
        module = family.build(recipe, target, lambda size: list(range(size)))
        return family.make_drafter(module, target, SHAPES[shape])

    return make


class Watched:
    """A drafter, and the drafts that it made."""

    def __init__(self, drafter):
        self.drafter, self.drafts = drafter, []

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, state, budget):
        draft = self.drafter.propose(state, budget)
        self.drafts.append((draft.tokens.tolist(), draft.parents.tolist()))
        return draft


def drafts(target, prompts, drafter):
    watched = Watched(drafter)
    found = decode(target, prompts, sampling=GREEDY, max_new_tokens=10, seeds=[0] * len(prompts), drafter=watched)
    return watched.drafts, [one.output_ids for one in found]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_head_alone_is_itself(target, prompts, heads, shape):
    """All of the weight on one head, or the same head twice: its own drafts, in chains and trees, in batches, too."""
    for texts in (prompts[:1], prompts):
        own, plain = drafts(target, texts, heads(1, shape))
        for mixture in (
            Mixture([heads(2, shape), heads(1, shape)], [0.0, 1.0]),
            Mixture([heads(1, shape), heads(1, shape)], [0.5, 0.5]),
        ):
            mixed, found = drafts(target, texts, mixture)
            assert mixed == own and found == plain


def test_it_is_the_mean_of_distributions(target, heads):
    """Not of logits, and not of weights."""
    one, other = heads(1), heads(2)
    hidden = torch.randn(3, one.size)
    mixture = Mixture([one, other], [0.3, 0.7])
    expected = 0.3 * one.logits(hidden).softmax(-1) + 0.7 * other.logits(hidden).softmax(-1)
    found = mixture.logits(torch.cat((hidden, hidden), -1))
    torch.testing.assert_close(found.exp(), expected, rtol=1e-4, atol=1e-6)


def test_two_that_differ_draft_neither_alone(target, prompts, heads):
    own = [drafts(target, prompts, heads(seed))[0] for seed in (1, 2)]
    mixed, _ = drafts(target, prompts, Mixture([heads(1), heads(2)], [0.5, 0.5]))
    assert mixed not in own
