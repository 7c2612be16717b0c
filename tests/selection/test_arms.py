"""The pool: who is in it, who is left out, and what of a member can be chosen."""

import pytest

from specctl.decoding.plain import NoDraft
from specctl.drafters.eagle3.drafter import FAMILY as eagle3
from specctl.drafters.eagle3.drafter import Eagle3Drafter
from specctl.drafters.eagle3.head import Eagle3Head
from specctl.drafters.text.lookup import DEPTH, Lookup
from specctl.drafters.tree import TreeShape
from specctl.errors import CheckpointError, UsageError
from specctl.recipe import DrafterRecipe, DraftingRecipe, SelectRecipe, ServeRecipe
from specctl.selection.arms import load_pool, longest_draft, make_arms, pool_paths
from tests.drafters.test_pool import write
from tests.measuring.streams import write_head


def test_a_small_pool_is_joined_by_those_that_need_no_training(tmp_path, monkeypatch, capsys, target):
    """The command's documented line names the default pool, which a fresh install has not got. It is said once, by
    who loads them: the command line and the library both ask who is in the pool."""
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


def test_an_empty_pool_that_was_named_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="no drafters in"):
        pool_paths(SelectRecipe(pool=tmp_path))


@pytest.mark.parametrize("again", ["pool/a", "./pool/a", "pool/../pool/a"])
def test_a_member_twice(tmp_path, target, again, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pool" / "a", target)
    with pytest.raises(UsageError, match="in the pool twice"):
        pool_paths(SelectRecipe(pool="pool", drafters=[again]))


def test_a_damaged_member_is_left_out_or_refused(tmp_path, target, capsys):
    good, bad = (write(tmp_path / name, target) for name in ("good", "bad"))
    (bad / "model.safetensors").write_bytes(b"nothing")
    recipe = SelectRecipe(pool=tmp_path)
    found = load_pool(recipe, target, pool_paths(recipe))
    assert list(found) == ["good"]
    assert "is left out of the pool" in capsys.readouterr().err and good.is_dir()
    with pytest.raises(CheckpointError, match="bad"):
        load_pool(recipe.model_copy(update={"strict": True}), target, pool_paths(recipe))


def test_a_pool_of_another_target_is_no_pool(tmp_path, target):
    other = {**target.identity, "vocab_hash": "0" * 16}
    for name in ("a", "b"):
        write(tmp_path / name, target, target=other)
    with pytest.raises(CheckpointError, match="no drafter of the pool can be used"):
        load_pool(SelectRecipe(pool=tmp_path), target, pool_paths(SelectRecipe(pool=tmp_path)))


def test_members_of_one_name_are_told_apart(tmp_path, target):
    for folder in ("x", "y"):
        write(tmp_path / folder / "head", target)
    recipe = SelectRecipe(pool=tmp_path)
    assert list(load_pool(recipe, target, pool_paths(recipe))) == [str(tmp_path / n / "head") for n in ("x", "y")]


def test_arms_by_name(target):
    recipe = SelectRecipe(drafters=["lookup", "suffix"], arms={"names": ["suffix"]})
    assert list(load_pool(recipe, target, recipe.drafters)) == ["suffix"]
    with pytest.raises(UsageError, match="the pool has no gold"):
        wrong = recipe.model_copy(update={"arms": recipe.arms.model_copy(update={"names": ["gold"]})})
        load_pool(wrong, target, recipe.drafters)


def head(target):
    made = Eagle3Head(eagle3.architecture(DrafterRecipe(vocab_size=64), target))
    return Eagle3Drafter(made, target, TreeShape(5, 1, 5, 1, 0.0))


def test_arms_of_sizes_and_shapes(target):
    drafter = head(target)
    recipe = SelectRecipe(arms={"draft_nodes": [0, 3], "shapes": [{"width": 2, "nodes": 6}]})
    arms = make_arms(recipe, target, {"a": drafter}, {})
    assert [arm.name for arm in arms] == ["no draft", "a ×3", "a width=2 nodes=6"]
    assert isinstance(arms[0].drafter, NoDraft) and arms[1].nodes == 3
    shaped = arms[2].drafter
    assert shaped.shape == TreeShape(5, 2, 6, 1, 0.0) and drafter.shape == TreeShape(5, 1, 5, 1, 0.0)
    assert shaped.key is drafter.key  # one memory: switching shapes costs no prefill
    with pytest.raises(UsageError, match="fixed draft shape"):
        make_arms(recipe, target, {"lookup": Lookup()}, {})


def test_how_far_a_drafter_reaches(target):
    assert longest_draft(head(target)) == 5
    assert longest_draft(Lookup(3)) == 3 and longest_draft(Lookup()) == max(DEPTH.values())
    assert longest_draft(NoDraft()) == 0


def test_a_shape_is_a_recipe_of_drafting():
    assert DraftingRecipe(width=2) == SelectRecipe(arms={"shapes": [{"width": 2}]}).arms.shapes[0]


def test_serve_chooses_among_the_named_drafters_alone(tmp_path, target, monkeypatch):
    """Every drafter in ./drafters joined them, and a head named from there was "in the pool twice"."""
    monkeypatch.chdir(tmp_path)
    write_head(tmp_path / "drafters/head", target, "eagle3")
    assert pool_paths(ServeRecipe(drafters=["drafters/head", "lookup"])) == ["drafters/head", "lookup"]
    assert pool_paths(ServeRecipe(pool="drafters")) == ["drafters/head", "lookup", "suffix"]
