"""Loading drafters by name, directory and pool; an unusable drafter gives an error with a hint."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import LlamaForCausalLM

from specctl.decoding.controllers import NoDraft
from specctl.drafters import checkpoint, names
from specctl.drafters import pool as loading
from specctl.drafters.lm import drafter as lm
from specctl.drafters.lm.model import LM, architecture
from specctl.drafters.mtp import drafter as mtp
from specctl.drafters.pool import FAMILIES, domains_of, find_pool, load_drafter
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.text.suffix import Suffix
from specctl.errors import CheckpointError, UsageError
from specctl.recipe import DrafterRecipe, DraftingRecipe
from tests.toys import mtp as toys


@pytest.fixture(scope="module")
def target(builtin_target):
    """The whole built-in target: ten layers, and it emits end-of-text."""
    return builtin_target


DRAFTING = DraftingRecipe()


def write(place, for_target, **changed):
    """Save a small `lm` drafter with the given config keys changed."""
    torch.manual_seed(0)
    model = LM(LlamaForCausalLM(architecture(DrafterRecipe(preset="tiny", num_layers=1), for_target)))
    return checkpoint.save(
        place,
        config={**lm.FAMILY.checkpoint_config(model, for_target.identity), **changed},
        tensors=lm.FAMILY.stored_state(model.state_dict()),
        info={},
    )


def test_drafters_load_by_name(target):
    assert isinstance(load_drafter("none", target, DRAFTING), NoDraft)
    lookup = load_drafter("lookup", target, DraftingRecipe(depth=4))
    assert isinstance(lookup, Lookup) and lookup.depth == 4
    suffix = load_drafter("suffix", target, DraftingRecipe(depth=4, nodes=5, children=2))
    assert isinstance(suffix, Suffix) and (suffix.depth, suffix.nodes, suffix.children) == (4, 5, 2)


def test_checking_names_does_not_import_torch():
    """The command line checks names before it loads anything."""
    code = "import sys, specctl.families; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_drafters_load_from_a_directory(target, tmp_path):
    drafter = load_drafter(str(write(tmp_path / "d", target)), target, DraftingRecipe(depth=3))
    assert isinstance(drafter, lm.LMDrafter) and drafter.shape.depth == 3


def test_a_hybrid_of_a_head_in_the_home_directory_loads(target, tmp_path, monkeypatch):
    """A shell leaves the `~` of `--drafter=~/sql+lookup` alone. The head was found, but its card was not."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "sql", target)
    assert load_drafter("~/sql+lookup", target, DRAFTING).taps == ()
    assert domains_of("~/sql+lookup") == []


def test_sampled_proposals_of_a_head_are_warned_about(target, tmp_path, capsys):
    """Heads used to ignore the option silently."""
    sampled = DraftingRecipe(proposal="sampled")
    load_drafter(str(write(tmp_path / "lm", target)), target, sampled)
    assert "sampled" not in capsys.readouterr().err
    head = toys.head(target)
    checkpoint.save(
        tmp_path / "head",
        config=mtp.FAMILY.checkpoint_config(head, target.identity),
        tensors=mtp.FAMILY.stored_state(head.state_dict()),
        info={},
    )
    load_drafter(str(tmp_path / "head"), target, sampled)
    assert "drafting.proposal=sampled is for family lm" in capsys.readouterr().err


def test_a_hybrid_starts_with_the_gain_that_the_card_of_its_head_suggests(target, tmp_path):
    quality = {}
    for name, info in {"unknown": {}, "half": {"mat": {"held-out sql": 2.5}}}.items():
        head = toys.head(target)
        config = mtp.FAMILY.checkpoint_config(head, target.identity)
        checkpoint.save(tmp_path / name, config=config, tensors=mtp.FAMILY.stored_state(head.state_dict()), info=info)
        quality[name] = load_drafter(f"{tmp_path / name}+lookup", target, DRAFTING).quality
    assert quality == {"unknown": 1.0, "half": 0.5}


def test_costs_are_kept_apart_by_the_width_of_the_trees(target, tmp_path, monkeypatch):
    """A level of four nodes costs 1.9 times as much as one of a single node. A run with one width left its costs in the
    cache, and hybrids of the other width took them for their own."""
    head, keys = toys.head(target), []
    config = mtp.FAMILY.checkpoint_config(head, target.identity)
    checkpoint.save(tmp_path / "head", config=config, tensors=mtp.FAMILY.stored_state(head.state_dict()), info={})
    costs = loading.costs_of

    def recorded(target, head, key):
        keys.extend([] if head is None else [key])  # costs without a head have one key
        return costs(target, head, key)

    monkeypatch.setattr(loading, "costs_of", recorded)
    for drafting in (DRAFTING, DraftingRecipe(width=1, depth=3), DraftingRecipe(width=4), DraftingRecipe(width=8)):
        load_drafter(f"{tmp_path / 'head'}+lookup", target, drafting)
    assert [keys.index(key) for key in keys] == [0, 0, 2, 3]


