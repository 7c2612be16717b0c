"""A learner in another process learns, stops and ends with the decoder."""

import dataclasses
import os
import queue
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specctl.adaptation import remote, worker
from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.remote import AsyncOnlineDrafter
from specctl.adaptation.worker import LearnerResult, PackedTensors, Ready
from specctl.errors import Interrupted, SpecctlError
from specctl.progress import interrupts
from tests.adaptation.lessons import ACCEPTANCE, answered, taught
from tests.measuring.streams import QUESTIONS, recipe, write_head


def test_packed_tensors_are_unpacked_unchanged():
    """Covers all element sizes, transposed tensors, empty tensors and scalars."""
    sent = {
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "none": torch.empty(0, 4),
        "count": torch.tensor(7),
        "weights": torch.randn(4, 3).T,
        "rate": torch.tensor(0.1, dtype=torch.float64),
    }
    parcel = PackedTensors.of(sent)
    found = parcel.tensors()
    assert found.keys() == sent.keys() and parcel.bytes.nbytes == sum(x.nbytes for x in sent.values())
    assert all(torch.equal(found[name], x) and found[name].dtype == x.dtype for name, x in sent.items())
    assert PackedTensors.of({}).tensors() == {}


def test_everything_is_in_shared_memory_before_it_is_sent():
    """With a full /dev/shm the queue's thread failed instead of the learner: the message was lost, and the decoder
    waited for it."""
    learner = SimpleNamespace(
        buffer=None, learn=lambda _: None, played=lambda: torch.ones(3), state=lambda: ({}, {"L": torch.ones(2)})
    )
    for with_state in (True, False):
        answer = worker._answer(learner, [worker.Chunk([], None, ACCEPTANCE)], with_state=with_state)
        assert answer.played.is_shared() and answer.state.bytes.is_shared() == with_state


def hand_over(pupil, chunk):
    chunk.into(pupil.buffer)
    pupil.learn_chunk(ACCEPTANCE, 0.0)


def wait_for(pupil):
    """Wait until all chunks are learned from, with pauses at arbitrary points."""
    while pupil.pending:
        with pupil.active():
            pupil.receive(0.02)


class Box(queue.Queue):
    """A queue to or from a process that is ready."""

    def __init__(self):
        super().__init__()
        self.put(Ready())

    def cancel_join_thread(self):
        pass


class Silent:
    """A fake process that never answers."""

    pid = exitcode = None

    def __init__(self, **arguments):
        pass

    def start(self):
        pass

    def is_alive(self):
        return False


def test_waiting_chunks_stay_within_the_memory_limit(tmp_path, tiny, monkeypatch, capsys):
    """Waiting chunks and the texts of the current chunk share buffer.max_mb. The oldest are dropped, with one warning
    and a count in every row that survives a restart. The chunk being learned from stays."""
    boxes = []
    context = SimpleNamespace(Queue=lambda: boxes.append(Box()) or boxes[-1], Process=Silent)
    monkeypatch.setattr(remote.multiprocessing, "get_context", lambda kind: context)
    made = recipe(
        "unread.jsonl", write_head(tmp_path / "eagle3", tiny, "eagle3"), tiny, algo=["ogd"], asynchronous=True
    )
    pupil = AsyncOnlineDrafter(made, "ogd", tiny, 0)
    inbox, outbox = boxes
    first, *others = chunks = [answered(pupil, tiny) for _ in range(6)]
    limit = pupil.buffer.max_bytes = int(2.5 * first.bytes)
    hand_over(pupil, first)
    assert inbox.get_nowait() == Ready() and inbox.get_nowait()[0].texts == first.texts
    for chunk in others[:4]:
        hand_over(pupil, chunk)
        assert sum(one.bytes for one in pupil.waiting) <= limit
    assert [one.texts for one in pupil.sent + pupil.waiting] == [one.texts for one in (first, *chunks[3:5])]
    with pupil.active():
        others[4].into(pupil.buffer)
    assert [one.texts for one in pupil.waiting] == [chunks[4].texts] and pupil.buffer.bytes + first.bytes <= limit
    lesson = pupil.learn_chunk(ACCEPTANCE, 0.0)
    assert (lesson.dropped, lesson.lag_chunks) == (3 * len(QUESTIONS), 3)
    assert capsys.readouterr().err.count("slower than the stream") == 1

    again = AsyncOnlineDrafter(made, "ogd", tiny, 0)
    again.restore(*pupil.state())
    assert again.pending == 3 and again.learn_chunk(ACCEPTANCE, 0.0).dropped == 3 * len(QUESTIONS)
    facts, tensors = OnlineDrafter.state(pupil)
    outbox.put(LearnerResult(lesson, pupil.played(), facts, PackedTensors.of(tensors)))
    with pupil.active():
        pass
    assert [one.texts for one in inbox.get_nowait()] == [one.texts for one in chunks[4:]] and not pupil.waiting
    pupil.close()
    again.close()


