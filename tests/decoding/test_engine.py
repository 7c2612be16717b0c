"""Requests that arrive, end and fail while others are decoded: each text equals the text decoded alone."""

import gc
import random
import weakref

import pytest
import torch

from specctl.decoding import engine as engine_module
from specctl.decoding import state as state_module
from specctl.decoding.controllers import Fixed
from specctl.decoding.protocols import Controller
from specctl.decoding.records import Label, Request
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.decoding.target import load_target
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.text.suffix import Suffix
from specctl.errors import CheckpointError, DataError, UsageError
from tests.conftest import ARCHITECTURES, write_tiny
from tests.decoding.test_device_round import SHAPES, eagle3, small_lm
from tests.toys.decoding import WORDS, decode, engine_for, target_of_few_words

HOT, COLD = Sampling(1.0, 0, 1.0), Sampling(0.7, 12, 0.9)
PENALISED = Sampling(1.0, 0, 1.0, repetition_penalty=1.3)


@pytest.fixture(scope="module")
def tiny(tiny_directory):
    """A target with few possible tokens, the end among them, so that random drafts are often right."""
    return target_of_few_words(tiny_directory("qwen3"), end_bias=-2.0)


MADE = {
    "plain": lambda target: None,
    "lookup": lambda target: Lookup(),
    "suffix": lambda target: Suffix(),
    "eagle3 tree": lambda target: eagle3(target, SHAPES["tree"]),
    "lm sampled": lambda target: small_lm(target, "sampled"),
}


def requests(count, rng, samplings=(GREEDY, HOT, COLD)):
    """Random requests with prompts and texts of many lengths."""
    return [
        Request(
            [rng.choice(WORDS[1:]) for _ in range(rng.choice([1, 2, 7, 30]))],
            rng.choice(samplings),
            rng.choice([1, 2, 5, 20, 45]),
            rng.randrange(1000),
            frozenset(rng.sample(WORDS[1:], rng.choice([0, 0, 1]))),
        )
        for _ in range(count)
    ]


def alone(target, request, drafter=None):
    """Decode one request alone, on the host."""
    (found,) = decode(
        target,
        [request.prompt],
        sampling=request.sampling,
        max_new_tokens=request.max_new_tokens,
        seeds=[request.seed],
        ends=request.ends,
        drafter=drafter,
        on_host=True,
    )
    return found


def test_no_requests_give_no_texts(tiny):
    """Raised an IndexError: the seconds of the last text were read."""
    assert decode(tiny, [], sampling=GREEDY, max_new_tokens=1, seeds=[]) == []


def drain(engine, told=None):
    """Step until the engine is idle. Returns all events as {id: (tokens, end)}."""
    told = {} if told is None else told
    while engine.busy:
        listen(engine.step(), told)
    return told


def listen(events, told):
    for event in events:
        tokens, ended = told.setdefault(event.id, ([], []))
        assert not ended, "an event after the end of a text"
        tokens += event.tokens
        if event.ended is not None:
            assert event.ended.output_ids == tokens and event.ended.index == event.id
            ended.append(event)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize(
    ("rounds", "seed"), [("0", 2), ("eager", 0), ("eager", 2)], ids=["by the host", "by the device", "with penalties"]
)
def test_texts_do_not_depend_on_arrivals_and_cancellations(tiny, monkeypatch, name, seed, rounds):
    """Requests arrive and are cancelled at random. Each has its own end ids, sampling and seed. Caches grow in small
    steps."""
    rng = random.Random(seed)
    drafter = MADE[name](tiny)
    asked = requests(12, rng, (GREEDY, HOT, COLD, PENALISED) if seed == 2 else (GREEDY, HOT, COLD))
    own = drafter if name == "lm sampled" else None  # with the ratio rule, sampled text depends on the drafter
    expected = [alone(tiny, request, own) for request in asked]
    monkeypatch.setenv("SPECCTL_GRAPHS", rounds)
    monkeypatch.setattr(state_module, "GROWTH", 4)
    monkeypatch.setattr(engine_module, "TWO_ROUNDS_TOKENS", 20)
    engine = engine_for(tiny, drafter=drafter, slots=rng.choice([None, 2, 4]), share_rows=False)
    told, cancelled, waiting = {}, set(), list(asked)
    while waiting or engine.busy:
        for _ in range(rng.choice([0, 0, 0, 1, 3]) if waiting else 0):
            if waiting:
                assert engine.add(waiting.pop(0)) == len(asked) - len(waiting) - 1
        begun = [id for id, (_, ended) in told.items() if not ended and id not in cancelled]
        if begun and rng.random() < 0.05:
            gone = rng.choice(begun)
            cancelled.add(gone)
            engine.cancel(gone)
        listen(engine.step(), told)
    assert sorted(told) == list(range(12))
    for id, (tokens, (end,)) in told.items():
        if end.ended.stop == "cancelled":
            assert id in cancelled and tokens == expected[id].output_ids[: len(tokens)]
        else:
            assert (tokens, end.ended.stop) == (expected[id].output_ids, expected[id].stop)


