"""D-PACE: weights of draft depths by how often a draft gets so far."""

import pytest
import torch
import torch.nn.functional as F

from specctl.drafters.dflash.drafter import FAMILY as dflash
from specctl.drafters.eagle3.drafter import FAMILY as eagle3
from specctl.drafters.feature.head import dpace_weights
from specctl.families import FAMILIES
from specctl.recipe import DrafterRecipe, TrainRecipe
from specctl.training.example import Example
from specctl.training.features import FeatureStore, slot_batch
from tests.drafters.recorded import recorded_logits

HEADS = {
    "dflash": lambda target: dflash.build(TrainRecipe(arch="dflash"), target, list),
    "pruned": lambda target: dflash.build(
        TrainRecipe(arch="dflash", drafter=DrafterRecipe(vocab_size=700, block_size=4)), target, lambda n: [*range(n)]
    ),
    "eagle3": lambda target: eagle3.build(TrainRecipe(arch="eagle3"), target, lambda n: [*range(n)]),
}


def weight(right, valid, k):
    """Σ_{j ≥ k} Π_{i ≤ j} ((1 − α) q_i + α) of one draft, α a half."""
    total, reached = 0.0, 1.0
    for j, (q, counts) in enumerate(zip(right, valid, strict=True)):
        if not counts:
            break
        reached *= 0.5 * q + 0.5
        total += reached if j >= k else 0.0
    return total


def test_weights_are_sums_over_the_depths_that_are_reached():
    right = torch.tensor([[0.9, 0.2], [0.5, 0.8], [0.1, 0.7]])  # [depth, draft]
    valid = torch.tensor([[True, True], [True, False], [True, True]])
    step, row = (part.flatten() for part in torch.meshgrid(torch.arange(3), torch.arange(2), indexing="ij"))
    found = dpace_weights(right.flatten(), row, step, valid.flatten()).view(3, 2)
    for draft in range(2):
        expected = [weight(right[:, draft].tolist(), valid[:, draft].tolist(), k) for k in range(3)]
        torch.testing.assert_close(found[:, draft], torch.tensor(expected))
    assert found[1, 1] == found[2, 1] == 0, "a draft ends at its first loss that does not count"


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("objective", ["soft_ce", "ce"])
def test_the_loss_is_weighted_by_it(target, kind, objective):
    torch.manual_seed(0)
    head = HEADS[kind](target)
    head.objective, head.paced = objective, True
    if kind == "eagle3":
        head.steps = 4
    texts = [torch.randint(5, 900, (size,)).tolist() for size in (25, 40)]
    examples = [Example(i, str(i), tokens, 8) for i, tokens in enumerate(texts)]
    batch = slot_batch(examples, FeatureStore(target, head.taps).get(examples), head.steps, head.t2d, 1)
    with recorded_logits(head) as seen, torch.no_grad():
        total, weights, steps = head(batch, target.model.embedding, target.head_weight[head.draft_ids])
    labels, inside = batch.labels, head.t2d[batch.labels]
    counts = inside if objective == "ce" else batch.in_draft_vocab
    rows = [batch.later_rows] * head.steps
    if kind == "eagle3":  # whose first depth is trained on all slots
        rows[0] = torch.arange(len(batch.query_rows))
    logits = torch.cat(seen).split([len(part) for part in rows])
    place = torch.searchsorted(head.draft_ids, labels).clamp_max(len(head.draft_ids) - 1)
    expected, mass = 0.0, 0.0
    for draft in range(len(batch.query_rows)):
        right, valid, losses = [], [], []
        for k in range(head.steps):
            if draft not in rows[k]:
                break
            at, drafted = draft + k, logits[k][int(torch.searchsorted(rows[k], draft))].log_softmax(-1)
            valid.append(bool(batch.valid_steps[draft] > k and counts[at]))
            right.append(float(drafted[place[at]].exp()) if inside[at] else 0.0)
            if objective == "ce":
                losses.append(-drafted[place[at]])
            else:
                hidden = batch.teacher[at].to(target.head_weight.dtype)
                teacher = head.squash(F.linear(hidden, target.head_weight[head.draft_ids]).float()).softmax(-1)
                losses.append(-(teacher * drafted).sum())
        for k, loss in enumerate(losses):
            share = weight(right, valid, k) if valid[k] else 0.0
            expected, mass = expected + share * float(loss), mass + share
    assert mass > 0
    torch.testing.assert_close(float(total), expected, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(float(weights), mass, rtol=2e-3, atol=1e-3)
    assert steps[0, 1] > steps[-1, 1] > 0


def test_only_families_that_draft_on_are_weighted_so():
    for name, family in FAMILIES.items():
        if family.supports_d_pace:
            assert TrainRecipe(arch=name, ttt_weights="d-pace").uses_d_pace
        else:
            with pytest.raises(ValueError, match=f"ttt_weights=d-pace: an option of .* heads, not of {name}"):
                TrainRecipe(arch=name, ttt_weights="d-pace")