def test_an_unknown_name_is_refused_with_a_suggestion(target):
    with pytest.raises(CheckpointError, match="no drafter 'lokup'") as error:
        load_drafter("lokup", target, DRAFTING)
    assert "lookup" in error.value.hint


def test_an_unknown_family_is_refused(target, tmp_path):
    """The family is looked up in a table and never imported by name."""
    write(tmp_path / "d", target, family="os")
    with pytest.raises(CheckpointError, match="family 'os'") as error:
        load_drafter(str(tmp_path / "d"), target, DRAFTING)
    assert all(family in error.value.hint for family in FAMILIES)


def test_a_drafter_of_another_target_is_refused(target, tmp_path):
    write(tmp_path / "d", target, target={**target.identity, "name": "llama", "vocab_hash": "0" * 16})
    with pytest.raises(CheckpointError, match="made for llama, but target builtin"):
        load_drafter(str(tmp_path / "d"), target, DRAFTING)


def test_weights_that_do_not_match_the_architecture_are_refused(target, tmp_path):
    sizes = {"hidden_size": 64, "vocab_size": target.vocab_size}
    write(tmp_path / "d", target, architecture={"model_type": "llama", **sizes})
    with pytest.raises(CheckpointError, match="do not match"):
        load_drafter(str(tmp_path / "d"), target, DRAFTING)


@pytest.fixture
def pool(target, tmp_path):
    for name in ("sql", "math", "deep/er/code"):
        write(tmp_path / "pool" / name, target)
    return tmp_path / "pool"


def test_find_pool_lists_saved_drafters_only(pool):
    (pool / ".sql.1-ab.tmp").mkdir()
    (pool / ".sql.1-ab.tmp" / "manifest.json").write_text("{}")  # a save in progress
    (pool / "sql.checkpoints" / "step-00000020").mkdir(parents=True)  # kept for --resume
    (pool / "sql.checkpoints" / "step-00000020" / "manifest.json").write_text("{}")
    (pool / "notes").mkdir()
    assert find_pool(pool) == [pool / "deep" / "er" / "code", pool / "math", pool / "sql"]


def test_domains_of_a_drafter(tmp_path, target):
    for name, info in {"one": ["sql"], "two": ["sql", "math"], "word": "sql", "none": None}.items():
        place = write(tmp_path / name, target)
        (place / "drafter.json").write_text(json.dumps({"domain": info} if info else {}))
    assert [domains_of(str(tmp_path / name)) for name in ("one", "two", "word", "none")] == [
        *(["sql"], ["sql", "math"], ["sql"], [])
    ]
    assert domains_of("lookup") == []
    (tmp_path / "one/drafter.json").unlink()
    with pytest.raises(CheckpointError, match=r"drafter\.json is missing"):
        domains_of(str(tmp_path / "one"))


def test_a_single_drafter_is_a_pool_of_one(pool):
    assert find_pool(pool / "sql") == [pool / "sql"]


def test_a_damaged_member_is_listed_and_fails_when_loaded(pool, target):
    """Skipping it would silently measure a smaller pool."""
    (pool / "sql" / "manifest.json").unlink()
    assert pool / "sql" in find_pool(pool)
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        load_drafter(str(pool / "sql"), target, DRAFTING)


def test_a_link_to_a_drafter_is_a_member(pool, tmp_path, target):
    """A pool made of links used to be refused, with `PosixPath('…')` in the message."""
    write(tmp_path / "elsewhere" / "math", target)
    before = find_pool(pool)
    (pool / "link").symlink_to(tmp_path / "elsewhere" / "math")
    (pool / "loop").symlink_to(pool)
    (pool / "away").symlink_to(tmp_path / "elsewhere")  # its target is not a drafter
    assert find_pool(pool) == sorted([*before, pool / "link"])
    assert load_drafter(str(pool / "link"), target, DRAFTING)


def test_control_characters_in_a_directory_name_are_refused(pool):
    (pool / "a\x1b[2Jb").mkdir()
    with pytest.raises(CheckpointError) as error:
        find_pool(pool)
    assert "\x1b" not in error.value.message


@pytest.mark.parametrize(("name", "kind"), [("nothing", UsageError), ("empty", CheckpointError)])
def test_a_missing_or_empty_pool_is_refused(tmp_path, name, kind):
    (tmp_path / "empty").mkdir()
    with pytest.raises(kind) as error:
        find_pool(tmp_path / name)
    assert error.value.hint


def test_drafters_named_by_path_are_saved_inside_the_pool(tmp_path):
    """Otherwise a learned drafter would overwrite its own starting point."""
    for path, place in (
        ("sql-eagle3+lookup", "sql-eagle3+lookup"),
        ("/pool/a/sql", "pool/a/sql"),
        ("../a/sql", "a/sql"),
    ):
        assert tmp_path / names.place_of(path) == tmp_path / place
    both = [f"{tmp_path}/a/sql", f"{tmp_path}/b/sql"]
    places = {names.place_of(name) for name in names.labels(both).values()}
    assert len(places) == 2 and not any(place.is_absolute() for place in places)
