"""Replace the weights of a drafter in place."""

import copy

import pytest
import torch

from specctl.adaptation.online_drafter import take_weights
from specctl.decoding.models import linear
from tests.decoding import test_device_round as toys
from tests.decoding.test_device_round import tiny  # noqa: F401 - a fixture
from tests.toys.decoding import decode, engine_for

NAMES = [name for name in toys.EACH if name not in ("plain", "suffix")]


@pytest.fixture
def plain_products(monkeypatch):
    """Leave weights unpacked, as on a GPU."""
    monkeypatch.setattr(linear, "_packed", lambda *_: None)


def other(target, name, monkeypatch):
    """Return a drafter with the same shape and other weights."""
    seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda number: seed(number + 1))
    made = toys.MADE[name](target)
    monkeypatch.setattr(torch, "manual_seed", seed)
    return made


def texts(target, drafter=None, engine=None):
    """Return each text with its number of accepted draft tokens."""
    engine = engine or engine_for(target, drafter)
    found = decode(target, toys.PROMPTS, sampling=toys.HOT, max_new_tokens=12, seeds=[*range(5)], engine=engine)
    return [(one.output_ids, one.accepted) for one in found]


@pytest.mark.parametrize("name", NAMES)
def test_drafts_use_the_new_weights_and_keep_the_graphs(tiny, plain_products, monkeypatch, name):  # noqa: F811
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    drafter, source = toys.MADE[name](tiny), other(tiny, name, monkeypatch)
    before, after = texts(tiny, drafter), texts(tiny, source)
    assert [ids for ids, _ in before] == [ids for ids, _ in after] and before != after
    engine = engine_for(tiny, drafter)
    assert texts(tiny, engine=engine) == before
    rounds = engine.device
    assert take_weights(drafter, source)
    assert texts(tiny, engine=engine) == after
    assert engine.device is rounds and rounds.tracks, "the graphs were lost"


def test_drafters_with_other_sizes_are_refused(tiny, plain_products, monkeypatch):  # noqa: F811
    drafter, wide = toys.MADE["eagle3 tree"](tiny), toys.eagle3(tiny, toys.SHAPES["tree"], num_heads=8)
    before = copy.deepcopy(drafter.qkv.weight)
    assert not take_weights(drafter, wide) and not take_weights(drafter, toys.MADE["medusa tree"](tiny))
    assert torch.equal(drafter.qkv.weight, before)


def test_packed_weights_are_refused(tiny, monkeypatch):  # noqa: F811
    monkeypatch.setattr(linear, "_packed", lambda weight, bias, rough: lambda x: x @ weight.T)
    drafter = toys.MADE["eagle3 tree"](tiny)
    assert not take_weights(drafter, other(tiny, "eagle3 tree", monkeypatch))
