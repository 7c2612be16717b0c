import math
from types import SimpleNamespace

import pytest
import torch

from specctl.families import FAMILIES
from specctl.recipe import TrainRecipe
from specctl.recipe.resolve import resolve
from specctl.training.schedule import STEPS, Schedule, batch_tokens


def schedule(shape="cosine", seconds=math.inf):
    return Schedule(steps=100, seconds=seconds, peak=1.0, floor=0.1, warmup=0.1, shape=shape)


@pytest.mark.parametrize("shape,half", [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_warmup_peak_and_end_of_each_shape(shape, half):
    s = schedule(shape)
    assert s.rate(5, 0) == pytest.approx(0.5)
    assert s.rate(10, 0) == pytest.approx(1.0)
    assert s.rate(55, 0) == pytest.approx(half)
    assert s.rate(100, 0) == pytest.approx(1.0 if shape == "constant" else 0.1)
    assert s.ended(100, 0) and not s.ended(99, 0)


@pytest.mark.parametrize("steps", [1, 3, 10, 60])
def test_a_short_run_never_exceeds_its_peak(steps):
    """With 10 steps and a warm-up of 1.5 %, the first step once had 6.7 times the peak."""
    short = Schedule(steps, seconds=math.inf, peak=1.0, floor=0.0, warmup=0.015, shape="cosine")
    assert short.rate(0, 0.0) == 1.0
    assert all(short.rate(step, 0.0) <= 1.0 for step in range(steps + 1))


def test_a_time_limit_ends_the_schedule_early():
    s = schedule(seconds=60.0)
    assert s.rate(20, 60.0) == pytest.approx(0.1)
    assert s.ended(20, 60.0)


@pytest.mark.parametrize(
    "options,per_epoch,steps",
    [
        ({}, 400, FAMILIES["eagle3"].cpu_tokens // 384),  # as many epochs as fill the token budget of a CPU
        ({}, 5000, 5000),  # but every response once
        ({"epochs": 2}, 400, 800),
        ({"max_steps": 7}, 400, 7),
        ({"arch": "lm"}, 400, 1200),
    ],
)
def test_the_length_of_a_run(options, per_epoch, steps):
    target = SimpleNamespace(device=torch.device("cpu"), hidden_size=256)
    assert Schedule.of(TrainRecipe(**options), target, per_epoch).steps == steps


@pytest.mark.parametrize(
    "tokens,size",
    [
        (1_000, 768),  # little data: small batches
        (276_000, 1_150),  # 2,400 responses: as many steps as a head needs
        (50_000_000, 16_384),  # enough data for batches that fill a GPU
    ],
)
def test_batches_on_a_gpu_leave_enough_steps(tokens, size):
    target = SimpleNamespace(device=torch.device("cuda"), hidden_size=576)
    assert batch_tokens(TrainRecipe(), target, tokens) == size
    assert batch_tokens(TrainRecipe(batch_tokens=4096), target, tokens) == 4096
    if size == 1_150:
        assert Schedule.of(TrainRecipe(), target, tokens // size).steps == pytest.approx(STEPS, rel=0.01)


@pytest.mark.parametrize(("step_s", "cut"), [(0.13, False), (0.4, False), (4.0, True)])
def test_the_demo_takes_the_same_steps_on_a_busy_machine(step_s, cut):
    """The demo is bounded by steps. Its time limit cuts only a machine many times slower, with the schedule at its
    end."""
    recipe = resolve("train-drafter", "demo/train")
    target = SimpleNamespace(device=torch.device("cpu"), hidden_size=256)
    s, step = Schedule.of(recipe, target, 400), 0
    while not s.ended(step, step * step_s):
        if not cut:
            assert s.rate(step, step * step_s) == s.rate(step, 0.0)
        step += 1
    assert (step < recipe.max_steps) == cut
    assert s.rate(step, step * step_s) == pytest.approx(0.0, abs=1e-6)


def test_an_adapter_gets_a_larger_learning_rate(tmp_path):
    """At the rate for full training an adapter gained half as much; a rate in the recipe is used unchanged."""
    target = SimpleNamespace(device=torch.device("cpu"), hidden_size=256)
    options = {"max_steps": 7, "init": tmp_path, "optimizer": {"type": "adamw"}}
    peaks = [Schedule.of(TrainRecipe(**options, lora={"enabled": on}), target, 1).peak for on in (False, True)]
    assert peaks[1] == pytest.approx(4 * peaks[0])
    named = options | {"lora": {"enabled": True}, "optimizer": {"lr": 0.003}}
    assert Schedule.of(TrainRecipe(**named), target, 1).peak == 0.003
