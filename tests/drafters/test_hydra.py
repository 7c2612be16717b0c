"""Hydra's files are those of its own repository, and its adapters draft as merged weights would."""

import pytest
import torch

from specctl.decoding.loop import decode
from specctl.decoding.sampling import GREEDY
from specctl.drafters import hydra, lora
from specctl.drafters.lora import Adapter
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe


@pytest.fixture(scope="module")
def module(target):
    recipe = TrainRecipe(arch="hydra", drafter=DrafterRecipe(draft_heads=2, num_layers=3))
    torch.manual_seed(0)
    module = hydra.build(recipe, target, lambda size: list(range(size)))
    for parameter in module.parameters():
        parameter.data += 0.03 * torch.randn_like(parameter)
    return module.eval()


def test_names_of_the_published_files(module):
    """Layers 2 … n are one module there, here stored once as number 3."""
    layer = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    layer += ["input_layernorm", "post_attention_layernorm"]
    names = {f"prefix_embeding_layer.layers.0.{part}.weight" for part in layer} | {"prefix_embeding_layer.norm.weight"}
    linears = ("hydra_mlp.{}.1.linear", "hydra_mlp.{}.1.res_connection", "hydra_mlp.{}.3.linear", "hydra_lm_head.{}.1")
    names |= {f"{part.format(k)}.{kind}" for part in linears for k in range(2) for kind in ("weight", "bias")}
    assert set(hydra.published(module.state_dict())) == names


def test_layers_are_applied_as_often_as_there_are(module):
    """By hand, as the published Sequential runs: first block, then the same block twice."""
    x = torch.randn(4, 3 * module.config.hidden_size)
    first, again = module.hydra_mlp[1][1], module.hydra_mlp[1][3]
    y = first.res_connection(x) + torch.nn.functional.silu(first.linear(x))
    for _ in range(2):
        y = y + torch.nn.functional.silu(again.linear(y))
    torch.testing.assert_close(module.head(1, x), module.hydra_lm_head[1][1](y))


def proposals(target, prompts, drafter):
    drafts = []
    decode(
        target, prompts, sampling=GREEDY, max_new_tokens=8, seeds=[0] * 3, drafter=drafter,
        on_round=lambda state, draft, verdict: drafts.append(draft.tokens.tolist()),
    )  # fmt: skip
    return drafts


def test_an_adapter_drafts_as_its_merged_weights(target, prompts, module):
    """Updates reach the prefix layer and the MLPs of every head."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name, part in module.named_modules():
        if name.rsplit(".", 1)[-1] in hydra.ADAPTABLE:
            rows, columns = part.weight.shape
            tensors[name + lora.DOWN] = torch.randn(2, columns, generator=generator) * columns**-0.5
            tensors[name + lora.UP] = torch.randn(rows, 2, generator=generator) * 0.3
    config = hydra.config(module, target.identity) | {"lora": {"rank": 2, "alpha": 2.0}}
    adapter = Adapter.of(config, tensors)
    base = hydra.drafter(module, target, DraftingRecipe())
    merged = hydra.drafter(hydra.restore(config, adapter.merge(module.state_dict())), target, DraftingRecipe())
    expected = proposals(target, prompts, merged)
    assert proposals(target, prompts, base) != expected
    assert proposals(target, prompts, base.adapted(adapter)) == expected


def test_dropout_is_for_training_only(target, module):
    hydra.prepare(module, TrainRecipe(arch="hydra", dropout=0.5))
    x = torch.randn(4, 2 * module.config.hidden_size)
    assert torch.equal(module.head(0, x), module.head(0, x))
    assert not torch.equal(module.train().head(0, x), module.head(0, x))
    module.eval()
