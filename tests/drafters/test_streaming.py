"""Catch-up windows: a drafter that lags far behind reads and attends to nothing but sinks and recent tokens."""

import pytest
import torch

from specctl.decoding.cache import RECOMPUTE, CatchUp
from specctl.decoding.sampling import GREEDY
from specctl.drafters.dflash.drafter import BlockDrafter
from specctl.drafters.eagle3.drafter import Eagle3Drafter
from specctl.drafters.hydra.drafter import HydraDrafter
from specctl.drafters.lm.drafter import ChainShape, LMDrafter
from specctl.drafters.mtp.drafter import MtpDrafter
from specctl.drafters.peagle.drafter import PEagleDrafter
from specctl.drafters.tree import TreeShape
from tests.drafters.heads import SHAPE, eagle3_head, eagle_drafter
from tests.drafters.test_depth_drafter import built
from tests.drafters.test_dflash import block_head
from tests.drafters.test_peagle import peagle_head
from tests.lossless.drafters import own_weights
from tests.toys import mtp
from tests.toys.decoding import decode, engine_for

SINK, WINDOW = 2, 6
NARROW = CatchUp(SINK, WINDOW)
TREE = TreeShape(3, 2, 8, 3, 0.0)


@pytest.fixture(scope="module")
def own(target):
    return own_weights(target, 0.3)


MAKE = {
    "eagle3": lambda target, own: Eagle3Drafter(eagle3_head(target, 0), target, SHAPE),
    "eagle3 tree": lambda target, own: Eagle3Drafter(eagle3_head(target, 0), target, TREE),
    "eagle": lambda target, own: eagle_drafter(target, 0),
    "peagle": lambda target, own: PEagleDrafter(peagle_head(target), target, SHAPE),
    "mtp": lambda target, own: MtpDrafter(mtp.head(target), target, SHAPE),
    "dflash": lambda target, own: BlockDrafter(block_head(target, block_size=4, num_layers=1), target, SHAPE),
    "hydra": lambda target, own: HydraDrafter(built(target, "hydra"), target, SHAPE),
    "lm": lambda target, own: LMDrafter(own, target, ChainShape(3, 0.0, False)),
}


def watch(target, prompts, drafter, ask, new=4, **options):
    """Call `ask(state)` after every round of plain decoding; return the number of calls."""
    asked = []

    def on_round(state, draft, verdict):
        asked.append(ask(state))

    decode(
        target,
        prompts,
        **{"sampling": GREEDY, "max_new_tokens": new, "seeds": [0] * len(prompts), "catch_up": NARROW, **options},
        taps=drafter.taps,
        on_round=on_round,
    )
    return len(asked)


@pytest.mark.parametrize(
    "cached, end, read",
    [
        (0, 6, 6),
        (0, 8, 8),
        (0, 9, 8),
        (0, 50, 8),
        (1, 50, 7),
        (2, 8, 6),
        (2, 9, 6),
        (30, 36, 6),
        (30, 50, 6),
        (9, 9, 0),
    ],
)
def test_catch_up_reads_sink_and_window(cached, end, read):
    """Tokens are skipped only if that saves work, and the sink is read once."""
    assert NARROW.count(cached, end) == read and RECOMPUTE.count(cached, end) == end - cached


@pytest.mark.parametrize("name", MAKE)
def test_lag_is_the_number_of_tokens_read(target, prompts, own, name, monkeypatch):
    drafter = MAKE[name](target, own)
    layer = drafter if name == "lm" else getattr(drafter, "prefix", drafter)
    lm = getattr(drafter, "model", None)
    part, method, count = {  # the argument is features [N, F], tokens [B, T] or lists [B][≤ T]
        "lm": (lm, "forward", torch.numel),
        "dflash": (layer, "_read", len),
        "peagle": (layer, "_draft", lambda tokens: sum(map(len, tokens))),
    }.get(name, (layer, "_layer", torch.numel))
    rows, real = [], getattr(part, method)
    monkeypatch.setattr(part, method, lambda read, *args: (rows.append(count(read)), real(read, *args))[1])

    def ask(state):
        if len(state.rows[0].ids) - state.rows[0].prompt_length in (3, 13):  # lags far behind, twice
            rows.clear()
            (needed,) = drafter.lag(state)
            drafter.advance(state)
            assert sum(rows) == needed == (SINK + WINDOW if state.rows[0].ids[-1] == first(state, 3) else WINDOW)

    def first(state, count):
        return state.rows[0].ids[state.rows[0].prompt_length + count - 1]

    assert watch(target, prompts[1:2], drafter, ask, new=16) >= 12


