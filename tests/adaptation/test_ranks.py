"""Several processes learn what one learns: shares of every batch, summed, and the same update everywhere."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from specctl.adaptation import ranks as group
from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.ranks import Group
from specctl.adaptation.updates.objective import Objective
from specctl.errors import RecipeError
from tests.adaptation.lessons import answered, taught
from tests.measuring.streams import recipe, sure_target, write_copy, write_head


class Threads(Group):
    """Ranks that are threads of this process."""

    def __init__(self, rank, size, barrier, table):
        self.rank, self.size, self._barrier, self._table = rank, size, barrier, table

    @classmethod
    def of(cls, size):
        barrier, table = threading.Barrier(size, timeout=60), [None] * size
        return [cls(rank, size, barrier, table) for rank in range(size)]

    def sum(self, x):
        self._table[self.rank] = x
        self._barrier.wait()
        total = torch.stack(self._table).sum(0)
        self._barrier.wait()
        return x.copy_(total)  # in place, as torch.distributed does


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tiny_directory):
    return sure_target(tmp_path_factory.mktemp("sure"), tiny_directory("llama"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory, tiny):
    place = tmp_path_factory.mktemp("heads")
    write_copy(place / "lm", tiny, tiny.name, 0.03)
    return {"lm": place / "lm"} | {name: write_head(place / name, tiny, name) for name in ("eagle3", "hydra")}


def pupil_of(made, target, **options):
    """A pupil that learns in several batches a chunk."""
    pupil = OnlineDrafter(made, made.algo[0], target, 0, **options)
    pupil.training = pupil.training.model_copy(update={"batch_tokens": 40})
    return pupil


@pytest.mark.parametrize(
    ("family", "algo", "size", "options"),
    [
        ("eagle3", "ogd", 2, {"holdout": 0.0}),
        ("eagle3", "opt-ensemble", 3, {"radius": 0.5, "members": 2}),
        ("eagle3", "ensemble", 2, {"step": "chunk", "members": 2}),
        ("hydra", "momentum", 3, {"dropout": 0.0}),
        ("lm", "osd", 3, {"holdout": 0.0}),
    ],
)
def test_ranks_learn_what_one_process_learns(tiny, heads, family, algo, size, options):
    """Up to the order of sums, over two chunks; three ranks have batches of two texts, of which one gets none."""
    made = recipe("unread.jsonl", heads[family], tiny, algo=[algo], learner=options)
    alone = pupil_of(made, tiny)
    start, chunks = alone.played(), [answered(alone, tiny), answered(alone, tiny, ["Count down.", "Say no.", "Why?"])]
    lessons, expected = taught(alone, chunks)
    pupils = [pupil_of(made, tiny, group=rank) for rank in Threads.of(size)]
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(lambda pupil: taught(pupil, chunks), pupils))
    moved = float((expected - start).abs().max())
    assert moved > 0 and {lesson.outcome.status for lesson in lessons} == {"updated"}
    for theirs, played in found:
        assert torch.equal(played, found[0][1]), "every rank makes the very same update"
        # Adam makes a step of whatever sign rounding leaves to a gradient of almost nothing.
        torch.testing.assert_close(played, expected, rtol=0, atol=4e-3 * moved)
        for one, other in zip(theirs, lessons, strict=True):
            assert one.outcome.steps == other.outcome.steps and one.texts == other.texts
            assert one.outcome.loss == pytest.approx(other.outcome.loss, rel=1e-4)
            assert one.outcome.losses == pytest.approx(other.outcome.losses, rel=1e-4)


def test_dropout_differs_by_rank(tiny, heads):
    """The same masks for every share would be half as many draws."""
    pupil = OnlineDrafter(
        recipe("unread.jsonl", heads["hydra"], tiny, algo=["ogd"], learner={"dropout": 0.5}), "ogd", tiny, 0
    )
    answered(pupil, tiny).into(pupil.buffer)
    (batch,) = pupil.batches(pupil.buffer.examples())
    module, run, w = pupil.trainable.module, pupil.trainable.loss, pupil.objective.start()
    losses = []
    for rank in (0, 0, 1):
        ranked = Group()
        ranked.rank = rank
        losses.append(float(Objective(module, run, 0, group=ranked).gradient(w, batch, 3)[0]))
    assert losses[0] == losses[1] != losses[2]


def test_a_gpu_that_is_not_there():
    group.check(["auto"]), group.check(["cpu", "cpu"])
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(
        RecipeError, match=f"{missing} does not exist, this machine has {torch.cuda.device_count()} GPU"
    ):
        group.check(["cpu", missing])