def test_a_waiting_request_can_be_cancelled(tiny):
    engine = engine_for(tiny, slots=1)
    first, second = (engine.add(Request([40, 41], GREEDY, 4, ends=frozenset())) for _ in range(2))
    told = {}
    listen(engine.step(), told)
    engine.cancel(second)
    drain(engine, told)
    assert told[second][0] == [] and told[second][1][0].ended.stop == "cancelled"
    assert told[first][1][0].ended.stop in ("eos", "length")
    with pytest.raises(UsageError, match="sequence 0 has ended"):
        engine.cancel(first)
    with pytest.raises(UsageError, match="there is no sequence 7"):
        engine.cancel(7)


BAD = {
    "0 tokens": Request([], GREEDY, 4),
    "takes 1 to": Request([40] * 10_000, GREEDY, 4),
    "a prompt contains token id -1": Request([40, -1], GREEDY, 4),
    "a prompt contains token id 99999": Request([99999], GREEDY, 4),
    "ends contains token id 99999": Request([40], GREEDY, 4, ends=frozenset({99999})),
    "max_new_tokens is 0": Request([40], GREEDY, 0),
}


@pytest.mark.parametrize("reason", BAD)
def test_an_invalid_request_is_refused_and_others_continue(tiny, reason):
    fine = Request([40, 41], HOT, 9, 3)
    engine = engine_for(tiny)
    engine.add(fine)
    engine.step()
    with pytest.raises(DataError, match=reason):
        engine.add(BAD[reason])
    assert drain(engine, {0: ([*engine.texts[0].output], [])})[0][0] == alone(tiny, fine).output_ids


def test_exact_mode_refuses_a_text_longer_than_its_rows(tiny):
    engine = engine_for(tiny, exact=True, slots=1)
    assert engine.add(Request([40, 41], GREEDY, 10)) == 0
    engine.step()
    with pytest.raises(DataError, match="exact mode"):
        engine.add(Request([40, 41], GREEDY, 11))


class Damaged:
    """A model that returns NaN from some position on, and leaves NaN in its cache."""

    def __init__(self, model, position):
        self.model, self.position = model, position

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, tokens, cache, plan, taps):
        hidden, tapped = self.model.forward(tokens, cache, plan, taps)
        for b in (plan.positions.amax(1) >= self.position).nonzero().flatten().tolist():
            hidden[b] = torch.nan
            if tapped is not None:
                tapped[b] = torch.nan
            cache.store[:, b, self.position :] = torch.nan
        return hidden, tapped


