"""A training resumes with another number of processes: optimizer state and epoch are divided again."""

import json
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from specctl.errors import CheckpointError, SpecctlError
from specctl.progress import Progress
from specctl.recipe import FeatureRecipe, OptimizerRecipe
from specctl.runs import Run
from specctl.training import checkpoint, loop, portable_state
from tests.training.elastic import losses
from tests.training.small import recipe


def launch(distilled, place, processes, stages, *actions):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    command += ["tests.training.elastic", str(distilled), str(place), ",".join(map(str, stages)), *actions]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("processes", "stages"),
    [(2, (2, 3)), (3, (1, 2, 3))],
    ids=["2", "3"],  # 3 divides few sizes evenly; stages 1 and 2 share DeepSpeed's optimizer
)
@pytest.mark.slow
def test_every_zero_stage_resumes_with_more_and_with_fewer_processes(
    distilled, target, tmp_path, monkeypatch, processes, stages
):
    """Losses equal an uninterrupted training, and are bitwise equal if the number of processes stays the same."""
    monkeypatch.setattr(loop, "load_target", lambda **_: target)
    alone = {stage: losses(distilled, tmp_path, "fresh:alone", stage) for stage in stages}
    said = launch(distilled, tmp_path, processes, stages, "fresh:several", "resume:several", "resume:alone")
    for stage in stages:
        several = said["fresh:several"][str(stage)]
        assert said["resume:several"][str(stage)] == several[2:]
        assert said["resume:alone"][str(stage)] == pytest.approx(alone[stage][2:], rel=1e-5)
        assert losses(distilled, tmp_path, "resume:several", stage) == pytest.approx(several[2:], rel=1e-5)


def test_processes_that_see_different_files_do_not_start(distilled, target, tmp_path, monkeypatch):
    """With --output-dir on the disks of the nodes, the first node resumed and the others began anew: they added up
    the gradients of different steps."""
    monkeypatch.setattr(loop, "load_target", lambda **_: target)
    (tmp_path / "run").mkdir()
    made = recipe(distilled, tmp_path, features=FeatureRecipe(mode="online"), resume=True)
    first, said = loop.make_trainer(made, Run(tmp_path / "run")), []
    monkeypatch.setattr(first, "max_over_ranks", lambda value: said.append(value) or value)
    first.start()
    first.state.loss = 1.0
    first.save()
    for place, starts in (("elsewhere", True), (".", False)):
        output = tmp_path / place / "drafter"
        other, there = loop.make_trainer(made.model_copy(update={"output_dir": output}), Run(tmp_path / "run")), said[:]
        monkeypatch.setattr(other, "max_over_ranks", lambda value, there=there: max(value, there.pop(0)))
        with nullcontext() if starts else pytest.raises(SpecctlError, match="different data, target weights or check"):
            other.start()


ON_CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1, "offload_optimizer": ON_CPU},
        {"stage": 2, "round_robin_gradients": True},
        {"stage": 3, "sub_group_size": 300_000, "stage3_param_persistence_threshold": 1000},
        {"stage": 3, "sub_group_size": 300_000, "offload_optimizer": ON_CPU, "offload_param": ON_CPU},
    ],
    ids=str,
)
def test_other_partitions_of_the_state_resume_exactly(distilled, target, tmp_path, monkeypatch, zero):
    """Covers DeepSpeed options that change how the state is divided or where it is stored."""
    monkeypatch.setattr(loop, "load_target", lambda **_: target)
    (tmp_path / "run").mkdir()
    options = dict(features=FeatureRecipe(mode="online"), resume=True, deepspeed={"zero_optimization": zero})
    found = []
    for step in (0, 1):
        trainer = loop.make_trainer(recipe(distilled, tmp_path, **options), Run(tmp_path / "run"))
        trainer.start()
        assert trainer.state.step == step
        with Progress("train") as bar:
            while trainer.state.step < 2:
                trainer.step(bar)
                if trainer.state.step == 1:
                    trainer.save()
        found.append(loop.weights(trainer.engine))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.fixture
def trainer_of(distilled, target, tmp_path, monkeypatch):
    """Return `make(world)`: a trainer with small batches, as one of `world` processes, resumed if possible."""
    monkeypatch.setattr(loop, "load_target", lambda **_: target)
    (tmp_path / "run").mkdir()

    def make(world, **changes):
        options = dict(features=FeatureRecipe(mode="online"), resume=True, batch_tokens=64, max_steps=100) | changes
        real = loop.start_processes
        with monkeypatch.context() as patched:
            patched.setattr(loop, "start_processes", lambda device: (real(device)[0], world))
            trainer = loop.make_trainer(recipe(distilled, tmp_path, **options), Run(tmp_path / "run"))
        trainer.start()
        return trainer

    return make


def advance(trainer, steps):
    """Take steps without updates and return the indices of their texts."""
    seen = []
    trainer.forward = lambda chosen: seen.extend(e.index for share in chosen for e in share) or ZEROS
    trainer._check_gradients = trainer._check_norm = lambda: None
    trainer.engine.backward = lambda loss: None
    trainer.engine.step = lambda: None
    trainer.max_over_ranks = lambda value: value
    with Progress("train") as bar:
        for _ in range(steps):
            trainer.step(bar)
    return seen


ZEROS = torch.zeros(()), torch.ones(()), []


