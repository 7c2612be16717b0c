"""Heads of one shape, stacked and scored in one forward, give the scores of each head alone."""

import copy

import pytest
import torch

from specctl.decoding.models import linear
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import load_target
from specctl.drafters.eagle import drafter as eagle
from specctl.drafters.eagle3 import drafter as eagle3
from specctl.drafters.eagle3.head import Eagle3Head
from specctl.drafters.feature.stacked import Stacked, scoring_groups
from specctl.drafters.lora import Adapter, LowRank
from specctl.drafters.mtp import drafter as mtp
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.tree import TreeShape
from specctl.families import FAMILIES
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe
from tests.drafters.test_lora import random_adapter
from tests.toys import mtp as mtp_layers
from tests.toys.decoding import decode

SHAPE = TreeShape(3, 1, 3, 1, 0.0)


def eagle3_head(target, seed, vocabulary=512):
    torch.manual_seed(seed)
    architecture = eagle3.FAMILY.architecture(DrafterRecipe(vocab_size=vocabulary), target)
    head = Eagle3Head(architecture, torch.randperm(target.vocab_size)[:vocabulary].sort().values)
    head.initialise(target)
    return disturbed(head)


def disturbed(head):
    """Add noise to all parameters. Norms start at 1, so a mix-up between heads would go unnoticed."""
    for parameter in head.parameters():
        parameter.data += 0.1 * parameter.std(correction=0).clamp_min(0.3) * torch.randn_like(parameter)
    return head


def eagle3_drafter(target, seed, **options):
    return eagle3.Eagle3Drafter(eagle3_head(target, seed, **options), target, SHAPE)


def eagle_drafter(target, seed):
    torch.manual_seed(seed)
    head = eagle.FAMILY.build(TrainRecipe(arch="eagle"), target, lambda size: list(range(size)))
    return eagle.EagleDrafter(disturbed(head), target, SHAPE)


def mtp_drafter(target, seed):
    return mtp.MtpDrafter(mtp_layers.head(target, bias=True, qk_norm=True, seed=seed), target, SHAPE)


@pytest.mark.parametrize("dtype,tolerance", [("fp32", 1e-4), ("bf16", 0.12)])
@pytest.mark.parametrize("make", [eagle3_drafter, eagle_drafter, mtp_drafter])
def test_stacked_scores_equal_scores_of_each_head(target, prompts, make, dtype, tolerance, monkeypatch):
    """A ragged batch with an empty span, scored repeatedly, with heads that have read different lengths.

    The weights of the single heads become views of the stack and must still work. bf16 runs unpacked, as on a GPU.
    """
    monkeypatch.setattr(linear, "_packed", lambda *_: None)
    target = target if dtype == "fp32" else load_target("builtin", device="cpu", dtype=dtype)
    apart = [make(target, seed) for seed in range(3)]
    heads = [make(target, seed) for seed in range(3)]
    stacked = Stacked(heads)
    assert heads[2].qkv.weight.data_ptr() == stacked._whole.qkv.weight[2].data_ptr()
    compared = []

    def ask(state, draft, verdict):
        sizes = [4, 0, 9]
        spans = [range(len(row.ids) - size, len(row.ids)) for row, size in zip(state.rows, sizes, strict=True)]
        if not compared:
            heads[1].advance(state)
        together = stacked.score(state, spans, 3)
        for others in (apart, heads):
            for head, found in zip(others, together, strict=True):
                for one, other in zip(head.score(state, spans, 3), found, strict=True):
                    assert one.positions == other.positions and torch.equal(one.ids, other.ids)
                    assert one.children == other.children
                    torch.testing.assert_close(other.logits, one.logits, atol=tolerance, rtol=tolerance)
                    compared.append(one.logits)

    decode(target, prompts, sampling=GREEDY, max_new_tokens=3, seeds=[0] * 3, taps=apart[0].taps, on_round=ask)
    some = [logits for logits in compared if logits.shape[1]]
    assert len(some) >= 24 and (some[0] - some[2]).abs().max() > 10 * tolerance  # negative control: the heads differ


