"""Damage is noticed: the newest whole checkpoint is taken, and never a fresh start in silence."""

import json
import os

import pytest
import torch

from specctl.errors import CheckpointError
from specctl.training import checkpoint
from specctl.training.run_state import RunState


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
def test_falls_back_to_the_one_before(tmp_path, capsys, damage):
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
def test_a_state_of_other_types_is_no_state(tmp_path, capsys, text, says):
    """Sealed by whoever wrote it; the state before it is taken, and the key is named."""
    make(tmp_path, 10)
    path = make(tmp_path, 20)
    (path / checkpoint.STATE).write_text(text)
    seal(path)
    assert checkpoint.newest(tmp_path, RunState)[1].step == 10
    said = capsys.readouterr().err
    assert f"{path} is damaged (trainer.json" in said and says in said and len(said) < 1000


def test_states_are_their_owners_alone(tmp_path):
    """Probes and buffers are token ids of users' texts; directories of an earlier specctl were open to all."""
    for name in ("new", "there"):
        (tmp_path / "there").mkdir(mode=0o755, exist_ok=True)
        checkpoint.save_tensors(tmp_path / name, 1, {"step": 1}, {"x": torch.ones(2)}, keep=1)
        assert (tmp_path / name).stat().st_mode & 0o077 == 0, name


def test_none_whole_is_an_error(tmp_path):
    (make(tmp_path, 10) / "model.pt").unlink()
    with pytest.raises(CheckpointError, match=r"all checkpoints .* are damaged"):
        checkpoint.newest(tmp_path, RunState)


def test_a_fresh_directory_has_none(tmp_path):
    assert checkpoint.newest(tmp_path / "nothing", RunState) is None


def test_nothing_but_tensors_is_read(tmp_path):
    """Under the name of a file of tensors, and under that of DeepSpeed's own; unpickling would make a directory."""

    class Program:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    for name, says in (
        (checkpoint.TENSORS, "cannot be loaded"),
        ("mp_rank_00_model_states.pt", "an earlier version of specctl"),
    ):
        path = make(tmp_path / name, 10)
        torch.save({"module": Program()}, path / name)
        with pytest.raises(CheckpointError, match=f"{path}.*{says}") as caught:
            checkpoint.load(None, path)
        assert "\n" not in caught.value.message and "--overwrite" in caught.value.hint
    assert not (tmp_path / "executed").exists()
