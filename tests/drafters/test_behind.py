"""What an idle drafter has missed: it is counted, read in one go, and a memory of another text is refused."""

import pytest
import torch

from specctl.decoding.sampling import GREEDY
from specctl.drafters.eagle3.drafter import Eagle3Drafter
from specctl.drafters.lm.drafter import LMDrafter
from specctl.drafters.lm.shape import ChainShape
from specctl.drafters.medusa.drafter import MedusaDrafter
from specctl.drafters.text.lookup import Lookup
from tests.drafters.test_depth_drafter import built
from tests.drafters.test_stacked import SHAPE, eagle3_head
from tests.lossless.drafters import own_weights
from tests.toys.decoding import decode


@pytest.fixture(scope="module")
def target(builtin_target):
    """The whole built-in target, which ends its texts by itself and has ten layers."""
    return builtin_target


@pytest.fixture(scope="module")
def drafters(target):
    """With what each has to read of a text of n committed tokens."""
    return {
        "eagle3": (Eagle3Drafter(eagle3_head(target, 0), target, SHAPE), lambda n: n - 1),  # the last one is not cached
        "lm": (LMDrafter(own_weights(target, 0.3), target, ChainShape(2, 0.0, False)), lambda n: n),
        "lookup": (Lookup(), lambda n: 0),
    }


@pytest.mark.parametrize("name", ["eagle3", "lm", "lookup"])
def test_behind_is_what_advance_reads(target, prompts, drafters, name):
    drafter, needed = drafters[name]
    seen = []

    def ask(state, draft, verdict):
        lengths = [len(row.ids) for row in state.rows]
        before = seen[-1] if seen else [0] * 3
        if len(seen) < 2:
            expected = [needed(n) - (needed(m) if m else 0) for n, m in zip(lengths, before, strict=True)]
            assert drafter.lag(state) == expected
            drafter.advance(state)
            assert max(drafter.lag(state)) <= (name == "lm")  # whose last token is read again
            seen.append(lengths)

    decode(target, prompts, sampling=GREEDY, max_new_tokens=6, seeds=[0] * 3, taps=drafter.taps, on_round=ask)
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["eagle3", "lm"])
def test_a_memory_of_a_longer_text_is_refused(target, prompts, drafters, name):
    """Left behind by another text of the slot: keys of tokens that are not there would spoil drafts without a word."""
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
def test_a_memory_that_is_not_brought_up_to_date_is_refused(target, prompts, drafters, name, monkeypatch):
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


def test_drafters_with_other_taps_share_the_features(target, prompts):
    """In a pool the loop keeps the states that any drafter reads; each finds its own among them."""
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
