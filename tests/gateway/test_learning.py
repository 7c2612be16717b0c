"""A drafter that learns while serving changes no text, fails alone, and saves its weights."""

import asyncio
import time
from dataclasses import replace

import pytest
import torch

from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.commands.serve_learning import online_recipe
from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine, EngineOptions
from specctl.drafters import checkpoint, pool
from specctl.errors import SpecctlError
from specctl.gateway.app import make_app
from specctl.gateway.engine_thread import EngineThread
from specctl.gateway.learning import HeadLearner, LearningPlan, ServingLearner
from specctl.gateway.metrics import Meter
from specctl.gateway.own_engine import OwnEngine
from specctl.recipe import LimitsRecipe, ServeRecipe
from tests.gateway.conftest import PATIENCE_S, Gateway, chat, heard, wait_for
from tests.measuring.streams import QUESTIONS, sure_target, write_head

CHAT = "/v1/chat/completions"
GREEDY = {"temperature": 0.0, "max_tokens": 24}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 24}


class Pupil(OnlineDrafter):
    """An online drafter that learns in this process, with the two methods that a gateway calls."""

    closed = False

    def hand_over(self, acceptance, decode_s):
        self.done = [*getattr(self, "done", []), self.learn_chunk(acceptance, decode_s)]

    def lessons(self):
        lessons, self.done = getattr(self, "done", []), []
        return lessons

    def close(self):
        self.closed = True


class RestlessLearner(HeadLearner):
    """A learner that replaces the drafter after every second step by a copy disturbed by `noise`."""

    noise, steps, exchanged_while_busy = 0.0, 0, 0

    def after_step(self, engine, seconds):
        self.steps += 1
        if self.steps % 2 == 0 and engine.texts:
            w = self.online_drafter.played()
            torch.manual_seed(self.steps)
            head = self.online_drafter.drafter_of(w + self.noise * w.std() * torch.randn_like(w))
            old, self.exchanged_while_busy = engine.controller.drafter, self.exchanged_while_busy + 1
            self._built = head
            super().after_step(engine, seconds)
            assert old not in engine.state.memory and engine.controller.drafter is not old
        else:
            super().after_step(engine, seconds)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tiny_directory):
    return sure_target(tmp_path_factory.mktemp("sure"), tiny_directory("llama"))


@pytest.fixture
def learning(tmp_path, tiny):
    """Return `make(drafter, kind, **learn)`, which gives (gateway, its only learner); both end with the test."""
    made = []

    def make(drafter, kind=HeadLearner, start=True, **learn):
        learn = {"chunk": 4, "save_s": 1e-3, "learner": {"budget": None, "holdout": 0}} | learn
        served = {"enabled": True, **learn}
        target = {"name": tiny.name, "dtype": "fp32", "device": "cpu"}
        recipe = ServeRecipe(target=target, drafters=[str(drafter)], learn=served)
        head = str(drafter).partition("+")[0]
        pupil = Pupil(online_recipe(recipe, checkpoint.existing_directory(_path(head))), recipe.learn.algo, tiny, 0)
        loaded = pool.load_drafter(str(drafter), tiny, recipe.drafting)
        meter = Meter("toy")
        thread = EngineThread(
            Engine(tiny, Fixed.of(loaded), EngineOptions(slots=8, keeps_hidden=True)), meter, "drafter"
        )
        plan = LearningPlan(recipe.learn.chunk, recipe.learn.longest, tmp_path / "learnt", recipe.learn.save_s, {})
        member = kind(pupil, ["drafter"], plan, meter)
        thread.learner = ServingLearner({"": member}, tiny)
        made.append(_gateway(thread))
        if start:
            thread.learner.start()
        return made[-1], member

    yield make
    for gateway in made:
        gateway.thread.stop()
        gateway.thread.learner.stop()


def _path(text):
    from pathlib import Path

    return Path(text)


def _gateway(thread):
    gateway = Gateway.__new__(Gateway)
    gateway.meter, gateway.thread = thread.meter, thread
    gateway.backend = OwnEngine(thread, thread.engine.target, "toy", ServeRecipe())
    gateway.backend.warm_up()
    thread.start()
    gateway.app = make_app(gateway.backend, LimitsRecipe(), None)
    return gateway


def texts_of(gateway, options=GREEDY, questions=QUESTIONS):
    answers = gateway.ask(CHAT, *[chat(question, **options) for question in questions])
    assert [one.status_code for one in answers] == [200] * len(answers)
    return [one.json()["choices"][0]["message"]["content"] for one in answers]


