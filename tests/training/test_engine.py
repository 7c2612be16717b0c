"""Precision under DeepSpeed: products in bf16, weights and optimizer state in fp32."""

import math

import pytest
import torch

from specctl.drafters import checkpoint as drafters
from specctl.kernels import distill
from specctl.recipe import DrafterRecipe, HeldOutRecipe
from specctl.runs import Run
from specctl.training import loop
from tests.training.small import recipe


def floats(state):
    """Return the dtypes of all optimizer tensors except the step counters."""
    return {t.dtype for values in state.values() for t in values.values() if torch.is_tensor(t) and t.numel() > 1}


@pytest.mark.parametrize(
    ("stage", "checkpointing"),
    [
        (0, True),
        pytest.param(1, False, marks=pytest.mark.slow),
        (2, False),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)  # DeepSpeed uses one optimizer for stages 1 and 2
def test_bf16_products_use_fp32_weights(distilled, target, tmp_path, monkeypatch, stage, checkpointing):
    """DeepSpeed checks the GPU's autocast and disables autocast set outside its engine.

    Here that check returns the CPU's autocast, which reproduces the behavior on a GPU.
    """
    real = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: real(*device or ("cpu",)))
    monkeypatch.setattr(loop, "load_target", lambda **_: target)
    options = {"drafter": DrafterRecipe(vocab_size=256, num_layers=2), "gradient_checkpointing": checkpointing}
    values = recipe(distilled, tmp_path, precision="bf16", zero_stage=stage, **options)
    trainer = loop.make_trainer(values, Run(tmp_path))
    seen, rows_of = set(), distill.distill_rows
    trainer.trainable.module.fc.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    monkeypatch.setattr(distill, "distill_rows", lambda rows, *args: seen.add(rows.dtype) or rows_of(rows, *args))
    trainer.start()
    trainer.train()
    assert seen == {torch.bfloat16}
    engine = trainer.engine
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    optimizer = engine.optimizer if stage == 0 else engine.optimizer.optimizer
    assert floats(optimizer.state) == {torch.float32}
    kept = drafters.load(tmp_path / "drafter").tensors
    assert "layers.1.mlp.down_proj.weight" in kept
    assert {t.dtype for t in kept.values() if t.is_floating_point()} == {torch.float32}


def test_without_held_out_prompts_the_last_weights_are_saved(distilled, target, tmp_path, monkeypatch):
    """Not the weights of the first evaluation; and no `mat` is reported."""
    monkeypatch.setattr(loop, "load_target", lambda **_: target)
    values = recipe(distilled, tmp_path, eval=HeldOutRecipe(every=1, fraction=1e-9))
    trainer = loop.make_trainer(values, Run(tmp_path))
    trainer.start()
    trainer.train()
    found = drafters.load(tmp_path / "drafter")
    assert found.info["steps"] == 2 and found.info["mat"] == {}
    last = trainer.trainable.module.state_dict()
    assert all(torch.equal(found.tensors[name], last[name]) for name in last)
    assert math.isnan(trainer.result().mat)
