"""Damage is noticed: the newest whole checkpoint is taken, and never a fresh start in silence."""

import json

import pytest

from specctl.errors import CheckpointError
from specctl.training import checkpoint


def make(root, step, content=b"weights"):
    path = root / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "model.pt").write_bytes(content)
    (path / checkpoint.STATE).write_text(json.dumps({"step": step}))
    (path / checkpoint.MANIFEST).write_text(json.dumps(checkpoint._digests(path)))
    return path


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "model.pt").write_bytes(b"weightz"),
        lambda path: (path / "model.pt").write_bytes(b"wei"),
        lambda path: (path / "model.pt").unlink(),
        lambda path: (path / checkpoint.MANIFEST).unlink(),
        lambda path: (path / checkpoint.MANIFEST).write_text("{"),
    ],
    ids=["flipped", "truncated", "missing", "no manifest", "torn manifest"],
)
def test_falls_back_to_the_one_before(tmp_path, capsys, damage):
    make(tmp_path, 10)
    damage(make(tmp_path, 20))
    path, state = checkpoint.newest(tmp_path)
    assert (path.name, state["step"]) == ("step-00000010", 10)
    assert "step-00000020 is damaged" in capsys.readouterr().err


def test_none_whole_is_an_error(tmp_path):
    (make(tmp_path, 10) / "model.pt").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint .* is whole"):
        checkpoint.newest(tmp_path)


def test_a_fresh_directory_has_none(tmp_path):
    assert checkpoint.newest(tmp_path / "nothing") is None
