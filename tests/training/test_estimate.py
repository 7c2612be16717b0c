"""The arithmetic of the estimate: against published sizes, and that more of what helps does help."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, MixtralConfig

from specctl.decoding.models.loading import builtin_path, load_config
from specctl.drafters.eagle3.head import Eagle3Config, Eagle3Head
from specctl.recipe import Gpu, ResourceRecipe, TargetRecipe, TrainRecipe
from specctl.training import engine, machine
from specctl.training.estimate import Texts, estimate
from specctl.training.machine import Machine, machine_for
from specctl.training.step_cost import PROMPT_COST
from specctl.training.target_outline import Outline

LLAMA31_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131072,
)  # fmt: skip
TEXTS = Texts(10_000, 500, 100, False)
CPU = Machine("cpu", 2, 1, 16)


def h100(gpus=8, processes=None):
    return Machine("h100-80g", gpus, processes or gpus, 80)


def of(machine=None, texts=TEXTS, **changes):
    return estimate(TrainRecipe(**changes), LLAMA31_8B, machine or h100(), texts)


def test_parameters_are_the_published_ones():
    """The EAGLE-3 head published for this target has 8.5e8 bytes of fp16 weights."""
    found = of()
    assert found.target_parameters == pytest.approx(8.03e9, rel=1e-3)
    assert found.drafter_parameters == pytest.approx(4.25e8, rel=0.01)


def test_the_builtin_target_and_its_head_are_counted_exactly():
    found = estimate(TrainRecipe(), load_config("builtin"), CPU, TEXTS)
    with safe_open(builtin_path() / "model.safetensors", "pt") as file:
        assert found.target_parameters == sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    shape = Eagle3Config(256, 4096, 2048, (2, 5, 7), 704, 8, 4, 32, 1e-5, 1e4, 2048, fc_norm=True, norm_output=True)
    head = Eagle3Head(shape)
    assert found.drafter_parameters == sum(p.numel() for p in head.parameters())


def test_tokens_pay_for_the_experts_they_visit_and_for_no_lookup():
    sizes = dict(vocab_size=1000, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    outline = Outline.of(MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2), torch.bfloat16)
    experts = 2 * 8 * 3 * 64 * 256
    matrices = outline.parameters - 5 * 64  # norms
    assert outline.active == matrices - experts * 3 // 4 - 1000 * 64


def test_each_layer_is_counted_and_all_but_the_last_run_over_the_prompts():
    one, two, three = (of(drafter={"num_layers": count}) for count in (1, 2, 3))
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert two.drafter_parameters - one.drafter_parameters == layer + 2 * 4096
    assert three.drafter_parameters - two.drafter_parameters == layer + 2 * 4096
    first = layer + 4096 * (4096 + 2 * 1024)  # its projections read twice as much
    prompts = TEXTS.responses * TEXTS.prompt_tokens * 5  # epochs
    longer = replace(TEXTS, prompt_tokens=2 * TEXTS.prompt_tokens)
    added = [of(texts=longer, drafter={"num_layers": count}).flops for count in (1, 2, 3)]
    target = added[0] - one.flops
    inputs, rest = PROMPT_COST * layer, 1 - PROMPT_COST  # the last layer computes only keys and values
    assert added[1] - two.flops - target == pytest.approx(6 * prompts * (inputs + rest * first), rel=0.01)
    assert added[2] - three.flops - target == pytest.approx(
        6 * prompts * (2 * inputs + rest * (first + layer)), rel=0.01
    )
    assert one.memory_gb["activations"] < two.memory_gb["activations"] < three.memory_gb["activations"]
    assert one.hours < two.hours < three.hours


def test_drafter_state_is_sixteen_bytes_a_parameter_and_falls_with_the_stage():
    states = [of(optimizer={"type": "adamw"}, zero_stage=stage).memory_gb["drafter"] for stage in range(4)]
    assert states[0] == pytest.approx(16 * of().drafter_parameters / 1e9)
    assert states == sorted(states, reverse=True)
    assert len(set(states)) == 4


def test_muon_keeps_less_than_adamw():
    assert of(optimizer={"type": "muon"}).memory_gb["drafter"] < of(optimizer={"type": "adamw"}).memory_gb["drafter"]


def test_more_gpus_are_faster_and_share_the_batch():
    one, eight = of(h100(1)), of(h100(8))
    assert eight.hours == pytest.approx(one.hours / 8, rel=0.01)
    assert 0.99 < eight.useful_share < one.useful_share == 1
    assert any("of which processes wait 0." in line for line in eight.lines)
    assert not any("processes wait" in line for line in one.lines)
    assert eight.memory_gb["activations"] < one.memory_gb["activations"]
    assert eight.memory_gb["target"] == one.memory_gb["target"]


def test_a_spread_target_takes_less_of_each_gpu_and_no_less_time():
    """Layers on several GPUs work one after the other: eight GPUs of one process are not eight times as fast."""
    spread, single = of(h100(8, 1)), of(h100(1))
    assert spread.memory_gb["target"] == pytest.approx(single.memory_gb["target"] / 8)
    assert spread.hours == single.hours


def test_cached_features_save_passes_of_the_target_and_take_disk():
    online, cached = (of(features={"mode": mode}) for mode in ("online", "cached"))
    assert cached.flops < online.flops
    assert "features" not in online.disk_gb
    tokens = TEXTS.responses * (3 * (TEXTS.response_tokens + TEXTS.prompt_tokens) + TEXTS.response_tokens)
    assert cached.disk_gb["features"] == pytest.approx(tokens * 4096 * 2 / 1e9)


def test_features_that_are_kept_are_on_a_gpu_for_two_batches():
    """The next one's are copied while a step computes; a CPU has nothing to copy."""
    for device, batches in ((h100(), 2), (CPU, 1)):
        once, kept = (of(device, features={"mode": mode}).memory_gb["features"] for mode in ("online", "cached"))
        assert kept == pytest.approx(batches * once)


