"""A row of the table is all that a family needs outside of its own module."""

import json
import pkgutil
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from specctl import api, families
from specctl.cli.main import app
from specctl.decoding.models.loading import builtin_path
from specctl.families import FAMILIES, NAMED, Export, Family
from specctl.formats import registry
from specctl.recipe import DraftingRecipe, ExportRecipe, OnlineRecipe, TrainRecipe

TOYS = {
    "follower": Family(
        "tests.toys.follower",
        trainee=None,
        exports={"paper": Export("tests.toys.follower:write", "Follower({place!r}, {target!r})", "")},
    ),
    "head": Family(
        "tests.toys.head",
        rates={"adamw": 1e-3, "muon": 1e-3},
        strides=False,
        exports={"paper": Export("tests.toys.head:write", "Head({place!r}, {target!r})", "")},
    ),
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


@pytest.mark.parametrize("name", TOYS)
def test_a_new_family_goes_the_whole_way(toys, distilled, name, tmp_path, monkeypatch):
    """Were a fact of a family kept anywhere else, one of these commands would not know the new one."""
    monkeypatch.chdir(tmp_path)
    options, data = distilled
    few = {"target__device": "cpu", "target__dtype": "fp32", "eval__prompts": 1, "eval__max_new_tokens": 8}
    made = api.train_drafter(**few, arch=name, distilled=data, eval__fraction=0.2, max_steps=3, output_dir="toy")
    assert made.arch == name and made.mat >= 1
    short = options | {"sampling__max_new_tokens": 8, "limit": 2}
    row = next(row for row in api.evaluate(**short, drafters=[made.drafter], baselines=[]).rows if row.drafter == "toy")
    assert row.mat >= 1
    chosen = api.select(**short, drafters=[made.drafter, "lookup"], algo=["hedgespec"], baselines=[])
    assert chosen.arms == ["toy", "lookup"]
    written = api.export(drafter=made.drafter, to="paper")
    place, target = Path(written.output).absolute(), str(builtin_path())
    assert (written.family, written.commands) == (name, [f"{name.title()}({str(place)!r}, {target!r})"])
    assert json.loads((place / "config.json").read_text()) == {"made_for": target, "depth": 3}


def test_recipes_take_what_is_in_the_table(toys):
    assert TrainRecipe(arch="follower").name == "sql-follower"
    assert "head" in TrainRecipe.model_json_schema()["properties"]["arch"]["enum"]
    assert "paper" in ExportRecipe.model_json_schema()["properties"]["to"]["enum"]
    for recipe, wrong in ((TrainRecipe, "os"), (TrainRecipe, 3), (OnlineRecipe, "follower")):
        with pytest.raises(ValidationError, match=r"Input should be 'eagle', 'eagle3', .* or '"):
            recipe(arch=wrong)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_paths_of_a_row_exist(name):
    """They are looked up when they are needed, which may be at the end of a long run."""
    family = FAMILIES[name]
    pkgutil.resolve_name(family.module)
    if family.trainee is not None:
        pkgutil.resolve_name(family.trainee)
        assert set(family.rates) == {"adamw", "muon"}
    for export in family.exports.values():
        pkgutil.resolve_name(export.write)
        assert export.read in registry.READERS


def test_drafters_by_name_exist():
    for path in NAMED.values():
        assert pkgutil.resolve_name(path)(DraftingRecipe()).taps == ()


def test_help_lists_families():
    text = " ".join(CliRunner().invoke(app, ["train-drafter", "--help"], env={"COLUMNS": "200"}).output.split())
    assert "eagle3, eagle, hydra, medusa, lm or retrieval" in text
    assert families.listed(["lm"]) == "lm"
