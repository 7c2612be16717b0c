"""recipes, domains, doctor."""

import json

from specctl import data_prep
from specctl.cli import doctor


def test_a_recipe_is_copied_edited_and_checked(specctl, tmp_path):
    assert specctl("recipes", "cp", "train-drafter/eagle3", "mine.yaml").code == 0
    mine = tmp_path / "mine.yaml"
    assert specctl("recipes", "validate", "mine.yaml").code == 0
    assert specctl("recipes", "cp", "eval", "mine.yaml").code == 2, "nothing is overwritten"
    mine.write_text(mine.read_text().replace("ttt_steps", "ttt_step").replace("clip: 0.5", "clip: high"))
    done = specctl("recipes", "validate", "mine.yaml")
    assert done.code == 2
    lines = mine.read_text().splitlines()
    for key in ("ttt_step", "clip"):
        number = next(n for n, line in enumerate(lines, 1) if line.strip().startswith(key))
        assert f"mine.yaml:{number}: " in done.err
    assert "did you mean ttt_steps?" in done.err


def test_recipes_are_listed_and_shown(specctl):
    names = specctl("recipes", "ls", "-q").out.split()
    assert {"distill", "eval", "generate", "train-drafter/eagle3", "demo/train", "deepspeed/zero3"} <= set(names)
    assert all(row["about"] for row in specctl("recipes", "ls", "--json").json["recipes"] if "zero" not in row["name"])
    assert json.loads(specctl("recipes", "show", "deepspeed/zero1").out)["zero_optimization"]["stage"] == 1


def test_domains_are_listed_and_shown(specctl):
    assert specctl("domains", "ls", "-q").out.split() == list(data_prep.DOMAINS)
    done = specctl("domains", "show", "sql", "--samples", "2", "--json")
    assert len(done.json["samples"]) == 2
    assert done.json["public"]["licence"]
    assert "prompts of the generator" in specctl("domains", "show", "sql").out


def test_doctor_is_content_here(specctl):
    done = specctl("doctor", "--json")
    assert done.code == 0, done.out
    found = {finding["what"]: finding for finding in done.json["findings"]}
    assert {"python", "torch", "transformers", "deepspeed", "memory", "disk", "target builtin"} <= set(found)
    assert found["target builtin"]["value"].startswith("lean step")


def test_doctor_names_what_is_missing_and_the_fix(specctl, monkeypatch):
    monkeypatch.setattr("specctl.runs.version", lambda name: {"torch": "1.0"}.get(name))
    done = specctl("doctor", "--json")
    assert done.code == 1
    missing = {finding["what"]: finding["fix"] for finding in done.json["findings"] if finding["state"] == "missing"}
    assert missing["torch"].startswith("pip install 'torch>=")
    assert missing["transformers"].startswith("pip install 'transformers>=")


def test_doctor_about_a_target_that_is_not_there(specctl):
    done = specctl("doctor", "--target", "./nowhere")
    assert done.code == 1
    assert "./nowhere" in done.out


def test_every_missing_finding_has_a_fix():
    assert doctor.package("torch", ">=2", None).fix
    assert doctor.package("torch", ">=2", "1.9").fix
    assert doctor.package("torch", ">=2", "2.13.0+cpu").state == "ok"


def test_doctor_sees_that_the_cores_are_taken():
    assert doctor.load(0.1, 2, 2).state == "ok"
    assert doctor.load(4.0, 1, 2).state == "ok"
    assert "OMP_NUM_THREADS=1" in doctor.load(1.3, 2, 2).fix
    assert "OMP_NUM_THREADS=5" in doctor.load(3.0, 8, 8).fix
