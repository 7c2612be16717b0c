"""Drafters of a pool learn in one process, each from its own texts, without disturbing each other."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from specctl.adaptation.worker import LearnerResult, PackedTensors
from specctl.commands.serve import load_drafters, make_thread
from specctl.commands.serve_learning import learning_from, online_recipe
from specctl.decoding.records import Counts, Label, RoundResult
from specctl.drafters import checkpoint
from specctl.gateway.learning import BackgroundOnlineDrafter, HeadLearner, LearningPlan, ServingLearner
from specctl.gateway.metrics import Meter
from specctl.recipe import ServeRecipe
from specctl.runs import Run
from specctl.selection.arms import learners_of
from tests.gateway.conftest import heard
from tests.gateway.test_learning import GREEDY, SAMPLED, Pupil, _gateway, ask_until, plain, texts_of
from tests.measuring.streams import free_hybrids, sure_target, write_head


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tiny_directory):
    return sure_target(tmp_path_factory.mktemp("sure"), tiny_directory("llama"))


@pytest.fixture
def heads(tmp_path, tiny):
    """Two heads of different families."""
    return [
        write_head(tmp_path / "pool" / family, tiny, family, seed) for seed, family in enumerate(("eagle3", "hydra"))
    ]


def recipe_of(tiny, *drafters, choose="random", **learn):
    learn = {"chunk": 4, "save_s": 1e-3, "learner": {"budget": None, "holdout": 0}} | learn
    target = {"name": tiny.name, "dtype": "fp32", "device": "cpu"}
    return ServeRecipe(
        target=target, drafters=[*map(str, drafters)], choose=choose, slots=8, learn={"enabled": True, **learn}
    )


@pytest.fixture
def learning(tmp_path, tiny):
    """Return `make(recipe)`, which gives (gateway, learner) with learners in this process; both end with the test."""
    made = []

    def make(recipe, start=True):
        meter = Meter("toy")
        drafters, places = load_drafters(recipe, tiny)
        thread = make_thread(recipe, tiny, drafters, places, meter)
        arms, members = {path: name for name, path in places.items()}, {}
        for place, paths in learners_of(recipe).items():
            pupil = Pupil(online_recipe(recipe, place), recipe.learn.algo, tiny, 0)
            options = (
                recipe.learn.chunk,
                recipe.learn.longest,
                tmp_path / "learnt" / place.name,
                recipe.learn.save_s,
                {},
            )
            plan = LearningPlan(*options, place.name)
            members[place.name] = HeadLearner(pupil, [arms[path] for path in paths], plan, meter)
        thread.learner = ServingLearner(members, tiny)
        made.append(_gateway(thread))
        if start:
            thread.learner.start()
        return made[-1], thread.learner

    yield make
    for gateway in made:
        gateway.thread.stop()
        gateway.thread.learner.stop()


def test_two_heads_learn_in_one_process_while_both_serve(tmp_path, tiny, heads):
    """From requests to saved directories: the target is loaded once more, texts stay lossless, and metrics are per
    drafter."""
    recipe = recipe_of(tiny, *heads, "lookup")
    run = Run.create("serve", recipe, tmp_path / "run")
    meter = Meter("toy")
    drafters, places = load_drafters(recipe, tiny)
    thread = make_thread(recipe, tiny, drafters, places, meter)
    expected = plain(tiny, GREEDY)
    with learning_from(thread, recipe, run, places) as summary:
        gateway, members = _gateway(thread), thread.learner.members
        (process,) = {member.online_drafter.process for member in members.values()}
        assert process._process.is_alive() and members.keys() == {"eagle3", "hydra"}
        ask_until(lambda: all(member.counts.version for member in members.values()), gateway, expected)
        assert texts_of(gateway) == expected
        for name in members:
            assert gateway.metric("specctl:learning", drafter=name) == 1
            assert gateway.metric("specctl:learning_version", drafter=name) >= 1
            assert gateway.metric("specctl:learning_lessons_total", drafter=name, status="updated") >= 1
            assert gateway.metric("specctl:learning_texts_total", drafter=name) >= 4
            assert gateway.metric("specctl:learning_mat", drafter=name, weights="first") >= 1
        assert gateway.metric("specctl:learning", drafter="lookup") is None
        assert sum(gateway.metric("specctl:learning_texts_total", drafter=name) for name in members) <= sum(
            meter.drafters[name].texts for name in members
        )
        thread.stop()
    assert not process._process.is_alive()
    found = summary()
    for place in heads:
        learnt = checkpoint.load(found[place.name].drafter)
        assert found[place.name].drafter == str(tmp_path / "run" / "drafters" / place.name)
        assert learnt.config["family"] == place.name and "while serving" in learnt.info["learnt"]
        before = checkpoint.load(place).tensors
        assert any(not torch.equal(value, before[name]) for name, value in learnt.tensors.items())
    assert found["eagle3"].lessons >= 1 and found["hydra"].version >= 1 and not found["hydra"].failed


@pytest.mark.parametrize("options", [GREEDY, pytest.param(SAMPLED, marks=pytest.mark.slow)])
def test_new_weights_of_one_drafter_change_no_other_drafter_and_no_text(tiny, heads, learning, monkeypatch, options):
    """Catches weights set on another arm, and a running text drafted with the memory of other weights."""
    free_hybrids(monkeypatch)
    gateway, learner = learning(recipe_of(tiny, *heads, f"{heads[0]}+lookup", chunk=10**6), start=False)
    controller, (first, other) = gateway.thread.engine.controller, learner.members.values()
    assert first.arms == ["eagle3", "eagle3+lookup"] and other.arms == ["hydra"]
    untouched, hybrid = controller.drafter("hydra"), controller.drafter("eagle3+lookup")
    kept, step, exchanged = other.online_drafter.played().clone(), learner.after_step, []

    def restless(engine, seconds):
        if engine.texts:
            w = first.online_drafter.played()
            torch.manual_seed(len(exchanged))
            first._built = first.online_drafter.drafter_of(w + 0.5 * w.std() * torch.randn_like(w))
            exchanged.append(first._built)
        step(engine, seconds)
        if engine.texts:
            assert controller.drafter("eagle3") is exchanged[-1] is controller.drafter("eagle3+lookup").head

    monkeypatch.setattr(learner, "after_step", restless)
    assert texts_of(gateway, options) == plain(tiny, options)
    assert first.counts.on and first.counts.version == len(exchanged) > 3 and other.counts.version == 0
    assert controller.drafter("hydra") is untouched and controller.drafter("eagle3+lookup").text is hybrid.text
    assert torch.equal(other.online_drafter.played(), kept)
    assert not controller.failures and controller.selector.arms[1].failures == 0


def test_one_failing_learner_stops_only_its_own_learning(tiny, heads, learning, monkeypatch, capsys):
    """The other drafters continue to learn, and requests succeed."""
    gateway, learner = learning(recipe_of(tiny, *heads), start=False)
    bad, good = learner.members["eagle3"], learner.members["hydra"]

    def fail(*_, **__):
        raise ValueError("Name a colour.")

    monkeypatch.setattr(bad.online_drafter, "hand_over", fail)
    learner.start()
    expected = plain(tiny, GREEDY)
    ask_until(lambda: not bad.counts.on and good.counts.version, gateway, expected)
    said = heard(capsys, "serving goes on with the present drafter")
    assert gateway.metric("specctl:learning", drafter="eagle3") == 0 and bad.counts.version == 0
    assert gateway.metric("specctl:learning", drafter="hydra") == 1 and good.counts.lessons["updated"]
    assert gateway.metric("specctl:faults_total", part="learner") == 1 and not good.online_drafter.closed
    said += capsys.readouterr().err
    assert said.count("learning of eagle3 has failed") == 1 and "colour" not in said and "of hydra" not in said


def test_the_full_information_policy_works_with_new_weights(tiny, heads, learning, monkeypatch):
    """Catches scores of old weights, and a number of scores that does not match the arms.

    The policy may find that no drafter pays, and then none would learn: the test makes the weights."""
    gateway, learner = learning(recipe_of(tiny, *heads, choose="hedgespec"), start=False)
    expected = plain(tiny, GREEDY)
    assert texts_of(gateway) == expected
    for member in learner.members.values():
        w = member.online_drafter.played()
        member._built = member.online_drafter.drafter_of(w + 0.5 * w.std() * torch.randn_like(w))
    assert texts_of(gateway) == expected
    assert [member.counts.version for member in learner.members.values()] == [1, 1]
    selector = gateway.thread.engine.controller.selector
    assert selector.scorer.drafters == [arm.drafter for arm in selector.arms]
    assert gateway.thread.engine.controller.failures == 0


def test_the_engine_gets_a_new_drafter_object_for_every_version(tiny, heads, monkeypatch):
    """Weights changed in place could change in the middle of a round."""
    monkeypatch.setattr("specctl.adaptation.online_drafter.take_weights", lambda *_: True)
    pupil = BackgroundOnlineDrafter(online_recipe(recipe_of(tiny, *heads), heads[0]), "ogd", tiny, 0, heads[0])
    first, w = pupil.drafter, pupil.played()
    results = [LearnerResult(None, w + 0.1, {}, PackedTensors.of({})), None]
    pupil.process = SimpleNamespace(receive=lambda name, seconds: results.pop(0))
    assert pupil.lessons() == [None] and pupil.drafter is not first and torch.equal(pupil.played(), w + 0.1)


class Member(SimpleNamespace):
    """A fake member that records its calls."""

    def __init__(self, arms, on=True):
        super().__init__(arms=arms, texts=[], rounds=0, parts=[], seconds=0.0, counts=SimpleNamespace(on=on))

    def take_text(self, state, b, text):
        self.texts.append(state.rows[b].request.label.query)

    def end_text(self, part):
        self.parts.append((part.accepted, part.verified))

    def add_round(self, counts):
        self.rounds += 1

    def after_step(self, engine, seconds):
        self.seconds += seconds


def test_a_text_teaches_the_drafter_of_most_of_its_rounds(tiny):
    """Time and acceptance are shared by rounds, so that all learners together get the time of a single learner."""
    heads = {"a": Member(["a", "a+lookup"]), "b": Member(["b"])}
    learner = ServingLearner(heads, tiny)
    requests = [SimpleNamespace(label=Label(query)) for query in "01"]
    rows = [SimpleNamespace(request=one, ids=[0] * 5, prompt_length=3, rejections=0, stop=None) for one in requests]
    state = SimpleNamespace(rows=rows, batch=2, memory={})
    # a drafts two of three rounds of the first text, under two names; lookup drafts most of the second
    for arms, stop in ((("a", "lookup"), None), (("b", "b"), None), (("a+lookup", "lookup"), "eos")):
        for row, arm in zip(rows, arms, strict=True):
            learner.note_round(row.request.label.query, arm)
            row.ids, row.stop = [*row.ids, 1, 1], stop
        learner.observe(state, RoundResult({0: Counts(2, 1, 4, True), 1: Counts(2, 1, 1, True)}, 0.1))
        learner.after_step(None, 6.0)
    assert heads["a"].texts == ["0"] and heads["b"].texts == []
    assert (heads["a"].rounds, heads["b"].rounds) == (2, 2)
    assert (heads["a"].parts, heads["b"].parts) == ([(2, 4)], [(1, 2), (1, 1)])
    assert (heads["a"].seconds, heads["b"].seconds) == (3.0 + 3.0, 6.0)
    assert learner._played == Counter(a=2, b=2, lookup=2)


def test_nothing_is_recorded_after_all_learners_have_ended(tiny):
    """The memory of a server used to grow with every text."""
    learner = ServingLearner({"a": Member(["a"], on=False)}, tiny)
    learner.note_round("0", "a")
    learner.observe(None, None)
    assert not learner._arms
