"""Fine-tuned MTP layers are exported into a copy of the target and to `speculators`, and imported again."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.commands import export as exporting
from specctl.commands import import_
from specctl.decoding.target import load_target
from specctl.drafters import checkpoint, pool
from specctl.drafters.mtp import layouts
from specctl.drafters.mtp.drafter import FAMILY as mtp
from specctl.drafters.mtp.drafter import MtpDrafter
from specctl.errors import CheckpointError, UsageError
from specctl.recipe import ExportRecipe, ImportRecipe
from tests.drafters.test_eagle3 import STEPS, forced
from tests.drafters.test_mtp import CHAIN, built, engine
from tests.formats.conftest import randomised
from tests.toys import mtp as toys

PROMPT = [5, 9, 77, 12, 40, 8, 3, 21]
KINDS = {
    "mimo": ("qwen2", "mimo", {"bias": True}, "vllm", {}),
    "mimo as sglang": ("qwen2", "mimo", {"bias": True}, "sglang", {"normed_features": True}),
    "qwen": ("qwen3", "qwen", {"qk_norm": True}, "vllm", {}),
}


class Case:
    """A target with an MTP layer, and a drafter directory with a modified layer."""

    def __init__(self, place, source, model, layout, options, drafter, shards):
        self.native = toys.write(place / "native", layout, source, shards=shards, **options)
        if model == "qwen2":
            config = Path(self.native) / "config.json"
            said = json.loads(config.read_text()) | {"architectures": ["MiMoForCausalLM"]}
            config.write_text(json.dumps(said | {"num_nextn_predict_layers": 1}))
        self.target = load_target(self.native, device="cpu", dtype="fp32")
        self.module = randomised(built(self.target, self.native, **drafter))
        self.drafter = checkpoint.save(
            place / "drafter",
            config=mtp.checkpoint_config(self.module, self.target.identity),
            tensors=mtp.stored_state(self.module.state_dict()),
            info={"domain": ["sql"]},
        )


@pytest.fixture(scope="module")
def make(tmp_path_factory, tiny_directory):
    made = {}

    def get(kind, shards=False):
        if (kind, shards) not in made:
            model, layout, options, _, drafter = KINDS[kind]
            place = tmp_path_factory.mktemp("mtp")
            made[kind, shards] = Case(place, tiny_directory(model), model, layout, options, drafter, shards)
        return made[kind, shards]

    return get


def export(drafter, to, place, **options):
    return exporting.export(ExportRecipe(drafter=drafter, to=to, output_dir=place, check=True, **options))


def imported(place, to, target, **options):
    recipe = ImportRecipe(head=place, output_dir=to, probe={"enabled": False}, **options)
    return import_.import_head(recipe, target=target)


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_drafts_with_the_trained_layer(make, tmp_path, kind, shards):
    """The engine arithmetic on the exported directory gives our logits.

    Other tensors of the target are unchanged, and its unchanged files take no extra disk space.
    """
    case, (_, layout, _, to, _) = make(kind, shards), KINDS[kind]
    result = export(case.drafter, to, tmp_path / "out")
    assert result.max_difference < 1e-4
    ids = [*PROMPT, 6]
    drawn = forced_text(case.target, ids)
    theirs = engine(
        tmp_path / "out", case.target, layout, drawn[: len(ids)], drawn[len(ids) :][: STEPS - 1],
        before_norm=kind == "mimo",
    )  # fmt: skip
    found = forced(MtpDrafter(case.module, case.target, CHAIN), case.target, drawn[: len(ids)], drawn[len(ids) :])
    for one, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3)
    before, after = ({n: t for f in Path(p).glob("*.safetensors") for n, t in load_file(f).items()}
                     for p in (case.native, tmp_path / "out"))  # fmt: skip
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert changed == {name for name in before if name.startswith(layouts.LAYOUTS[layout].prefix)}
    names = {file.name for file in Path(case.native).iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names | {"export.json", "README.md"}
    if shards:
        first = "model-00001-of-00002.safetensors"
        assert os.path.samefile(Path(case.native) / first, tmp_path / "out" / first)
    assert not os.path.samefile(Path(case.native) / "config.json", tmp_path / "out/config.json")


def forced_text(target, ids):
    """Return ids plus the target's greedy tokens after all but the last of the ids."""
    from specctl.decoding.sampling import GREEDY
    from tests.toys.decoding import decode

    found = decode(target, [ids[:-1]], sampling=GREEDY, max_new_tokens=5, seeds=[0])[0]
    return found.prompt_ids + found.output_ids


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_layer_is_imported_unchanged(make, tmp_path, kind):
    case, to = make(kind), KINDS[kind][3]
    export(case.drafter, to, tmp_path / "out")
    result = imported(tmp_path / "out", tmp_path / "back", case.target)
    assert (result.format, result.family) == ("mtp", "mtp")
    one, other = (checkpoint.load(place) for place in (case.drafter, tmp_path / "back"))
    assert one.config["architecture"] == other.config["architecture"]
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, other.tensors[name].float()) for name, tensor in one.tensors.items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_untrained_layer_of_a_target_can_be_imported(make, tmp_path, kind):
    """It loads and drafts, as a baseline and as a base for adapters."""
    case = make(kind)
    imported(case.native, tmp_path / "own", case.target)
    module = pool.load_module(pool.read_drafter(tmp_path / "own", case.target), case.target)
    expected = built(case.target, case.native)
    assert all(torch.equal(t, expected.state_dict()[n]) for n, t in module.state_dict().items())