def test_features_in_memory_are_in_that_of_the_host():
    """Counted as a GPU's they refused trainings that fit: the host has many times its memory."""
    for device, more in ((h100(), 1), (CPU, 10)):
        cached, kept = (of(device, features={"mode": mode}).memory_gb["features"] for mode in ("cached", "memory"))
        assert kept == cached if more == 1 else kept > more * cached


def test_a_target_that_does_not_fit_is_loaded_without_its_layers():
    """Where features come from elsewhere: 2.1 B of 70.6 B parameters. One that fits, or has to be whole, is whole."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    large = LlamaConfig(**{**LLAMA31_8B.to_dict(), **sizes, "head_dim": 128})

    def of_70b(**features):
        return estimate(TrainRecipe(features={"mode": "server", **features}, batch_tokens=4096), large, h100(), TEXTS)

    ends, whole, forced = of_70b(), of_70b(whole_target=True), of_70b(whole_target=False)
    assert ends == forced and ends.fits and not whole.fits
    assert ends.loaded_parameters == 2 * 128256 * 8192 + 8192
    assert ends.memory_gb["target"] == pytest.approx(4.2, abs=0.01) and "target's forward" not in ends.memory_gb
    assert (
        whole.memory_gb["target"] == pytest.approx(141.1, abs=0.1) and whole.advice[0] == "features.whole_target=false"
    )
    assert any("2.10 B parameters of the target are loaded" in line for line in ends.lines)
    assert not any("without its layers" in line for line in whole.lines)
    for found in (of(features={"mode": "server"}), of(features={"mode": "online"}, arch="lm")):
        assert found.loaded_parameters == found.target_parameters


def test_an_independent_drafter_does_not_pay_for_the_target():
    found = of(arch="lm")
    assert "target's forward" not in found.memory_gb
    assert found.flops < of().flops / 10


def test_what_does_not_fit_is_said_with_the_keys_that_help():
    found = of(h100(1))
    assert not found.fits
    (batch,) = (line for line in found.advice if line.startswith("batch_tokens="))
    smaller = int(batch.removeprefix("batch_tokens=").split()[0])
    assert of(h100(1), batch_tokens=smaller).fits, "the advice does not help"
    assert not of(h100(1), batch_tokens=smaller + 512).fits
    assert any("NOT fit" in line for line in found.lines)


LONG = dict(max_length=131_072, drafter={"sliding_window": 2048}, batch_tokens=16_384, features={"mode": "cached"})


def test_long_texts_in_pieces_take_the_memory_of_a_piece():
    """With long prompts or long responses, twice the length takes the same memory in a step of the head. Only the
    target's KV cache is larger."""
    for short, long in (((500, 30_000), (500, 60_000)), ((30_000, 100), (60_000, 100))):
        one, two = (of(texts=Texts(1000, *size, False), piece_length=8192, **LONG).memory_gb for size in (short, long))
        whole = of(texts=Texts(1000, *long, False), **LONG).memory_gb
        assert two["activations"] == pytest.approx(one["activations"], rel=0.05) and two["features"] < 0.6
        assert whole["activations"] > 3 * two["activations"] and whole["features"] > 3 * two["features"]
        assert two["target's forward"] > one["target's forward"]


