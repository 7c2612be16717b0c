"""Damage is noticed: the newest whole checkpoint is taken, and never a fresh start in silence."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from specctl.errors import CheckpointError
from specctl.training import checkpoint
from specctl.training.loop import Progressed


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
    path, state = checkpoint.newest(tmp_path, Progressed)
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
    assert checkpoint.newest(tmp_path, Progressed)[1].step == 10
    said = capsys.readouterr().err
    assert f"{path} is damaged (trainer.json" in said and says in said and len(said) < 1000


def test_none_whole_is_an_error(tmp_path):
    (make(tmp_path, 10) / "model.pt").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint .* is whole"):
        checkpoint.newest(tmp_path, Progressed)


def test_a_fresh_directory_has_none(tmp_path):
    assert checkpoint.newest(tmp_path / "nothing", Progressed) is None


class Program:
    """What is no data: reading it makes a directory."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


class Engine:
    """Reads its files as DeepSpeed does: by its checkpoint engine, or past it."""

    def __init__(self, past):
        self.checkpoint_engine = SimpleNamespace(load=self.read)
        self.past = past
        self.module = torch.nn.Linear(2, 1)
        self.module.register_buffer("draft_ids", torch.tensor([3, 5]))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.5)
        self.global_steps = self.global_samples = self.skipped_steps = 0

    def read(self, path, map_location=None):
        return torch.load(path, map_location=map_location, weights_only=False)

    def load_checkpoint(self, root, tag):
        read = self.read if self.past else self.checkpoint_engine.load
        found = read(os.path.join(root, tag, "model.pt"), map_location="cpu")
        self.module.load_state_dict(found["module"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.global_steps = found["global_steps"]
        return root, {}

    def trained(self):
        """What a checkpoint of it holds after a step."""
        self.module(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), "global_steps": 1}


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("forced", [None, "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_nothing_in_a_checkpoint_is_executed(tmp_path, monkeypatch, past, zipped, forced):
    if forced is not None:
        monkeypatch.setenv(forced, "1")
    path, place, engine = make(tmp_path, 10), tmp_path / "executed", Engine(past)
    torch.save({"module": Program(place)}, path / "model.pt", _use_new_zipfile_serialization=zipped)
    before = engine.checkpoint_engine.load
    with pytest.raises(CheckpointError, match=rf"{path}\b.*mkdir") as caught:
        checkpoint.load(engine, path)
    assert not place.exists() and "\n" not in caught.value.message
    assert past or str(path / "model.pt") in caught.value.message
    assert engine.checkpoint_engine.load == before
    assert [name for name in os.environ if "WEIGHTS_ONLY" in name] == ([forced] if forced else [])


@pytest.mark.parametrize("content", [b"", b"garbage", {"module": None}, {"other": 1}, [1], None])
def test_another_content_does_not_fit(tmp_path, content):
    path = make(tmp_path, 10)
    if not isinstance(content, bytes):
        torch.save(content, path / "model.pt")
    else:
        (path / "model.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=str(path)):
        checkpoint.load(Engine(False), path)


def edited(*keys, value):
    def edit(content):
        for key in keys[:-1]:
            content = content[key]
        content.pop(keys[-1]) if value is None else content.update({keys[-1]: value})

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        edited("optimizer", "state", 0, "exp_avg", value=torch.zeros(3)),
        edited("optimizer", "state", 0, "exp_avg", value="x"),
        edited("optimizer", "state", 0, "exp_avg_sq", value=None),
        edited("module", "draft_ids", value=torch.tensor([3, 10**6])),
        edited("global_steps", value="x"),
    ],
    ids=["shape", "type", "missing", "draft vocabulary", "counts"],
)
def test_what_would_fail_or_mislead_later_does_not_fit(tmp_path, edit):
    """Each of them loads without a word."""
    path, content = make(tmp_path, 10), Engine(False).trained()
    edit(content)
    torch.save(content, path / "model.pt")
    with pytest.raises(CheckpointError, match=f"{path} does not fit"):
        checkpoint.load(Engine(False), path)


def test_options_of_the_optimizer_are_the_recipes(tmp_path):
    """Those in the file are whatever somebody has written."""
    path, content = make(tmp_path, 10), Engine(False).trained()
    content["optimizer"]["param_groups"][0].update(betas="xx", lr=None, peak_lr="x")
    torch.save(content, path / "model.pt")
    engine = Engine(False)
    checkpoint.load(engine, path)
    (group,) = engine.optimizer.param_groups
    assert (group["lr"], group["betas"], "peak_lr" in group) == (0.5, (0.9, 0.999), False)
    assert engine.optimizer.state_dict()["state"][0]["step"] == 1
