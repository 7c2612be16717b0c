"""Heads exported for llama.cpp: its arithmetic on the file gives the logits of our drafter."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from specctl.cli.main import run
from specctl.commands import export as exporting
from specctl.commands.import_ import import_head
from specctl.decoding.models.gguf_file import Numbers
from specctl.decoding.models.loading import builtin_path
from specctl.drafters import checkpoint
from specctl.errors import CheckpointError, UsageError
from specctl.formats import head_directory, llamacpp, registry
from specctl.formats.gguf_writer import write as write_gguf
from specctl.recipe import ExportRecipe, ImportRecipe
from tests.drafters.variants import VARIANTS
from tests.formats import llamacpp_arithmetic
from tests.formats.conftest import CUSTOM, DEFAULT, STEPS
from tests.formats.test_export import assert_same
from tests.toys.gguf import write

PLAIN = {"fc_norm": False, "norm_output": False}
UNREAD = ("fc_norm", "norm_output", "sliding_window", "num_layers")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The built-in target as a GGUF file in fp32."""
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write(builtin_path(), path)
    return path


@pytest.fixture
def exact(monkeypatch):
    """Write fp32 matrices, because rounding to bf16 would hide small errors."""
    monkeypatch.setattr(llamacpp, "_rounded", lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)


def export(drafter, place, file, **options):
    recipe = ExportRecipe(drafter=drafter, to="llama.cpp", output_dir=place, check=True, target={"name": str(file)})
    return exporting.export(recipe.model_copy(update=options))


def drafted(consumer, place, model, text, **options):
    ids, committed = text
    return consumer(place / "model.gguf", model, ids[:committed], ids[committed : committed + STEPS - 1], **options)


@pytest.mark.parametrize("options", [{}, {"norm_before_fc": True}, {"norm_before_residual": True}], ids=str)
@pytest.mark.parametrize(("taps", "draft_vocab"), [(DEFAULT, None), (CUSTOM, 700)])
def test_eagle3_logits_equal_llama_cpp(make, ours, model, text, tmp_path, file, exact, taps, draft_vocab, options):
    """Catches rotary dimensions in halves, offsets instead of ids, an off-by-one in a tap, and an omitted norm."""
    drafter = make("eagle3", taps=taps, draft_vocab=draft_vocab, **options)
    result = export(drafter, tmp_path / "out", file)
    assert_same(drafted(llamacpp_arithmetic.eagle3, tmp_path / "out", model, text), ours(drafter))
    assert result.max_difference < 1e-4
    assert result.commands[0].split("--spec-type ")[1] == "draft-eagle3 --spec-draft-n-max 3 --metrics"
    assert str(file) in result.commands[0] and str(tmp_path / "out/model.gguf") in result.commands[0]


@pytest.mark.parametrize(("to", "options"), [("vllm", {}), ("sglang", {}), ("speculators", {}), ("eagle", PLAIN)])
def test_a_command_for_an_engine_without_gguf_names_the_original(make, tmp_path, file, to, options):
    """The commands passed the path of the GGUF file to vLLM and SGLang, which cannot serve it."""
    found = export(make("eagle3", taps=DEFAULT, **options), tmp_path / "out", file, to=to)
    assert len(found.commands) == 1 and "ORIGINAL-MODEL" in found.commands[0]
    assert not [command for command in found.commands if ".gguf" in command]
    assert [note for note in found.notes if "ORIGINAL-MODEL" in note and "no GGUF" in note]


