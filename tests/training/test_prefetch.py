"""Features read ahead by a thread equal features read at once, and errors of the thread reach the caller."""

import signal
import subprocess
import sys
import threading

import pytest
import torch

from specctl.errors import CheckpointError
from specctl.progress import Progress
from specctl.recipe import FeatureRecipe
from specctl.runs import Run
from specctl.training import loop, prefetch
from specctl.training.feature_files import Features
from specctl.training.prefetch import PinnedCopies, Prefetcher
from tests.training.small import recipe


def numbered(index):
    return Features(*(torch.full((2,), index * 10 + part) for part in range(3)))


def at_once(features):
    return lambda: features


def test_a_prefetched_item_is_taken_once():
    """Only requested items are returned, in the requested order; returned twice, they would be stale."""
    reader = Prefetcher(numbered, at_once)
    assert reader.take([1]) == {}
    reader.start([3, 1, 2])
    taken = reader.take([2, 3, 9])
    assert list(taken) == [2, 3] and all(taken[index].taps[0] == index * 10 for index in taken)
    assert reader.take([1, 2, 3]) == {}


def test_reading_ahead_never_overlaps_with_the_caller(monkeypatch):
    """An unexpected batch waits for the thread too, because files are opened and closed without a lock."""
    waited, read = threading.Event(), []

    class Noted(prefetch.Future):
        def result(self, timeout=None):
            waited.set()
            return super().result(timeout)

    def once_waited_for(index):
        assert waited.wait(60)
        read.append(index)
        return numbered(index)

    monkeypatch.setattr(prefetch, "Future", Noted)
    reader = Prefetcher(once_waited_for, at_once)
    reader.start([1])
    assert reader.take([2]) == {} and read == [1]


def test_an_error_in_the_thread_is_raised_in_the_loop():
    def read(index):
        raise CheckpointError(f"shard {index} is damaged", "compute it again")

    reader = Prefetcher(read, at_once)
    reader.start([7])
    with pytest.raises(CheckpointError, match="shard 7 is damaged") as caught:
        reader.take([7])
    assert caught.value.hint == "compute it again"
    assert reader.take([7]) == {}


HANGING = """
import signal, threading
from specctl.training.prefetch import Prefetcher

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has inherited that it is ignored

def read(index):
    print("reading", flush=True)
    threading.Event().wait()

reader = Prefetcher(read, lambda features: lambda: features)
reader.start([0])
reader.take([0])
"""


def test_ctrl_c_ends_a_process_with_a_hanging_disk():
    child = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "reading\n"
    child.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in child.communicate(timeout=60)[1]
    assert child.returncode != 0


class Stream:
    """A fake CUDA stream that records its events and waits."""

    def __init__(self, said, name):
        self.said, self.name = said, name

    def __enter__(self):
        self.said.append(f"on {self.name}")

    def __exit__(self, *error):
        self.said.append(f"off {self.name}")

    def record_event(self):
        self.said.append("event")
        return "copied"

    def wait_event(self, event):
        self.said.append(f"{self.name} waits for {event}")


@pytest.fixture
def gpu(monkeypatch):
    """Record the calls that a GPU would get, in order; tensors stay on the CPU."""
    said = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(said, "copies"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(said, "compute"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: said.append("pin") or self.clone())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: said.append(f"kept for {stream.name}"))
    move = torch.Tensor.to

    def to(self, *where, non_blocking=False, **options):
        if non_blocking:
            said.append("copy")
        return move(self, *where, **options)

    monkeypatch.setattr(torch.Tensor, "to", to)
    return said


def test_copies_run_on_their_own_stream_and_are_waited_for(gpu):
    """Without the wait, a step would read missing data; without `record_stream`, memory could be overwritten."""
    arrive = PinnedCopies(torch.device("cpu"))(numbered(4))
    assert gpu == ["on copies", *["pin", "copy"] * 3, "event", "off copies"]
    gpu.clear()
    assert all(map(torch.equal, vars(arrive()).values(), vars(numbered(4)).values()))
    assert gpu == ["compute waits for copied", *["kept for compute"] * 3]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["memory", "cached"])
def test_reading_ahead_does_not_change_the_training(distilled, target, tmp_path, monkeypatch, gpu, mode):
    """On a fake GPU, every text except the first batch of an epoch is read by the thread."""
    monkeypatch.setattr(loop, "load_target", lambda **_: target)
    losses = {}
    for ahead in (False, True):
        place = tmp_path / str(ahead)
        place.mkdir()
        made = recipe(distilled, place, features=FeatureRecipe(mode=mode, dir=tmp_path / "features"), max_steps=10)
        trainer = loop.make_trainer(made, Run(place))
        trainer.start()
        store = trainer.trainable.store
        assert store.reader is None  # a CPU has nothing to copy
        copies, late = PinnedCopies(target.device), []
        if ahead:
            store.reader = Prefetcher(lambda index, kept=store.kept: kept[index], copies)
            real = store.reader.take

            def take(indices, real=real, late=late):
                taken = real(indices)
                late.append(len(taken) < len(indices))
                return taken

            store.reader.take = take
        with Progress("train") as bar:
            losses[ahead] = [trainer.step(bar) or trainer.state.loss for _ in range(10)]
        places = [place for epoch in range(10) for place in range(len(trainer.batches(epoch)))]
        assert not ahead or late == [place == 0 for place in places[:10]]
    assert losses[True] == losses[False] and gpu.count("copy") > 0
