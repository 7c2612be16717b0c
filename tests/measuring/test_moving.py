"""`online` with a learner process, a pool of drafters, chosen draft lengths, or a changing target."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specctl.adaptation.buffer import BufferedText, ReplayBuffer
from specctl.adaptation.specialists import Specialists
from specctl.adaptation.stream import PromptStream
from specctl.adaptation.stream_learner import Lesson
from specctl.adaptation.updates.ensemble import UpdateOutcome
from specctl.adaptation.updates.watchdog import Acceptance
from specctl.adaptation.worker import Chunk
from specctl.decoding.records import Label, Request, Sequence
from specctl.decoding.sampling import GREEDY
from specctl.distillation.rejections import Rejections
from specctl.drafters import checkpoint
from specctl.drafters.hybrid import costs
from specctl.errors import CheckpointError, SpecctlError
from specctl.measuring.online_contenders import OnlineContenders
from specctl.recipe import OnlineRecipe
from specctl.runs import to_json
from specctl.selection.controller import RoundLine
from specctl.training.example import Example
from tests.measuring.streams import (
    QUESTIONS,
    free_hybrids,
    learnt,
    lines,
    recipe,
    same_runs,
    weights,
    write_copy,
    write_head,
    write_prompts,
)
from tests.toys.decoding import decode


@pytest.fixture(scope="module")
def pool(tmp_path_factory, tiny):
    """A pool with a close copy of the target, a heavily disturbed copy, and an untrained head."""
    place = tmp_path_factory.mktemp("pool")
    write_copy(place / "good", tiny, tiny.name, 0.03)
    write_copy(place / "bad", tiny, tiny.name, 1.0)
    write_head(place / "head", tiny, "eagle3")
    return place


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path)


@pytest.mark.slow  # tests/adaptation/test_remote.py also runs two processes
def test_a_learner_process_learns_the_same(tmp_path, prompts, tiny, pool):
    """With a single chunk there is nothing that could differ."""
    made = recipe(prompts, pool / "head", tiny, algo=["ogd"], stream={"chunk": 5})
    here, _ = learnt(tmp_path / "here", made, tiny)
    there, _ = learnt(tmp_path / "there", made.model_copy(update={"asynchronous": True}), tiny)
    ours, theirs = weights(tmp_path / "here", "ogd"), weights(tmp_path / "there", "ogd")
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert there.lossless.mismatches == 0 and there.per_chunk[0].behind == 1
    assert there.per_chunk[0].status == "pending" and here.per_chunk[0].status == "updated"
    children = [name for name in os.listdir("/proc") if name.isdigit() and _parent(name) == os.getpid()]
    names = [Path(f"/proc/{name}/cmdline").read_text() for name in children]
    assert not any("spawn_main" in name for name in names), "a learner that stands still would wait for ever"


def _parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


@pytest.mark.slow
def test_chunks_waiting_for_the_learner_survive_a_restart(prompts, tiny, pool):
    """They are saved while the learner is paused, and another process learns them. Replay would show a text that came
    twice or with the wrong number."""
    made = recipe(prompts, pool / "head", tiny, algo=["ogd"], buffer={"replay": 1.0}, baselines=[])
    chunk = next(PromptStream(made.data, made.stream, tiny, Rejections(None, 0.0), size=2).chunks())
    remote = made.model_copy(update={"asynchronous": True})
    here, there, again = (
        OnlineContenders(made, tiny, 0),
        OnlineContenders(remote, tiny, 0),
        OnlineContenders(remote, tiny, 0),
    )
    try:
        for stage in (here, there):
            stage.learn(chunk, stage.answer(chunk, lambda *args: None))
        facts, tensors = there.state()
        assert len(facts["pupils"]["ogd"]["waiting"]) == 1
        kept = json.loads(to_json(facts))
        again.restore(kept, tensors)
        assert json.loads(to_json(again.state()[0])) == kept
        again.finish()
        assert torch.equal(again.learners["ogd"].played(), here.learners["ogd"].played())
        found, expected = (stage.state()[0]["pupils"]["ogd"] for stage in (again, here))
        assert (found.pop("waiting"), found.pop("dropped_here")) == ([], 0) and found == expected
    finally:
        there.close()
        again.close()


@pytest.mark.slow
def test_a_failing_learner_process_is_reported(tmp_path, prompts, tiny, pool):
    made = recipe(prompts, pool / "head", tiny, algo=["ogd"], asynchronous=True, learner_device="cuda:7")
    with pytest.raises(SpecctlError, match="the learner process failed"):
        learnt(tmp_path / "run", made, tiny)


@pytest.mark.parametrize("feedback", ["verdict", "rerun"])
def test_a_chunk_is_sent_to_another_process_unchanged(tiny, pool, feedback):
    """The features of several texts are packed into one tensor each, and unpacked again."""
    source, goal = (ReplayBuffer(tiny, (0, 2), max_bytes=2**20, feedback=feedback) for _ in range(2))
    prompts = [tiny.render([{"role": "user", "content": text}]) for text in QUESTIONS[:3]]
    decode(
        tiny,
        prompts,
        sampling=GREEDY,
        max_new_tokens=5,
        seeds=[0] * 3,
        taps=(0, 2),
        on_commit=source.observe,
        keeps_hidden=source.keeps_hidden,
    )
    Chunk.of(source, Acceptance.of([(1, 2)])).into(goal)
    assert goal.texts == source.texts and goal.bytes == source.bytes and goal.kept.keys() == source.kept.keys()
    for index, features in source.kept.items():
        assert all(
            torch.equal(a, b) for a, b in zip(vars(features).values(), vars(goal.kept[index]).values(), strict=True)
        )


def test_specialists_learn_only_from_texts_they_won(tmp_path, prompts, tiny, pool):
    """HedgeSpec finds the close copy; the others win nothing and stay unchanged bit for bit."""
    made = recipe(prompts, pool / "good", tiny, algo=["ogd"], sampling={"max_new_tokens": 16}).model_dump()
    made |= {"init": None, "arch": None, "pool": pool, "game": {"loss": "length"}}  # measured times differ between runs
    found, _ = learnt(tmp_path / "run", OnlineRecipe(**made), tiny)
    assert found.lossless.mismatches == 0 and found.family is None
    assert [row.algo for row in found.learners] == ["ogd", "vanilla", "static", "lookup"]
    assert {len(row["weights"]) for row in lines(tmp_path / "run")} == {3}, "shares of the arms"
    moved = {}
    for name in ("good", "bad", "head"):
        after = weights(tmp_path / "run", f"ogd/{name}")
        before = checkpoint.load(pool / name).tensors
        moved[name] = any(not torch.equal(after[key], before[key]) for key in before)
    assert moved["good"] and not moved["bad"]


@pytest.mark.parametrize(("temperature", "estimator"), [(0.0, "realised"), (1.0, "product")])
def test_greedy_texts_use_the_realised_estimator(tiny, pool, monkeypatch, temperature, estimator):
    """Products of γ, a softmax at temperature 1, would predict far too few tokens, in `select` as well."""
    monkeypatch.setattr("specctl.selection.assembly.step_seconds", lambda target, rows, batch: [1.0])
    made = recipe("unread.jsonl", pool / "good", tiny, algo=["ogd"], sampling={"temperature": temperature})
    made = made.model_copy(update={"init": None, "arch": None, "pool": pool})
    controller = Specialists(made, "ogd", tiny, 0).controller
    assert controller.new_game(Label("a")).rules.estimator == estimator


@pytest.mark.parametrize(("policy", "reward", "plain"), [("hedgespec", None, True), ("metasd-ucb", "bd", False)])
def test_a_pool_that_plays_for_time_can_choose_no_draft(tiny, pool, monkeypatch, policy, reward, plain):
    """A pool that lost on a stream was still used, and was slower than plain decoding."""
    monkeypatch.setattr("specctl.selection.assembly.step_seconds", lambda target, rows, batch: [1.0])
    made = recipe("unread.jsonl", pool / "good", tiny, algo=["ogd"], game={"reward": reward} if reward else {})
    policy = made.policy.model_copy(update={"name": policy})
    made = made.model_copy(update={"init": None, "arch": None, "pool": pool, "policy": policy})
    specialists = Specialists(made, "ogd", tiny, 0)
    arms = [arm.name for arm in specialists.controller.arms]
    assert ("no draft" in arms) == plain and set(arms) - {"no draft"} == {"good", "bad", "head"}
    specialists._note(RoundLine("q", "sql", 0, 1, "no draft", 1, 0, 0, [], None, 0.0, 0.0, 0))
    assert specialists.rounds["no draft"] == 1 and not specialists._won["q"], "plain rounds win no text"


def test_a_repeated_prompt_gets_its_own_game(tiny, pool, monkeypatch):
    """In one batch it used to be refused as the same game; in sequence, the second continued the first game.

    The reward is in units of the batch's share of a plain step.
    """
    batches = []
    monkeypatch.setattr(
        "specctl.selection.assembly.step_seconds", lambda target, rows, batch: batches.append(batch) or [1.0]
    )
    made = recipe("unread.jsonl", pool / "good", tiny, algo=["ogd"], batch=2, game={"reward": "throughput"})
    policy = made.policy.model_copy(update={"name": "ucbspec"})
    made = made.model_copy(update={"init": None, "arch": None, "pool": pool, "policy": policy})
    specialists = Specialists(made, "ogd", tiny, 0)
    games = []
    for queries in (["a", "a"], ["a", "b"]):
        selector = specialists.controller
        labels = specialists.labels([Label(query, "sql") for query in queries])
        texts = [Sequence.of(Request([5], GREEDY, 1, label=label), 8, frozenset()) for label in labels]
        for text in texts:
            selector.begin(text)
        games += [selector.plays[text].game for text in texts]
        for text in texts:
            selector.end(text)
    assert len({id(game) for game in games}) == 4 and batches == [2]


@pytest.mark.parametrize("reset", ["query", "chunk"])
def test_texts_of_a_repeated_prompt_have_their_own_winners(tiny, pool, reset):
    """Rounds were counted by prompt. Both texts then went to the drafter with the most tokens in both together."""
    made = recipe("unread.jsonl", pool / "good", tiny, algo=["ogd"], game={"loss": "length"}, buffer={"max_mb": 9})
    policy = made.policy.model_copy(update={"reset": reset})
    made = made.model_copy(update={"init": None, "arch": None, "pool": pool, "policy": policy})
    specialists, learned = Specialists(made, "ogd", tiny, 0), {}

    def learn(name, learner, acceptance):
        learned[name] = ([text.example.index for text in learner.buffer.texts.values()], acceptance.texts)
        return Lesson("keep", UpdateOutcome("static"), 0, 0, 0, (), 0.0)

    for name, learner in specialists.online_drafters.items():
        learner.learn_chunk = lambda acceptance, decode_s, name=name, learner=learner: learn(name, learner, acceptance)
    for index, (arm, committed) in enumerate((("good", 9), ("bad", 2), ("bad", 3))):
        (label,) = specialists.labels([Label("again" if index else "once", "sql")])
        specialists._note(RoundLine(label.query, "sql", 0, 1, arm, committed, 1, 2, [], None, 0.0, 0.0, 0))
        if index == 2:
            specialists._note(RoundLine(label.query, "sql", 0, 2, "good", 9, 1, 1, [], None, 0.0, 0.0, 0))
        specialists.buffer.add(BufferedText(Example(index, label.query, [5] * 8, 3), []), None)
    specialists.learn_chunk(Acceptance(), 1.0)
    assert learned == {"good": ([0, 2], ((1, 2), (1, 1))), "bad": ([1], ((1, 2), (1, 2)))}
    assert [label.query for label in specialists.labels([Label("again", "sql")] * 2)] == ["again", "again 1"]


@pytest.mark.slow
@pytest.mark.parametrize(("reset", "replay"), [("query", 0.0), ("chunk", 1.0)])
def test_a_pool_resumes_exactly(tmp_path, prompts, tiny, pool, reset, replay):
    """After its first chunk and after its end. Texts keep counting up, because a text with a used number would not be
    learned from."""
    made = recipe(prompts, pool / "good", tiny, algo=["ogd"]).model_dump() | {"init": None, "arch": None, "pool": pool}
    made |= {"checkpoint": {"every": 1, "keep": 9}, "policy": {"reset": reset}, "buffer": {"replay": replay}}
    made |= {"game": {"loss": "length"}}  # measured times differ between runs
    learnt(tmp_path / "whole", OnlineRecipe(**made), tiny)
    place = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for later in sorted((place / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later)
    made |= {"resume": True, "output_dir": place}
    for _ in range(2):
        learnt(place, OnlineRecipe(**made), tiny)
        same_runs(place, tmp_path / "whole", ["ogd/good", "ogd/bad", "ogd/head"])


def test_draft_lengths_follow_their_cost(tmp_path, prompts, tiny, pool):
    """Drafts are short if a token costs as much as a step, and maximal if they are free."""
    lengths = []
    for cost in (0.0, 3.0):
        made = recipe(prompts, pool / "good", tiny, algo=["ogd"], draft_length="auto", draft_cost=cost)
        found, _ = learnt(tmp_path / f"run{cost}", made, tiny)
        assert found.lossless.mismatches == 0
        lengths.append(sum(row.draft_length for row in found.per_chunk))
    assert lengths[0] > 2 * lengths[1]


def test_heads_draft_together_with_a_text_drafter(tmp_path, prompts, tiny, pool, monkeypatch):
    """The learning head and the fixed head each share a tree with `lookup`."""
    free_hybrids(monkeypatch)
    mats = {}
    for beside in (None, "lookup"):
        made = recipe(prompts, pool / "good", tiny, algo=["ogd"], beside=beside, baselines=["static", "lookup"])
        found, _ = learnt(tmp_path / f"run-{beside}", made, tiny)
        assert found.lossless.mismatches == 0
        mats[beside] = {row.algo: row.mat for row in found.learners}
    for name in ("static", "ogd"):
        assert mats["lookup"][name] >= max(mats[None][name], mats[None]["lookup"])


def test_the_gain_of_a_head_is_remembered_between_texts(tiny, pool, monkeypatch):
    """Otherwise every text, and every resumed run, would try a useless head again."""
    monkeypatch.setattr("specctl.drafters.pool.costs_of", lambda *_: costs.Costs((1.0,) * len(costs.ROWS), 0.1, 0.1))
    made = recipe("unread.jsonl", pool / "good", tiny, algo=["ogd"], beside="lookup", baselines=["static"])
    stage, again = OnlineContenders(made, tiny, 0), OnlineContenders(made, tiny, 0)

    def past(of, name):
        head = of.learners["ogd"].drafter if name == "ogd" else of.fixed[name]
        return of._hybrid(name, head).past

    for tokens, name in enumerate(("ogd", "static")):
        for _ in range(50):
            past(stage, name).gain.learn(2, tokens)
    again.restore(*stage.state())
    assert past(again, "ogd").state() == past(stage, "ogd").state()
    assert past(again, "static").state() == past(stage, "static").state() != past(stage, "ogd").state()
    assert past(again, "ogd").gain(2) < 0.1 < 0.9 < past(again, "static").gain(2)


def test_retrieval_drafts_earlier_answers(tmp_path, prompts, tiny, pool):
    """Every prompt comes twice, one chunk apart; only `retrieval` knows the second answer."""
    again = tmp_path / "again.jsonl"
    known = prompts.read_text().splitlines(keepends=True)[:4]
    again.write_text(2 * "".join(known[:2]) + 2 * "".join(known[2:]))
    made = recipe(again, pool / "good", tiny, algo=["static"], baselines=["suffix", "retrieval"])
    found, _ = learnt(tmp_path / "run", made, tiny)
    assert found.lossless.mismatches == 0
    first, second = ([row.untrained_mat for row in found.per_chunk][n::2] for n in (0, 1))
    assert all(mats["retrieval"] > 2 * mats["suffix"] for mats in second)
    assert first[0]["retrieval"] == first[0]["suffix"]
    retrieval = next(row for row in found.learners if row.algo == "retrieval")
    assert retrieval.kind == "untrained" and retrieval.learn_s > 0


def test_heads_draft_together_with_retrieval(tmp_path, prompts, tiny, pool, monkeypatch):
    """The time of the store counts as learning time."""
    free_hybrids(monkeypatch)
    made = recipe(prompts, pool / "good", tiny, algo=["ogd"], beside="retrieval", baselines=["static"])
    found, _ = learnt(tmp_path / "run", made, tiny)
    assert found.lossless.mismatches == 0 and all(row.learn_s > row.store_s > 0 for row in found.per_chunk)


def test_a_hybrid_with_automatic_draft_length_is_refused(prompts, tiny, pool):
    with pytest.raises(ValueError, match="chooses its draft depth itself"):
        recipe(prompts, pool / "good", tiny, beside="lookup", draft_length="auto")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, tiny):
    """The target after a few steps on one text, like an early fine-tuned checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(tiny.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny.name)
    ids = torch.tensor([tokenizer("the answer is four, and four is the answer")["input_ids"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(5):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    place = tmp_path_factory.mktemp("tuned")
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.mark.parametrize("drafter", ["head", "pool"])
def test_the_target_may_change_during_a_stream(tmp_path, prompts, tiny, pool, tuned, drafter, monkeypatch):
    """Texts follow the current target, drafters draft for it, and learning continues, also in a resumed run. Each
    target is warmed up: the first slow calls of a new target used to be timed as decoding."""
    warmed, warm_up = [], OnlineContenders.warm_up
    monkeypatch.setattr(
        OnlineContenders, "warm_up", lambda self, turns: (warmed.append(self.target.name), warm_up(self, turns))
    )
    fields = {"target_schedule": [f"{tiny.name}:2", f"{tuned}:3"], "checkpoint": {"every": 1, "keep": 2}}
    made = recipe(prompts, pool / "head", tiny, algo=["ogd"], save_outputs=True, **fields).model_dump()
    if drafter == "pool":
        made |= {"init": None, "arch": None, "pool": pool, "game": {"loss": "length"}}  # measured times differ
    found, _ = learnt(tmp_path / "run", OnlineRecipe(**made), tiny)
    assert found.lossless.mismatches == 0 and found.lossless.sequences == 3 * len(QUESTIONS)
    rows = lines(tmp_path / "run")
    assert [row["target"] for row in rows] == [tiny.name, str(tuned), str(tuned)]
    assert {row["status"] for row in rows} == {"updated"} and warmed == [tiny.name, str(tuned)]
    again, _ = learnt(tmp_path / "run", OnlineRecipe(**made | {"resume": True, "output_dir": tmp_path / "run"}), tiny)
    assert again.mat == found.mat


def test_a_scheduled_target_with_other_sizes_is_refused(tmp_path, prompts, tiny, pool):
    made = recipe(prompts, pool / "head", tiny, algo=["ogd"], target_schedule=[f"{tiny.name}:2", "builtin:3"])
    with pytest.raises(CheckpointError, match="hidden_size"):
        learnt(tmp_path / "run", made, tiny)
