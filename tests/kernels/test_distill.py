"""The fused distillation loss agrees with its formulas in value and gradients."""

import pytest
import torch
import torch.nn.functional as F

from specctl.kernels import cpu, distill, reference
from specctl.kernels.distill import SoftmaxSample, Teacher, linear_distill
from specctl.kernels.objectives import OBJECTIVES


def mixed(p, q):
    kl, tv = (FORMULAS[name](p, q) for name in ("kl", "tv"))
    share = torch.exp(-3 * torch.minimum(p, q).sum(-1)).detach()
    return share * kl + (1 - share) * tv


FORMULAS = {
    "soft_ce": lambda p, q: -(p * q.log()).sum(-1),
    "kl": lambda p, q: torch.xlogy(p, p).sum(-1) - (p * q.log()).sum(-1),
    "reverse_kl": lambda p, q: (q * (q / p.clamp_min(1e-9)).log()).sum(-1),
    "tv": lambda p, q: 0.5 * (p - q).abs().sum(-1),
    "log_tv": lambda p, q: -torch.minimum(p, q).sum(-1).log(),
    "lk_lambda": mixed,
    "ce": lambda p, q: -q.gather(-1, p.unsqueeze(-1)).squeeze(-1).log(),
}
H, VD, R, N = 24, 53, 40, 70


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_and_gradients_equal_their_formulas(monkeypatch, backend, objective):
    """With several parts, one-hot teachers and unequal weights."""
    monkeypatch.setattr(cpu, "CACHED", 7 * VD)
    logits = torch.randn(N, VD, requires_grad=True)
    teacher = torch.randn(N, VD).mul_(4).softmax(-1)
    teacher[:5] = F.one_hot(torch.arange(5), VD).float()
    if objective == "ce":
        teacher = teacher.argmax(-1)
    weight = torch.rand(N)
    expected = FORMULAS[objective](teacher, logits.softmax(-1))
    (weight * expected).sum().backward()
    rows = logits.detach().clone()
    losses = backend.distill_rows(rows, teacher, weight, objective)
    torch.testing.assert_close(losses, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(rows, logits.grad, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 2, 33, 8193])
def test_losses_and_gradients_equal_the_reference(backend, objective, dtype, vocabulary):
    """Rows span several blocks or are slices of wider rows; bf16 gradients agree to the last place."""
    wide = (torch.randn(3, vocabulary + 5) * 3).to(dtype)
    teacher = torch.randn(3, vocabulary).mul_(3).softmax(-1)
    teacher = teacher.argmax(-1) if objective == "ce" else teacher
    weight = torch.tensor([1.0, 0.0, 0.3])
    expected = wide[:, :vocabulary].clone()
    losses = reference.distill_rows(expected, teacher, weight, objective)
    beyond = wide[:, vocabulary:].clone()
    ours = backend.distill_rows(wide[:, :vocabulary], teacher, weight, objective)
    torch.testing.assert_close(ours, losses, atol=2e-5, rtol=1e-4)
    tolerance = 1e-4 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(wide[:, :vocabulary], expected, atol=1e-5, rtol=tolerance)
    assert torch.equal(wide[:, vocabulary:], beyond)


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name not in ("ce", "soft_ce")])
def test_divergences_vanish_if_drafter_and_target_agree(objective):
    rows = torch.randn(9, 31)
    losses = reference.distill_rows(rows, rows.softmax(-1), torch.ones(9), objective)
    torch.testing.assert_close(losses, torch.zeros(9), atol=1e-5, rtol=0)


def problem(bias, kind):
    """Return hidden states, head, bias, teacher (rows in one of three forms), row indices and shares."""
    hidden, weight = torch.randn(N, H, requires_grad=True), (torch.randn(VD, H) * 0.2).requires_grad_()
    offset = torch.randn(VD, requires_grad=True) if bias else None
    states, head = torch.randn(R, 11), torch.randn(VD, 11)
    teachers = {
        "hidden": Teacher(states, head),
        "probabilities": Teacher((states @ head.T).softmax(-1)),
        "tokens": Teacher((states @ head.T).argmax(-1)),
    }
    return hidden, weight, offset, teachers[kind], torch.randint(R, (N,)), torch.rand(N) * (torch.rand(N) > 0.3)


