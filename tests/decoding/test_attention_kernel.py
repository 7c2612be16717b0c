"""Attention by a kernel that takes lengths and ancestors, compared with attention with a mask. Here the kernel is the
reference; tests/kernels/test_triton.py runs this file again with Triton's kernel in its interpreter."""

import os
import warnings
from types import SimpleNamespace

import pytest
import torch

from specctl import kernels
from specctl.decoding import attention
from specctl.decoding.cache import KVCache
from specctl.decoding.models.layers import attend
from specctl.decoding.plan import plan_at, plan_rows
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import DraftTree
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.errors import UsageError
from specctl.kernels import reference, self_check
from tests.toys.decoding import decode

CPU = torch.device("cpu")
FP32 = torch.float32
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["triton" if INTERPRETED else "reference"])
def kernel(request, monkeypatch):
    """`kernel()`: from this call on attention uses the kernel. Returns the list of its calls."""
    calls = []
    if request.param == "triton":
        from specctl.kernels.triton_backend import attention as op
    else:
        op = reference.attention

    def start():
        monkeypatch.setenv("SPECCTL_ATTENTION", "kernel")
        monkeypatch.setattr(kernels, "attention", lambda *args: (calls.append(args), op(*args))[1])
        return calls

    return start


def tree(batch, rows, reach):
    """[batch, rows, reach]: the last rows of the ancestor matrices of trees."""
    seen = torch.eye(reach, dtype=torch.bool).repeat(batch, 1, 1)
    for b in range(batch):
        for row in range(1, reach):
            seen[b, row] |= seen[b, (row - 1) // (2 + b)]
    return seen[:, reach - rows :]


def host(base, rows, **how):
    return plan_rows(base, rows, device=CPU, dtype=FP32, **how)


def device(base, rows, reach, chain=False):
    visible = torch.ones(reach, reach).tril().bool()[reach - rows :].expand(len(base), -1, -1)
    visible = visible if chain else tree(len(base), rows, reach)
    return plan_at(torch.tensor(base), visible, torch.arange(rows), span=80, dtype=FP32, chain=chain)


DEPTHS = torch.tensor([[0, 1, 1, 2, 2]]).expand(3, -1)
PLANS = {
    "one row": lambda: host([40], 1),
    "one row of each": lambda: host([40, 40, 40], 1),
    "ragged": lambda: host([40, 3, 17], 1),
    "ragged chain": lambda: host([40, 3, 17], 5),
    "chain": lambda: host([40], 5),
    "tree": lambda: host([40], 5, visible=tree(1, 5, 5), depth=DEPTHS[:1]),
    "ragged tree": lambda: host([40, 0, 17], 5, visible=tree(3, 5, 5), depth=DEPTHS),
    "exact": lambda: host([40], 8, span=80),
    "device chain": lambda: device([40, 0, 17], 5, 5, chain=True),
    "device tree": lambda: device([40, 0, 17], 5, 5),
    "a level of a tree": lambda: device([40, 0, 17], 4, 12),
    "window": lambda: host([40, 3, 17], 5).with_window(9, FP32),
    "window of one row": lambda: host([40], 1).with_window(9, FP32),
    "window of a tree": lambda: device([40, 0, 17], 4, 12).with_window(13, FP32),
    "one of several rows": lambda: device([40, 0, 17], 5, 5, chain=True).row(torch.tensor([4, 0, 2])),
    "one of several rows, window": lambda: device([40, 0, 17], 5, 5).with_window(9, FP32).row(torch.tensor([1, 0, 3])),
}


@pytest.mark.parametrize("name", PLANS)
def test_kernel_attention_equals_masked_attention(monkeypatch, kernel, name):
    """A plan that gets its mask later is compared, too."""
    torch.manual_seed(0)
    expected_plan = PLANS[name]()
    batch = expected_plan.positions.shape[0]
    rows = expected_plan.positions.shape[1]
    cache = KVCache(2, batch, 2, 80, 8, dtype=FP32, device=CPU)
    cache.store.normal_()
    q = torch.randn(batch, rows, 6, 8)
    expected = attend(q, cache, 1, expected_plan, 0.3)
    calls = kernel()
    plan = PLANS[name]()
    assert plan.mask is None and torch.equal(plan.positions, expected_plan.positions)
    torch.testing.assert_close(attend(q, cache, 1, plan, 0.3), expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1
    masked = plan.masked(FP32)
    torch.testing.assert_close(attend(q, cache, 1, masked, 0.3), expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1 and plan.masked(FP32) is masked


def test_plans_with_skipped_slots_have_a_mask(kernel):
    gaps = [range(0), range(1, 3), range(4, 15)]
    expected = host([40, 3, 17], 5).without_slots(gaps, FP32)
    kernel()
    assert torch.equal(host([40, 3, 17], 5).without_slots(gaps, FP32).mask, expected.mask)
    assert host([40, 3, 17], 5).without_slots([range(0)] * 3, FP32).mask is None


def test_prompts_and_very_large_trees_do_not_use_the_kernel(kernel):
    """The ancestors of a tree with more than 64 rows do not fit into 64 bits."""
    kernel()
    assert host([0, 0], 9).causal
    assert host([7], 65, visible=torch.ones(1, 65, 65).tril().bool(), depth=torch.arange(65)[None]).mask is not None


class Guess(Drafter):
    """Drafts chains or trees that contain some right tokens of known answers."""

    def __init__(self, answers, chain):
        self.answers, self.chain = answers, chain

    def propose(self, state, budget):
        drafts = []
        for row in state.rows:
            answer = self.answers[tuple(row.ids[: row.prompt_length])][len(row.output) :]
            right = [*answer[:2], 7] if len(row.ids) % 3 else [9, 9, 9]
            right = right[: max(min(row.draft_room, budget - 3), 0)]
            if self.chain:
                drafts.append((right, list(range(-1, len(right) - 1))))
            else:  # each right token follows a wrong sibling
                tokens = [token for pair in zip([11] * len(right), right, strict=True) for token in pair]
                drafts.append((tokens, [2 * (n // 2) - 1 if n > 1 else -1 for n in range(len(tokens))]))
        return DraftTree.from_trees(drafts, state.device)


@pytest.fixture
def small(target, monkeypatch):
    """The built-in target; in the interpreter, which needs milliseconds per program, only two of its layers."""
    if INTERPRETED:
        monkeypatch.setattr(target.model, "layers", target.model.layers[:2])
    return target


@pytest.mark.parametrize("chain", [True, False])
def test_texts_equal_those_of_pytorchs_attention(small, prompts, kernel, chain):
    """In fp32, for a ragged batch: plain decoding, and drafts with some wrong tokens."""
    short = [prompts[0], prompts[1][:40]]
    how = dict(sampling=[GREEDY, Sampling(0.8, 40, 0.9)], max_new_tokens=[7, 6], seeds=[1, 2])
    plain = decode(small, short, **how)
    calls = kernel()
    if chain:
        assert [one.output_ids for one in decode(small, short, **how)] == [one.output_ids for one in plain]
    answers = {tuple(one.prompt_ids): one.output_ids for one in plain}
    drafted = decode(small, short, drafter=Guess(answers, chain), **how)
    assert [one.output_ids for one in drafted] == [one.output_ids for one in plain]
    assert sum(one.accepted for one in drafted) > 3
    assert max(args[0].shape[1] for args in calls) > 2
    assert any(args[2].ancestor_bits is not None for args in calls) != chain


def test_exact_mode_gives_equal_bits_for_plain_and_speculative_steps(small, prompts, kernel, monkeypatch):
    """The logits are compared, because texts could be equal by chance."""
    kernel()
    steps = []
    real = small.step

    def watched(tokens, cache, plan, taps=()):
        answer = real(tokens, cache, plan, taps)
        steps.append((int(plan.positions[0, 0]), tokens[0].tolist(), answer[0][0].clone()))
        return answer

    monkeypatch.setattr(small, "step", watched)
    how = dict(sampling=GREEDY, max_new_tokens=9, seeds=[0], exact=True)
    plain = decode(small, prompts[:1], **how)[0]
    text = plain.prompt_ids + plain.output_ids
    alone = {start: logits[0] for start, _, logits in steps}
    steps.clear()
    drafted = decode(small, prompts[:1], drafter=Guess({tuple(plain.prompt_ids): plain.output_ids}, True), **how)
    assert drafted[0].output_ids == plain.output_ids
    inside = 0
    for start, tokens, logits in steps:
        for t in range(4):
            if tokens[: t + 1] == text[start : start + t + 1] and start + t in alone:
                assert torch.equal(logits[t], alone[start + t])
                inside += t > 0
    assert inside > 2


def test_a_wrong_kernel_is_refused_for_its_head_shape(monkeypatch):
    """With one warning. Other shapes on the device keep the kernel, and a correct kernel is checked only once."""
    tried = []

    def op(*args):
        tried.append(args[0].shape[3])
        return (0.01 if args[0].shape[3] == 16 else 0.0) + reference.attention(*args)

    monkeypatch.setattr(kernels, "attention", op)
    monkeypatch.delenv("SPECCTL_ATTENTION", raising=False)
    self_check.passes.cache_clear()
    try:
        wrong = torch.zeros(1, 1, 4, 16), torch.zeros(1, 3, 4, 16)
        with pytest.warns(
            UserWarning, match="attention on cpu runs in PyTorch: 4 query and 2 KV heads of dimension 16"
        ):
            assert not attention.served(*wrong)
        count = len(tried)
        right = torch.zeros(1, 1, 4, 8), torch.zeros(1, 3, 4, 8)
        with warnings.catch_warnings(action="error"):
            assert not attention.served(*wrong) and len(tried) == count
            assert attention.served(*right) and attention.served(*right)
            monkeypatch.setattr(attention, "by_kernel", lambda device: True)
            assert attention.serves(CPU, FP32, 4, 2, 8) and not attention.serves(CPU, FP32, 4, 2, 16)
        assert len(tried) - count == tried.count(8) < 10
    finally:
        self_check.passes.cache_clear()


def test_a_kernel_that_raises_falls_back_to_the_mask(monkeypatch, kernel):
    """The plan was made without a mask, before the kernel turned out not to support these heads."""
    torch.manual_seed(0)
    cache = KVCache(1, 1, 2, 80, 8, dtype=FP32, device=CPU)
    cache.store.normal_()
    q = torch.randn(1, 5, 6, 8)
    expected = attend(q, cache, 0, PLANS["tree"](), 0.3)
    kernel()
    plan = PLANS["tree"]()

    def refuse(*args):
        raise ValueError("no such heads")

    monkeypatch.delenv("SPECCTL_ATTENTION")
    monkeypatch.setattr(kernels, "attention", refuse)
    self_check.passes.cache_clear()
    with pytest.warns(UserWarning, match="6 query and 2 KV heads .*: attention fails: no such heads"):
        torch.testing.assert_close(attend(q, cache, 0, plan, 0.3), expected, rtol=1e-5, atol=1e-5)
    self_check.passes.cache_clear()


def test_the_self_check_detects_small_errors():
    """Rows that see a sibling, one slot too few, or miss the last block of many slots."""
    how = (CPU, torch.bfloat16, (8, 2, 16))

    def changed(change):
        def attention(q, rows, ancestry, span, scale):
            return reference.attention(q, rows, *change(ancestry, span), scale)

        return SimpleNamespace(attention=attention)

    assert self_check.attention_mismatch(reference, *how, False) is None
    wrong = [
        lambda a, span: (a if a.ancestor_bits is None else a._replace(ancestor_bits=a.ancestor_bits | 2), span),
        lambda a, span: (a._replace(base=a.base.clamp(min=1)), span),
        lambda a, span: (a._replace(first=(a.base[:, None] > 200) * torch.full((3, 1), 128)), span),
    ]
    for change in wrong:
        assert "a different result from the reference" in self_check.attention_mismatch(changed(change), *how, False)


def test_the_self_check_detects_a_wrong_page():
    how = (CPU, torch.bfloat16, (8, 2, 16))
    assert self_check.attention_mismatch(reference, *how, True) is None

    def of_a_neighbour(*args):
        return reference.attention(*args[:5], args[5].roll(1, 0))

    wrong = SimpleNamespace(attention=of_a_neighbour)
    assert "a different result from the reference" in self_check.attention_mismatch(wrong, *how, True)


def test_the_attention_kernel_is_chosen_by_device_and_environment(monkeypatch):
    monkeypatch.delenv("SPECCTL_ATTENTION", raising=False)
    monkeypatch.delenv("SPECCTL_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "checked_backend", lambda name, device: name)
    gpu = torch.device("cuda", 0)
    assert not attention.by_kernel(CPU)
    assert attention.by_kernel(gpu) == kernels.TRITON
    monkeypatch.setenv("SPECCTL_KERNELS", "reference")
    assert not attention.by_kernel(gpu)
    for chosen in ("kernel", "sdpa"):
        monkeypatch.setenv("SPECCTL_ATTENTION", chosen)
        assert attention.by_kernel(gpu) == attention.by_kernel(CPU) == (chosen == "kernel")
    monkeypatch.setenv("SPECCTL_ATTENTION", "flash")
    with pytest.raises(UsageError, match="SPECCTL_ATTENTION='flash'"):
        attention.by_kernel(CPU)