@pytest.mark.parametrize("name", ["plain", "eagle3 tree", "lm sampled", "exact", "exact lookup"])
@pytest.mark.parametrize(
    ("position", "slots"),
    [(40, 2), (52, 2), (52, None)],
    ids=["in a prompt", "in a round", "in a round, all at once"],  # with two slots, slots are reused
)
def test_logits_that_are_not_finite_end_only_their_own_text(tiny, monkeypatch, name, position, slots):
    """Neighbors, and later texts in its slot, do not read its NaN."""
    exact = name.startswith("exact")
    drafter = MADE[name.removeprefix("exact").strip() or "plain"](tiny)
    asked = [Request([40 + n, 41, 43][: n + 1], GREEDY, 14, n) for n in range(3)] * 2
    expected = [alone(tiny, request).output_ids for request in asked]
    asked[1] = Request([40] * 50, HOT, 30, 8)
    assert len(alone(tiny, asked[1]).output_ids) > 4
    monkeypatch.setattr(tiny, "model", Damaged(tiny.model, position))
    engine = engine_for(tiny, drafter=drafter, slots=slots, exact=exact)
    for request in asked:
        engine.add(request)
    told = drain(engine)
    (failed,) = told[1][1]
    assert failed.ended.stop == "failed" and (told[1][0] == [] if position == 40 else 0 < len(told[1][0]) < 4)
    assert isinstance(failed.error, CheckpointError) and "not finite" in str(failed.error)
    assert [told[n][0] for n in (0, 2, 3, 4, 5)] == [expected[n] for n in (0, 2, 3, 4, 5)]


class Fussy(Lookup):
    """Raises if it drafts for a text with a certain token."""

    def __init__(self, token):
        super().__init__()
        self.token = token

    def propose(self, state, budget):
        if any(self.token in row.ids for row in state.rows if row.stop is None):
            raise RuntimeError("I will not")
        return super().propose(state, budget)


def test_a_drafter_that_raises_for_one_text_ends_only_that_text(tiny):
    asked = [Request([40, 41], GREEDY, 9), Request([600, 41], GREEDY, 9), Request([44, 44], GREEDY, 9)]
    engine = engine_for(tiny, drafter=Fussy(600))
    for request in asked:
        engine.add(request)
    told = drain(engine)
    (failed,) = told[1][1]
    assert failed.ended.stop == "failed" and str(failed.error) == "I will not" and len(told[1][0]) == 1
    for n in (0, 2):
        assert told[n][0] == alone(tiny, asked[n]).output_ids


def test_a_drafter_that_raises_for_every_batch_ends_all_its_texts(tiny):
    class Single(Lookup):
        def propose(self, state, budget):
            if state.batch > 1:
                raise RuntimeError("one at a time")
            return super().propose(state, budget)

    engine = engine_for(tiny, drafter=Single())
    for start in (40, 41):
        engine.add(Request([start], GREEDY, 9))
    assert {str(end.error) for _, (end,) in drain(engine).values()} == {"one at a time"}
    with pytest.raises(RuntimeError, match="one at a time"):
        decode(tiny, [[40], [41]], sampling=GREEDY, max_new_tokens=9, seeds=[0, 0], drafter=Single())


class Watching(Controller):
    """Plays one drafter and records the controller's calls."""

    def __init__(self, drafter, refuses=None):
        self.drafter, self.refuses = drafter, refuses
        self.begun, self.ended, self.seen = [], [], 0

    def begin(self, text):
        if text.request.label and text.request.label.query == self.refuses:
            raise ValueError("not this one")
        self.begun.append(text.index)

    def choose(self, state):
        assert {row.index for row in state.rows if row.stop is None} & {*self.begun} - {*self.ended}
        return self.drafter

    def observe(self, state, result):
        self.seen += 1

    def end(self, text):
        self.ended.append(text.index)


def test_a_controller_gets_the_beginning_and_end_of_every_text(tiny):
    """However the text ends."""
    controller = Watching(Suffix())
    engine = engine_for(tiny, controller=controller, slots=4)
    for n in range(6):
        engine.add(Request([40 + n, 41], GREEDY, 12, n))
    told = {}
    listen(engine.step(), told)
    engine.cancel(3)
    drain(engine, told)
    assert sorted(controller.begun) == sorted(controller.ended) == [*range(6)] and controller.seen