def test_the_plan_of_a_feature_server_names_the_original_of_a_gguf_target(file, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    argv = ["train-drafter", "--target", str(file), "--domain", "sql", "features.mode=server", "--dry-run", "--json"]
    assert run(argv) == 0
    steps = json.loads(capfd.readouterr().out)["steps"]
    starts = [step for step in steps if step.startswith("start a server with")]
    assert starts and all("ORIGINAL-MODEL" in step and ".gguf" not in step for step in starts)
    assert [step for step in steps if "no GGUF" in step]


@pytest.mark.parametrize("own_mask", [True, False], ids=["own mask", "target's row"])
@pytest.mark.parametrize(("rank", "draft_vocab"), [(0, None), (0, 700), (8, None), (8, 700)])
def test_block_logits_equal_llama_cpp(make, ours, model, text, tmp_path, file, exact, rank, draft_vocab, own_mask):
    """Catches layers counted from their outputs, the target's row in the masks, and an extra slot."""
    drafter = make("dflash", rank=rank, draft_vocab=draft_vocab, own_mask=own_mask)
    result = export(drafter, tmp_path / "out", file)
    found = drafted(llamacpp_arithmetic.block, tmp_path / "out", model, text, tokens=result.tokens)
    assert_same(found, ours(drafter))
    assert result.max_difference < 1e-4
    assert f"--spec-type {'draft-dspark' if rank else 'draft-dflash'}" in result.commands[0]


SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = {"sliding_window": 70, "layer_types": (SLIDING, FULL)}


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 64, "layer_types": (SLIDING, SLIDING)},
        {"is_causal": True},
        MIXED | {"is_causal": True},
        MIXED | {"is_causal": False, "rank": 8},
    ],
    ids=str,
)
def test_windows_and_causal_blocks_equal_llama_cpp(make, ours, target, model, text, tmp_path, file, exact, options):
    """Catches a window without its pattern, and a causal mask missing from the file."""
    drafter = make("dflash", **options)
    result = export(drafter, tmp_path / "out", file)
    found = drafted(llamacpp_arithmetic.block, tmp_path / "out", model, text, tokens=result.tokens)
    assert_same(found, ours(drafter))
    back = ImportRecipe(head=tmp_path / "out", output_dir=tmp_path / "back", probe={"enabled": False})
    import_head(back, target=target)
    one, two = (checkpoint.load(path).config["architecture"] for path in (drafter, tmp_path / "back"))
    assert {key for key in one.keys() | two.keys() if one.get(key) != two.get(key)} <= {"max_position_embeddings"}


def test_a_head_with_only_some_causal_layers_is_refused(make, tmp_path, file):
    """llama.cpp has one flag for all layers and would draft without the causal mask."""
    with pytest.raises(CheckpointError, match="only some layers of the head are causal") as error:
        export(make("dflash", **MIXED), tmp_path / "out", file)
    assert "--to vllm" in error.value.hint and not (tmp_path / "out").exists()


@pytest.mark.parametrize("named", ["out", "out/model.gguf"])
def test_the_command_line_imports_an_exported_gguf(make, tmp_path, file, monkeypatch, named):
    """It used to look for a config.json, which is not there."""
    monkeypatch.chdir(tmp_path)
    export(make("eagle3", taps=DEFAULT, draft_vocab=700), tmp_path / "out", file)
    assert run(["import", named, "--target", "builtin", "--no-probe"]) == 0
    assert checkpoint.family(tmp_path / "drafters" / Path(named).stem) == "eagle3"


def test_the_check_notices_halves_instead_of_pairs(make, ours, model, text, tmp_path, file, exact, monkeypatch):
    """Negative control of the tests above."""
    drafter = make("eagle3", taps=DEFAULT, draft_vocab=None)
    monkeypatch.setattr(llamacpp, "in_pairs", lambda weight, heads: weight)
    with pytest.raises(CheckpointError, match="differs by"):
        export(drafter, tmp_path / "out", file)
    export(drafter, tmp_path / "out", file, check=False)
    found = drafted(llamacpp_arithmetic.eagle3, tmp_path / "out", model, text)
    assert (found - ours(drafter)).abs().max() > 0.01


def test_matrices_are_bf16_and_the_tokenizer_is_copied_from_the_target(make, tmp_path, file):
    result = export(make("eagle3", draft_vocab=64), tmp_path / "out", file)
    head, target = (gguf.GGUFReader(path) for path in (tmp_path / "out/model.gguf", file))
    kinds = {one.name: one.tensor_type.name for one in head.tensors}
    assert kinds.pop("d2t") == "I64" and {kinds[name] for name in kinds if "norm" in name} == {"F32"}
    assert {kinds[name] for name in kinds if "norm" not in name} == {"BF16"}
    assert result.max_difference == 0, "compared with the rounded head"
    for name, field in target.fields.items():
        if name.startswith("tokenizer."):
            assert head.fields[name].contents() == field.contents() and head.fields[name].types == field.types


@pytest.mark.parametrize("variant", VARIANTS)
def test_options_unsupported_by_llama_cpp_are_refused_by_name(make, tmp_path, file, variant):
    wrong = [name for name in UNREAD if VARIANTS[variant].get(name)]
    drafter = make("eagle3", draft_vocab=64, **VARIANTS[variant])
    if not wrong:
        assert export(drafter, tmp_path / "out", file).max_difference == 0
        return
    with pytest.raises(CheckpointError, match=r" and ".join(wrong)) as error:
        export(drafter, tmp_path / "out", file)
    assert "train-drafter/llama-cpp" in error.value.hint and not (tmp_path / "out").exists()


