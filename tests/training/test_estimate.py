"""The cost estimate agrees with published sizes, and reacts to each option in the right direction."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from safetensors import safe_open
from transformers import Gemma3nTextConfig, Gemma4TextConfig, LlamaConfig, MixtralConfig

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
TINY = dict(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
TEXTS = Texts(10_000, 500, 100, False)
CPU = Machine("cpu", 2, 1, 16)


def h100(gpus=8, processes=None):
    return Machine("h100-80g", gpus, processes or gpus, 80)


def of(machine=None, texts=TEXTS, **changes):
    return estimate(TrainRecipe(**changes), LLAMA31_8B, machine or h100(), texts)


def test_parameter_counts_match_published_models():
    """The published EAGLE-3 head for this target has 8.5e8 bytes in fp16."""
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


def test_active_parameters_exclude_idle_experts_and_the_embedding():
    sizes = dict(vocab_size=1000, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    outline = Outline.of(MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2), torch.bfloat16)
    experts = 2 * 8 * 3 * 64 * 256
    matrices = outline.parameters - 5 * 64  # minus norms
    assert outline.active == matrices - experts * 3 // 4 - 1000 * 64


@pytest.mark.parametrize(
    "config",
    [
        Gemma4TextConfig(**TINY, head_dim=16, global_head_dim=24, layer_types=["sliding_attention", "full_attention"]),
        Gemma3nTextConfig(**TINY | {"intermediate_size": [96, 96]}, head_dim=16, layer_types=["full_attention"] * 2,
                          num_kv_shared_layers=0),
    ],
    ids=["head_dim by layer", "intermediate_size by layer"],
)  # fmt: skip
def test_a_target_may_state_sizes_by_layer(config):
    """Gemma 4 raised transformers' AmbiguousGlobalPerLayerAttributeError, from a head and from an estimate."""
    found = estimate(TrainRecipe(), config, CPU, TEXTS)
    shape = Outline.of(config, torch.bfloat16).drafter(TrainRecipe()).config
    assert (shape.head_dim, shape.intermediate_size) == (16, 96)
    assert found.drafter_parameters > 0


def test_each_drafter_layer_adds_to_parameters_compute_and_memory():
    one, two, three = (of(drafter={"num_layers": count}) for count in (1, 2, 3))
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert two.drafter_parameters - one.drafter_parameters == layer + 2 * 4096
    assert three.drafter_parameters - two.drafter_parameters == layer + 2 * 4096
    first = layer + 4096 * (4096 + 2 * 1024)  # the projections of the first layer read two inputs
    prompts = TEXTS.responses * TEXTS.prompt_tokens * 5  # times epochs
    longer = replace(TEXTS, prompt_tokens=2 * TEXTS.prompt_tokens)
    added = [of(texts=longer, drafter={"num_layers": count}).flops for count in (1, 2, 3)]
    target = added[0] - one.flops
    inputs, rest = PROMPT_COST * layer, 1 - PROMPT_COST  # in prompts, the last layer computes only keys and values
    assert added[1] - two.flops - target == pytest.approx(6 * prompts * (inputs + rest * first), rel=0.01)
    assert added[2] - three.flops - target == pytest.approx(
        6 * prompts * (2 * inputs + rest * (first + layer)), rel=0.01
    )
    assert one.memory_gb["activations"] < two.memory_gb["activations"] < three.memory_gb["activations"]
    assert one.hours < two.hours < three.hours


def test_drafter_state_is_16_bytes_per_parameter_and_shrinks_with_the_zero_stage():
    states = [of(optimizer={"type": "adamw"}, zero_stage=stage).memory_gb["drafter"] for stage in range(4)]
    assert states[0] == pytest.approx(16 * of().drafter_parameters / 1e9)
    assert states == sorted(states, reverse=True)
    assert len(set(states)) == 4


def test_muon_needs_less_memory_than_adamw():
    assert of(optimizer={"type": "muon"}).memory_gb["drafter"] < of(optimizer={"type": "adamw"}).memory_gb["drafter"]


