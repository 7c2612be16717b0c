"""A drafter directory is complete or gives an error naming the bad file; it cannot run code or point outside."""

import errno
import json
import multiprocessing
import os
import resource
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from specctl.drafters import checkpoint
from specctl.errors import CheckpointError, SpecctlError, UsageError
from specctl.runs import backup

CONFIG = {
    "family": "lm",
    "architecture": {"hidden_size": 4},
    "target": {"name": "builtin", "hidden_size": 256, "num_layers": 10, "vocab_hash": "ab12"},
}
INFO = {"domain": ["sql"], "licence": "apache-2.0", "mat": {"sql": 3.5}, "data": "f00d"}
FILES = ["README.md", "config.json", "drafter.json", "model.safetensors"]


def write(place, value=1.0, **options):
    tensors = {"a.weight": torch.full((3, 4), value), "b": torch.arange(5)}
    return checkpoint.save(place, config=CONFIG, tensors=tensors, info=INFO, **options)


@pytest.fixture
def drafter(tmp_path):
    return write(tmp_path / "sql-lm")


def change_manifest(drafter, change):
    manifest = json.loads((drafter / "manifest.json").read_text())
    change(manifest)
    (drafter / "manifest.json").write_text(json.dumps(manifest))


def test_a_saved_drafter_loads_unchanged(drafter):
    found = checkpoint.load(drafter)
    assert found.config == CONFIG and found.info == INFO and found.path == drafter
    assert torch.equal(found.tensors["a.weight"], torch.ones(3, 4))
    assert torch.equal(found.tensors["b"], torch.arange(5))


KIND = {"mean": [0.5], "error": 0.1}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("domain", 2),
        ("train_tokens", "many"),
        ("mat", [3.5]),
        ("mat", {"sql": "3.5"}),
        ("mat", {"sql": float("nan")}),
        ("prompts", {"taps": 2, "kinds": {}}),
        ("prompts", {"kinds": {}}),
        ("prompts", {"taps": [2], "kinds": [KIND]}),
        ("prompts", {"taps": [2], "kinds": {"sql": KIND | {"mean": [[0.5]]}}}),
        ("prompts", {"taps": [2], "kinds": {"sql": KIND | {"error": None}}}),
    ],
)
def test_a_wrong_value_of_the_description_is_named(drafter, key, value):
    """Cards, hybrids, pools and `--init auto` read these keys. Each of these used to raise."""
    (drafter / "drafter.json").write_text(json.dumps(INFO | {key: value}))
    with pytest.raises(CheckpointError, match=rf"drafter\.json: {key}"):
        checkpoint.read_info(drafter)
    change_manifest(drafter, lambda manifest: manifest.update(files=checkpoint.digests(drafter)))
    with pytest.raises(CheckpointError, match=rf"drafter\.json: {key}"):
        checkpoint.load(drafter)


def test_views_are_stored_by_value(tmp_path):
    """A transposed or sliced weight shares its storage with a larger tensor, which must not be written."""
    matrix = torch.randn(4, 6)
    checkpoint.save(tmp_path / "d", config=CONFIG, tensors={"t": matrix.T, "row": matrix[1]}, info={})
    found = checkpoint.load(tmp_path / "d").tensors
    assert torch.equal(found["t"], matrix.T) and torch.equal(found["row"], matrix[1])


def test_weights_get_the_default_file_permissions(tmp_path):
    """safetensors creates files that only the owner can read; an engine may run as another user."""
    (tmp_path / "any").touch()
    checkpoint.write_tensors(tmp_path / "weights", {"x": torch.ones(2)})
    assert (tmp_path / "weights").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_weights_replace_a_symlink_instead_of_following_it(tmp_path):
    """A dangling link must not create its target either."""
    (tmp_path / "victim").write_text("safe")
    for name in ("victim", "nothing"):
        (tmp_path / "weights").unlink(missing_ok=True)
        (tmp_path / "weights").symlink_to(tmp_path / name)
        checkpoint.write_tensors(tmp_path / "weights", {"x": torch.ones(2)})
        assert not (tmp_path / "weights").is_symlink()
    assert (tmp_path / "victim").read_text() == "safe" and not (tmp_path / "nothing").exists()


