"""train-drafter end to end on a few responses: it learns, resumes bit for bit, and stops before a bad update."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time

import peft
import pytest
import torch
import torch.distributed as dist

from specctl import lock
from specctl.decoding.models.loading import builtin_path
from specctl.drafters import checkpoint as drafters
from specctl.drafters.pool import load_drafter, merge_adapter, restore_module
from specctl.errors import CheckpointError, DataError, Interrupted, SpecctlError, UsageError
from specctl.progress import Progress, interrupts
from specctl.recipe import (
    CheckpointRecipe,
    DrafterRecipe,
    DraftingRecipe,
    FeatureRecipe,
    HeldOutRecipe,
    LoraRecipe,
    OptimizerRecipe,
    TargetRecipe,
)
from specctl.runs import Run
from specctl.training import engine, loop
from specctl.training.data import load_corpus
from specctl.training.features import FeatureStore
from specctl.training.outcome import held_out_acceptance
from tests.training import small
from tests.training.small import metrics, train


def recipe(distilled, place, **changes):
    values = dict(
        drafter=DrafterRecipe(vocab_size=512),
        max_steps=6,
        batch_tokens=256,
        sampled_softmax=192,
        eval=HeldOutRecipe(every=3, prompts=1, max_new_tokens=12, fraction=0.2),
        checkpoint=CheckpointRecipe(every=2, keep=2),
        optimizer=OptimizerRecipe(),
    )
    return small.recipe(distilled, place, **{**values, **changes})


def make(place):
    place.mkdir(parents=True, exist_ok=True)
    return place


@pytest.fixture(scope="module")
def trained(distilled, tmp_path_factory):
    place = tmp_path_factory.mktemp("trained")
    return place, train(recipe(distilled, place), place)


@pytest.mark.parametrize("max_steps", [6, pytest.param(None, marks=pytest.mark.slow)])
def test_a_run_ended_by_max_minutes_says_so(distilled, tmp_path, capsys, max_steps):
    """With `max_steps` it is a warning, because the drafter is not what the recipe asked for."""
    result = train(recipe(distilled, tmp_path, max_steps=max_steps, max_minutes=1e-6), tmp_path)
    told = [line for line in capsys.readouterr().err.splitlines() if "max_minutes=1e-06 ended the training" in line]
    assert result.steps == 1 and len(told) == 1
    assert told[0].startswith("warning: ") == bool(max_steps)
    assert "after 1 of 6 steps" in told[0] or max_steps is None


def test_a_run_that_its_time_has_ended_computes_no_features_again(distilled, tmp_path, monkeypatch):
    """A resumed run without a step to make computed the features of all texts, and then measured its drafter."""
    options = dict(max_minutes=1e-6, eval=HeldOutRecipe(prompts=1, max_new_tokens=2))
    (made, again) = (recipe(distilled, tmp_path, resume=resume, **options) for resume in (False, True))
    train(made, tmp_path)
    monkeypatch.delattr(FeatureStore, "prepare")
    assert train(again, make(tmp_path / "again")).steps == 1


def test_the_slowest_clock_counts_for_all_processes(distilled, tmp_path, monkeypatch):
    """Otherwise processes would use different learning rates, and the first to end would block the others."""
    trainer = loop.make_trainer(recipe(distilled, tmp_path, max_minutes=1), Run(make(tmp_path / "run")))

    def with_a_slower_one(tensor, op=dist.ReduceOp.SUM, **_):
        tensor += 60 * (op == dist.ReduceOp.MAX)

    monkeypatch.setattr(dist, "all_reduce", with_a_slower_one)
    trainer.world = 2
    with Progress("train") as bar:
        trainer.step(bar)
    assert trainer.state.seconds > 60 and trainer.schedule.ended(1, trainer.state.seconds)


def test_learns_and_writes_a_drafter_that_loads(trained, target):
    place, result = trained
    losses = [line["loss"] for line in metrics(place) if "loss" in line]
    assert len(losses) == result.steps == 6
    assert losses[-1] < losses[0]
    assert result.mat >= 1.0
    assert any("mat" in line for line in metrics(place))
    drafter = load_drafter(result.drafter, target, DraftingRecipe())
    assert drafter.taps


def test_the_reported_mat_comes_from_prompts_that_selected_nothing(trained, distilled, target):
    """The saved drafter is measured on held-out prompts that were not used to select a checkpoint."""
    place, result = trained
    checks = [line["mat"] for line in metrics(place) if "mat" in line]
    assert result.choosing_mat == max(checks) and len(checks) == 2
    made = recipe(distilled, place)
    corpus = load_corpus(made, target)
    assert len(corpus.selection_prompts) == len(corpus.report_prompts) == 1
    assert corpus.selection_prompts != corpus.report_prompts
    drafter = load_drafter(result.drafter, target, DraftingRecipe())
    own = [
        held_out_acceptance(made, target, prompts, drafter)
        for prompts in (corpus.report_prompts, corpus.selection_prompts)
    ]
    assert own == [(result.mat, result.acceptance_by_position), (result.choosing_mat, own[1][1])]
    name = "held-out biochem"
    said = {name: round(result.mat, 3), f"{name}, prompts that chose it": round(max(checks), 3)}
    assert json.loads((place / "drafter" / "drafter.json").read_text())["mat"] == said
    assert [line["reported_mat"] for line in metrics(place) if "reported_mat" in line] == [result.mat]


@pytest.mark.parametrize("end", [Interrupted, pytest.param(OSError, marks=pytest.mark.slow)])
def test_resume_is_exact(trained, distilled, tmp_path, monkeypatch, end):
    """Stopped after three steps and resumed, weights and losses equal the uninterrupted run bit for bit.

    The metrics list every step once, even if the third was logged but not saved.
    """
    place, _ = trained
    real = loop.Trainer.step

    def stop_after_three(self, bar):
        real(self, bar)
        if self.state.step == 3:
            if end is OSError:
                raise OSError
            interrupts.handle(15)

    monkeypatch.setattr(loop.Trainer, "step", stop_after_three)
    with pytest.raises(end):
        train(recipe(distilled, tmp_path), tmp_path / "first")
    interrupts.reset()
    monkeypatch.setattr(loop.Trainer, "step", real)
    train(recipe(distilled, tmp_path, resume=True), tmp_path / "again")
    kept = ("step", "loss", "mat", "tokens")
    ours, theirs = ([[line.get(key) for key in kept] for line in metrics(at)] for at in (tmp_path / "again", place))
    assert ours == theirs
    whole, resumed = (drafters.load(p / "drafter").tensors for p in (place, tmp_path))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("arch", ["eagle3", "peagle", "hydra", "medusa", "eagle", "dflash"])
def test_a_step_samples_the_vocabulary_and_a_check_does_not(distilled, tmp_path, arch):
    """Every family learns from the sample. Without gradients, as for held-out texts, the loss is of all tokens."""
    made = recipe(distilled, tmp_path, drafter=DrafterRecipe(), arch=arch, sampled_softmax=512)
    trainer = loop.make_trainer(made, Run(make(tmp_path / "run")))
    trainable = trainer.trainable
    examples = trainer.corpus.train[:4]
    trainable.store.prepare(examples, made.features, tmp_path / "features")
    batch = trainable.batch(examples, 0)
    trainable.module.eval()  # without the noise of eagle

    def loss(seed, **grad):
        torch.manual_seed(seed)
        with torch.set_grad_enabled(bool(grad)):
            return trainable.loss(trainable.module, batch)[0].item()

    sampled, whole = [loss(seed, grad=True) for seed in (0, 1, 0)], [loss(seed) for seed in (0, 1)]
    assert sampled[0] == sampled[2] != sampled[1] and whole[0] == whole[1] != sampled[0]
    assert sampled == pytest.approx([whole[0]] * 3, rel=0.2)
    trainable.module.sampled_softmax = 0
    assert loss(0, grad=True) == pytest.approx(whole[0], rel=1e-5)


def test_a_second_training_of_the_same_drafter_is_refused(distilled, tmp_path):
    """It would remove the checkpoints of the first. The lock is released when the first ends."""
    with lock.hold(tmp_path / ".drafter.lock", tmp_path), pytest.raises(UsageError, match=f"process {os.getpid()}"):
        train(recipe(distilled, tmp_path, overwrite=True), tmp_path / "run")
    with pytest.raises(DataError, match="no distilled data"):
        train(recipe(tmp_path / "nowhere", tmp_path), tmp_path / "run")
    assert not list(tmp_path.glob(".*.lock"))


def test_dropout_depends_on_the_step_alone(distilled, tmp_path):
    """Otherwise a resumed run would differ from an uninterrupted one."""
    options = dict(arch="hydra", dropout=0.5, drafter=DrafterRecipe(draft_heads=1))
    trainer = loop.make_trainer(recipe(distilled, tmp_path, **options), Run(make(tmp_path / "run")))
    chosen = [trainer.corpus.train[:2]]
    first, again = (trainer.forward(chosen)[0].item() for _ in range(2))
    trainer.state.step += 1
    assert first == again != trainer.forward(chosen)[0].item()


def test_every_epoch_takes_each_text_once(distilled, tmp_path, monkeypatch):
    """Epochs differ in their number of batches. With the first epoch's number, longer epochs lost their last batch and
    shorter ones started over."""
    trainer = loop.make_trainer(recipe(distilled, tmp_path, max_steps=9), Run(make(tmp_path / "run")))
    texts, cuts = trainer.corpus.train[:4], [[2], [1, 2, 3], []]
    taken = []

    def dealt(epoch):
        edges = [0, *cuts[epoch % 3], len(texts)]
        return [[texts[start:stop]] for start, stop in itertools.pairwise(edges)]

    real = trainer.forward
    monkeypatch.setattr(trainer, "batches", dealt)
    monkeypatch.setattr(trainer, "forward", lambda batch: taken.append(batch) or real(batch))
    with Progress("train") as bar:
        for _ in range(7):
            trainer.step(bar)
    assert taken == dealt(0) + dealt(1) + dealt(2)
    assert (trainer.state.epoch, trainer.state.place) == (3, 0)


def test_resuming_with_another_recipe_is_refused(trained, distilled):
    place, _ = trained
    with pytest.raises(UsageError, match=r"a different recipe: ttt_steps was 2 and is 3 now$"):
        train(recipe(distilled, place, resume=True, ttt_steps=3), place / "other")


@pytest.fixture(scope="module")
def tuned(trained, distilled, tmp_path_factory):
    """Return (place, recipe) of a drafter trained from another one, with its own copies of data and target."""
    place = tmp_path_factory.mktemp("tuned")
    shutil.copytree(distilled, place / "data")
    shutil.copytree(trained[0] / "drafter", place / "first")
    shutil.copytree(builtin_path(), place / "target")
    made = recipe(
        place / "data",
        place,
        target=TargetRecipe(name=str(place / "target"), dtype="fp32", device="cpu"),
        init=place / "first",
        drafter=DrafterRecipe(),
        features=FeatureRecipe(mode="online"),
        eval=HeldOutRecipe(prompts=1, max_new_tokens=2),
        max_steps=1,
    )
    train(made, place / "run")
    return place, made


def other_response(place):
    """Change one token id in the distilled data."""
    shard = next(place.glob("data/shard-*"))
    rows = [json.loads(line) for line in shard.read_text().splitlines()]
    rows[-1]["response_ids"][0] += 1
    shard.write_text("".join(json.dumps(row) + "\n" for row in rows))
    next(place.glob("data/manifest-*")).unlink()


def other_drafter(place):
    found = drafters.load(place / "first")
    drafters.save(
        place / "first",
        config=found.config,
        tensors={name: x * 2 if x.is_floating_point() else x for name, x in found.tensors.items()},
        info=found.info,
        overwrite=True,
    )


def other_weights(place):
    path = place / "target" / "model.safetensors"
    content = path.read_bytes()
    about = path.stat()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_response, "the data in .*data changed since .*step-00000001 was made"),
        (other_drafter, "the drafter .*first changed"),
        (other_weights, "the weights of target .*target changed"),
    ],
)
def test_resuming_with_changed_inputs_is_refused(tuned, tmp_path, change, says):
    """Path and recipe are the same, but the drafter would mix two inputs."""
    place, made = tuned
    kept = tmp_path / "kept"
    for name in ("data", "first", "target"):
        shutil.copytree(place / name, kept / name)
    change(place)
    try:
        with pytest.raises(UsageError, match=says) as caught:
            train(made.model_copy(update={"resume": True}), tmp_path / "run")
        assert "--overwrite" in caught.value.hint
    finally:
        for name in ("data", "first", "target"):
            shutil.rmtree(place / name)
            shutil.copytree(kept / name, place / name)
    train(made.model_copy(update={"resume": True}), tmp_path / "again")


@pytest.mark.parametrize(
    ("stage", "lora"),
    [
        pytest.param(1, False, marks=pytest.mark.slow),
        (2, True),
        pytest.param(3, True, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
)
def test_every_zero_stage_resumes_exactly(trained, distilled, target, tmp_path, monkeypatch, stage, lora):
    """This holds too if most weights are frozen."""
    monkeypatch.setattr(loop, "load_target", lambda **_: target)
    options = dict(zero_stage=stage, optimizer=OptimizerRecipe(type="adamw"), features=FeatureRecipe(mode="online"))
    if lora:
        options |= dict(init=trained[0] / "drafter", drafter=DrafterRecipe(), lora=LoraRecipe(enabled=True, rank=4))
    made = recipe(distilled, tmp_path, resume=True, **options)
    weights = []
    for step in (0, 1):
        trainer = loop.make_trainer(made, Run(make(tmp_path / "run")))
        trainer.start()
        assert trainer.state.step == step
        with Progress("train") as bar:
            for _ in range(2 - step):
                trainer.step(bar)
                if trainer.state.step == 1:
                    trainer.save()
        weights.append(loop.weights(trainer.engine))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_features_that_do_not_fit_keep_the_earlier_training(trained, distilled, tmp_path):
    """--overwrite removes the old training only after the new one can start."""
    shutil.copytree(trained[0], tmp_path / "run")
    there = sorted(str(path) for path in (tmp_path / "run").rglob("*"))
    small = FeatureRecipe(mode="memory", budget_gb=1e-9)
    with pytest.raises(SpecctlError, match=r"features\.budget_gb"):
        train(recipe(distilled, tmp_path / "run", overwrite=True, features=small), tmp_path / "other")
    assert sorted(str(path) for path in (tmp_path / "run").rglob("*")) == there


def poison(monkeypatch, change):
    """Apply `change` to the loss of step 2."""
    real = loop.Trainer.forward

    def poisoned(self, chosen):
        total, weight, steps = real(self, chosen)
        return (change(total) if self.state.step == 2 else total), weight, steps

    monkeypatch.setattr(loop.Trainer, "forward", poisoned)


@pytest.mark.parametrize(
    ("fails", "place"),
    [
        ("batch", "specctl.training.trainable.TrainableHead"),
        ("save_tensors", "specctl.training.checkpoint"),
        ("held_out_acceptance", "specctl.training.loop"),
    ],
)
def test_the_others_are_told_of_a_rank_that_fails_alone(distilled, tmp_path, monkeypatch, fails, place):
    """A rank with a full disk or damaged features ended by itself, and the others waited for it for half an hour."""
    sums, total = [], engine.over_ranks
    monkeypatch.setattr(engine, "over_ranks", lambda values, device: sums.append(values) or total(values, device))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"{place}.{fails}", full)
    with pytest.raises(OSError, match="No space"):
        train(recipe(distilled, tmp_path, max_steps=1), tmp_path)
    assert sums[-1] == [False, True]


def test_a_non_finite_loss_stops_before_the_update(distilled, tmp_path, monkeypatch):
    poison(monkeypatch, lambda total: total * float("nan"))
    with pytest.raises(SpecctlError, match="loss is nan at step 2"):
        train(recipe(distilled, tmp_path), tmp_path)
    assert [p.name for p in (tmp_path / "drafter.checkpoints").glob("step-*")] == ["step-00000002"]


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2, 3))])
def test_a_non_finite_gradient_stops_the_run(distilled, tmp_path, monkeypatch, stage):
    """At every ZeRO stage, and the checkpoint of the previous step stays intact."""

    def poisoned(total):
        total.register_hook(lambda gradient: gradient * float("nan"))
        return total

    poison(monkeypatch, poisoned)
    options = dict(zero_stage=stage, optimizer=OptimizerRecipe(type="adamw"))
    with pytest.raises(SpecctlError, match="gradient is not finite at step 2"):
        train(recipe(distilled, tmp_path, **options), tmp_path)
    assert [p.name for p in (tmp_path / "drafter.checkpoints").glob("step-*")] == ["step-00000002"]


def test_fine_tuning_keeps_the_draft_vocabulary(trained, distilled, tmp_path):
    """All weights change except the draft vocabulary, and training starts from the learned weights."""
    place, first = trained
    options = dict(init=place / "drafter", drafter=DrafterRecipe(), max_steps=2)
    result = train(recipe(distilled, tmp_path, **options), tmp_path)
    before, after = drafters.load(first.drafter).tensors, drafters.load(result.drafter).tensors
    assert torch.equal(before["d2t"], after["d2t"])
    assert not torch.equal(before["fc.weight"], after["fc.weight"])
    start = next(line["loss"] for line in metrics(tmp_path) if "loss" in line)
    assert start < next(line["loss"] for line in metrics(place) if "loss" in line)


@pytest.mark.slow
def test_an_adapter_is_small_resumes_and_keeps_its_base(trained, distilled, tmp_path, target):
    place, _first = trained
    options = dict(
        init=place / "drafter", drafter=DrafterRecipe(), lora=LoraRecipe(enabled=True, rank=4), max_steps=4,
        batch_tokens=10**6,  # every step sees all the data, so the losses are comparable

        optimizer=OptimizerRecipe(lr=0.001),
    )  # fmt: skip
    before = drafters.weights_digest(place / "drafter")
    result = train(recipe(distilled, tmp_path, **options), tmp_path)
    assert drafters.weights_digest(place / "drafter") == before
    saved = drafters.load(result.drafter)
    assert saved.tensors and all(".lora_" in name for name in saved.tensors)
    assert any(tensor.any() for name, tensor in saved.tensors.items() if "lora_B" in name)
    base = restore_module(drafters.load(place / "drafter"))
    by_peft = peft.PeftModel.from_pretrained(base, result.drafter).merge_and_unload().state_dict()
    torch.testing.assert_close(dict(by_peft), merge_adapter(saved).tensors)
    losses = [line["loss"] for line in metrics(tmp_path) if "loss" in line]
    assert losses[-1] < losses[0]
    assert load_drafter(result.drafter, target, DraftingRecipe()).taps
    again = train(recipe(distilled, tmp_path, **options, resume=True), tmp_path / "again")
    assert again.steps == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"arch": "eagle"}, "family eagle3, not eagle"), ({"lora": {"enabled": True}}, "already an adapter")],
)
def test_an_unsuitable_initial_drafter_is_refused(trained, distilled, tmp_path, changes, says):
    place, _first = trained
    start = place / "drafter"
    if "lora" in changes:
        found = drafters.load(start)
        origin = {"rank": 4, "alpha": 8.0, "base": {"path": ".", "sha256": ""}}
        start = drafters.save(tmp_path / "a", config=found.config | {"lora": origin}, tensors=found.tensors, info={})
    with pytest.raises(CheckpointError, match=says):
        train(recipe(distilled, tmp_path, init=start, drafter=DrafterRecipe(), **changes), tmp_path)


def test_lm_learns(distilled, tmp_path):
    options = dict(arch="lm", objective="ce", drafter=DrafterRecipe(preset="tiny"))
    result = train(recipe(distilled, tmp_path, **options), tmp_path)
    losses = [line["loss"] for line in metrics(tmp_path) if "loss" in line]
    assert losses[-1] < losses[0]
    assert drafters.load(result.drafter).config["family"] == "lm"


def written(recipe, place):
    """Write the keys of the recipe that these tests set to a file; return its path."""
    keep = {
        "target", "distilled", "output_dir", "drafter", "optimizer", "max_steps", "ttt_steps", "batch_tokens", "eval",
        "checkpoint", "precision", "zero_stage", "sampled_softmax",
    }  # fmt: skip
    file = make(place) / "recipe.yaml"
    file.write_text(json.dumps(recipe.model_dump(mode="json", include=keep, exclude_none=True)))
    return str(file)


def logged(place):
    """Return the losses of all runs under `place`."""
    lines = [json.loads(line) for file in place.glob("runs/*/metrics.jsonl") for line in file.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def launch(distilled, place, processes, stage, *flags):
    """Run `specctl train-drafter` under torchrun; return the losses of all steps.

    Every step sees the same texts and the whole vocabulary: each process would draw its own sample.
    """
    options = dict(batch_tokens=10**6, optimizer=OptimizerRecipe(type="adamw"), sampled_softmax=0)
    values = recipe(distilled, place, zero_stage=stage, max_steps=4, **options)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "specctl", "train-drafter", "--recipe", written(values, place), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return logged(place)


@pytest.mark.slow
def test_tensor_parallel_targets_train_like_whole_ones(distilled, tmp_path):
    """Catches ranks that compute features of different texts, and a `mat` measured by one rank only."""
    made = {}
    for slices in (1, 2):
        place = tmp_path / str(slices)
        flags = [f"target.tensor_parallel={slices}", "features.mode=cached", "features.whole_target=true"]
        flags += [f"features.dir={place / 'features'}"]
        made[slices] = launch(distilled, place, slices, 0, *flags)
    assert made[2] == pytest.approx(made[1], rel=1e-4)
    facts = [drafters.load(tmp_path / str(slices) / "drafter").info["mat"] for slices in made]
    assert facts[0] == facts[1] != {}


def steps_of(place):
    """Return the number of logged steps under `place`. The last line may be incomplete."""
    return sum(file.read_text().count('"loss":') for file in place.glob("runs/*/metrics.jsonl"))


@pytest.mark.slow
def test_killed_runs_resume_exactly(distilled, tmp_path):
    """kill -9 at three moments, then --resume to the end, gives the weights of an undisturbed run bit for bit."""
    whole = train(recipe(distilled, tmp_path / "whole", max_steps=12), tmp_path / "whole")
    place = tmp_path / "killed"
    file = written(recipe(distilled, place, max_steps=12), place)
    command = [sys.executable, "-m", "specctl", "train-drafter", "--recipe", file, "--resume"]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums depend on the number of threads
    options = dict(cwd=place, env=environment, stdout=subprocess.DEVNULL, stderr=(place / "stderr").open("w"))
    for steps, delay in ((1, 0.0), (4, 0.02), (8, 0.05)):  # the delays reach into the writing of checkpoint and drafter
        process = subprocess.Popen(command, **options)
        while steps_of(place) < steps and process.poll() is None:
            time.sleep(0.005)
        time.sleep(delay)
        assert process.poll() is None, (place / "stderr").read_text()[-2000:]
        process.kill()
        process.wait()
    subprocess.run(command, check=True, timeout=300, **options)
    ours, theirs = (drafters.load(path).tensors for path in (place / "drafter", whole.drafter))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_processes_reach_the_loss_of_one(distilled, tmp_path, stage):
    """The global batches are the same; losses agree to fp32 rounding at every step and ZeRO stage."""
    alone = launch(distilled, tmp_path / "one", 1, 0)
    pair = launch(distilled, tmp_path / "two", 2, stage)
    assert pair == pytest.approx(alone, rel=2e-3)
    shutil.rmtree(max((tmp_path / "two" / "drafter.checkpoints").glob("step-*")))
    shutil.rmtree(tmp_path / "two" / "runs")
    assert launch(distilled, tmp_path / "two", 2, stage, "--resume")[-2:] == pair[-2:]
