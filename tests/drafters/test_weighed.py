"""Text drafters that draft as many nodes as their rows are worth."""

import pytest
import torch

from specctl.decoding.sampling import GREEDY, Sampling
from specctl.drafters import pool
from specctl.drafters.hybrid import costs
from specctl.drafters.hybrid.costs import ROWS, Costs
from specctl.drafters.hybrid.weighed import WeighedText
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.tree import ProposedTree
from specctl.recipe import DraftingRecipe
from specctl.selection.arms import longest_draft
from tests.toys.decoding import decode

HOT = Sampling(1.0, 0, 1.0)


def rows_cost(each):
    return Costs(tuple(1 + each * (rows - 1) for rows in ROWS), 0.0, 0.0)


class Guesses(Lookup):
    """Proposes a chain of wrong tokens, each with the probability `claim`."""

    def __init__(self, claim):
        super().__init__()
        self.claim = claim

    def propose_trees(self, state, nodes):
        return [ProposedTree([4] * 3, [-1, 0, 1], [self.claim] * 3) for _ in state.rows]


def sizes_of(target, prompts, drafter, new=40, **how):
    """Number of nodes in every round, and the texts."""
    sizes = []
    texts = decode(
        target,
        prompts,
        sampling=how.pop("sampling", GREEDY),
        max_new_tokens=new,
        seeds=list(range(len(prompts))),
        drafter=drafter,
        on_round=lambda state, draft, verdict: sizes.append(draft.size),
        **how,
    )
    return sizes, [text.output_ids for text in texts]


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("how", [{}, {"slots": 3}, {"exact": True}], ids=["alone", "batch", "exact"])
def test_texts_are_plain_texts(target, prompts, sampling, how):
    plain = sizes_of(target, prompts, None, sampling=sampling, **how)[1]
    sizes, texts = sizes_of(target, prompts, WeighedText(Lookup(), rows_cost(0.01)), sampling=sampling, **how)
    assert texts == plain
    assert max(sizes) > 0


def test_nothing_is_drafted_when_a_row_costs_a_round(target, prompts):
    assert set(sizes_of(target, prompts, WeighedText(Lookup(), rows_cost(1.0)))[0]) == {0}


def test_cheap_rows_allow_longer_drafts_than_the_default(target, prompts):
    assert max(sizes_of(target, prompts, WeighedText(Lookup(), rows_cost(0.001)))[0]) > max(
        sizes_of(target, prompts, Lookup())[0]
    )


def test_no_draft_is_longer_than_it_says(target, prompts):
    """Tables and rewards of a pool have room for the longest draft."""
    prompt = prompts[0] + [17, 18] * 20  # repeats itself, so that drafts are long
    for each in (0.001, 0.1):
        drafter = WeighedText(Lookup(), rows_cost(each))
        assert 0 < max(sizes_of(target, [prompt], drafter)[0]) <= longest_draft(drafter) <= 32
    assert longest_draft(WeighedText(Lookup(), rows_cost(0.001))) == 32


def test_padding_of_exact_mode_is_used(target, prompts):
    """All steps have eight rows, so that seven nodes cost nothing."""
    free = sizes_of(target, prompts, WeighedText(Lookup(), rows_cost(0.0)), exact=True)[0]
    assert sizes_of(target, prompts, WeighedText(Lookup(), rows_cost(1.0)), exact=True)[0] == free
    assert max(free) == 7


def test_claims_that_never_come_true_are_no_longer_drafted(target, prompts):
    sizes, _ = sizes_of(target, prompts[:1], WeighedText(Guesses(0.5), rows_cost(0.3)))
    assert sizes[0] > 0
    assert set(sizes[-10:]) == {0}


def test_sampled_texts_start_with_less_trust(target, prompts):
    drafter = WeighedText(Guesses(0.3), rows_cost(0.25))
    assert sizes_of(target, prompts[:1], drafter)[0][0] > 0
    assert sizes_of(target, prompts[:1], drafter, sampling=HOT)[0][0] == 0


class TestLoading:
    @pytest.mark.parametrize("name", ["lookup", "suffix"])
    def test_text_drafters_weigh_their_nodes_on_a_cpu(self, target, name):
        drafter = pool.load_drafter(name, target, DraftingRecipe())
        assert isinstance(drafter, WeighedText)
        assert longest_draft(drafter) == (drafter.offered if name == "lookup" else drafter.text.depth)

    def test_a_head_costs_nothing_without_one(self, target, monkeypatch):
        monkeypatch.setattr(costs, "REPEATS", 1)
        measured = costs.measure(target, None)
        assert (measured.first, measured.level, measured.text_first, measured.text_level) == (0, 0, 0, 0)
        assert measured.round(63) > measured.round(1) == 1

    @pytest.mark.parametrize("drafting", [{"depth": 3}, {"nodes": 5}])
    def test_a_recipe_may_set_the_size(self, target, drafting):
        assert not isinstance(pool.load_drafter("suffix", target, DraftingRecipe(**drafting)), WeighedText)

    def test_a_gpu_has_drafts_of_one_size(self, target, monkeypatch):
        monkeypatch.setattr(target, "device", torch.device("cuda"))
        assert not isinstance(pool.load_drafter("lookup", target, DraftingRecipe()), WeighedText)

    @pytest.mark.parametrize("name", ["none", "lookahead"])
    def test_other_drafters_without_weights_do_not(self, target, name):
        assert not isinstance(pool.load_drafter(name, target, DraftingRecipe()), WeighedText)

    def test_a_part_of_a_hybrid_does_not(self, target):
        assert type(pool.load_single("lookup", target, DraftingRecipe())) is Lookup