def test_more_gpus_are_faster_and_split_the_batch():
    one, eight = of(h100(1)), of(h100(8))
    assert eight.hours == pytest.approx(one.hours / 8, rel=0.01)
    assert 0.99 < eight.useful_share < one.useful_share == 1
    assert any("of which processes wait 0." in line for line in eight.lines)
    assert not any("processes wait" in line for line in one.lines)
    assert eight.memory_gb["activations"] < one.memory_gb["activations"]
    assert eight.memory_gb["target"] == one.memory_gb["target"]


def test_spreading_the_target_saves_memory_but_no_time():
    """Layers on several GPUs run in sequence: eight GPUs in one process are not eight times as fast."""
    spread, single = of(h100(8, 1)), of(h100(1))
    assert spread.memory_gb["target"] == pytest.approx(single.memory_gb["target"] / 8)
    assert spread.hours == single.hours


def test_cached_features_save_target_passes_and_use_disk():
    online, cached = (of(features={"mode": mode}) for mode in ("online", "cached"))
    assert cached.flops < online.flops
    assert "features" not in online.disk_gb
    tokens = TEXTS.responses * (3 * (TEXTS.response_tokens + TEXTS.prompt_tokens) + TEXTS.response_tokens)
    assert cached.disk_gb["features"] == pytest.approx(tokens * 4096 * 2 / 1e9)


def test_kept_features_occupy_a_gpu_for_two_batches():
    """The next batch is copied during a step; a CPU needs no copy."""
    for device, batches in ((h100(), 2), (CPU, 1)):
        once, kept = (of(device, features={"mode": mode}).memory_gb["features"] for mode in ("online", "cached"))
        assert kept == pytest.approx(batches * once)


def test_features_in_memory_count_as_host_memory():
    """Counting them as GPU memory refused trainings that fit."""
    for device, more in ((h100(), 1), (CPU, 10)):
        cached, kept = (of(device, features={"mode": mode}).memory_gb["features"] for mode in ("cached", "memory"))
        assert kept == cached if more == 1 else kept > more * cached


def test_a_cpu_runs_the_target_over_one_text_at_a_time():
    """Memory for a GPU's batch of texts was 4.6 GB for a target of 0.6 B parameters, where it takes 0.5."""
    device, short, long = (
        estimate(TrainRecipe(), LLAMA31_8B, machine, texts).memory_gb["target's forward"]
        for machine, texts in ((h100(), TEXTS), (CPU, TEXTS), (CPU, replace(TEXTS, prompt_tokens=1500)))
    )
    logits = 512 * 128256 * 4 / 1e9  # in fp32, before they are rounded or beside the rounded ones
    assert logits < short < logits + 0.9 < device / 3
    assert short < long < device


def test_the_python_process_and_the_drafter_of_a_check_count_on_a_cpu():
    """The estimate of a head for the built-in target was 0.12 GB, where the training took 0.62 GB."""
    config, texts = load_config("builtin"), Texts(6, 66, 60, True)

    def memory(device, **changes):
        return estimate(TrainRecipe(**changes), config, device, texts).memory_gb

    whole = memory(CPU)
    assert 0.5 < sum(whole.values()) < 0.65 and whole["acceptance check"] == 0
    small = memory(CPU, batch_tokens=1, gradient_checkpointing=True, drafter={"vocab_size": 4096, "num_layers": 16})
    assert small["acceptance check"] > 0
    assert not {"process", "acceptance check"} & memory(h100(1)).keys()
    ends = memory(CPU, features={"mode": "server", "whole_target": False})
    assert "process" in ends and "acceptance check" not in ends


def test_a_target_that_does_not_fit_is_loaded_without_its_layers():
    """If features come from elsewhere, 2.1 B of 70.6 B parameters are loaded; a target that fits is loaded whole."""
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