def test_unsupported_targets_and_heads_are_refused(make, tmp_path, file):
    with pytest.raises(CheckpointError, match="serves GGUF files") as error:
        exporting.export(
            ExportRecipe(drafter=make("eagle3", draft_vocab=64), to="llama.cpp", output_dir=tmp_path / "o")
        )
    assert "--target FILE.gguf" in error.value.hint
    with pytest.raises(CheckpointError, match="DFlash 2"):
        export(make("dflash", conv_kernel_size=2, selector_rank=4), tmp_path / "out", file)
    with pytest.raises(UsageError, match="hydra drafters cannot be written"):
        export(make("hydra"), tmp_path / "out", file)
    with pytest.raises(CheckpointError, match="no engine can provide"):
        export(make("eagle3", taps=(2, 5), draft_vocab=64), tmp_path / "out", file)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("eagle3", {"draft_vocab": 700, "norm_before_fc": True, "norm_before_residual": True}),
        ("dflash", {"rank": 8, "draft_vocab": 700, "own_mask": True, "confidence": True}),
    ],
)
def test_an_exported_file_can_be_imported(make, target, tmp_path, file, family, options):
    drafter = make(family, **options)
    export(drafter, tmp_path / "out", file)
    result = import_head(
        ImportRecipe(head=tmp_path / "out", output_dir=tmp_path / "back", probe={"enabled": False}), target=target
    )
    before, after = checkpoint.load(drafter), checkpoint.load(tmp_path / "back")
    longer = before.config["architecture"] | {"max_position_embeddings": target.context_length}
    assert (result.format, after.config["architecture"]) == ("llama.cpp", longer)
    for name, tensor in before.tensors.items():
        assert torch.equal(after.tensors[name], llamacpp._rounded(tensor).to(after.tensors[name])) or (
            name == "mask_embedding" and torch.allclose(after.tensors[name], tensor, rtol=2**-8)
        )


def test_empty_arrays_and_large_integers_are_written(tmp_path):
    """A tokenizer without merges has an empty array, and integers may need 64 bits. Both used to raise."""
    metadata = {
        "general.architecture": "eagle3",
        "tokenizer.ggml.merges": [],
        "large": 2**33,
        "none": Numbers.of(np.zeros(0, "<f4")),
    }
    write_gguf(tmp_path / "m.gguf", metadata, {"fc.weight": torch.zeros(2, 2)})
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["large"].contents() == 2**33 and not {"none", "tokenizer.ggml.merges"} & fields.keys()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("eagle3.target_layers", [2, 5], "fc.weight is of shape"),
        ("eagle3.target_layers", "2", "target_layers is 2"),
        ("eagle3.rope.freq_base", "1e4", "rope_theta is 1e4"),
        ("eagle3.rope.freq_base", Numbers.of(np.ones(2, "<f4")), "rope_theta is .1.0, 1.0"),
        ("eagle3.rope.scaling.type", Numbers.of(np.ones(2, "<f4")), "rope.scaling.type is .1.0, 1.0"),
        ("eagle3.block_count", 0, "block_count is 0"),
        ("eagle3.embedding_length", 8, "hidden_size is 8"),
        ("eagle3.rope.scaling.type", "yarn", "rope.scaling.type is yarn"),
        ("d2t", torch.tensor([0, 10**6]), "d2t is of shape"),
        ("rope_freqs.weight", torch.ones(8), "rope_freqs"),
    ],
)
def test_a_damaged_file_names_the_bad_field(make, target, tmp_path, file, key, value, says):
    export(make("eagle3", draft_vocab=64), tmp_path / "out", file)
    found = head_directory.read(tmp_path / "out")
    config, tensors = dict(found.config), dict(found.tensors)
    (tensors if isinstance(value, torch.Tensor) else config)[key] = value
    (tmp_path / "bad").mkdir()
    write_gguf(tmp_path / "bad/model.gguf", config, tensors)
    bad = head_directory.read(tmp_path / "bad")
    assert registry.detect(bad) == "llama.cpp"
    with pytest.raises(CheckpointError, match=says):
        import_head(ImportRecipe(head=tmp_path / "bad", output_dir=tmp_path / "back"), target=target)
