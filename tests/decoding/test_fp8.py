"""Targets with fp8 weights on a machine without a GPU, where `transformers` dequantizes them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.decoding.models.describe import describe
from specctl.decoding.target import load_target
from specctl.errors import CheckpointError

SCALE = 0.25


@pytest.fixture
def fp8(tiny_directory, tmp_path, monkeypatch):
    """A directory with the layers' products in fp8, and a directory with the same values in fp32."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    places = tmp_path / "fp8", tmp_path / "plain"
    held = load_file(Path(tiny_directory("llama")) / "model.safetensors")
    coded = {name: (x / SCALE).to(torch.float8_e4m3fn) for name, x in held.items() if "_proj" in name}
    scales = {f"{name}_scale_inv": torch.full((1, 1), SCALE) for name in coded}
    plain = {name: code.float() * SCALE for name, code in coded.items()}
    for place, tensors in zip(places, (coded | scales, plain), strict=True):
        shutil.copytree(tiny_directory("llama"), place)
        save_file(held | tensors, place / "model.safetensors", {"format": "pt"})
    file = places[0] / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    file.write_text(json.dumps(config))
    return tuple(map(str, places))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_dequantized_weights_have_the_dtype_of_the_target(fp8, dtype):
    """In fp32, the default, products of bf16 and fp32 failed with an error of PyTorch."""
    logits = []
    for place in fp8:
        target = load_target(place, device="cpu", dtype=dtype)
        assert target.path == "lean"
        logits.append(target.prefill([[5, 9, 200, 31]], target.model.new_cache(1, 4))[0])
    torch.testing.assert_close(*logits)


def test_the_description_tells_how_it_runs(fp8):
    """It named the forward of `transformers`, which never ran it."""
    assert describe(fp8[0]).path == "lean" and "dequantized" in describe(fp8[0]).why
    assert describe(fp8[0]).dtype == describe(fp8[1]).dtype and "fp8" not in describe(fp8[1]).why


def test_a_weight_without_its_scale_is_refused_by_name(fp8):
    """The codes were multiplied as weights, or ended in an error about dtypes."""
    file = Path(fp8[0]) / "model.safetensors"
    held = load_file(file)
    del held["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(held, file, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"no scales .* of the fp8 weights model\.layers\.1\.mlp\.up_proj\.weight$"
    ):
        load_target(fp8[0], device="cpu")