def test_an_independent_drafter_needs_no_target_pass():
    found = of(arch="lm")
    assert "target's forward" not in found.memory_gb
    assert found.flops < of().flops / 10


def test_a_training_that_does_not_fit_gets_advice_that_helps():
    found = of(h100(1))
    assert not found.fits
    (batch,) = (line for line in found.advice if line.startswith("batch_tokens="))
    smaller = int(batch.removeprefix("batch_tokens=").split()[0])
    assert of(h100(1), batch_tokens=smaller).fits, "the advice does not help"
    assert not of(h100(1), batch_tokens=smaller + 512).fits
    assert any("NOT fit" in line for line in found.lines)


LONG = dict(max_length=131_072, drafter={"sliding_window": 2048}, batch_tokens=16_384, features={"mode": "cached"})


def test_memory_for_long_texts_in_pieces_is_that_of_one_piece():
    """Twice the prompt or response takes the same memory in a head step; only the target's KV cache grows."""
    for short, long in (((500, 30_000), (500, 60_000)), ((30_000, 100), (60_000, 100))):
        one, two = (of(texts=Texts(1000, *size, False), piece_length=8192, **LONG).memory_gb for size in (short, long))
        whole = of(texts=Texts(1000, *long, False), **LONG).memory_gb
        assert two["activations"] == pytest.approx(one["activations"], rel=0.05) and two["features"] < 0.6
        assert whole["activations"] > 3 * two["activations"] and whole["features"] > 3 * two["features"]
        assert two["target's forward"] > one["target's forward"]


def test_texts_over_the_limit_are_counted_as_cut():
    cut, fitting = (
        of(texts=Texts(100, *size, False), features={"mode": "cached"}) for size in ((2000, 50_000), (2, 2046))
    )
    assert cut.disk_gb["features"] == pytest.approx(fitting.disk_gb["features"], rel=0.01)


def test_long_texts_pay_for_attention_and_pieces_for_their_prefix():
    """8.03 B parameters minus the embedding, and 2 · 32 layers · 4096 channels · S² FLOPs."""
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


def test_a_piece_that_does_not_fit_gets_advice_for_a_shorter_one():
    found = of(h100(1), texts=Texts(1000, 60_000, 100, False), piece_length=32_768, **LONG)
    (shorter,) = (line for line in found.advice if line.startswith("piece_length="))
    size = int(shorter.removeprefix("piece_length=").split()[0])
    assert of(h100(1), texts=Texts(1000, 60_000, 100, False), piece_length=size - 256, **LONG).fits


def test_a_time_limit_bounds_the_estimate():
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
def test_the_machine_follows_from_recipe_and_environment(monkeypatch, resources, target, environ, expected):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    recipe = TrainRecipe(resources=ResourceRecipe(**resources), target=TargetRecipe(**target))
    found = machine_for(recipe)
    assert found is not None
    assert (found.gpu, found.gpus, found.processes) == expected
    assert found.memory_gb > 0


def test_the_device_table_has_every_gpu_of_the_recipe():
    assert set(machine.DEVICES) == set(get_args(Gpu))
    assert set(machine.PRODUCTS.values()) < set(machine.DEVICES)


def test_zero_options_do_not_reset_the_stage():
    """A shallow merge of `zero_optimization` would silently fall back to stage 0."""
    recipe = TrainRecipe(zero_stage=2, deepspeed={"zero_optimization": {"overlap_comm": False}})
    config = engine.engine_config(recipe)
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert config["gradient_clipping"] == recipe.optimizer.clip


def test_the_recipe_takes_the_stage_of_its_deepspeed_options():
    """Otherwise the optimizer would be chosen for whole matrices but would get partitioned ones."""
    recipe = TrainRecipe(deepspeed={"zero_optimization": {"stage": 2}})
    assert (recipe.zero_stage, recipe.optimizer_type) == (2, "adamw")
    assert TrainRecipe(**recipe.model_dump()).zero_stage == 2
