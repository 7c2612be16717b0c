"""Loading a pool of drafters: its members, the members that are left out, and the arms made from the pool."""

import pytest
import torch

from specctl.decoding.controllers import NoDraft
from specctl.drafters import checkpoint
from specctl.drafters.eagle3.drafter import FAMILY as eagle3
from specctl.drafters.eagle3.drafter import Eagle3Drafter
from specctl.drafters.eagle3.head import Eagle3Head
from specctl.drafters.text.lookup import DEPTH, Lookup
from specctl.drafters.tree import TreeShape
from specctl.errors import CheckpointError, UsageError
from specctl.recipe import DrafterRecipe, DraftingRecipe, SelectRecipe, ServeRecipe
from specctl.selection.arms import load_pool, longest_draft, make_arms, pool_paths, trained_on
from tests.drafters.test_pool import write
from tests.measuring.streams import write_head


def test_lookup_and_suffix_join_a_small_pool(tmp_path, monkeypatch, capsys, target):
    """A fresh install lacks the default pool. Only `load_pool` says so: the command line and the library both call
    `pool_paths`, which stays silent."""
    monkeypatch.chdir(tmp_path)
    for recipe in (SelectRecipe(), SelectRecipe(pool="./drafters")):
        assert pool_paths(recipe) == ["lookup", "suffix"]
    assert capsys.readouterr().err == ""
    assert list(load_pool(recipe, target, pool_paths(recipe))) == ["lookup", "suffix"]
    assert "a pool of 0: lookup and suffix join it" in capsys.readouterr().err
    both = SelectRecipe(drafters=["suffix", "lookup"])
    load_pool(both, target, pool_paths(both))
    assert capsys.readouterr().err == ""
    assert pool_paths(SelectRecipe(drafters=["suffix"])) == ["suffix", "lookup"]
    assert pool_paths(SelectRecipe(drafters=["suffix", "lookup"])) == ["suffix", "lookup"]


def test_a_named_pool_without_drafters_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no drafters in"):
        pool_paths(SelectRecipe(pool=tmp_path))


@pytest.mark.parametrize("again", ["pool/a", "./pool/a", "pool/../pool/a"])
def test_a_drafter_listed_twice_is_refused(tmp_path, target, again, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pool" / "a", target)
    with pytest.raises(UsageError, match="in the pool twice"):
        pool_paths(SelectRecipe(pool="pool", drafters=[again]))


def test_a_damaged_drafter_is_left_out_or_with_strict_refused(tmp_path, target, capsys):
    good, bad = (write(tmp_path / name, target) for name in ("good", "bad"))
    (bad / "model.safetensors").write_bytes(b"nothing")
    recipe = SelectRecipe(pool=tmp_path)
    found = load_pool(recipe, target, pool_paths(recipe))
    assert list(found) == ["good"]
    assert "is left out of the pool" in capsys.readouterr().err and good.is_dir()
    with pytest.raises(CheckpointError, match="bad"):
        load_pool(recipe.model_copy(update={"strict": True}), target, pool_paths(recipe))


def test_a_pool_made_for_another_target_is_refused(tmp_path, target):
    other = {**target.identity, "vocab_hash": "0" * 16}
    for name in ("a", "b"):
        write(tmp_path / name, target, target=other)
    with pytest.raises(CheckpointError, match="no drafter of the pool can be used"):
        load_pool(SelectRecipe(pool=tmp_path), target, pool_paths(SelectRecipe(pool=tmp_path)))


def test_drafters_with_the_same_folder_name_are_named_by_path(tmp_path, target):
    for folder in ("x", "y"):
        write(tmp_path / folder / "head", target)
    recipe = SelectRecipe(pool=tmp_path)
    assert list(load_pool(recipe, target, pool_paths(recipe))) == [str(tmp_path / n / "head") for n in ("x", "y")]


def test_arms_names_select_drafters_of_the_pool(target):
    recipe = SelectRecipe(drafters=["lookup", "suffix"], arms={"names": ["suffix"]})
    assert list(load_pool(recipe, target, recipe.drafters)) == ["suffix"]
    with pytest.raises(UsageError, match="the pool has no gold"):
        wrong = recipe.model_copy(update={"arms": recipe.arms.model_copy(update={"names": ["gold"]})})
        load_pool(wrong, target, recipe.drafters)


def head(target):
    made = Eagle3Head(eagle3.architecture(DrafterRecipe(vocab_size=64), target))
    return Eagle3Drafter(made, target, TreeShape(5, 1, 5, 1, 0.0))


def test_draft_nodes_and_shapes_make_one_arm_each(target):
    drafter = head(target)
    recipe = SelectRecipe(arms={"draft_nodes": [0, 3], "shapes": [{"width": 2, "nodes": 6}]})
    arms = make_arms(recipe, {"a": drafter}, {})
    assert [arm.name for arm in arms] == ["no draft", "a ×3", "a width=2 nodes=6"]
    assert isinstance(arms[0].drafter, NoDraft) and arms[1].nodes == 3
    shaped = arms[2].drafter
    assert shaped.shape == TreeShape(5, 2, 6, 1, 0.0) and drafter.shape == TreeShape(5, 1, 5, 1, 0.0)
    assert shaped.key is drafter.key  # shared memory: switching shapes needs no prefill
    with pytest.raises(UsageError, match="fixed draft shape"):
        make_arms(recipe, {"lookup": Lookup()}, {})


def test_longest_draft_of_each_kind_of_drafter(target):
    assert longest_draft(head(target)) == 5
    assert longest_draft(Lookup(3)) == 3 and longest_draft(Lookup()) == max(DEPTH.values())
    assert longest_draft(NoDraft()) == 0


def test_arm_shapes_are_drafting_recipes():
    assert DraftingRecipe(width=2) == SelectRecipe(arms={"shapes": [{"width": 2}]}).arms.shapes[0]


def test_serve_uses_only_the_named_drafters(tmp_path, target, monkeypatch):
    """Every drafter in ./drafters used to join the named ones, so that a named head in that folder was "in the pool
    twice"."""
    monkeypatch.chdir(tmp_path)
    write_head(tmp_path / "drafters/head", target, "eagle3")
    assert pool_paths(ServeRecipe(drafters=["drafters/head", "lookup"])) == ["drafters/head", "lookup"]
    assert pool_paths(ServeRecipe(pool="drafters")) == ["drafters/head", "lookup", "suffix"]


def test_kinds_of_prompts_with_another_number_of_features_are_left_out(tmp_path, target):
    """They used to end in an error of numpy, or in every round of a policy."""
    for name, size in (("a", 2), ("b", target.hidden_size)):
        told = {"taps": [1], "kinds": {"sql": {"mean": [0.5] * size, "error": 0.1}}}
        config = {"family": "retrieval", "target": target.identity}
        checkpoint.save(tmp_path / name, config=config, tensors={"a": torch.ones(1)}, info={"prompts": told})
    assert list(trained_on({name: str(tmp_path / name) for name in "ab"}, target)) == ["b"]
