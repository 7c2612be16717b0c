"""`online` resumes exactly, bit for bit in fp32, after a signal, a kill or a full disk."""

import errno
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl import progress
from specctl.adaptation.online_drafter import weights_of
from specctl.adaptation.stream import PromptStream
from specctl.distillation import line_streams
from specctl.distillation.rejections import Rejections
from specctl.drafters import checkpoint as checkpoints
from specctl.errors import CheckpointError, DataError, Interrupted, SpecctlError, UsageError
from specctl.measuring import online_contenders, online_journal
from specctl.measuring.online_contenders import OnlineContenders
from specctl.measuring.resumable_run import Saved
from specctl.recipe import DataRecipe
from specctl.recipe.train import CheckpointRecipe
from specctl.training import checkpoint
from tests.measuring.streams import (
    QUESTIONS,
    answers,
    contents,
    learnt,
    lines,
    recipe,
    same_runs,
    write_copy,
    write_prompts,
)

ALGO = ["ogd", "opt-ensemble"]


@pytest.fixture(scope="module")
def make(tmp_path_factory, tiny, copy):
    """Return `made(**fields)`: a recipe with five prompts, a short last chunk and replay."""
    prompts = write_prompts(tmp_path_factory.mktemp("prompts"))

    def made(**fields):
        options = dict(
            algo=ALGO,
            baselines=[],
            learner={"lr": 1e-3, "holdout": 0.5},
            buffer={"replay": 0.5},
            stream={"shuffle": True},
            checkpoint=CheckpointRecipe(every=2, keep=2),
        )
        return recipe(prompts, copy, tiny, **options | fields)

    return made