def test_the_card_has_the_target_and_the_numbers(drafter):
    card = (drafter / "README.md").read_text()
    assert "with `builtin`" in card and 'license: "apache-2.0"' in card and "| sql | 3.50 |" in card


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, but its manifest says"),
        (lambda path: path.write_bytes(b""), "bytes, but its manifest says"),
        (lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]), "sha256 differs"),
    ],
    ids=["missing", "truncated", "empty", "flipped"],
)
def test_a_damaged_file_is_named(drafter, name, damage, says):
    damage(drafter / name)
    with pytest.raises(CheckpointError, match=says) as error:
        checkpoint.load(drafter)
    assert str(drafter / name) in error.value.message and error.value.hint and error.value.exit_code == 4


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is missing"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "JSON object"),
        (b"{}", "does not have format"),
        (b'{"format": 1, "files": {}}', "does not list"),
    ],
)
def test_a_bad_manifest_is_named(drafter, content, says):
    if content is None:
        (drafter / "manifest.json").unlink()
    else:
        (drafter / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as error:
        checkpoint.load(drafter)
    assert "manifest.json" in error.value.message


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "sub/../../outside", "..", "a\0b", "", "x" * 5000])
def test_a_manifest_cannot_point_outside(drafter, name):
    """The error names the drafter and stays short."""
    (drafter.parent / "outside").write_text("x")
    change_manifest(drafter, lambda m: m["files"].update({name: {"bytes": 1, "sha256": ""}}))
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(drafter)
    assert str(drafter) in error.value.message and len(error.value.message) < 500


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_pipe_in_a_drafter_is_refused(drafter, pipe, name):
    (drafter / name).unlink()
    pipe(drafter / name)
    with pytest.raises(CheckpointError, match="a named pipe") as error:
        checkpoint.load(drafter)
    assert str(drafter) in error.value.message and name in error.value.message


@pytest.mark.parametrize("name", ["x" * 5000, "/" + "x" * 5000, "x/" * 3000])
def test_an_overlong_path_is_reported_as_missing(tmp_path, name):
    with pytest.raises(CheckpointError, match="no drafter directory"):
        checkpoint.existing_directory(Path(name))


def test_a_link_cannot_lead_outside(drafter):
    """A link to identical bytes is refused too, because its target can change after the check."""
    weights = drafter / "model.safetensors"
    weights.rename(drafter.parent / "elsewhere")
    weights.symlink_to(drafter.parent / "elsewhere")
    with pytest.raises(CheckpointError, match="points outside"):
        checkpoint.load(drafter)


def test_weights_that_are_a_pickle_are_refused(drafter, tmp_path):
    """A pickle is refused even when the manifest lists it; an unlisted pickle is never opened."""
    marker = tmp_path / "executed"
    evil = b"cos\nsystem\n(S'touch %s'\ntR." % str(marker).encode()
    (drafter / "pytorch_model.bin").write_bytes(evil)
    checkpoint.load(drafter)
    (drafter / "model.safetensors").write_bytes(evil)
    change_manifest(drafter, lambda m: m["files"].update(checkpoint.digests(drafter)))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        checkpoint.load(drafter)
    assert not marker.exists()


def test_a_missing_directory_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="no drafter directory"):
        checkpoint.load(tmp_path / "nothing")


def test_a_drafter_is_replaced_only_when_asked(drafter):
    with pytest.raises(UsageError, match="already contains a drafter"):
        write(drafter, 2.0)
    assert checkpoint.load(drafter).tensors["a.weight"][0, 0] == 1
    write(drafter, 2.0, overwrite=True)
    assert checkpoint.load(drafter).tensors["a.weight"][0, 0] == 2
    assert sorted(os.listdir(drafter.parent)) == [drafter.name]


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_paths_that_are_not_drafters_are_never_replaced(tmp_path, drafter, kind):
    place = tmp_path / "home"
    if kind == "directory":
        place.mkdir()
        (place / "thesis.tex").write_text("years")
    elif kind == "file":
        place.write_text("years")
    else:
        place.symlink_to(drafter)
    with pytest.raises(UsageError, match="is a link" if kind == "link" else "not a drafter directory"):
        write(place, overwrite=True)
    checkpoint.load(drafter)


def test_an_empty_directory_can_be_saved_to(tmp_path):
    (tmp_path / "d").mkdir()
    checkpoint.load(write(tmp_path / "d"))


def write_with_limit(drafter, limit):
    """Try to save with a file-size limit of `limit` bytes; exit with 0 if saving fails cleanly."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        checkpoint.save(drafter, config=CONFIG, info=INFO, tensors={"a": torch.ones(2)}, overwrite=True)
    except SpecctlError as error:
        sys.exit(error.message != f"cannot write {drafter}: File too large")
    sys.exit(2)


@pytest.mark.parametrize("limit", [40, 200])
def test_a_full_disk_leaves_the_old_drafter(drafter, limit):
    """The smaller limit fails the weights, the larger one a JSON file written after them."""
    process = multiprocessing.get_context("fork").Process(target=write_with_limit, args=(drafter, limit))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert checkpoint.load(drafter).tensors["a.weight"][0, 0] == 1
    assert os.listdir(drafter.parent) == [drafter.name]


def stage_with_limit(place, write):
    """Try `write(directory)` with a limit of 4 KiB per file; exit with 0 if that fails cleanly."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        with checkpoint.staged(place) as draft:
            write(draft)
    except SpecctlError as error:
        sys.exit("cannot write" not in error.message or "\n" in error.message)
    sys.exit(2)