def test_every_text_is_seen_once_in_an_epoch_resumed_with_other_process_counts(trainer_of, capsys):
    """Three steps with two processes, two with three, and the rest with a single process; the next epoch has all
    texts."""
    seen = []
    for world, steps in ((2, 3), (3, 2)):
        trainer = trainer_of(world)
        assert trainer.state.world == world
        seen += advance(trainer, steps)
        state = portable_state.collect(trainer.engine)
        checkpoint.save_tensors(trainer.checkpoints, trainer.state.step, vars(trainer.state), state, keep=1)
    trainer = trainer_of(1)
    left = len(trainer.batches(0))
    every = sorted(example.index for example in trainer.corpus.train)
    assert 0 < len(seen) < len(every) and trainer.state.taken == [(2, 3), (3, 2)]
    seen += advance(trainer, left)
    assert sorted(seen) == every
    assert (trainer.state.epoch, trainer.state.place, trainer.state.taken, trainer.state.step) == (1, 0, [], 5 + left)
    assert sorted(advance(trainer, len(trainer.batches(1)))) == every
    told = capsys.readouterr().err
    assert "WORLD_SIZE was 2" in told and "is 1 now: the rest of the epoch is distributed again" in told


def test_the_schedule_follows_the_share_that_other_processes_have_done(trainer_of):
    """With eight processes every step has eight texts. A run that resumed with eight counted the small steps of one
    process as such steps: it ended early, and its learning rate fell at once."""

    def resumed(world, steps):
        trainer = trainer_of(world, max_steps=None, epochs=4)
        advance(trainer, steps)
        state = portable_state.collect(trainer.engine)
        checkpoint.save_tensors(trainer.checkpoints, trainer.state.step, vars(trainer.state), state, keep=1)
        return trainer

    alone = resumed(1, 4).schedule
    trainer = resumed(8, 2)
    plain, many = trainer._schedule(8), trainer.schedule
    assert plain.steps < alone.steps / 2
    assert (alone.first, alone.begun, many.first, many.begun) == (0, 0, 4, 4 / alone.steps)
    assert many.steps == 4 + math.ceil((1 - many.begun) * plain.steps)
    assert many.done(many.steps) == 1
    assert resumed(8, 1).schedule == many
    again = resumed(1, 0).schedule
    assert (again.first, again.begun) == (7, many.done(7))
    assert again.steps == 7 + math.ceil((1 - again.begun) * alone.steps)


def test_a_finished_epoch_is_not_resumed(trainer_of):
    trainer = trainer_of(1)
    trainer.state.place = len(trainer.batches(0))
    trainer._redistribute_epoch(trainer.checkpoints, replace(trainer.state, world=1))
    assert (trainer.state.epoch, trainer.state.place, trainer.state.taken) == (1, 0, [])


@pytest.fixture(scope="module", params=[0, 2])
def saved(request, distilled, target, tmp_path_factory):
    """Return (recipe, trainer to load into) after one saved step: ZeRO 0 with Muon, or ZeRO 2."""
    place = tmp_path_factory.mktemp("saved")
    made = recipe(
        distilled,
        place,
        features=FeatureRecipe(mode="online"),
        zero_stage=request.param,
        optimizer=OptimizerRecipe(),
        resume=True,
    )
    (place / "run").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "load_target", lambda **_: target)
        trainer = loop.make_trainer(made, Run(place / "run"))
        trainer.start()
        with Progress("train") as bar:
            trainer.step(bar)
        trainer.save()
        return made, loop.make_trainer(made, Run(place / "run"))


def first(tensors, *prefixes):
    return next(name for name in tensors if name.startswith(prefixes))


MOMENT = "momentum_buffer.", "exp_avg."


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda t: t.pop(first(t, "weights.")), "it has no weights."),
        (lambda t: t.pop(first(t, "exp_avg_sq.")), "it has no exp_avg_sq."),
        (lambda t: t.update({first(t, "weights."): torch.zeros(3)}), r"weights\.\S+ is torch.float32 \[3\], not"),
        (lambda t: t.update({first(t, *MOMENT): torch.zeros(3)}), r"is torch.float32 \[3\], not"),
        (lambda t: t.update({first(t, *MOMENT): t[first(t, *MOMENT)].double()}), "is torch.float64"),
        (lambda t: t.update({first(t, "step."): torch.ones(2)}), r"step\.\S+ is torch.float32 \[2\], not"),
        (lambda t: t["weights.d2t"].add_(1), "d2t differs from the value that recipe and data give"),
        (
            lambda t: t.update({"exp_avg.nobody": torch.zeros(3)}),
            "it has 'exp_avg.nobody', which this run does not have",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_it_is_loaded(saved, monkeypatch, damage, says):
    made, trainer = saved
    before = loop.weights(trainer.engine)
    path = checkpoint.directory(made.output) / "step-00000001"
    tensors = {name: value.clone() for name, value in checkpoint.load_tensors(path).items()}
    damage(tensors)
    monkeypatch.setattr(checkpoint, "load_tensors", lambda path: tensors)
    with pytest.raises(CheckpointError, match=f"{path} does not fit this run: .*{says}"):
        checkpoint.load(trainer.engine, path)
    assert all(torch.equal(value, before[name]) for name, value in loop.weights(trainer.engine).items())
