"""Damaged training checkpoints are noticed: the newest intact one is used, and training never restarts silently."""

import json
import os

import pytest
import torch

from specctl.errors import CheckpointError
from specctl.training import checkpoint
from specctl.training.checkpoint import RunState


def make(root, step, content=b"weights"):
    path = root / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "model.pt").write_bytes(content)
    (path / checkpoint.STATE).write_text(json.dumps({"step": step}))
    return seal(path)


def seal(path):
    (path / checkpoint.MANIFEST).write_text(json.dumps(checkpoint.digests(path)))
    return path


def manifest(text):
    return lambda path: (path / checkpoint.MANIFEST).write_text(text)


def pipe(name):
    def damage(path):
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "model.pt").write_bytes(b"weightz"),
        lambda path: (path / "model.pt").write_bytes(b"wei"),
        lambda path: (path / "model.pt").unlink(),
        lambda path: (path / checkpoint.MANIFEST).unlink(),
        lambda path: (path / "zero_pp_rank_0.pt").write_bytes(b""),
        *map(manifest, ["{", "{}", "[]", "null", "1", '"x"', "[" * 10**5, '{"trainer.json": 3}', '{"\\ud800": ""}']),
        pipe(checkpoint.MANIFEST),
        pipe("model.pt"),
        pipe("mp_rank_00_model_states.pt"),
    ],
    ids=lambda damage: getattr(damage, "__name__", None),
)
def test_damage_falls_back_to_the_previous_checkpoint(tmp_path, capsys, damage):
    make(tmp_path, 10)
    damage(make(tmp_path, 20))
    path, state = checkpoint.newest(tmp_path, RunState)
    assert (path.name, state.step) == ("step-00000010", 10)
    assert "step-00000020 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"step": null}', "'step'"),
        ('{"step": "3"}', "'step'"),
        ('{"step": -1}', "'step'"),
        ('{"step": 1e400}', "'step'"),
        ('{"step": 9' + 9999 * "9" + "}", "out of range"),
        ('{"tokens": []}', "'tokens'"),
        ('{"seconds": Infinity}', "'seconds'"),
        ('{"loss": {}}', "'loss'"),
        ('{"best_mat": true}', "'best_mat'"),
        ('{"recipe": 7}', "'recipe'"),
        ('{"made_of": {"data": 7}}', "'made_of.data'"),
        ('{"run": []}', "'run'"),
        ('{"metrics": -9}', "'metrics'"),
        ("[]", "trainer.json"),
        ("null", "trainer.json"),
        ("[" * 10**5, "trainer.json"),
        ("{", "trainer.json"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_state_with_wrong_types_counts_as_damaged(tmp_path, capsys, text, says):
    """The checksums are right, but the values are not; the error names the key."""
    make(tmp_path, 10)
    path = make(tmp_path, 20)
    (path / checkpoint.STATE).write_text(text)
    seal(path)
    assert checkpoint.newest(tmp_path, RunState)[1].step == 10
    said = capsys.readouterr().err
    assert f"{path} is damaged (trainer.json" in said and says in said and len(said) < 1000


def test_checkpoints_are_readable_by_their_owner_only(tmp_path):
    """Checkpoints contain token ids of users' texts."""
    checkpoint.save_tensors(tmp_path / "new", 1, {"step": 1}, {"x": torch.ones(2)}, keep=1)
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0


def test_a_damaged_checkpoint_does_not_displace_an_intact_one(tmp_path):
    """A run that resumed before the damaged checkpoint once deleted its own, if it was stopped before that step."""
    make(tmp_path, 10)
    (make(tmp_path, 20) / "model.pt").unlink()
    checkpoint.save_tensors(tmp_path, 15, {"step": 15}, {"x": torch.ones(2)}, keep=1)
    path, state = checkpoint.newest(tmp_path, RunState)
    assert (path.name, state.step) == ("step-00000015", 15)
    assert not (tmp_path / "step-00000010").exists()


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    (make(tmp_path, 10) / "model.pt").unlink()
    with pytest.raises(CheckpointError, match=r"all checkpoints .* are damaged"):
        checkpoint.newest(tmp_path, RunState)


def test_a_missing_directory_has_no_checkpoint(tmp_path):
    assert checkpoint.newest(tmp_path / "nothing", RunState) is None


def test_pickled_checkpoints_are_refused_and_not_executed(tmp_path):
    """Unpickling would create a directory."""

    class Program:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    path = make(tmp_path, 10)
    torch.save({"module": Program()}, path / checkpoint.TENSORS)
    with pytest.raises(CheckpointError, match=f"{path}.*cannot be loaded") as caught:
        checkpoint.load(None, path)
    assert "\n" not in caught.value.message and "--overwrite" in caught.value.hint
    assert not (tmp_path / "executed").exists()
