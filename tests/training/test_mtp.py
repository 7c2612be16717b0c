"""Fine-tuning the MTP layer of a target: it learns, resumes, and supports adapters and all feature modes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specctl.decoding.target import load_target
from specctl.drafters import checkpoint as drafters
from specctl.drafters.mtp import layouts
from specctl.drafters.pool import load_drafter
from specctl.errors import CheckpointError, Interrupted
from specctl.progress import interrupts
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
from specctl.training import loop
from tests.toys import mtp
from tests.training import small
from tests.training.small import metrics, train

STEPS = 24


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """The built-in target with a random MTP layer in the layout of MiMo."""
    return mtp.write(tmp_path_factory.mktemp("native"), "mimo")


def recipe(distilled, place, native, **changes):
    values = dict(
        arch="mtp",
        target=TargetRecipe(name=native, dtype="fp32", device="cpu"),
        drafter=DrafterRecipe(),
        max_steps=STEPS,
        batch_tokens=256,
        ttt_steps=3,
        ttt_stride=1,
        eval=HeldOutRecipe(every=STEPS // 2, prompts=2, max_new_tokens=16, fraction=0.2),
        checkpoint=CheckpointRecipe(every=2, keep=2),
        optimizer=OptimizerRecipe(type="adamw", lr=3e-3),
    )
    return small.recipe(distilled, place, **{**values, **changes})


@pytest.fixture(scope="module")
def trained(distilled, native, tmp_path_factory):
    place = tmp_path_factory.mktemp("trained")
    return place, train(recipe(distilled, place, native), place)


@pytest.mark.slow
def test_training_needs_none_of_the_target_layers(distilled, native, tmp_path):
    """Bitwise equal on cached features; the MTP layer is read from the files."""

    def run(name, **changes):
        features = FeatureRecipe(mode="cached", dir=tmp_path / "features", **changes)
        options = {"max_steps": 2, "features": features, "eval": HeldOutRecipe()}
        train(recipe(distilled, tmp_path / name, native, **options), tmp_path / name)
        return drafters.load(tmp_path / name / "drafter").tensors

    whole, ends = run("whole"), run("ends", whole_target=False)
    assert all(torch.equal(whole[name], tensor) for name, tensor in ends.items())


@pytest.mark.slow
def test_training_lowers_the_loss_and_raises_mat(trained, native):
    place, result = trained
    lines = metrics(place)
    losses = [line["loss"] for line in lines if "loss" in line]
    mats = [line["mat"] for line in lines if "mat" in line]
    assert losses[-1] < 0.7 * losses[0]
    assert max(mats) > 1.1 and result.mat > 1.1, "a random layer has 1.0"
    written = drafters.load(place / "drafter")
    assert written.config["family"] == "mtp" and written.config["target"]["name"] == native
    assert written.config["architecture"]["layout"] == "mimo"
    assert {"token_norm.weight", "layer.mlp.up_proj.weight", "target_norm"} <= written.tensors.keys()
    assert not any("lm_head" in name or "embed" in name for name in written.tensors), "frozen ones are the target's"


def test_training_starts_from_the_layer_of_the_target(distilled, native, tmp_path):
    """With a learning rate near zero, the saved tensors equal the target's own."""
    made = recipe(distilled, tmp_path, native, max_steps=1, optimizer=OptimizerRecipe(type="adamw", lr=1e-12))
    train(made, tmp_path / "run")
    held = {name: tensor for name, tensor in load_file(Path(native) / "model.safetensors").items() if ".mtp_" in name}
    written = layouts.to_target_names(layouts.LAYOUTS["mimo"], drafters.load(tmp_path / "drafter").tensors)
    assert written.keys() == held.keys()
    for name, tensor in written.items():
        torch.testing.assert_close(tensor.float(), held[name].float(), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_resume_is_exact(trained, distilled, native, tmp_path, monkeypatch):
    place, _ = trained
    real = loop.Trainer.step

    def stop(self, bar):
        real(self, bar)
        if self.state.step == 3:
            interrupts.handle(15)

    monkeypatch.setattr(loop.Trainer, "step", stop)
    with pytest.raises(Interrupted):
        train(recipe(distilled, tmp_path, native), tmp_path / "first")
    interrupts.reset()
    monkeypatch.setattr(loop.Trainer, "step", real)
    train(recipe(distilled, tmp_path, native, resume=True), tmp_path / "again")
    whole, resumed = (drafters.load(p / "drafter").tensors for p in (place, tmp_path))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cached", "online"])
def test_every_feature_mode_trains_the_same(distilled, native, tmp_path, mode):
    short = dict(max_steps=3, eval=HeldOutRecipe(prompts=1, max_new_tokens=2))
    for where in ("memory", mode):
        features = FeatureRecipe(mode=where, dir=tmp_path / "features" if where == "cached" else None)
        train(recipe(distilled, tmp_path / where, native, features=features, **short), tmp_path / where / "run")
    one, other = (drafters.load(tmp_path / where / "drafter").tensors for where in ("memory", mode))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_an_adapter_trains_and_loads_with_its_base(trained, distilled, native, tmp_path):
    place, _ = trained
    made = recipe(
        distilled, tmp_path, native, init=place / "drafter", lora=LoraRecipe(enabled=True, rank=4), max_steps=3
    )
    train(made, tmp_path / "run")
    names = {name.rsplit(".lora", 1)[0] for name in drafters.load(tmp_path / "drafter").tensors}
    assert {"fc", "layer.self_attn.q_proj", "layer.mlp.down_proj"} <= names
    target = load_target(native, device="cpu", dtype="fp32")
    assert load_drafter(str(tmp_path / "drafter"), target, DraftingRecipe()).taps == (10,)


def test_a_target_without_an_mtp_layer_is_refused(distilled, tmp_path):
    plain = TargetRecipe(dtype="fp32", device="cpu")
    with pytest.raises(CheckpointError, match=r"target builtin has no MTP layer \(tensors mtp\.\*"):
        train(recipe(distilled, tmp_path, "builtin", target=plain), tmp_path / "run")
    assert not (tmp_path / "drafter").exists() and not list(Path(tmp_path).glob("**/*.safetensors"))
