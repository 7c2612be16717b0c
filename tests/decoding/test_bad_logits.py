"""Targets with logits that are not finite: an error that names the target, and no text."""

import pytest
import torch

from specctl.decoding.protocols import Drafter
from specctl.decoding.records import DraftTree
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.decoding.target import load_target
from specctl.errors import CheckpointError
from tests.toys.decoding import decode


class Poisoned:
    """The target's model; from the `after`-th product with the vocabulary on, one logit of each row is `value`."""

    def __init__(self, model, value, after):
        self.model, self.value, self.left = model, value, after

    def __getattr__(self, name):
        return getattr(self.model, name)

    def logits(self, hidden):
        logits = self.model.logits(hidden).clone()
        self.left -= 1
        if self.left < 0:
            logits[..., 7] = self.value
        return logits


class Guess(Drafter):
    """Drafts one token."""

    def propose(self, state, budget):
        return DraftTree.from_chains([[5]] * state.batch, torch.device("cpu"))


OPTIONS = dict(sampling=GREEDY, max_new_tokens=6, seeds=[0])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0, 0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("after", [0, 2], ids=["of the prompt", "of a step"])
@pytest.mark.parametrize("drafter", [None, Guess()], ids=["plain", "drafted"])
@pytest.mark.parametrize("rounds", ["0", "eager"], ids=["by the host", "by the device"])
def test_nan_or_infinite_logits_stop_decoding(target, prompts, monkeypatch, sampling, value, after, drafter, rounds):
    monkeypatch.setenv("SPECCTL_GRAPHS", rounds)
    monkeypatch.setattr(target, "model", Poisoned(target.model, value, after))
    with pytest.raises(CheckpointError, match="logits of target builtin are not finite in float32"):
        decode(target, prompts[:1], **OPTIONS | {"sampling": sampling}, drafter=drafter)


def test_a_logit_of_minus_infinity_is_no_error(target, prompts, monkeypatch):
    plain = decode(target, prompts[:1], **OPTIONS)[0].output_ids
    assert 7 not in plain
    monkeypatch.setattr(target, "model", Poisoned(target.model, -torch.inf, 0))
    assert decode(target, prompts[:1], **OPTIONS)[0].output_ids == plain


def test_fp16_overflow_suggests_bf16(tiny_directory, prompts):
    found = load_target(tiny_directory("llama"), device="cpu", dtype="fp16")
    assert found.path == "lean"
    found.model.head.weight.fill_(6e4)  # the products exceed 65504, fp16's largest number
    with pytest.raises(CheckpointError, match="not finite in float16") as failure:
        decode(found, prompts[:1], **OPTIONS)
    assert "bf16" in failure.value.hint


def test_a_batch_may_end_before_its_first_round(target, prompts):
    found = decode(target, prompts, **OPTIONS | {"max_new_tokens": 1, "seeds": [0] * 3})
    assert [len(one.output_ids) for one in found] == [1, 1, 1]
    assert all(one.target_passes == 0 for one in found)
