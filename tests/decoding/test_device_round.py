"""Rounds on the device against the host's: the same texts and counts, whatever the drafter, the batch and the end."""

from dataclasses import replace

import pytest
import torch

from specctl.decoding import loop
from specctl.decoding.device_round import DeviceRounds
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.drafters import eagle, lm
from specctl.drafters.tree import Shape
from specctl.recipe import DraftingRecipe, TrainRecipe
from tests.lossless.drafters import own_weights
from tests.lossless.test_equality import random_eagle3

HOT = Sampling(1.0, 0, 1.0)
FILTERED = Sampling(0.8, 40, 0.9)
CHAIN = Shape(depth=4, width=1, nodes=4, children=1, stop_below=0.0)
COMB = Shape(depth=4, width=1, nodes=9, children=3, stop_below=0.0)
TREE = Shape(depth=4, width=5, nodes=14, children=3, stop_below=0.0)


def lm_drafter(target, proposal):
    return lm.drafter(own_weights(target, 0.3), target, DraftingRecipe(depth=4, stop_below=0.0, proposal=proposal))


DRAFTERS = {
    "plain": lambda target: None,
    "eagle3-chain": lambda target: random_eagle3(target, CHAIN),
    "eagle3-comb": lambda target: random_eagle3(target, COMB),
    "eagle3-tree": lambda target: random_eagle3(target, TREE),
    "eagle": lambda target: replace_shape(eagle.drafter(eagle.build(TrainRecipe(), target, None), target, DraftingRecipe()), TREE),
    "lm": lambda target: lm_drafter(target, "deterministic"),
    "lm-sampled": lambda target: lm_drafter(target, "sampled"),
}


def replace_shape(drafter, shape):
    drafter.shape = shape
    return drafter


@pytest.fixture(scope="module")
def drafters(target):
    made = {}
    return lambda name: made.setdefault(name, DRAFTERS[name](target))


def run(target, prompts, **options):
    found = loop.decode(target, prompts, share_rows=False, **options)
    return [replace(one, prefill_s=0, decode_s=0) for one in found]


@pytest.mark.parametrize("sampling", [GREEDY, HOT, FILTERED], ids=["greedy", "hot", "filtered"])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("count", [1, 3])
def test_same_texts_and_counts(target, prompts, drafters, monkeypatch, name, sampling, count):
    options = dict(
        sampling=sampling, max_new_tokens=[24, 9, 17][:count], seeds=[5, 6, 7][:count], drafter=drafters(name), slots=2
    )
    host = run(target, prompts[:count], **options)
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    device = run(target, prompts[:count], **options)
    print([(o.accepted, o.drafted, o.target_passes) for o in host], name)
    assert device == host
