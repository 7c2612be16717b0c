"""Precision under DeepSpeed: products in bf16, weights and optimizer state in fp32."""

import math

import pytest
import torch

from specctl.drafters import checkpoint as drafters
from specctl.kernels import distill
from specctl.recipe import DrafterRecipe, HeldOutRecipe
from specctl.runs import Run
from specctl.training import engine, loop
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
    ours = trainer.engine
    assert {p.dtype for p in ours.module.parameters()} == {torch.float32}
    optimizer = ours.optimizer if stage == 0 else ours.optimizer.optimizer
    assert floats(optimizer.state) == {torch.float32}
    kept = drafters.load(tmp_path / "drafter").tensors
    assert "layers.1.mlp.down_proj.weight" in kept
    assert {t.dtype for t in kept.values() if t.is_floating_point()} == {torch.float32}


def test_small_gradients_survive_fp16(tmp_path):
    """fp16 has no numbers below 6e-8. With 40,000 weighted tokens in a step, the gradients of an eagle3 head's queries
    were wrong by 18 %."""

    class Squared(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).float().square().sum(), len(x)

    module = Squared(4, 1, bias=False)
    engine.autocast(module, recipe(tmp_path, tmp_path, precision="fp16"))
    loss, _ = module(torch.ones(2, 4))
    (loss * 1e-8).backward()
    expected = torch.full((1, 4), 4e-8 * module.weight.sum().item())
    torch.testing.assert_close(module.weight.grad, expected, rtol=0.05, atol=0)


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
