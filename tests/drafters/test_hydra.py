"""Hydra checkpoints use the names of the published files, and layers compute what the published code does."""

import pytest
import torch

from specctl.drafters.hydra.drafter import FAMILY as hydra
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe
from tests.drafters.heads import disturbed


@pytest.fixture(scope="module")
def module(target):
    recipe = TrainRecipe(arch="hydra", drafter=DrafterRecipe(draft_heads=2, num_layers=3))
    torch.manual_seed(0)
    module = hydra.build(recipe, target, lambda size: list(range(size)))
    for parameter in module.parameters():
        parameter.data += 0.03 * torch.randn_like(parameter)
    return module.eval()


def test_stored_names_are_the_published_names(module):
    """The published files hold layers 2 … n as one shared module; it is stored once, under number 3."""
    layer = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    layer += ["input_layernorm", "post_attention_layernorm"]
    names = {f"prefix_embeding_layer.layers.0.{part}.weight" for part in layer} | {"prefix_embeding_layer.norm.weight"}
    linears = ("hydra_mlp.{}.1.linear", "hydra_mlp.{}.1.res_connection", "hydra_mlp.{}.3.linear", "hydra_lm_head.{}.1")
    names |= {f"{part.format(k)}.{kind}" for part in linears for k in range(2) for kind in ("weight", "bias")}
    assert set(hydra.stored_state(module.state_dict())) == names


def test_the_shared_layer_is_applied_once_per_layer(module):
    """By hand, as the published Sequential runs: the first block, then the shared block twice."""
    x = torch.randn(4, 3 * module.config.hidden_size)
    first, again = module.hydra_mlp[1][1], module.hydra_mlp[1][3]
    y = first.res_connection(x) + torch.nn.functional.silu(first.linear(x))
    for _ in range(2):
        y = y + torch.nn.functional.silu(again.linear(y))
    torch.testing.assert_close(module.hidden(1, x), y)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_drafter_computes_the_logits_of_its_module(target, layers):
    """Heads of one layer had a second copy of its matrix, which no step read."""
    recipe = TrainRecipe(arch="hydra", drafter=DrafterRecipe(draft_heads=2, num_layers=layers))
    module = disturbed(hydra.build(recipe, target, lambda size: list(range(size)))).eval()
    drafter = hydra.make_drafter(module, target, DraftingRecipe())
    tokens, states = torch.tensor([[5, 6], [7, 8]]), torch.randn(2, target.hidden_size)
    inputs = torch.cat((states, target.model.embedding[tokens].flatten(1)), -1)
    with torch.no_grad():
        torch.testing.assert_close(drafter.logits(1, states, tokens), module.vocabulary(1)(module.hidden(1, inputs)))
    assert len(drafter.again) == (2 if layers == 2 else 0)


def test_dropout_is_for_training_only(target, module):
    hydra.set_training_options(module, TrainRecipe(arch="hydra", dropout=0.5))
    x = torch.randn(4, 2 * module.config.hidden_size)
    assert torch.equal(module.hidden(0, x), module.hidden(0, x))
    assert not torch.equal(module.train().hidden(0, x), module.hidden(0, x))
    module.eval()