def test_an_lm_equals_transformers_on_the_tokens_read(target, prompts, own):
    """Compare with the model run on sink, window and later tokens at their original positions."""
    drafter, since = LMDrafter(own, target, ChainShape(3, 0.0, False)), []

    def ask(state):
        drafter.advance(state)
        since.append([len(row.ids) - WINDOW for row in state.rows])
        for row, logits, start in zip(state.rows, state.memory[drafter].logits, since[0], strict=True):
            places = torch.tensor([[*range(SINK), *range(max(start, SINK), len(row.ids))]])
            expected = own.model(input_ids=torch.tensor([row.ids])[:, places[0]], position_ids=places).logits[0, -1]
            torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)

    with torch.inference_mode():
        assert watch(target, prompts, drafter, ask) == 3
    assert min(since[0]) > SINK


@pytest.mark.parametrize("name", ["eagle3", "eagle3 tree", "eagle", "peagle", "mtp", "dflash", "hydra"])
@pytest.mark.parametrize("reach", [3, 9])
def test_skipped_tokens_are_not_attended(target, prompts, own, name, reach):
    """Drafts and scores equal a head that read everything and had the gap masked afterwards.

    If the scored rows reach back past the window (9), the drafter reads more, with a window before them.
    """
    ours, theirs = (MAKE[name](target, own) for _ in range(2))
    of = lambda drafter: getattr(drafter, "prefix", drafter)  # noqa: E731

    def ask(state):
        for drafter in (ours, theirs):
            drafter.invalidate(state)
        ours.advance(state)
        state.catch_up = RECOMPUTE
        theirs.advance(state)
        state.catch_up = NARROW
        mine, whole = (of(drafter)._memory(state) for drafter in (ours, theirs))
        if name != "dflash":  # DFlash carries no hidden state between rounds
            assert not torch.allclose(mine.hidden, whole.hidden, atol=1e-2)  # the skipped tokens do matter
        gaps = [range(SINK, end - WINDOW) for end in state.cached]
        assert mine.cache.skipped == gaps
        for b, gap in enumerate(gaps):
            mine.cache.store[:, b, gap.start : gap.stop] = 100.0
        whole.cache.skipped = list(gaps)
        of(theirs)._fill_last(state, whole, 1)
        torch.testing.assert_close(mine.hidden, whole.hidden, atol=1e-4, rtol=1e-4)
        one, other = (drafter.propose(state, 8) for drafter in (ours, theirs))
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.parents, other.parents)
        spans = [range(len(row.ids) - reach, len(row.ids)) for row in state.rows]
        scores = ours.score(state, spans, 2)
        if reach > WINDOW:
            assert all(gap.stop < end - reach for gap, end in zip(mine.cache.skipped, state.cached, strict=True))
            whole.cache.skipped = list(mine.cache.skipped)
        for found, expected in zip(scores, theirs.score(state, spans, 2), strict=True):
            torch.testing.assert_close(found.logits, expected.logits, atol=1e-3, rtol=1e-3)

    assert watch(target, prompts, ours, ask) == 3


@pytest.mark.parametrize("name", MAKE)
def test_the_next_text_in_a_slot_starts_without_a_gap(target, prompts, own, name):
    drafter, found = MAKE[name](target, own), []

    def ask(state):
        drafter.propose(state, 4)
        memory = state.memory[getattr(getattr(drafter, "prefix", drafter), "key", drafter)]
        found.append((state.rows[0].index, memory.cache.skipped[0]))

    watch(target, [prompts[1], prompts[0][:5], prompts[1]], drafter, ask, new=3, slots=1)
    assert [bool(skipped) for _, skipped in found] == [True, True, False, False, True, True]


def test_device_rounds_do_not_support_catch_up_windows(target, prompts, own, monkeypatch):
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    drafter = MAKE["eagle3"](target, own)
    engines = [engine_for(target, drafter, catch_up=how) for how in (RECOMPUTE, NARROW)]
    assert [engine.device is None for engine in engines] == [False, True]
