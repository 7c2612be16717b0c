"""`Drafter.lag` counts the tokens that `advance` will read, and stale draft caches are refused."""

import pytest
import torch

from specctl.decoding.sampling import GREEDY
from specctl.drafters.eagle3.drafter import Eagle3Drafter
from specctl.drafters.lm.drafter import ChainShape, LMDrafter
from specctl.drafters.medusa.drafter import MedusaDrafter
from specctl.drafters.text.lookup import Lookup
from tests.drafters.heads import SHAPE, eagle3_head
from tests.drafters.test_depth_drafter import built
from tests.lossless.drafters import own_weights
from tests.toys.decoding import decode


@pytest.fixture(scope="module")
def target(builtin_target):
    """The whole built-in target: ten layers, and it emits end-of-text."""
    return builtin_target


@pytest.fixture(scope="module")
def drafters(target):
    """Map each name to a drafter and the number of tokens it reads from a text of n committed tokens."""
    return {
        "eagle3": (Eagle3Drafter(eagle3_head(target, 0), target, SHAPE), lambda n: n - 1),  # the last one is not cached
        "lm": (LMDrafter(own_weights(target, 0.3), target, ChainShape(2, 0.0, False)), lambda n: n),
        "lookup": (Lookup(), lambda n: 0),
    }


@pytest.mark.parametrize("name", ["eagle3", "lm", "lookup"])
def test_lag_is_the_number_of_tokens_advance_reads(target, prompts, drafters, name):
    drafter, needed = drafters[name]
    seen = []

    def ask(state, draft, verdict):
        lengths = [len(row.ids) for row in state.rows]
        before = seen[-1] if seen else [0] * 3
        if len(seen) < 2:
            expected = [needed(n) - (needed(m) if m else 0) for n, m in zip(lengths, before, strict=True)]
            assert drafter.lag(state) == expected
            drafter.advance(state)
            assert max(drafter.lag(state)) <= (name == "lm")  # the LM drafter reads its last token again
            seen.append(lengths)

    decode(target, prompts, sampling=GREEDY, max_new_tokens=6, seeds=[0] * 3, taps=drafter.taps, on_round=ask)
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["eagle3", "lm"])
def test_a_cache_longer_than_the_text_is_refused(target, prompts, drafters, name):
    """Catches a cache left by an earlier text in the same slot: its extra keys would silently spoil drafts."""
    drafter, _ = drafters[name]

    def poison(state, draft, verdict):
        drafter.advance(state)
        memory = state.memory[getattr(drafter, "key", drafter)]
        known = memory.cached if name == "eagle3" else memory.length
        known[1] += 5
        for use in (lambda: drafter.propose(state, 4), lambda: drafter.score(state, [range(5, 7)] * 3)):
            with pytest.raises(AssertionError, match="stale draft cache"):
                use()
        known[1] -= 5
        drafter.propose(state, 4)

    decode(target, prompts, sampling=GREEDY, max_new_tokens=3, seeds=[0] * 3, taps=drafter.taps, on_round=poison)


@pytest.mark.parametrize("name", ["eagle3", "lm"])
def test_a_cache_that_was_not_advanced_is_refused(target, prompts, drafters, name, monkeypatch):
    drafter, _ = drafters[name]

    def poison(state, draft, verdict):
        if drafter not in state.memory:
            drafter.advance(state)
            return
        with monkeypatch.context() as patch:
            patch.setattr(drafter, "advance", lambda state: None)
            for use in (lambda: drafter.propose(state, 4), lambda: drafter.score(state, [range(5, 7)] * 3)):
                with pytest.raises(AssertionError, match="stale draft cache"):
                    use()

    decode(target, prompts, sampling=GREEDY, max_new_tokens=5, seeds=[0] * 3, taps=drafter.taps, on_round=poison)


def test_drafters_with_different_taps_share_the_features(target, prompts):
    """In a pool, the decoding loop stores the union of all taps and each drafter selects its own."""
    heads = [
        Eagle3Drafter(eagle3_head(target, 0), target, SHAPE),
        MedusaDrafter(built(target, "medusa"), target, SHAPE),
    ]
    taps = tuple(sorted({tap for head in heads for tap in head.taps} | {1}))
    assert all(head.taps != taps for head in heads)
    for head in heads:
        found = []

        def ask(state, draft, verdict, head=head, found=found):
            spans = [range(len(row.ids) - 4, len(row.ids)) for row in state.rows]
            tokens = head.propose(state, 8).tokens
            found.append((tokens, [score.logits for score in head.score(state, spans, 2)]))

        for read in (head.taps, taps):
            decode(target, prompts, sampling=GREEDY, max_new_tokens=4, seeds=[0] * 3, taps=read, on_round=ask)
        half = len(found) // 2
        for (tokens, scores), (others, again) in zip(found[:half], found[half:], strict=True):
            assert torch.equal(tokens, others) and all(map(torch.equal, scores, again))
