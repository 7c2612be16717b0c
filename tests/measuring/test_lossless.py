"""Tie-aware comparison of texts: rounding explains ties, but not mismatches."""

import torch

from specctl.decoding.plan import plan_rows
from specctl.decoding.sampling import GREEDY
from specctl.measuring import lossless
from specctl.measuring.lossless import Losslessness, comparable, compare
from specctl.recipe import DraftingRecipe, SamplingRecipe
from tests.toys.decoding import decode

PROMPT = [5, 6, 7, 8]


def best(target, ids):
    """Return the top three logits, relative to the largest absolute logit, and their tokens."""
    logits = lossless.next_token_logits(target, ids)
    return (logits / logits.abs().max()).topk(3)


def test_equal_texts_are_equal(target):
    assert compare(target, PROMPT, [1, 2], [1, 2], 1e-3) == "equal"


def test_a_wrong_token_is_a_mismatch(target):
    (decoded,) = decode(target, [PROMPT], sampling=GREEDY, max_new_tokens=8, seeds=[0])
    right = decoded.output_ids
    for position in (0, 4):
        wrong = list(right)
        wrong[position] = best(target, PROMPT + right[:position]).indices[2].item()
        assert compare(target, PROMPT, right, wrong, 1e-3) == "mismatch"
        assert compare(target, PROMPT, wrong, right, 1e-3) == "mismatch"


def test_the_margin_at_the_divergence_decides(target):
    """Two answers are a tie if the tolerance exceeds the margin, otherwise a mismatch."""
    top = best(target, PROMPT)
    margin = (top.values[0] - top.values[1]).item()
    a, b = ([top.indices[i].item(), 9] for i in (0, 1))
    assert compare(target, PROMPT, a, b, margin * 1.01) == "tie"
    assert compare(target, PROMPT, a, b, margin * 0.99) == "mismatch"


def test_the_tolerance_is_relative_to_the_logits(target, monkeypatch):
    """An absolute limit of 0.25 in bf16, one step between logits above 32, reported 3 false mismatches in 3,000
    texts."""
    top = best(target, PROMPT)
    margin = (top.values[0] - top.values[1]).item()
    logits = lossless.next_token_logits(target, PROMPT)
    a, b = ([top.indices[i].item(), 9] for i in (0, 1))
    for scale in (0.1, 10):
        monkeypatch.setattr(lossless, "next_token_logits", lambda target, ids, scale=scale: logits * scale)
        assert compare(target, PROMPT, a, b, margin * 1.01) == "tie"
        assert compare(target, PROMPT, a, b, margin * 0.99) == "mismatch"


def test_a_third_token_is_not_a_tie(target):
    """A small margin between the top two must not excuse a token outside them."""
    top = best(target, PROMPT)
    between = ((top.values[0] - top.values[1]) + (top.values[0] - top.values[2])).item() / 2
    assert compare(target, PROMPT, [top.indices[0].item()], [top.indices[2].item()], between) == "mismatch"


def test_stopping_early_is_a_mismatch(target):
    assert compare(target, PROMPT, [1, 2, 3], [1, 2], 100.0) == "mismatch"


def test_exact_demands_equality(target):
    tolerance = lossless.tolerance(target, SamplingRecipe(exact=True))
    top = best(target, PROMPT)
    assert compare(target, PROMPT, [top.indices[0].item()], [top.indices[1].item()], tolerance) == "mismatch"


def test_which_settings_demand_equal_text():
    greedy, warm = SamplingRecipe(), SamplingRecipe(temperature=1.0)
    exact = SamplingRecipe(temperature=1.0, exact=True)
    match, ratio = DraftingRecipe(), DraftingRecipe(proposal="sampled")
    assert comparable(greedy, match) and comparable(greedy, ratio) and comparable(exact, match)
    assert not comparable(warm, match) and not comparable(exact, ratio)


def test_agreements_are_counted():
    counts = Losslessness()
    for agreement in ("equal", "tie", "mismatch", "tie"):
        counts.add(agreement)
    assert counts == Losslessness(sequences=4, mismatches=1, ties=2)


def test_the_tolerance_covers_different_batch_shapes(target):
    """Compare one row after a cache with one prefill; a smaller tolerance would call ties mismatches."""
    ids = list(range(5, 69))
    cache = target.model.new_cache(1, len(ids))
    whole, _, _ = target.prefill([ids], cache)
    plan = plan_rows([len(ids) - 1], 1, device=target.device, dtype=target.dtype)
    step, _, _ = target.step(torch.tensor([ids[-1:]]), cache, plan)
    assert (step[0, 0] - whole[0]).abs().max() < lossless.TOLERANCE[target.dtype] * whole.abs().max()
