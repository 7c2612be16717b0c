"""A digest distinguishes a target's weights from others at the same path, without reading all tensors."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from specctl.decoding import target_text
from specctl.decoding.models.loading import load_config, load_tokenizer, location
from specctl.decoding.target_text import weights_digest, with_weights_digest
from specctl.errors import CheckpointError


@pytest.fixture
def model(tmp_path):
    """Two matrices and a norm, in two shards with an index."""
    place = tmp_path / "model"
    place.mkdir()
    torch.manual_seed(0)
    save_file({"a": torch.randn(64, 64), "norm": torch.ones(8)}, place / "one.safetensors")
    save_file({"b": torch.randn(64, 64)}, place / "two.safetensors")
    (place / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "one.safetensors", "norm": "one.safetensors", "b": "two.safetensors"}}'
    )
    return place


@pytest.mark.parametrize("whole", [2**26, 0])
def test_the_digest_changes_with_any_tensor(model, tmp_path, monkeypatch, whole):
    """Each tensor is changed in place; a copy of the files has an equal digest."""
    monkeypatch.setattr(target_text, "WHOLE", whole)
    monkeypatch.setattr(target_text, "BLOCK", 64)
    first = weights_digest(str(model))
    assert weights_digest(str(shutil.copytree(model, tmp_path / "copy"))) == first
    found = {first}
    for tensors, file in (
        ({"a": torch.zeros(64, 64), "norm": torch.ones(8)}, "one.safetensors"),
        ({"a": torch.zeros(64, 64), "norm": torch.ones(8) * 2}, "one.safetensors"),
        ({"b": torch.zeros(64, 64)}, "two.safetensors"),
        ({"b": torch.zeros(32, 128)}, "two.safetensors"),
    ):
        save_file(tensors, model / file)
        found.add(weights_digest(str(model)))
    assert len(found) == 5 and all(len(digest) == 16 for digest in found)


def test_pickled_weights_are_sampled_throughout_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(target_text, "WHOLE", 0)
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(bytes(10**6))
    first = weights_digest(str(tmp_path))
    path.write_bytes(bytes(500_000) + b"x" * 2000 + bytes(498_000))
    assert weights_digest(str(tmp_path)) not in (first, None)


def test_a_directory_without_weights_has_no_digest(tmp_path):
    assert weights_digest(str(tmp_path)) is None


def test_records_without_a_digest_match_any_weights():
    now = {"target": {"name": "m", "weights": "ab"}}
    assert with_weights_digest({"target": {"name": "m"}}, now) == now
    assert with_weights_digest({"target": {"name": "m", "weights": "cd"}}, now)["target"]["weights"] == "cd"


@pytest.mark.parametrize(
    ("index", "says"),
    [("[" * 100_000, "nested too deeply"), ("[]", "cannot be read"), ('{"weight_map": {"a": "../x"}}', "x")],
)
def test_an_unreadable_index_is_refused(model, index, says):
    (model / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=says) as error:
        weights_digest(str(model))
    assert str(model) in error.value.message


def test_a_pipe_among_the_files_of_a_model_is_not_opened(model, pipe):
    """`transformers` would open the pipe, because it looks for a file of this name."""
    name = pipe(model / "tokenizer_config.json")
    for look in (weights_digest, location, load_tokenizer, load_config):
        with pytest.raises(CheckpointError, match="a named pipe, not a regular file") as error:
            look(str(model))
        assert str(name) in error.value.message