def write_tensors_with_limit(path):
    """Try to write tensors with a limit of 4 KiB; exit with 0 if that fails as other writes do."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        checkpoint.write_tensors(path, {"a": torch.ones(5000)})
    except OSError as error:
        sys.exit((error.errno, error.filename) != (errno.EFBIG, str(path)))
    sys.exit(2)


def test_a_full_disk_is_an_error_of_the_file(tmp_path):
    """A checkpoint of a training on a full disk ended in an "unexpected OSError" without a remedy."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=write_tensors_with_limit, args=(tmp_path / "a.safetensors",))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def save_pickle(draft):
    torch.save({"a": torch.ones(5000)}, draft / "a.bin")


def save_tokenizer(draft):
    Tokenizer(WordLevel({f"word {number}": number for number in range(5000)})).save(str(draft / "tokenizer.json"))


@pytest.mark.parametrize("write", [save_pickle, save_tokenizer])
def test_a_full_disk_is_named_whatever_library_writes(tmp_path, write):
    """`torch.save` raises a RuntimeError, and `tokenizers` a bare Exception."""
    place = tmp_path / "exported"
    process = multiprocessing.get_context("fork").Process(target=stage_with_limit, args=(place, write))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError("injected"), SpecctlError), (KeyboardInterrupt(), KeyboardInterrupt)],
    ids=["OSError", "KeyboardInterrupt"],
)
def test_a_failed_move_puts_the_old_drafter_back(drafter, monkeypatch, error, raised):
    rename = os.rename

    def last_fails(self, new):
        if new == drafter and self != backup(drafter):
            raise error
        rename(self, new)

    monkeypatch.setattr(type(drafter), "rename", last_fails)
    with pytest.raises(raised):
        write(drafter, 2.0, overwrite=True)
    assert checkpoint.load(drafter).tensors["a.weight"][0, 0] == 1


def test_a_crash_between_the_two_renames_loses_nothing(drafter):
    """After kill -9, only the backup of the old drafter exists."""
    drafter.rename(backup(drafter))
    assert checkpoint.load(drafter).tensors["a.weight"][0, 0] == 1
    write(drafter, 2.0)
    assert checkpoint.load(drafter).tensors["a.weight"][0, 0] == 2
    assert os.listdir(drafter.parent) == [drafter.name]


class OtherTarget:
    def __init__(self, **changed):
        self.identity = {**CONFIG["target"], **changed}


def test_the_same_target_under_another_name_fits():
    checkpoint.check_target(CONFIG, OtherTarget(name="/models/copy"))


@pytest.mark.parametrize("changed", [{"vocab_hash": "cd34"}, {"hidden_size": 512}, {"num_layers": 11}], ids=str)
def test_another_target_is_refused(changed):
    with pytest.raises(CheckpointError, match="was made for builtin, but target qwen is another") as error:
        checkpoint.check_target(CONFIG, OtherTarget(name="qwen", **changed), "drafters/sql")
    (key, value), *_ = changed.items()
    assert key in error.value.message and str(value) in error.value.message and "drafters/sql" in error.value.message


ADAPTERS = [{}, {"adapter": "a", "adapter_weights": "01"}, {"adapter": "b", "adapter_weights": "02"}]


@pytest.mark.parametrize("own", ADAPTERS)
@pytest.mark.parametrize("given", ADAPTERS)
def test_a_different_target_adapter_is_warned_about(own, given, capsys):
    config = CONFIG | {"target": CONFIG["target"] | own}
    checkpoint.check_target(config, OtherTarget(**given), "drafters/sql")
    names = [f"adapter {one['adapter']}" if one else "no adapter" for one in (own, given)]
    said = f"drafters/sql was made for a target with {names[0]}, not with {names[1]}"
    assert (said in capsys.readouterr().err) is (own != given)


def test_a_config_without_target_is_refused(tmp_path):
    checkpoint.save(tmp_path / "d", config={"family": "lm"}, tensors={}, info={})
    with pytest.raises(CheckpointError, match="lacks"):
        checkpoint.load(tmp_path / "d")


def test_saving_never_deletes_another_drafter(drafter):
    """The library replaces a drafter without the checks of the command line."""
    inner = write(drafter / "inner")
    with pytest.raises(UsageError, match=f"contains the drafter {inner}"):
        write(drafter, 2.0, overwrite=True)
    checkpoint.load(inner)
