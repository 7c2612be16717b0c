"""A new family or format needs one row in its table, and no other change outside its module."""

import json
import pkgutil
from inspect import signature
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner

from specctl import api, families
from specctl.cli.main import app
from specctl.decoding.models.loading import builtin_path
from specctl.drafters import checkpoint
from specctl.families import FAMILIES, WEIGHTLESS_DRAFTERS, Family
from specctl.formats import registry
from specctl.formats.registry import FORMATS, Format
from specctl.recipe import DraftingRecipe, ExportRecipe, ImportRecipe, OnlineRecipe, TrainRecipe
from specctl.selection.arms import PLAIN

TOYS = {
    "follower": Family("tests.toys.follower:FAMILY", trainable=None),
    "head": Family("tests.toys.head:FAMILY", rates={"adamw": 1e-3, "muon": 1e-3}, supports_stride=False),
}
PROMPTS = ["Name a colour.", "What is 3 + 4?", "Count to nine.", "Name the days of the week."]


@pytest.fixture
def toys(monkeypatch):
    for name, row in TOYS.items():
        monkeypatch.setitem(FAMILIES, name, row)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    place = tmp_path_factory.mktemp("families")
    lines = [json.dumps({"prompt": f"{text} {number}"}) for number in range(6) for text in PROMPTS]
    (place / "prompts.jsonl").write_text("\n".join(lines))
    options = dict(data__prompts=str(place / "prompts.jsonl"), target__device="cpu", target__dtype="fp32")
    api.distill(**options, sampling__max_new_tokens=16, batch_size=24, output_dir=place / "data")
    return options, place / "data"


@pytest.mark.parametrize("name", ["follower", pytest.param("head", marks=pytest.mark.slow)])
def test_a_new_family_works_in_every_command(toys, distilled, name, tmp_path, monkeypatch):
    """Catches a command that keeps its own list of families."""
    monkeypatch.chdir(tmp_path)
    options, data = distilled
    few = {"target__device": "cpu", "target__dtype": "fp32", "eval__prompts": 1, "eval__max_new_tokens": 8}
    made = api.train_drafter(**few, arch=name, distilled=data, eval__fraction=0.2, max_steps=3, output_dir="toy")
    assert made.arch == name and made.mat >= 1
    short = options | {"sampling__max_new_tokens": 8, "limit": 2}
    row = next(row for row in api.evaluate(**short, drafters=[made.drafter], baselines=[]).rows if row.drafter == "toy")
    assert row.mat >= 1
    chosen = api.select(**short, drafters=[made.drafter, "lookup"], algo=["hedgespec"], baselines=[])
    assert [arm for arm in chosen.arms if arm != PLAIN] == ["toy", "lookup", "retrieval"]
    goes_through_paper(made.drafter, name, monkeypatch)


def goes_through_paper(drafter, family, monkeypatch):
    """Export and import with a new format that is one file and one row."""
    monkeypatch.setitem(FORMATS, "paper", Format("tests.toys.paper", (family,), ("origami",)))
    written = document(["export", str(drafter), "--to", "origami", "--check"])
    place, target = Path(written["output"]).absolute(), str(builtin_path())
    assert written["commands"] == [f"origami {place} {target} 3"] and written["notes"] == ["origami is made of paper"]
    few = ["probe.prompts=1", "probe.max_new_tokens=8", "target.device=cpu", "target.dtype=fp32"]
    for form in ("auto", "paper"):
        read = document(["import", str(place), "--format", form, "--output-dir", f"back-{form}", *few])
        assert (read["format"], read["family"]) == ("paper", family)
        assert read["notes"] == [f"made for {target}"] and read["probe"]["tokens"] == 8
        before, after = checkpoint.load(drafter), checkpoint.load(Path(f"back-{form}"))
        assert before.config["architecture"] == after.config["architecture"]
        assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())


def document(arguments):
    """Return the JSON document printed by a command line."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_recipes_accept_the_families_of_the_table(toys):
    assert TrainRecipe(arch="follower").name == "sql-follower"
    assert "head" in TrainRecipe.model_json_schema()["properties"]["arch"]["enum"]
    for recipe, wrong in ((TrainRecipe, "os"), (TrainRecipe, 3), (OnlineRecipe, "follower")):
        with pytest.raises(ValidationError, match=r"Input should be 'eagle', 'eagle3', .* or '"):
            recipe(arch=wrong)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_paths_of_a_family_exist(name):
    """They are resolved when needed, which may be at the end of a long run."""
    family = FAMILIES[name]
    assert family.implementation == f"specctl.drafters.{name}.drafter:FAMILY"  # follows from the name
    assert pkgutil.resolve_name(family.implementation).name == name
    if family.trainable is not None:
        pkgutil.resolve_name(family.trainable)
        assert set(family.rates) == {"adamw", "muon"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_implements_its_protocol(name):
    """A missing or misspelled function would only fail in the one command that uses it."""
    row = FORMATS[name]
    assert {*row.families} <= {*FAMILIES} and row.readers
    functions = [function for function in vars(registry.FormatModule) if not function.startswith("_")]
    assert len(functions) == 4
    for function in functions:
        told = signature(getattr(registry.load(name), function)).parameters
        assert [*signature(getattr(registry.FormatModule, function)).parameters][1:] == [*told]


def test_recipes_accept_the_formats_of_the_table(monkeypatch):
    monkeypatch.setitem(FORMATS, "paper", Format("tests.toys.paper", ("eagle",), ("origami",)))
    assert ExportRecipe(to="origami").to == "origami" and ImportRecipe(format="paper").format == "paper"
    with pytest.raises(ValidationError, match=r"Input should be 'vllm', 'sglang', .* or 'origami'"):
        ExportRecipe(to="glue")
    with pytest.raises(ValidationError, match=r"Input should be 'auto', 'llama.cpp', 'speculators', .* or 'paper'"):
        ImportRecipe(format="glue")


def test_one_format_writes_a_family_for_a_reader():
    """With two, the order of the table would decide silently."""
    pairs = [(family, to) for row in FORMATS.values() for family in row.families for to in row.readers]
    assert len(set(pairs)) == len(pairs)


def test_drafters_without_weights_can_be_built():
    for path in WEIGHTLESS_DRAFTERS.values():
        assert pkgutil.resolve_name(path)(DraftingRecipe()).taps == ()


def test_help_lists_the_families():
    text = " ".join(CliRunner().invoke(app, ["train-drafter", "--help"], env={"COLUMNS": "200"}).output.split())
    assert "eagle3, eagle, peagle, dflash, mtp, hydra, medusa, lm or retrieval" in text
    assert families.listed(["lm"]) == "lm"