def test_an_export_can_be_trained_further(make, tmp_path):
    """A layer trained on states after the final norm is trained there again."""
    case = make("mimo as sglang")
    export(case.drafter, "sglang", tmp_path / "out")
    again = built(load_target(str(tmp_path / "out"), device="cpu", dtype="fp32"), str(tmp_path / "out"))
    assert again.config == case.module.config
    assert all(torch.equal(t, case.module.state_dict()[n]) for n, t in again.state_dict().items())


def test_commands_serve_the_directory_as_the_target(make, tmp_path):
    place = tmp_path / "a target"
    (line,) = export(make("mimo").drafter, "vllm", place, tokens=2).commands
    assert line == (
        f"vllm serve '{place}' --speculative-config " + '\'{"method": "mtp", "num_speculative_tokens": 2}\''
    )
    (line,) = export(make("mimo as sglang").drafter, "sglang", tmp_path / "b", tokens=2).commands
    assert f"--model-path {tmp_path / 'b'} --speculative-algorithm NEXTN" in line
    assert "--speculative-num-steps 2 " in line and "--speculative-num-draft-tokens 3" in line
    result = export(make("qwen").drafter, "vllm", tmp_path / "c")
    assert result.commands == [] and "does not serve MTP heads for Qwen3ForCausalLM" in result.notes[0]


@pytest.mark.parametrize(
    ("kind", "to", "says"),
    [
        ("mimo", "sglang", "state after the final norm; this layer was trained on the other"),
        ("mimo as sglang", "vllm", "state before the final norm; this layer was trained on the other"),
        ("mimo", "speculators", "has layout mimo"),
    ],
)
def test_exports_that_an_engine_would_compute_differently_are_refused(make, tmp_path, kind, to, says):
    with pytest.raises(CheckpointError, match=says):
        export(make(kind).drafter, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_formats_without_mtp_are_refused(make, tmp_path):
    with pytest.raises(UsageError, match="mtp drafters cannot be written for hf"):
        export(make("mimo").drafter, "hf", tmp_path / "out")


def test_a_target_without_the_layer_is_refused(make, tmp_path, tiny_directory):
    """A copy of the target with the layer removed; no files are left."""
    with pytest.raises(CheckpointError, match=r"has no tensor model\.mtp_layers\.0\."):
        export(make("mimo").drafter, "vllm", tmp_path / "out", target={"name": tiny_directory("qwen2")})
    assert not list(tmp_path.iterdir())


def test_speculators_export_is_imported_unchanged(make, tmp_path):
    """With the tensor names of the package and its required config keys."""
    case = make("qwen")
    result = export(case.drafter, "speculators", tmp_path / "out", tokens=3)
    assert result.commands == [f"speculators stitch-mtp {tmp_path / 'out'} {case.native}"]
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["speculators_model_type"] == "mtp" and config["num_nextn_predict_layers"] == 1
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    names = load_file(tmp_path / "out/model.safetensors").keys()
    assert {"mtp_layers.0.input_proj.weight", "mtp_layers.0.self_attn.q_norm.weight"} <= names
    assert all(name.startswith("mtp_layers.0.") for name in names)
    imported(tmp_path / "out", tmp_path / "back", case.target)
    one, other = (checkpoint.load(place) for place in (case.drafter, tmp_path / "back"))
    assert one.config["architecture"] == other.config["architecture"]
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t | {"mtp_layers.1.mlp.up_proj.weight": torch.zeros(2)}, "more than one MTP layer"),
        (lambda t: t | {"d2t": torch.zeros(2)}, "d2t is unknown"),
        (lambda t: {n: x for n, x in t.items() if "q_norm" not in n}, "k_norm|q_norm"),
    ],
)
def test_unsupported_speculators_layers_are_refused(make, tmp_path, change, says):
    case = make("qwen")
    export(case.drafter, "speculators", tmp_path / "out")
    file = tmp_path / "out/model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=says):
        imported(tmp_path / "out", tmp_path / "back", case.target)
    assert not (tmp_path / "back").exists()