def test_learners_in_one_process_share_the_target_and_fail_separately(tmp_path, tiny, monkeypatch):
    """Otherwise each would load its own target, and a failing one would end the others."""
    names, loaded, inbox, outbox = ["eagle3", "hydra"], [], queue.Queue(), queue.Queue()
    heads = [write_head(tmp_path / name, tiny, name) for name in names]
    recipes = [recipe("unread.jsonl", head, tiny, algo=["ogd"], asynchronous=True) for head in heads]
    learners = [
        worker.WorkerLearner(made, "ogd", 0, head, "cpu", torch.get_num_threads(), name=name)
        for made, head, name in zip(recipes, heads, names, strict=True)
    ]
    load = worker.load_target
    monkeypatch.setattr(worker, "load_target", lambda *a, **k: loaded.append(load(*a, **k)) or loaded[-1])
    monkeypatch.setattr(worker, "_die_with_parent", lambda: None)
    here = {name: OnlineDrafter(made, "ogd", tiny, 0) for name, made in zip(names, recipes, strict=True)}
    chunks = {name: dataclasses.replace(answered(pupil, tiny), learner=name) for name, pupil in here.items()}
    broken = {name: dataclasses.replace(chunk, features=None, texts=[None]) for name, chunk in chunks.items()}
    for sent in (broken["eagle3"], chunks["hydra"], chunks["eagle3"], broken["hydra"]):
        inbox.put([sent])
    worker.run_worker(learners, inbox, outbox)
    ready, first, lesson, last = (outbox.get_nowait() for _ in range(4))
    assert ready == Ready() and outbox.empty() and len(loaded) == 1
    assert (first.learner, last.learner, lesson.learner) == ("eagle3", "hydra", "hydra") and "Error" in first.message
    assert lesson.lesson.outcome.status == "updated"
    assert torch.equal(lesson.played, taught(here["hydra"], [chunks["hydra"]])[1]), "as it learns alone"


def stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


@pytest.mark.slow
def test_a_worker_learns_like_a_local_learner_and_ends_with_the_decoder(tmp_path, tiny, monkeypatch):
    """The worker continues from a local learner's state and is paused repeatedly.

    While others decode, it pauses and leaves them all threads. A signal ends the wait, and the decoder notices its
    death and leaves no process.
    """
    head = write_head(tmp_path / "eagle3", tiny, "eagle3")
    fields = {"asynchronous": True, "learner": {"rest": 0}}
    made = recipe("unread.jsonl", head, tiny, algo=["ensemble"], **fields)
    here = OnlineDrafter(made, "ensemble", tiny, 0)
    asked = (QUESTIONS, QUESTIONS, ["Why?"], QUESTIONS)
    start, (*chunks, last) = here.played(), [answered(here, tiny, questions) for questions in asked]
    taught(here, chunks[:1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: threads.append(count))
    threads, scratch = [4], tempfile.mkdtemp()
    monkeypatch.setenv("TMPDIR", scratch)
    there = AsyncOnlineDrafter(made, "ensemble", tiny, 0)
    with there.active():
        assert threads == [4, 2]
    assert threads == [4, 2, 4]
    there.restore(*here.state())
    for chunk in chunks[1:]:  # one of the chunks has no held-out text
        hand_over(there, chunk)
        wait_for(there)
    assert len({x.untyped_storage().data_ptr() for x in there._learner_state[1].values()}) == 1, (
        "every tensor is an open file"
    )
    lessons, expected = taught(here, chunks[1:])
    moved = float((expected - start).abs().max())
    torch.testing.assert_close(there.played(), expected, rtol=0, atol=1e-3 * moved)
    assert there._last.lesson.outcome.losses == pytest.approx(lessons[-1].outcome.losses, rel=1e-4)

    pids, until = sorted(child.pid for child in remote.multiprocessing.active_children()), time.monotonic() + 120
    while not all(map(stopped, pids)):
        assert time.monotonic() < until, "one was not told to stop"
    hand_over(there, last)
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.01)
    interrupts.handle(signal.SIGTERM)
    with pytest.raises(Interrupted):
        there.finish()
    interrupts.reset()
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(SpecctlError, match="the learner process ended with code -9"):
        wait_for(there)
    there.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    os.rmdir(scratch)  # no socket is left


def test_a_budget_applies_to_the_decoding_time_of_each_chunk(tmp_path, tiny):
    """Without the time, a gateway's learner would use all of it and `online --async` would learn nothing."""
    made = recipe("unread.jsonl", write_head(tmp_path / "eagle3", tiny, "eagle3"), tiny, algo=["ogd"])
    made.learner.budget = 0.05
    pupil = OnlineDrafter(made, "ogd", tiny, 0)
    chunks = [answered(pupil, tiny) for _ in range(3)]

    def status(decode_s):
        chunk = chunks.pop(0)
        chunk.into(pupil.buffer)
        return worker._lesson(pupil, [dataclasses.replace(chunk, decode_s=decode_s)]).outcome.status

    assert [status(0.0), status(None), status(1e4)] == ["rested", "updated", "updated"]