TWICE = {"seeds": [0, 1], "baselines": ["vanilla", "retrieval"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, make, tiny):
    """Return `run(**fields)`, which gives (place, result) of an undisturbed run."""
    runs = {}

    def run(**fields):
        key = json.dumps(fields)
        if key not in runs:
            place = tmp_path_factory.mktemp("whole") / "run"
            runs[key] = place, learnt(place, make(**fields), tiny)[0]
        return runs[key]

    return run


@pytest.fixture
def stopped(stop, tiny):
    """Return `run(turn, place, made)`, which gives the error of a run stopped by SIGTERM in that turn."""

    def run(turn, place, made):
        stop(turn)
        with pytest.raises(Interrupted) as caught:
            learnt(place, made, tiny)
        progress.interrupts.reset()
        return caught.value

    return run


def rewrite(state, document):
    """Write another trainer.json into a state, with correct digests."""
    (state / "trainer.json").write_text(json.dumps(document))
    (state / "manifest.json").write_text(json.dumps(checkpoint.digests(state)))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def again(place, made, tiny):
    return learnt(place, made.model_copy(update={"resume": True, "output_dir": place}), tiny)


@pytest.fixture
def stop(monkeypatch):
    """Return `at(turn)`, which sends SIGTERM while that turn is answered."""
    ask = online_contenders.answer_batch

    def at(turn):
        turns = iter(range(1, 100))

        def interrupted(*args):
            if next(turns) == turn:
                progress.interrupts.handle(15)
            return ask(*args)

        monkeypatch.setattr(online_contenders, "answer_batch", interrupted)

    yield at
    progress.interrupts.reset()


@pytest.mark.parametrize(("turn", "done"), [pytest.param(1, 0, marks=pytest.mark.slow), (3, 1), (8, 3 + 1)])
def test_a_run_stopped_in_the_middle_of_a_chunk_resumes_exactly(tmp_path, make, tiny, whole, stopped, turn, done):
    """In the first chunk, and after a boundary in the second pass. The unfinished chunk is answered again."""
    told = stopped(turn, tmp_path / "run", make(**TWICE))
    assert told.message.endswith(f"after {done} chunk{'' if done == 1 else 's'}")
    assert f"--resume --output-dir {tmp_path}" in told.hint
    assert len(lines(tmp_path / "run") if done else []) == done * len(ALGO)
    found, _ = again(tmp_path / "run", make(**TWICE), tiny)
    place, theirs = whole(**TWICE)
    same_runs(tmp_path / "run", place, [name + seed for name in ALGO for seed in ("", "-seed1")])
    for key in ("chunks", "prompts", "mat", "mat_first", "mat_last", "lossless", "rejected"):
        assert getattr(found, key) == getattr(theirs, key), key
    assert found.lossless.sequences == 3 * 2 * len(QUESTIONS)
    assert found.drafters.keys() == theirs.drafters.keys()


def test_a_resumed_run_warms_up_without_side_effects(tmp_path, make, tiny, whole, stopped, monkeypatch):
    """Otherwise the first chunk would be timed cold. Replayed texts, text numbers and draft lengths continue."""
    lengths = {"draft_length": "auto", "draft_cost": 1.0}
    stopped(3, tmp_path / "run", make(**lengths))
    warm_up, warmed = online_contenders.warm_up, []
    monkeypatch.setattr(online_contenders, "warm_up", lambda *args: warmed.append(warm_up(*args)))
    again(tmp_path / "run", make(**lengths), tiny)
    assert len(warmed) == 1
    same_runs(tmp_path / "run", whole(**lengths)[0], ALGO)


def test_resuming_a_finished_run_gives_the_same_result(tmp_path, make, tiny, whole, monkeypatch):
    place = shutil.copytree(whole(**TWICE)[0], tmp_path / "run")
    monkeypatch.setattr(OnlineContenders, "answer", lambda *args: pytest.fail("everything is answered"))
    found, document = again(place, make(**TWICE), tiny)
    assert found.learners == whole(**TWICE)[1].learners and found.lossless == whole(**TWICE)[1].lossless
    assert document["drafters"] == {name: str(place / "drafters" / name) for name in ALGO}


def test_damaged_states_are_skipped(tmp_path, make, tiny, whole, capsys):
    """A flipped byte falls back to the previous state with a warning. If all are damaged, it is an error."""
    place = shutil.copytree(whole()[0], tmp_path / "run")
    first, last = sorted((place / "checkpoints").iterdir())
    flip(last / "trainer.json")
    again(place, make(), tiny)
    said = capsys.readouterr().err
    assert f"{last} is damaged" in said and "resumed after chunk 2" in said
    same_runs(place, whole()[0], ALGO)
    flip(last / "manifest.json")
    flip(first / "state.safetensors")
    with pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged"):
        again(place, make(), tiny)
    assert len(lines(place)) == len(lines(whole()[0]))


@pytest.mark.parametrize("damage", [os.unlink, flip], ids=["lost", "flipped"])
@pytest.mark.parametrize("name", ["records/00000001.parquet", "chunks.jsonl"])
def test_lost_and_changed_answers_are_refused(tmp_path, make, tiny, whole, name, damage):
    """Otherwise the results of a part would pass for the results of all."""
    place = shutil.copytree(whole()[0], tmp_path / "run")
    damage(place / name)
    before = contents(place)
    with pytest.raises(CheckpointError, match=rf"{place / name} (was changed or deleted|lacks chunks)"):
        again(place, make(), tiny)
    assert contents(place) == before


def state_of(place, number):
    """Keep only the state after chunk `number`; return its trainer.json, its tensors and a function to write them."""
    for path in (place / "checkpoints").iterdir():
        state = json.loads((path / "trainer.json").read_text())
        if state["mark"]["number"] != number:
            shutil.rmtree(path)
            continue
        left, tensors = path, load_file(path / "state.safetensors")
        kept = state

    def write():
        save_file(tensors, left / "state.safetensors")
        rewrite(left, kept)

    return kept, tensors, write


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("mark",), []),
        (("mark", "number"), "2"),
        (("mark", "number"), 10**9),
        (("mark", "passed"), None),
        (("mark", "sizes"), {"chunks.jsonl": -1}),
        (("mark", "digests"), {"../thesis": "ab"}),
        (("mark", "stream"), {}),
        (("mark", "stream", "chunks"), "x"),
        (("mark", "stream", "prompts"), -1),
        (("mark", "stage", "chunks"), "x"),
        (("mark", "stage", "turns"), None),
        (("mark", "stage", "refused"), 5),
        (("mark", "stage", "lengths"), []),
        (("mark", "stage", "pupils"), []),
        (("mark", "stage", "pupils", "ogd"), 3),
        (("mark", "stage", "pupils", "ogd", "chunks"), "x"),
        (("mark", "stage", "pupils", "ogd", "buffer"), None),
        (("stamp",), {"recipe": 3}),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else str(value)[:20],
)
def test_a_forged_state_is_refused(tmp_path, make, tiny, whole, keys, value):
    """With one line that names the place, and nothing is changed."""
    place = shutil.copytree(whole()[0], tmp_path / "run")
    state, _, write = state_of(place, 2)
    inner = state
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    write()
    before = contents(place)
    with pytest.raises(CheckpointError, match=str(place)) as caught:
        again(place, make(), tiny)
    assert "\n" not in caught.value.message and contents(place) == before