def test_scoring_groups_hold_heads_of_one_shape_or_one_base(target):
    """On a GPU, equal shapes are stacked. Adapters are grouped with their base. Other drafters stay alone."""
    heads = [eagle3_drafter(target, 0), eagle3_drafter(target, 1), eagle3_drafter(target, 2, vocabulary=256)]
    pool = [Lookup(), *heads, eagle_drafter(target, 0)]
    assert scoring_groups(pool) == [[0], [1], [2], [3], [4]]
    adapted = copy.copy(heads[0])
    adapted.qkv = LowRank(heads[0].qkv, torch.zeros(2, 512), torch.zeros(512, 2))
    assert scoring_groups([*pool, adapted]) == [[0], [1, 5], [2], [3], [4]]
    for head in pool[1:]:
        head.device = torch.device("cuda")
    assert scoring_groups(pool) == [[0], [1, 2], [3], [4]]
    assert scoring_groups([*pool[:1], *pool[2:], adapted]) == [
        [0],
        [1],
        [2],
        [3],
        [4],
    ]  # products with low-rank updates are not stacked


@pytest.mark.parametrize("family", [eagle3.FAMILY, eagle.FAMILY, mtp.FAMILY])
def test_adapters_are_scored_in_one_forward_with_their_base(target, prompts, family):
    """Scores equal merged heads, for different ranks and subsets of projections, and for the base itself.

    Memory holds one base plus the updates.
    """
    head = {
        eagle3.FAMILY: lambda: eagle3_head(target, 0),
        eagle.FAMILY: lambda: eagle.FAMILY.build(TrainRecipe(), target, lambda size: range(size)),
        mtp.FAMILY: lambda: mtp_layers.head(target),
    }[family]()
    config, state_dict = family.checkpoint_config(head, target.identity), family.stored_state(head.state_dict())
    adapters = []
    adaptable = FAMILIES[config["family"]].lora_modules
    for seed, (rank, names) in enumerate([(4, adaptable), (2, adaptable), (3, ("o_proj", "up_proj"))]):
        pairs = random_adapter(head, torch.Generator().manual_seed(seed), names, rank)
        adapters.append(Adapter.of({**config, "lora": {"rank": rank, "alpha": 8.0}}, pairs))
    base = family.make_drafter(head, target, DraftingRecipe())
    pool = [base.adapted(adapter) for adapter in adapters] + [base]
    apart = [
        family.make_drafter(family.restore(config, adapter.merge(state_dict)), target, DraftingRecipe())
        for adapter in adapters
    ] + [family.make_drafter(head, target, DraftingRecipe())]
    assert scoring_groups(pool) == [[0, 1, 2, 3]]
    products, found = [], []
    stacked = Stacked(pool)
    real = stacked._whole.down.base
    stacked._whole.down.base = lambda x: (products.append(len(x)), real(x))[1]

    def ask(state, draft, verdict):
        spans = [range(len(row.ids) - size, len(row.ids)) for row, size in zip(state.rows, [4, 0, 9], strict=True)]
        for head, scores in zip(apart, stacked.score(state, spans, 2), strict=True):
            for one, other in zip(head.score(state, spans, 2), scores, strict=True):
                torch.testing.assert_close(other.logits, one.logits, atol=1e-3, rtol=1e-3)
                found.append(one.logits)
        one, other = (drafters[1].propose(state, 6) for drafters in (pool, apart))  # stacked updates are views
        assert torch.equal(one.tokens, other.tokens)

    decode(target, prompts, sampling=GREEDY, max_new_tokens=3, seeds=[0] * 3, taps=base.taps, on_round=ask)
    assert products and len(products) == 2 * len(found) // (3 * len(pool))  # one product for all heads, per depth
    assert (found[0] - found[3]).abs().max() > 0.01
    parts = [vars(head)[name] for head in pool for name in ("qkv", "o", "gate_up", "down", "fc")]
    updates = {t.untyped_storage() for part in parts if isinstance(part, LowRank) for t in (part.down, part.up)}
    bases = {id(part.base if isinstance(part, LowRank) else part) for part in parts}
    assert len(bases) == 5 and len({storage.data_ptr() for storage in updates}) == 2 * (
        4 if family is eagle.FAMILY else 5
    )