def test_a_text_refused_by_its_controller_fails_alone(tiny):
    engine = engine_for(tiny, controller=Watching(Lookup(), refuses="b"))
    for query in "abc":
        engine.add(Request([40, 41], GREEDY, 5, label=Label(query)))
    told = drain(engine)
    assert str(told[1][1][0].error) == "not this one" and told[1][0] == []
    assert told[0][0] == told[2][0] == alone(tiny, Request([40, 41], GREEDY, 5)).output_ids
    assert engine.controller.begun == sorted(engine.controller.ended) == [0, 2]


def test_a_text_that_fails_in_its_prompt_is_reported_as_ended(tiny, monkeypatch):
    """It has no tokens, but a session would wait for its end forever."""
    monkeypatch.setattr(tiny, "model", Damaged(tiny.model, 40))
    engine = engine_for(tiny, controller=Watching(Lookup()))
    engine.add(Request([40] * 50, GREEDY, 5))
    assert drain(engine)[0][0] == []
    assert engine.controller.begun == engine.controller.ended == [0]


def test_the_cache_grows_with_its_texts(tiny, monkeypatch):
    """It is not allocated for `max_new_tokens` at once."""
    monkeypatch.setattr(state_module, "GROWTH", 8)
    request = Request([40, 41], Sampling(1.0, 0, 1.0), 400, 0, frozenset())
    monkeypatch.setattr(tiny, "eos_ids", frozenset())
    engine = engine_for(tiny, drafter=eagle3(tiny, SHAPES["tree"]))
    engine.add(request)
    sizes = []
    while engine.busy:
        engine.step()
        sizes += [engine.state.capacity] * engine.busy
    assert sizes[0] < 100 and sizes == sorted(sizes) and len(set(sizes)) < 6
    assert len(set(sizes)) > 2 and sizes[-1] <= 402 + engine.state.spare + 1


def test_pages_are_not_leased_beyond_the_capacity(monkeypatch, tmp_path):
    """A long text beside a longer prompt leased more pages than the batch's table has columns, and every text of the
    batch failed. On a GPU, with paged caches, this happened for any answer of more than 512 tokens."""
    kind, sizes = ARCHITECTURES["qwen3"]
    place = write_tiny(tmp_path, kind, sizes | {"max_position_embeddings": 512})
    target = load_target(str(place), device="cpu", dtype="fp32")
    target.eos_ids = frozenset()
    asked = [Request([40, 41] * 130, GREEDY, 2), Request([42, 43, 44], GREEDY, 350)]
    expected = [alone(target, request).output_ids for request in asked]
    monkeypatch.setenv("SPECCTL_KV", "paged")
    monkeypatch.setattr(state_module, "GROWTH", 200)
    engine = engine_for(target)
    for request in asked:
        engine.add(request)
    told = drain(engine)
    assert [told[n][0] for n in (0, 1)] == expected and len(expected[1]) == 350


def test_a_text_ended_by_a_pending_round_can_be_cancelled(tiny, monkeypatch):
    """Two clients of a server disconnected at once. Cancelling the first text ended the second, and cancelling that one
    then raised and stopped the server. The host learns of an end one round late."""
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    for steps in range(1, 8):
        engine, told = engine_for(tiny), {}
        ids = [engine.add(Request([40, 41], GREEDY, 4)) for _ in range(2)]
        for _ in range(steps):
            listen(engine.step(), told)
        for id in [id for id in ids if id in engine.texts]:
            engine.cancel(id)
        assert all(drain(engine, told)[id][1] for id in ids)


def test_an_idle_engine_accepts_new_requests(tiny):
    engine = engine_for(tiny, controller=Fixed(Lookup()))
    for n in range(3):
        request = Request([40 + n], HOT, 7, n)
        assert engine.add(request) == n
        assert drain(engine)[n][0] == alone(tiny, request).output_ids
        assert not engine.busy and engine.step() == []


@pytest.mark.parametrize("rounds", ["0", "eager"])
def test_a_dropped_engine_is_freed_without_garbage_collection(tiny, monkeypatch, rounds):
    """It holds GPU memory, which must be released at once."""
    monkeypatch.setenv("SPECCTL_GRAPHS", rounds)
    engine = engine_for(tiny, drafter=Lookup(3))
    engine.add(Request([40, 41], GREEDY, 9))
    drain(engine)
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()
