"""Overlaps along drafts, compared with distributions computed from texts that contain the draft."""

import numpy as np
import pytest
import torch

from specctl.decoding.controllers import NoDraft
from specctl.decoding.records import DraftTree, first_chain
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.decoding.verify import verify
from specctl.drafters.eagle3 import drafter as eagle3
from specctl.drafters.lm.drafter import ChainShape, LMDrafter
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.text.suffix import Suffix
from specctl.drafters.tree import TreeShape
from specctl.recipe import DraftingRecipe
from specctl.selection.feedback import overlap, overlaps
from tests.lossless.drafters import own_weights
from tests.selection.test_feedback import head, law, standing, trained


@pytest.fixture(scope="module")
def drafters(target):
    small = DraftingRecipe(stop_below=0.0, keep_above=0.0, children=2, nodes=6, width=2, depth=3)
    return {
        "chain": eagle3.Eagle3Drafter(head(target, 1, 3000), target, TreeShape(4, 1, 4, 1, 0.0)),
        "leaves": eagle3.Eagle3Drafter(head(target, 2, 3000), target, TreeShape(4, 1, 9, 3, 0.0)),
        "tree": eagle3.Eagle3Drafter(head(target, 3, 3000), target, TreeShape(4, 3, 12, 3, 0.0)),
        "hydra": trained(target, "hydra", small, draft_heads=3),
        "medusa": trained(target, "medusa", small, draft_heads=3, vocab_size=2000),
        "lm": LMDrafter(own_weights(target, 0.3), target, ChainShape(5, 0.0, False)),
        "lookup": Lookup(4),
        "suffix": Suffix(depth=4, nodes=8, children=3),
        "none": NoDraft(),
    }


@torch.inference_mode()
def expected(target, drafter, ids, chain):
    """1 − TV at every position of `chain`: p̄ from a prefill of text and chain, q̄ from the drafter's scores of drafts
    that begin at the chain."""
    whole, n = ids + chain, len(ids)
    p = law(target, [*whole, 0], Sampling(1.0, 0, 1.0))[n - 1 : -1]
    score = drafter.score(standing(target, [*whole, 0], drafter.taps, GREEDY), [range(n, len(whole))], len(chain))[0]
    if score.logits is None:
        return p.gather(1, torch.tensor(chain)[:, None])[:, 0]
    q = torch.zeros_like(p)
    for k in range(len(chain)):
        row = score.logits[min(k, len(score.logits) - 1), k]
        q[k, slice(None) if score.ids is None else score.ids] = row.softmax(-1)
    return torch.minimum(p, q).sum(-1)


@pytest.fixture(scope="module")
def text(prompts):
    return prompts[1] + prompts[1][-30:]  # repeats itself, so that text drafters draft


@torch.inference_mode()
def test_overlap_covers_every_drafted_position(target, drafters, text):
    """Rejected positions included, each conditioned on the draft before it. Catches rows of other nodes or depths,
    draft vocabulary ids mistaken for the target's, and an end at the first rejection."""
    missed = 0
    for name, drafter in drafters.items():
        state = standing(target, text, drafter.taps, GREEDY)
        draft = drafter.propose(state, 20)
        verdict = verify(target, state, draft)
        chain = draft.tokens[0, first_chain(draft.parents[0].tolist())].tolist()
        found = overlap(draft, 0, verdict.logits[0])
        assert len(found) == len(chain) == max(verdict.depths[0], 0), name
        if chain:
            np.testing.assert_allclose(found, expected(target, drafter, text, chain), atol=3e-4, err_msg=name)
            missed += len(chain) > len(verdict.paths[0]) + 1
    assert missed > 3


@torch.inference_mode()
def test_unplayed_and_verified_drafts_have_equal_overlaps(target, drafters, text, monkeypatch):
    """In one pass, in two, or in one per draft: the chains do not influence each other."""
    taps = tuple(sorted({tap for drafter in drafters.values() for tap in drafter.taps}))
    state = standing(target, text, taps, GREEDY)
    drafts = [drafter.propose(state, 20) for drafter in drafters.values()]
    wanted = [overlap(draft, 0, verify(target, state, draft).logits[0]) for draft in drafts]
    for room in (63, 16, 6):
        monkeypatch.setattr("specctl.selection.feedback.MAX_NODES", room)
        for one, other in zip(overlaps(target, state, drafts), wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


@torch.inference_mode()
def test_overlap_in_a_batch_equals_overlap_alone(target, drafters, prompts):
    """Wrong rows would be of another sequence: the rows of a tree of several chains are stored together for all
    sequences."""
    from specctl.decoding.records import Request
    from specctl.decoding.state import DecodeState

    texts = [prompts[0], prompts[1]]
    for name in ("tree", "hydra", "lm"):
        drafter = drafters[name]
        alone = []
        for ids in texts:
            state = standing(target, ids, drafter.taps, GREEDY)
            draft = drafter.propose(state, 20)
            alone.append(overlap(draft, 0, verify(target, state, draft).logits[0]))
        state = DecodeState(target, taps=drafter.taps, spare=63)
        state.assign_slots([state.sequence(Request(ids[:-1], GREEDY, 41)) for ids in texts])
        _, _, tapped = target.prefill([ids[:-1] for ids in texts], state.cache, drafter.taps)
        state.begin([0, 1], [ids[-1] for ids in texts], tapped)
        draft = drafter.propose(state, 20)
        logits = verify(target, state, draft).logits
        for b in range(2):
            np.testing.assert_allclose(overlap(draft, b, logits[b]), alone[b], atol=3e-4, err_msg=name)


def test_overlap_of_nan_logits_is_nan():
    """A game counts NaN and gives it the largest loss."""
    draft = DraftTree.from_chains([[1, 2]], torch.device("cpu"))
    assert np.isnan(overlap(draft, 0, torch.full((3, 4), float("nan")))).all()
    assert first_chain([-1, -1, 0, 0, 2, -2]) == [0, 2, 4] and first_chain([]) == []