def test_a_text_longer_than_the_limit_is_counted_as_it_is_cut():
    cut, fitting = (
        of(texts=Texts(100, *size, False), features={"mode": "cached"}) for size in ((2000, 50_000), (2, 2046))
    )
    assert cut.disk_gb["features"] == pytest.approx(fitting.disk_gb["features"], rel=0.01)


def test_a_long_text_pays_for_attention_and_a_piece_for_the_text_before_it():
    """8.03 B parameters less the embedding, and 2 · 32 layers · 4096 channels · S² FLOPs."""
    text = Texts(1000, 500, 100_000, False)
    cached = of(texts=text, piece_length=8192, **LONG)
    target = 1000 * (2 * 7.5e9 * 100_500 + 2 * 32 * 4096 * 100_500**2)
    assert cached.flops == pytest.approx(target, rel=0.1)
    assert cached.disk_gb["features"] < of(texts=text, **LONG).disk_gb["features"] / 20
    responses = Texts(100, 60_000, 100, False)
    kept, anew = (
        of(texts=responses, piece_length=8192, epochs=1, **LONG | {"features": {"mode": mode}}).flops
        for mode in ("cached", "online")
    )
    assert anew > 2 * kept


def test_a_piece_that_does_not_fit_is_to_be_shorter():
    found = of(h100(1), texts=Texts(1000, 60_000, 100, False), piece_length=32_768, **LONG)
    (shorter,) = (line for line in found.advice if line.startswith("piece_length="))
    size = int(shorter.removeprefix("piece_length=").split()[0])
    assert of(h100(1), texts=Texts(1000, 60_000, 100, False), piece_length=size - 256, **LONG).fits


def test_a_time_limit_ends_the_estimate():
    assert of(max_minutes=1.0).hours == pytest.approx(1 / 60)


@pytest.mark.parametrize(
    ("resources", "target", "environ", "expected"),
    [
        ({"gpu": "h100-80g", "gpus": 8}, {}, {}, ("h100-80g", 8, 8)),
        ({"gpu": "h100-80g", "gpus": 8}, {"device_map": "auto"}, {}, ("h100-80g", 8, 1)),
        ({"gpu": "h100-80g", "gpus": 8, "processes": 4}, {"device_map": "auto"}, {}, ("h100-80g", 8, 4)),
        ({"gpu": "h200", "gpus": 16}, {}, {"WORLD_SIZE": "2"}, ("h200", 16, 2)),
        ({"gpu": "l40s"}, {}, {}, ("l40s", 1, 1)),
        ({"threads": 3}, {"device": "cpu"}, {}, ("cpu", 3, 1)),
    ],
)
def test_which_machine_is_meant(resources, target, environ, expected):
    recipe = TrainRecipe(resources=ResourceRecipe(**resources), target=TargetRecipe(**target))
    found = machine_for(recipe, environ)
    assert found is not None
    assert (found.gpu, found.gpus, found.processes) == expected
    assert found.memory_gb > 0


def test_every_name_of_the_recipe_is_in_the_table():
    assert set(machine.DEVICES) == set(get_args(Gpu))
    assert set(machine.PRODUCTS.values()) < set(machine.DEVICES)


def test_options_of_the_engine_do_not_reset_the_stage():
    """A shallow merge of `zero_optimization` would silently fall back to stage 0."""
    recipe = TrainRecipe(zero_stage=2, deepspeed={"zero_optimization": {"overlap_comm": False}})
    config = engine.engine_config(recipe)
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert config["gradient_clipping"] == recipe.optimizer.clip


def test_the_stage_of_the_json_is_that_of_the_recipe():
    """Otherwise the optimizer would be chosen for whole matrices, and get parts of them."""
    recipe = TrainRecipe(deepspeed={"zero_optimization": {"stage": 2}})
    assert (recipe.zero_stage, recipe.optimizer_type) == (2, "adamw")
    assert TrainRecipe(**recipe.model_dump()).zero_stage == 2