@pytest.mark.parametrize("change", [lambda x: x[:1], lambda x: x.int()], ids=["shape", "type"])
def test_forged_tensors_are_refused(tmp_path, make, tiny, whole, change):
    place = shutil.copytree(whole()[0], tmp_path / "run")
    _, tensors, write = state_of(place, 2)
    name = next(name for name, value in tensors.items() if name.startswith("ogd/learner") and value.numel() > 99)
    tensors[name] = change(tensors[name]).contiguous()
    write()
    with pytest.raises(CheckpointError, match=f"{place}.*does not fit"):
        again(place, make(), tiny)


def test_changed_target_weights_are_refused(tmp_path, make, tiny, whole, monkeypatch):
    """States written before weights had digests are accepted."""
    place = shutil.copytree(whole()[0], tmp_path / "run")
    monkeypatch.setitem(tiny.identity, "weights", "others")
    with pytest.raises(UsageError, match="weights was"):
        again(place, make(), tiny)
    for path in (place / "checkpoints").iterdir():
        state = json.loads((path / "trainer.json").read_text())
        del state["stamp"]["target"]["weights"]
        rewrite(path, state)
    again(place, make(), tiny)


def test_resuming_with_another_recipe_or_drafter_is_refused(tmp_path, make, tiny, whole, copy):
    """A refusal changes nothing in the directory."""
    place = shutil.copytree(whole()[0], tmp_path / "run")
    before = contents(place)
    with pytest.raises(UsageError, match=r"learner\.lr was 0\.001, is 0\.01"):
        again(place, make(learner={"lr": 1e-2, "holdout": 0.5}), tiny)
    with pytest.raises(UsageError, match="algo was"):
        again(place, make(algo=["ogd"]), tiny)
    other = write_copy(tmp_path / "lm", tiny, tiny.name, 0.02)
    kept = copy.parent / "kept"
    copy.rename(kept)
    try:
        shutil.copytree(other, copy)
        with pytest.raises(UsageError, match="lm was"):
            again(place, make(), tiny)
    finally:
        shutil.rmtree(copy)
        kept.rename(copy)
    assert contents(place) == before


def test_resuming_with_other_prompts_is_refused(tmp_path, make, tiny, stopped):
    mine = write_prompts(tmp_path, [*QUESTIONS, "Who?"])
    made = make(data={"prompts": str(mine)}, stream={})
    stopped(5, tmp_path / "run", made)
    write_prompts(tmp_path, ["Another one.", *QUESTIONS])
    before = contents(tmp_path / "run")
    with pytest.raises(DataError, match="does not begin with the 4 prompts"):
        again(tmp_path / "run", made, tiny)
    assert contents(tmp_path / "run") == before


def test_a_state_of_an_earlier_layout_is_refused(tmp_path, make, tiny, whole):
    """With a message instead of a KeyError."""
    place = shutil.copytree(whole(draft_length="auto", draft_cost=1.0)[0], tmp_path / "run")
    for state in (place / "checkpoints").iterdir():
        written = json.loads((state / "trainer.json").read_text())
        if written["mark"]["stage"] is None:
            shutil.rmtree(state)  # the end of the pass, which needs no restoring
            continue
        del written["mark"]["stage"]["lengths"]["ogd"]["unused"]
        rewrite(state, written)
    before = contents(place)
    with pytest.raises(CheckpointError, match="lacks 'unused': another version of specctl") as caught:
        again(place, make(draft_length="auto", draft_cost=1.0), tiny)
    assert "--overwrite" in caught.value.hint and contents(place) == before


