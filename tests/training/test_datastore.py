"""train-drafter --arch retrieval takes no steps, and writes a drafter without the held-out prompts."""

import json

import pytest

from specctl.decoding.prompt_features import cluster_of, features_at
from specctl.drafters.pool import load_drafter
from specctl.errors import RecipeError, UsageError
from specctl.recipe import DraftingRecipe, HeldOutRecipe, TargetRecipe, TrainRecipe
from specctl.runs import Run
from specctl.training.data import load_distilled
from specctl.training.loop import train_drafter


def recipe(distilled, place, **changes):
    values = dict(
        target=TargetRecipe(dtype="fp32", device="cpu"),
        arch="retrieval",
        distilled=distilled,
        output_dir=place / "drafter",
        eval=HeldOutRecipe(prompts=2, max_new_tokens=12, fraction=0.2),
    )
    return TrainRecipe(**{**values, **changes})


def test_a_datastore_is_collected_measured_and_loaded(distilled, target, tmp_path):
    made = recipe(distilled, tmp_path)
    result = train_drafter(made, Run(tmp_path))
    corpus = load_distilled([distilled], target, 2048, 0.2, 4)
    assert (result.arch, result.steps, result.domain) == ("retrieval", 0, "biochem")
    assert result.train_tokens == sum(example.response_length for example in corpus.train)
    assert result.mat > 1 and result.acceptance_by_position
    drafter = load_drafter(result.drafter, target, DraftingRecipe())
    store = drafter.text.corpus.tokens.tolist()
    for example in corpus.train:
        response = [*example.tokens[example.prompt_length :]]
        assert any(store[at : at + len(response)] == response for at in range(len(store)))
    info = json.loads((tmp_path / "drafter" / "drafter.json").read_text())
    assert info["mat"] == {"held-out biochem": round(result.mat, 3)}
    assert info["steps"] == 0
    mean, error = cluster_of(features_at(target, [one.ids for one in corpus.prompts["biochem"]], (target.num_layers,)))
    known = info["prompts"]["kinds"]["biochem"]
    assert info["prompts"]["taps"] == [target.num_layers]
    assert known["mean"] == pytest.approx(mean, rel=1e-3, abs=1e-3)
    assert known["error"] == pytest.approx(error, rel=1e-3)
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "retrieval" in card and "kinds" not in card


def test_held_out_prompts_are_not_in_the_store(distilled, target, tmp_path):
    """Otherwise its mean accepted tokens would measure memorization."""
    result = train_drafter(recipe(distilled, tmp_path), Run(tmp_path))
    store = load_drafter(result.drafter, target, DraftingRecipe()).text.corpus.tokens.tolist()
    corpus = load_distilled([distilled], target, 2048, 0.2, 4)
    assert len(corpus.held_out) == 4
    assert store.count(-1) == len(corpus.train)


def test_options_of_trained_drafters_are_refused(distilled, tmp_path):
    with pytest.raises(RecipeError, match="retrieval"):
        train_drafter(recipe(distilled, tmp_path, objective="ce"), Run(tmp_path))


def test_several_processes_are_refused(distilled, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="single process"):
        train_drafter(recipe(distilled, tmp_path), Run(tmp_path))
