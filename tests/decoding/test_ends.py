"""Embedding, final norm and head of targets that only engines run: equal to the `transformers` model's, under any
tensor names."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.decoding.models.weight_files import EMBEDDINGS, WeightFiles
from specctl.decoding.target import load_target
from specctl.errors import CheckpointError
from specctl.formats.head import TargetFacts
from tests.toys.engine_targets import TARGETS, forward, write

FP32 = {"device": "cpu", "dtype": "fp32"}
IDS = [5, 100, 7, 300, 41, 9, 2000, 4090]


OFTEN = ("qwen3-next", "qwen3.5", "nemotron-h", "granite-hybrid", "llama4", "llava")


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in TARGETS]
)
def test_embedding_norm_and_logits_equal_transformers(name, tmp_path):
    """From the state before the final norm to the logits. A norm's weight may be the factor or the factor minus one,
    logits may be scaled, heads may be tied. Catches the norm of a vision tower or draft layer."""
    model = write(name, tmp_path)
    logits, states = forward(name, model, IDS)
    target = load_target(str(tmp_path), **FP32, whole=False)
    assert not target.whole and target.vocab_size == 4224 and target.num_layers == 4
    assert target.hidden_size == 64 and target.identity["weights"]
    with torch.no_grad():
        normed = model.get_submodule(TARGETS[name][2])(states[-1])
    assert torch.equal(target.model.normed(states[-1]), normed)
    torch.testing.assert_close(target.model.logits(normed), logits, rtol=1e-5, atol=1e-5)
    rows = torch.nn.functional.rms_norm(states[-1], (64,), target.norm_weight, eps=1e-5)
    torch.testing.assert_close(rows, normed, rtol=1e-3, atol=1e-3)
    assert torch.equal(target.model.embedding, model.get_input_embeddings().weight)
    products = (normed @ target.head_weight.T).float()
    torch.testing.assert_close(products * target.squash.scale, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h"])
def test_exports_read_the_embedding_without_loading_the_target(name, tmp_path):
    """An exported head with a learned mask contains a copy of the embedding. Nemotron-H names it
    `backbone.embeddings.weight`."""
    model = write(name, tmp_path)
    made_for = {"name": str(tmp_path), "hidden_size": 64, "num_layers": 4, "vocab_size": 4224}
    facts = TargetFacts.of_identity(made_for)
    assert torch.equal(facts.token_embedding(), model.get_input_embeddings().weight)
    assert facts.context_length == 512 and facts.architectures == model.config.architectures


PREFIXES = {
    "a draft layer": ("model.language_model.", "mtp."),
    "a draft layer among the layers": ("model.language_model.", "model.layers.4."),
    "outside": ("language_model.model.", "talker.model.codec."),
    "a part that thinks": ("thinker.model.", "mtp."),
}


@pytest.mark.parametrize("case", PREFIXES)
def test_the_targets_own_embedding_and_norm_are_found_under_any_prefix(case, tmp_path):
    """Draft layers have an embedding and a norm of equal shapes, and the index may list its files in any order."""
    model = write("qwen3.5-moe", tmp_path)
    prefix, other = PREFIXES[case]
    kept = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    old = "model.language_model."
    ends = {name: tensor for name, tensor in kept.items() if name.startswith((f"{old}embed_tokens", f"{old}norm"))}
    renamed = {name.replace(old, prefix): tensor for name, tensor in ends.items()}
    renamed["lm_head.weight"] = kept["lm_head.weight"]
    copies = {name.replace(old, other): torch.zeros_like(tensor) for name, tensor in ends.items()}
    parts = {"model-00001-of-00002.safetensors": copies, "model-00002-of-00002.safetensors": renamed}
    for file, tensors in parts.items():
        save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    where = {name: file for file, tensors in parts.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    target = load_target(str(tmp_path), **FP32, whole=False)
    assert torch.equal(target.model.embedding, model.get_input_embeddings().weight)
    assert torch.equal(target.head_weight, model.get_output_embeddings().weight)
    assert torch.equal(target.model.normed(torch.ones(1, 64)), model.model.language_model.norm(torch.ones(1, 64)))


@pytest.mark.parametrize("lost", ["embed_tokens", "norm", "lm_head"])
def test_a_missing_tensor_is_named(lost, tmp_path):
    write("qwen3-next", tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    outside = {name: x for name, x in kept.items() if ".layers." in name or f"{lost}.weight" not in name}
    save_file(outside, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"its files lack \S*{lost}\.weight of shape"):
        load_target(str(tmp_path), **FP32, whole=False)


def test_a_quantized_head_is_refused(tmp_path):
    """Its bytes would be taken for numbers."""
    write("qwen3-next", tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    kept["lm_head.weight"] = kept["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is stored as torch\.float8"):
        load_target(str(tmp_path), **FP32, whole=False)


def test_tensors_are_found_by_name_and_shape(tmp_path):
    """The position embeddings of a tower have a name with the same ending."""
    own, positions = torch.ones(20, 4), torch.zeros(9, 4)
    held = {"model.embeddings.weight": positions, "backbone.embeddings.weight": own}
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert WeightFiles(str(tmp_path)).find(EMBEDDINGS, (20, 4)) == "backbone.embeddings.weight"
    assert WeightFiles(str(tmp_path)).find(EMBEDDINGS, (21, 4)) is None