@pytest.mark.parametrize("part", [1, 5 * VD, 2**23])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "objective"), [("hidden", "soft_ce"), ("probabilities", "log_tv"), ("tokens", "ce")])
def test_linear_distill_equals_the_loss_of_a_linear_layer(monkeypatch, kind, objective, bias, part):
    """With parts of any size, teacher rows used several times or never, and rows with share 0."""
    monkeypatch.setitem(distill.PART, "cpu", part)
    hidden, weight, offset, teacher, at, share = problem(bias, kind)
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    total, losses = linear_distill(hidden, weight, offset, teacher, at, share, objective)
    (3 * total).backward()
    ours = [leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    known = teacher.rows if teacher.head is None else (teacher.rows @ teacher.head.T).softmax(-1)
    each = FORMULAS[objective](known[at], F.linear(hidden, weight, offset).softmax(-1))
    (3 * share * each).sum().backward()
    torch.testing.assert_close(losses, each.detach() * (share > 0), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(total, (share * each).sum(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours, [leaf.grad for leaf in leaves], atol=1e-4, rtol=1e-4)
    assert not losses.requires_grad


def test_a_frozen_head_and_frozen_states_get_no_gradient():
    hidden, weight, _, teacher, at, share = problem(False, "hidden")
    linear_distill(hidden, weight.detach(), None, teacher, at, share, "soft_ce")[0].backward()
    assert hidden.grad is not None and weight.grad is None
    hidden.grad = None
    linear_distill(hidden.detach(), weight, None, teacher, at, share, "soft_ce")[0].backward()
    assert hidden.grad is None and weight.grad is not None
    with torch.no_grad():
        assert not linear_distill(hidden, weight, None, teacher, at, share, "soft_ce")[0].requires_grad


@pytest.mark.parametrize("kept", [0, 1])
def test_a_batch_without_weight_has_zero_loss_and_gradients(kept):
    hidden, weight, _, teacher, at, share = problem(False, "hidden")
    total, losses = linear_distill(hidden[:kept], weight, None, teacher, at[:kept], share[:kept] * 0, "soft_ce")
    total.backward()
    assert total == 0 and losses.tolist() == [0.0] * kept
    assert weight.grad.abs().max() == 0


def test_products_run_in_the_autocast_dtype():
    """fp32 weights, bf16 products, fp32 gradients."""
    hidden, weight, _, teacher, at, share = problem(False, "hidden")
    exact, _ = linear_distill(hidden, weight, None, teacher, at, share, "soft_ce")
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = linear_distill(hidden, weight, None, teacher, at, share, "soft_ce")
    total.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert total != exact
    torch.testing.assert_close(total, exact, rtol=2e-2, atol=0)


def test_the_logits_are_never_stored_as_a_whole(monkeypatch):
    """Negative control: with a single part they are."""
    largest = []

    def linear(*args):
        out = F.linear(*args)
        largest.append(out.numel())
        return out

    monkeypatch.setattr(distill, "linear", linear)
    hidden, weight, _, teacher, at, share = problem(False, "hidden")
    for part, whole in ((5 * VD, False), (2**23, True)):
        monkeypatch.setitem(distill.PART, "cpu", part)
        largest.clear()
        linear_distill(hidden, weight, None, teacher, at, share, "soft_ce")
        assert (max(largest) > 5 * VD) == whole


def gradients(hidden, weight, bias, teacher):
    """Loss, and its gradients by the hidden states and the vocabulary matrix, for a row each."""
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    x, w, b = leaves[0], leaves[1], bias
    if teacher.sample is not None:
        w, b = teacher.sample.of(w, b)
    total, _ = linear_distill(x, w, b, teacher, torch.arange(len(x)), torch.ones(len(x)), "soft_ce")
    total.backward()
    return torch.stack([total.detach()]), *[leaf.grad for leaf in leaves]


def closeness(found, wanted):
    return F.cosine_similarity(found.flatten(), wanted.flatten(), 0).item(), (found.norm() / wanted.norm()).item()


@pytest.mark.parametrize("kind", ["hidden", "probabilities"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_sampled_softmax_estimates_loss_and_gradients(monkeypatch, kind, bias):
    """The likeliest tokens alone would not do: their loss is too low, and nothing would make the others less likely."""
    torch.manual_seed(3)
    V, H, R, count = 3000, 24, 40, 300
    hidden, weight, offset = torch.randn(R, H), 0.4 * torch.randn(V, H), 0.1 * torch.randn(V) if bias else None
    states, head = torch.randn(R, H), 1.5 * torch.randn(V, H)
    teacher = Teacher(states, head) if kind == "hidden" else Teacher((states @ head.T).softmax(-1))
    whole = gradients(hidden, weight, offset, teacher)
    drawn = [teacher.sampled(count) for _ in range(30)]
    mean = [
        torch.stack(parts).mean(0)
        for parts in zip(*[gradients(hidden, weight, offset, one) for one in drawn], strict=True)
    ]
    for found, wanted in zip(mean, whole, strict=True):
        direction, length = closeness(found, wanted)
        assert direction > 0.98 and length == pytest.approx(1, abs=0.1)
    likely, log_count = drawn[0].sample
    assert len(likely.unique()) == count and log_count.exp().sum() == pytest.approx(V)
    alone = drawn[0]._replace(rows=drawn[0].rows[:, :200], sample=SoftmaxSample(likely[:200], log_count[:200]))
    assert gradients(hidden, weight, offset, alone)[0] < 0.8 * whole[0]
    torch.manual_seed(4)
    at_once = teacher.sampled(count)
    monkeypatch.setattr(distill, "MASS", 7 * V)
    torch.manual_seed(4)
    torch.testing.assert_close(teacher.sampled(count).rows, at_once.rows)


def test_small_vocabularies_are_not_sampled():
    teacher = Teacher(torch.rand(4, 100))
    assert teacher.sampled(51) is teacher and teacher.sampled(50).rows.shape == (4, 50)
