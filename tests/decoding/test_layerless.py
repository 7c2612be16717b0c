"""A layerless target equals the whole one outside its layers, bit for bit and with the same identity, and reads nothing
else."""

import json
import multiprocessing
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specctl.decoding.models.loading import builtin_path
from specctl.decoding.target import load_target
from specctl.errors import CheckpointError
from tests.conftest import ARCHITECTURES

FP32 = {"device": "cpu", "dtype": "fp32"}


def sharded(directory, place, without=()):
    """A copy of a checkpoint with its tensors in three files, without the tensors in `without`."""
    for file in Path(directory).iterdir():
        if file.suffix != ".safetensors":
            (place / file.name).write_bytes(file.read_bytes())
    tensors = {name: x for name, x in load_file(Path(directory) / "model.safetensors").items() if name not in without}
    where = {name: f"model-{number % 3 + 1:05}-of-00003.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in sorted(set(where.values())):
        part = {name: x for name, x in tensors.items() if where[name] == file}
        save_file(part, place / file, metadata={"format": "pt"})
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return str(place)


@pytest.mark.parametrize("kind", ["builtin", *ARCHITECTURES])
def test_a_layerless_target_equals_the_whole_one_outside_its_layers(tiny_directory, kind, tmp_path):
    """On both paths, with tied and untied heads, in one file and in several."""
    name = "builtin" if kind == "builtin" else tiny_directory(kind)
    place = sharded(builtin_path() if kind == "builtin" else name, tmp_path)
    for directory in (name, place):
        whole, ends = load_target(directory, **FP32), load_target(directory, **FP32, whole=False)
        assert whole.whole and not ends.whole
        assert (ends.identity, ends.path, ends.eos_ids) == (whole.identity, whole.path, whole.eos_ids)
        assert (ends.num_layers, ends.context_length) == (whole.num_layers, whole.context_length)
        assert ends.squash == whole.squash and ends.row_flops < whole.row_flops
        states = torch.randn(4, whole.hidden_size, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            assert torch.equal(ends.model.logits(states), whole.model.logits(states))
            assert torch.equal(ends.model.normed(states), whole.model.normed(states))
        assert torch.equal(ends.model.embedding, whole.model.embedding)
        assert torch.equal(ends.head_weight, whole.head_weight)
        norms = [ends.norm_weight, whole.norm_weight]
        assert norms == [None, None] or torch.equal(*norms)


def test_a_layerless_target_refuses_a_forward(tiny_directory):
    ends = load_target(tiny_directory("llama"), **FP32, whole=False)
    with pytest.raises(RuntimeError, match="without its layers"):
        ends.model.new_cache(1, 8)
    with pytest.raises(RuntimeError, match="without its layers"):
        ends.model.forward(torch.zeros(1, 1, dtype=torch.long), None, None, ())


def test_a_missing_tensor_is_named(tiny_directory, tmp_path):
    """`transformers` would initialize it at random."""
    place = sharded(tiny_directory("qwen3"), tmp_path, without=["model.norm.weight"])
    with pytest.raises(CheckpointError, match=r"lack model\.norm\.weight") as error:
        load_target(place, **FP32, whole=False)
    assert "features.whole_target" in error.value.hint


def test_a_target_with_quantized_layers_loads_without_them(tiny_directory, tmp_path):
    """Published files quantize only the layers. These targets use transformers' path."""
    place = Path(sharded(tiny_directory("llama"), tmp_path))
    config = json.loads((place / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (place / "config.json").write_text(json.dumps(config))
    ends = load_target(str(place), **FP32, whole=False)
    assert ends.path == "transformers" and ends.config.quantization_config
    assert torch.equal(ends.head_weight, load_target(tiny_directory("llama"), **FP32).head_weight)


def peak():
    """The peak memory of this process in MiB."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def send_peaks(answer, place, name):
    """Send the memory that loading a layerless target takes, and the memory that reading one matrix of a layer
    takes."""
    load_target(name, device="cpu", dtype="fp32", whole=False)
    before = peak()
    target = load_target(place, device="cpu", dtype="fp32", whole=False)
    loaded = peak()
    with safe_open(place + "/model-00002-of-00002.safetensors", "pt") as file:
        file.get_tensor("model.layers.0.mlp.up_proj.weight").sum()
    answer.send((target.row_flops, loaded - before, peak() - loaded))


def test_no_layer_is_read(tiny_directory, tmp_path):
    """The layers are 12 GB of a sparse file, so every matrix that is read shows in the memory of the process."""
    name, inner, layers, size = tiny_directory("llama"), 2**20, 20, 48
    place = Path(sharded(name, tmp_path))
    config = json.loads((place / "config.json").read_text())
    config |= {"intermediate_size": inner, "num_hidden_layers": layers}
    (place / "config.json").write_text(json.dumps(config))
    tensors = load_file(Path(name) / "model.safetensors")
    rest = {key: x for key, x in tensors.items() if ".layers." not in key}
    for file in place.glob("*.safetensors"):
        file.unlink()
    save_file(rest, place / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    header, end = {}, 0
    for layer in range(layers):
        for key, x in tensors.items():
            if key.startswith("model.layers.0."):
                wide = {"mlp.up_proj": [inner, size], "mlp.gate_proj": [inner, size], "mlp.down_proj": [size, inner]}
                shape = next((shape for part, shape in wide.items() if part in key), list(x.shape))
                start, end = end, end + 4 * torch.Size(shape).numel()
                entry = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
                header[key.replace(".0.", f".{layer}.")] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(place / "model-00002-of-00002.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    files = dict.fromkeys(rest, "model-00001-of-00002.safetensors")
    files |= dict.fromkeys(header, "model-00002-of-00002.safetensors")
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    context = multiprocessing.get_context("fork")
    found, answer = context.Pipe(duplex=False)
    process = context.Process(target=send_peaks, args=(answer, str(place), name))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    _, loading, one_matrix = found.recv()
    assert end > 12e9 and loading < 64 and one_matrix > 150