def refusals(tmp_path, tiny, copy):
    """Return changes to the recipe that can be refused only with target, prompts and drafters loaded."""
    other = shutil.copytree(copy, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["target"]["vocab_hash"] = "0" * 16
    found = checkpoints.load(copy)
    checkpoints.save(other, config=config, tensors=found.tensors, info=found.info, overwrite=True)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n" * 3)
    return [
        ({"init": other}, CheckpointError, "is another model"),
        ({"data": DataRecipe(prompts=str(bad))}, DataError, "3 of 3 prompts rejected"),
        ({"algo": ["ogd", "static"], "baselines": ["static"]}, UsageError, "two contenders"),
    ]


def test_a_refused_start_keeps_the_earlier_run(tmp_path, make, tiny, whole, copy):
    """With --overwrite, files are removed only when nothing can be refused anymore."""
    place = shutil.copytree(whole()[0], tmp_path / "run")
    (place / "rejected.jsonl").write_text("{}\n")
    before = contents(place)
    for changes, error, says in refusals(tmp_path, tiny, copy):
        with pytest.raises(error, match=says):
            learnt(place, make(overwrite=True, output_dir=place).model_copy(update=changes), tiny)
        assert contents(place) == before, says
    learnt(place, make(overwrite=True, output_dir=place), tiny)
    same_runs(place, whole()[0], ALGO)
    assert not (place / "rejected.jsonl").exists()


def test_resuming_reads_the_prompts_no_more_often(tmp_path, make, tiny, stopped, monkeypatch):
    """Three times: a look at the beginning, a count, and the stream. Comparing them used to take two more."""
    opened, real = [], line_streams.open_prompts
    monkeypatch.setattr(line_streams, "open_prompts", lambda name: opened.append(name) or real(name))
    stopped(3, tmp_path / "run", make())
    assert len(opened) == 3
    again(tmp_path / "run", make(), tiny)
    assert len(opened) == 6


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("place", "name", "call", "saved"),
    [(checkpoint, "write_tensors", 2, 2), (checkpoint, "atomic_write", 2, 0), (online_journal, "write_records", 3, 2)],
)
def test_a_full_disk_keeps_the_last_state(tmp_path, make, tiny, whole, monkeypatch, place, name, call, saved):
    """While the second state, the manifest of the first state, or the answers of the third chunk are written."""
    real, calls = getattr(place, name), iter(range(1, 100))

    def fill(*args, **kwargs):
        return full() if next(calls) == call else real(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(place, name, fill)
        with pytest.raises(SpecctlError, match=r"cannot save to .*: No space left on device") as caught:
            learnt(tmp_path / "run", make(), tiny)
    assert f"--resume --output-dir {tmp_path / 'run'}" in caught.value.hint
    assert f"the state after {saved} chunks is saved" in caught.value.hint
    again(tmp_path / "run", make(), tiny)
    same_runs(tmp_path / "run", whole()[0], ALGO)


def test_a_full_disk_at_the_end_can_be_resumed(tmp_path, make, tiny, whole, monkeypatch):
    """The learned drafters could not be written; resuming writes them."""
    with monkeypatch.context() as patched:
        patched.setattr("specctl.drafters.checkpoint.write_tensors", full)
        with pytest.raises(SpecctlError, match=r"cannot write .*/drafters/ogd"):
            learnt(tmp_path / "run", make(), tiny)
    again(tmp_path / "run", make(), tiny)
    same_runs(tmp_path / "run", whole()[0], ALGO)


def test_rejected_prompts_are_counted_in_a_resumed_run(tmp_path, make, tiny, stopped):
    """This holds in the second pass too, which does not read them again."""
    mine = write_prompts(tmp_path, QUESTIONS)
    mine.write_text(mine.read_text() + "{\n" + json.dumps({"prompt": "word " * 400}) + "\n")
    made = make(data={"prompts": str(mine), "max_rejected": 0.5}, seeds=[0, 1])
    stopped(8, tmp_path / "run", made)
    found, _ = again(tmp_path / "run", made, tiny)
    assert found.rejected == len((tmp_path / "run/rejected.jsonl").read_text().splitlines()) == 2
    assert found.prompts == 2 * len(QUESTIONS)


def test_resuming_from_stdin_continues_with_new_lines(tmp_path, make, tiny, stopped, monkeypatch):
    """The lines of the unfinished chunk are requested again."""

    def send(questions):
        text = "".join(json.dumps({"prompt": one}) + "\n" for one in questions)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))

    made = make(data={"prompts": "-"}, stream={})
    send(QUESTIONS)
    learnt(tmp_path / "whole", made, tiny)
    send(QUESTIONS)
    assert "send the prompts after the first 2 again" in stopped(3, tmp_path / "run", made).hint
    send(QUESTIONS[2:])
    again(tmp_path / "run", made, tiny)
    same_runs(tmp_path / "run", tmp_path / "whole", ALGO)