def ask_until(condition, gateway, expected):
    """Ask again and again until a condition holds, or fail. Learning takes its time, which no number of texts fits."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it never came true"
        assert texts_of(gateway) == expected


def plain(tiny, options):
    """Return the texts without a drafter."""
    thread = EngineThread(Engine(tiny, Fixed.of(None), EngineOptions(slots=8)), Meter("toy"), "plain")
    gateway = _gateway(thread)
    try:
        return texts_of(gateway, options)
    finally:
        thread.stop()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lm", SAMPLED),
        ("eagle3+lookup", GREEDY),
        *(pytest.param(kind, GREEDY, marks=pytest.mark.slow) for kind in ("eagle3", "hydra", "lm")),
        *(pytest.param(kind, SAMPLED, marks=pytest.mark.slow) for kind in ("eagle3", "hydra", "eagle3+lookup")),
    ],
)
def test_texts_do_not_depend_on_weights_replaced_midway(tmp_path, tiny, copy, learning, kind, options):
    """A drafter with a stale or missing memory may only cost acceptance."""
    drafter = copy if kind == "lm" else f"{write_head(tmp_path / 'head', tiny, kind.partition('+')[0])}"
    gateway, learner = learning(drafter + "+lookup" if "+" in kind else drafter, RestlessLearner, start=False)
    learner.noise = 0.5
    assert texts_of(gateway, options) == plain(tiny, options)
    assert learner.counts.on and learner.counts.version == learner.exchanged_while_busy > 3


@pytest.mark.parametrize("kind", [pytest.param("eagle3", marks=pytest.mark.slow), "lm"])
def test_a_replaced_drafter_reads_the_running_texts(tmp_path, tiny, copy, learning, kind):
    """With equal weights it must draft exactly like the old one."""
    drafter = copy if kind == "lm" else write_head(tmp_path / "head", tiny, kind)
    still, _ = learning(drafter, start=False)
    restless, learner = learning(drafter, RestlessLearner, start=False)
    for question in QUESTIONS[:3]:  # one at a time, because drafts are shorter in a batch
        assert texts_of(still, GREEDY, [question]) == texts_of(restless, GREEDY, [question])
    assert learner.exchanged_while_busy > 3
    one, other = still.meter.drafters["drafter"], restless.meter.drafters["drafter"]
    assert (one.rounds, one.accepted_at) == (other.rounds, other.accepted_at) and one.rounds > 0


def test_the_drafter_learns_while_serving_and_restarts_from_its_copy(tmp_path, tiny, learning):
    """The saved weights are the newest, and the next process starts from the copy."""
    start = write_head(tmp_path / "head", tiny, "eagle3")
    gateway, learner = learning(start)
    expected = plain(tiny, GREEDY)
    for _ in range(3):
        assert texts_of(gateway) == expected
        wait_for(lambda: learner._handed is None)
    wait_for(lambda: learner.counts.lessons["updated"] >= 2)
    assert texts_of(gateway) == expected
    assert learner.counts.version >= 1 and learner.counts.texts >= 8 and gateway.metric("specctl:learning") == 1
    gateway.thread.stop()
    gateway.thread.learner.stop()
    assert learner.online_drafter.closed
    again, _ = learning(tmp_path / "learnt", start=False)
    (copied,) = again.thread.learner.members.values()
    assert torch.equal(copied.online_drafter.played(), learner.online_drafter.played())
    before = checkpoint.load(start).tensors
    assert any(
        not torch.equal(value, before[name]) for name, value in checkpoint.load(tmp_path / "learnt").tensors.items()
    )
    assert texts_of(again) == expected


def test_learning_metrics_are_exported(tmp_path, tiny, learning):
    # Texts are handed over when the last one has ended: no step exchanges the drafter before the next request.
    gateway, learner = learning(write_head(tmp_path / "head", tiny, "eagle3"), chunk=len(QUESTIONS))
    texts_of(gateway)
    wait_for(lambda: learner.counts.lessons["updated"] == 1 and learner._built is not None)
    texts_of(gateway)
    learner._count()
    first, present = (gateway.metric("specctl:learning_mat", weights=name) for name in ("first", "present"))
    assert first >= 1 and present >= 1 and gateway.metric("specctl:learning_version") == 1
    assert gateway.metric("specctl:learning_lessons_total", status="updated") >= 1
    assert gateway.metric("specctl:learning_learn_s_total") > 0 and gateway.metric("specctl:learning_serve_s_total") > 0
    assert 4 <= gateway.metric("specctl:learning_texts_total") <= 2 * len(QUESTIONS)
    assert "specctl:learning_mat" in (asyncio.run(_get(gateway, "/metrics")))


async def _get(gateway, path):
    async with gateway.client() as http:
        return (await http.get(path)).text


@pytest.mark.parametrize(
    "method", ["lessons", "observe", "exchange", pytest.param("hand_over", marks=pytest.mark.slow)]
)
def test_a_failing_learner_stops_only_the_learning(tmp_path, tiny, learning, monkeypatch, capsys, method):
    """With a single warning, and without failing requests."""
    gateway, learner = learning(write_head(tmp_path / "head", tiny, "eagle3"), start=False)

    def fail(*_, **__):
        raise ValueError("Name a colour.")

    owner = {"observe": gateway.thread.learner._texts, "exchange": gateway.thread.engine}.get(
        method, learner.online_drafter
    )
    monkeypatch.setattr(owner, method, fail)
    gateway.thread.learner.start()
    expected = plain(tiny, GREEDY)
    for _ in range(3):
        assert texts_of(gateway) == expected
        wait_for(lambda: learner._handed is None or not learner.counts.on)
    if method == "exchange":
        wait_for(lambda: learner._built is not None or not learner.counts.on)
        assert texts_of(gateway) == expected
    said = heard(capsys, "serving goes on with the present drafter")
    assert texts_of(gateway) == expected
    said += capsys.readouterr().err
    assert said.count("learning has failed") == 1 and "colour" not in said
    assert gateway.metric("specctl:learning") == 0 and gateway.metric("specctl:faults_total", part="learner") == 1
    assert not learner.buffer.texts


def test_a_harmful_update_is_rolled_back(tiny, copy, learning, capsys):
    """Otherwise weights that ruin every draft would stay."""
    harmful = {"budget": None, "holdout": 0, "optimizer": "sgd", "lr": 50.0, "clip": 0.0}
    gateway, learner = learning(copy, learner=harmful, chunk=5)
    expected = plain(tiny, GREEDY)
    ask_until(lambda: learner.counts.rollbacks, gateway, expected)
    heard(capsys, "was taken back")


@pytest.mark.slow
def test_repeated_harmful_lessons_end_the_learning(tmp_path, tiny, learning, monkeypatch, capsys):
    """A learning rate that is far too large would waste time forever."""
    gateway, learner = learning(write_head(tmp_path / "head", tiny, "eagle3"), start=False)
    vector = learner.online_drafter.trainable.loss
    monkeypatch.setattr(
        learner.online_drafter.objective, "_run", lambda *a: (torch.nan * vector(*a)[0], *vector(*a)[1:])
    )
    gateway.thread.learner.start()
    for _ in range(8):
        texts_of(gateway)
        wait_for(lambda: learner._handed is None or not learner.counts.on)
    wait_for(lambda: not learner.counts.on)
    said = capsys.readouterr().err
    assert said.count("was not finite") == 5 and "5 lessons in a row" in said and not learner.counts.on


def test_long_and_many_texts_do_not_fill_the_memory(tmp_path, tiny, learning):
    """One client must not displace the texts of all others."""
    gateway, learner = learning(write_head(tmp_path / "head", tiny, "eagle3"), start=False, longest=30, chunk=10**6)
    texts_of(gateway, GREEDY)
    assert not learner.buffer.texts and learner.buffer.dropped == len(QUESTIONS)
    learner.plan = replace(learner.plan, longest=2048)
    texts_of(gateway, GREEDY)
    assert len(learner.buffer.texts) == len(QUESTIONS)
    learner.buffer.max_bytes = 2 * learner.buffer.bytes // len(QUESTIONS)
    texts_of(gateway, GREEDY)
    assert 1 <= len(learner.buffer.texts) <= 3 and learner.buffer.bytes <= learner.buffer.max_bytes
    assert learner._ended.maxlen == 8 * 10**6 and learner._handed is None


@pytest.mark.slow
def test_a_full_disk_only_prevents_saving(tmp_path, tiny, learning, monkeypatch, capsys):
    """Learning continues, with a single warning."""
    gateway, learner = learning(write_head(tmp_path / "head", tiny, "eagle3"), start=False)

    def full(*_):
        raise SpecctlError("the disk is full")

    monkeypatch.setattr(learner.online_drafter, "save", full)
    gateway.thread.learner.start()
    for _ in range(2):
        texts_of(gateway)
        wait_for(lambda: learner._handed is None)
    wait_for(lambda: (gateway.metric("specctl:faults_total", part="learner's copy") or 0) >= 2)
    assert learner.counts.on and capsys.readouterr().err.count("is not saved") == 1
