"""Incomplete weights, and weights that another file changes, are refused wherever a model is loaded."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.cli import doctor
from specctl.commands import bench
from specctl.decoding.models.lean import check_slices
from specctl.decoding.models.loading import load_config
from specctl.decoding.models.parallel import Slice, load_slice
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import load_target
from specctl.drafters.lm.model import base_of
from specctl.errors import SpecctlError
from specctl.lab.reasoning.judge import make_judge
from specctl.lab.reasoning.modes import load_draft_lm
from specctl.lab.reasoning.options import JudgeRecipe
from specctl.lab.routing.router import Router
from specctl.lab.train_router.recipe import RouterRecipe
from specctl.measuring.transformers_baseline import load_generator
from specctl.recipe import BenchRecipe, DrafterRecipe, TargetRecipe
from tests.toys.decoding import decode

FP32 = {"device": "cpu", "dtype": "fp32"}
CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
WEIGHTS = "model.safetensors"
UP, BIAS = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"


def tensors(change):
    """Damage the weight file: apply `change` to its dictionary of tensors."""

    def damage(place):
        save_file(change(load_file(place / WEIGHTS)), place / WEIGHTS, metadata={"format": "pt"})

    return damage


def key(**keys):
    """Damage config.json by setting keys."""

    def damage(place):
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(config | keys))

    return damage


def adapter(place):
    """Add a PEFT adapter, as `save_pretrained` writes it."""
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (place / "adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": str(place)}))
    start = "base_model.model.model.layers.0.self_attn.q_proj"
    parts = {f"{start}.lora_A.weight": torch.ones(2, 48), f"{start}.lora_B.weight": torch.ones(48, 2)}
    save_file(parts, place / "adapter_model.safetensors", metadata={"format": "pt"})


def pickled(place):
    """Convert the weights to a pickle, which has no readable header, and leave out one matrix."""
    held = load_file(place / WEIGHTS)
    torch.save({name: tensor for name, tensor in held.items() if name != UP}, place / "pytorch_model.bin")
    (place / WEIGHTS).unlink()


DAMAGES = {
    "lacking": (
        tensors(lambda t: {n: x for n, x in t.items() if ".1.mlp." not in n}),
        r"lack (model\.)?layers\.1\.mlp\.down_proj\.weight, .* config.json requires",
    ),
    "prefix": (tensors(lambda t: {f"base_model.model.{n}": x for n, x in t.items()}), r"prefix 'base_model\.model\."),
    "compiled": (tensors(lambda t: {f"_orig_mod.{n}": x for n, x in t.items()}), r"prefix '_orig_mod\."),
    "shape": (
        tensors(lambda t: t | {UP: t[UP][1:].clone()}),
        rf"{UP[6:]} has shape \[63, 48\] in its files, but config.json requires \[64, 48\]",
    ),
    "bias": (tensors(lambda t: t | {BIAS: torch.ones(48)}), rf"contain {BIAS}, which .* does not have"),
    "unscaled": (tensors(lambda t: t | {f"{UP}_scale_inv": torch.ones(1)}), f"contain {UP}_scale_inv"),
    "quantised": (key(quantization_config={"quant_method": "exl2", "bits": 4}), "quant_method is 'exl2'"),
    "adapter": (adapter, r"adapter \(adapter_config\.json\)"),
    "pickle": (pickled, f"lack {UP}"),
}
IN_LAYERS = {
    "lacking",
    "shape",
    "bias",
    "unscaled",
    "pickle",
    "quantised",
}  # damages that a layerless target does not read


@pytest.fixture(scope="module")
def whole(tiny_directory):
    return tiny_directory("llama")


@pytest.fixture(scope="module")
def tiny(whole):
    return load_target(whole, **FP32)


@pytest.fixture(scope="module")
def damaged(whole, tmp_path_factory):
    """`damaged(name)`: a directory with this damage, and the expected error."""
    made = {}

    def make(name):
        change, says = DAMAGES[name]
        if name not in made:
            made[name] = Path(shutil.copytree(whole, tmp_path_factory.mktemp(name) / "model"))
            change(made[name])
        return made[name], says

    return make


def sliced(place):
    """The first of two slices of a target."""
    config = load_config(place)
    check_slices(place, config, 2)
    return load_slice(place, config, Slice(0, 2), **CPU)


DOORS = {
    "target": lambda place, tiny: load_target(place, **FP32),
    "ends": lambda place, tiny: load_target(place, **FP32, whole=False),
    "slice": lambda place, tiny: sliced(place),
    "base": lambda place, tiny: base_of(DrafterRecipe(base=place), tiny),
    "draft": load_draft_lm,
    "judge": lambda place, tiny: make_judge(JudgeRecipe(kind="model", name=place), "cpu"),
    "encoder": lambda place, tiny: make_judge(JudgeRecipe(kind="embedding", name=place), "cpu"),
    "router": lambda place, tiny: Router.new(RouterRecipe(model=place), ["a", "b"], tiny),
    "bench": lambda place, tiny: bench.load(
        BenchRecipe(target=TargetRecipe(name=place), parts=["steps"]), CPU["device"]
    ),
    "transformers": lambda place, tiny: load_generator(TargetRecipe(name=place), tiny, GREEDY, {}),
}


ALL = ("target", "ends", "slice", "encoder")
"""The other doors use the same checks as `target` or `encoder`, so two damages suffice to show this."""
CASES = [(door, damage) for door in DOORS for damage in DAMAGES if door in ALL or damage in ("lacking", "adapter")]


@pytest.mark.parametrize(("door", "damage"), CASES)
def test_damaged_weights_are_refused_everywhere(door, damage, damaged, tiny):
    """`transformers` only warns and initializes missing weights at random: the text was noise, with exit code 0."""
    place, says = damaged(damage)
    if (door == "ends" and damage in IN_LAYERS) or (door == "encoder" and damage == "quantised"):
        DOORS[door](str(place), tiny)
        return
    if door in ("slice", "encoder") and damage in ("pickle", "quantised"):
        says = "no safetensors|cannot load judge|quantised"
    with pytest.raises(SpecctlError, match=says) as error:
        DOORS[door](str(place), tiny)
    assert str(place) in error.value.message and "\n" not in error.value.message


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "quantised"])  # which an engine may run
def test_doctor_names_the_damage(damage, damaged):
    """It once compared only file sizes and accepted a target without a layer. It reads headers only, so it cannot check
    a pickle."""
    place, says = damaged(damage)
    about, usable = doctor.describe_target(str(place))
    found = doctor.weights(place) if about else usable
    assert found.state == ("ok" if damage == "pickle" else "missing")
    assert damage == "pickle" or (re.search(says, found.value) and found.fix)


@pytest.mark.parametrize("kind", ["llama-bias-tied", "qwen2", "gemma2", "gpt2", "mistral-window"])
def test_derived_tensors_need_not_be_stored(kind, tiny_directory, tmp_path):
    """A tied head comes from the embedding, and buffers are computed. Old files hold frequencies that are not
    needed."""
    place = Path(shutil.copytree(tiny_directory(kind), tmp_path / kind))
    held = load_file(place / WEIGHTS) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    save_file(held, place / WEIGHTS, metadata={"format": "pt"})
    assert doctor.weights(place).state == "ok"
    target = load_target(str(place), **FP32)
    texts = [
        decode(one, [[5, 6, 7]], sampling=GREEDY, seeds=[0], max_new_tokens=4)[0].output_ids
        for one in (target, load_target(tiny_directory(kind), **FP32))
    ]
    assert texts[0] == texts[1]