def test_a_refused_chunk_updates_the_drafting_weights(make, tiny):
    """An optimistic learner's played weights depend on η, which a refused chunk lowers.

    Otherwise a resumed run would draft with other weights than an uninterrupted one.
    """
    made = make(algo=["optimistic"], buffer={}, learner={"lr": 1e-3})
    stage = OnlineContenders(made, tiny, 0)
    pupil = stage.learners["optimistic"]
    chunk = next(PromptStream(made.data, made.stream, tiny, Rejections(None, 0.0), size=2).chunks())
    for gradient in (pupil.objective.gradient, lambda w, batch, draw: (torch.tensor(torch.nan), torch.tensor(1.0), w)):
        before, pupil.objective.gradient = [tensor.clone() for tensor in weights_of(pupil.drafter)], gradient
        stage.learn(chunk, stage.answer(chunk, lambda *args: None))
        after = weights_of(pupil.drafter)
        assert not all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert stage.failed_chunks["optimistic"] == 1


COMMAND = [sys.executable, "-m", "specctl", "online"]


def launch(place, made, *flags):
    """Start the installed command on a recipe."""
    file = place.parent / "recipe.yaml"
    fields = made.model_dump(mode="json", include=made.model_fields_set)
    file.write_text(json.dumps({"command": "online", **fields}))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with open(place.parent / "log", "a") as log:
        command = [*COMMAND, "--recipe", str(file), "--output-dir", str(place), *flags]
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=place.parent, env=environment)


def chunks(place):
    path = place / "chunks.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def kill(place, made, count, delay=0.0):
    """Send kill -9 after `count` lines of chunks.jsonl and `delay` seconds."""
    process = launch(place, made, "--resume")
    while chunks(place) < count and process.poll() is None:
        time.sleep(0.005)
    time.sleep(delay)
    assert process.poll() is None, (place.parent / "log").read_text()[-2000:]
    process.kill()
    process.wait()


def test_a_killed_run_resumes_exactly(tmp_path, make, whole, tiny):
    """Killed as soon as it has learned from a chunk."""
    made = make(checkpoint=CheckpointRecipe(every=1, keep=2))
    process = multiprocessing.get_context("fork").Process(target=learnt, args=(tmp_path / "run", made, tiny))
    process.start()
    while chunks(tmp_path / "run") < len(ALGO) + 1 and process.is_alive():
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    again(tmp_path / "run", made, tiny)
    same_runs(tmp_path / "run", whole()[0], ALGO)
    assert checkpoint.newest(tmp_path / "run/checkpoints", Saved)[1].mark.number == 3


@pytest.mark.slow
def test_runs_killed_repeatedly_resume_exactly(tmp_path, make, tiny):
    """At eight moments in two passes, some while a state or drafter is being written."""
    draw = random.Random(0)
    made = make(**TWICE, checkpoint=CheckpointRecipe(every=1, keep=2))
    total = 2 * 3 * len(ALGO)
    moments = sorted((draw.randint(1, total), draw.random() * 0.05) for _ in range(8))
    for moment in moments:
        kill(tmp_path / "run", made, *moment)
    assert launch(tmp_path / "run", made, "--resume").wait(300) == 0, (tmp_path / "log").read_text()[-2000:]
    learnt(tmp_path / "alone", made, tiny)
    same_runs(tmp_path / "run", tmp_path / "alone", [name + seed for name in ALGO for seed in ("", "-seed1")])
    assert len(answers(tmp_path / "run")) == 2 * len([*TWICE["baselines"], *ALGO]) * len(QUESTIONS)
