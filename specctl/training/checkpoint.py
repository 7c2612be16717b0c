"""Training checkpoints: what DeepSpeed needs to go on, whole or not at all.

    <output>.checkpoints/step-00000200/   the engine's files, trainer.json, manifest.json (sha256 of each, written last)

and what `specctl online` needs, whose steps are chunks, its tensors in state.safetensors.

A checkpoint is written beside its final place and renamed; resuming takes the newest one whose manifest verifies.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specctl.errors import CheckpointError
from specctl.formats.checkpoint import TRAINING, separate
from specctl.progress import warn
from specctl.runs import atomic_write, make_dir, to_json

MANIFEST, STATE, TENSORS = "manifest.json", "trainer.json", "state.safetensors"


def directory(output: Path) -> Path:
    """Where the checkpoints of the drafter at `output` are kept."""
    return output.with_name(output.name + TRAINING)


def save(root: Path, engine: Any, step: int, state: dict[str, Any], *, keep: int) -> None:
    """Save the engine and `state` (all ranks call this); the `keep` newest checkpoints stay."""
    lead = dist.get_rank() == 0
    if lead:
        _prepare(root, step)
    dist.barrier()
    engine.save_checkpoint(str(root), tag=_draft(root, step).name, save_latest=False)
    dist.barrier()
    if lead:
        _finish(root, step, state, keep)
    dist.barrier()


def save_tensors(root: Path, step: int, state: dict[str, Any], tensors: dict[str, Tensor], *, keep: int) -> None:
    """Save `state` and tensors of one process; the `keep` newest checkpoints stay. OSError leaves what was there."""
    try:
        _prepare(root, step)
        save_file(separate(tensors), _draft(root, step) / TENSORS)
        _finish(root, step, state, keep)
    except SafetensorError as error:  # a full disk, in its words
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(_draft(root, step), ignore_errors=True)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Those of a checkpoint that `save_tensors` wrote, on the CPU."""
    return load_file(path / TENSORS)


def _draft(root: Path, step: int) -> Path:
    return root / f".step-{step:08d}.tmp"


def _prepare(root: Path, step: int) -> None:
    make_dir(root)
    shutil.rmtree(_draft(root, step), ignore_errors=True)
    _draft(root, step).mkdir()


def _finish(root: Path, step: int, state: dict[str, Any], keep: int) -> None:
    draft, place = _draft(root, step), root / f"step-{step:08d}"
    atomic_write(draft / STATE, to_json(state, indent=2) + "\n")
    atomic_write(draft / MANIFEST, to_json(_digests(draft), indent=2) + "\n")
    shutil.rmtree(place, ignore_errors=True)
    draft.rename(place)
    for old in _found(root)[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def newest(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that verifies, with its state; damaged ones are passed over with a warning.

    Raises CheckpointError when there are checkpoints and none is whole: starting again silently would lose work.
    """
    found = _found(root)
    for path in found:
        problem = _problem(path)
        if problem is None:
            return path, json.loads((path / STATE).read_text())
        warn(f"checkpoint {path} is damaged ({problem}); trying the one before it")
    if found:
        raise CheckpointError(f"no checkpoint in {root} is whole", "start again with --overwrite")
    return None


def load(engine: Any, path: Path) -> None:
    """Restore model and optimizer (all ranks call this)."""
    loaded, _ = engine.load_checkpoint(str(path.parent), tag=path.name)
    if loaded is None:
        raise CheckpointError(
            f"checkpoint {path} does not fit this run", "the ZeRO stage and number of processes must agree"
        )


def discard(root: Path) -> None:
    """Forget the checkpoints of an earlier run."""
    shutil.rmtree(root, ignore_errors=True)


def _found(root: Path) -> list[Path]:
    return sorted(root.glob("step-*"), reverse=True)


def _problem(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        expected = json.loads((path / MANIFEST).read_text())
        present = _digests(path)
    except (OSError, ValueError) as error:
        return str(error)
    wrong = [name for name, digest in expected.items() if present.get(name) != digest]
    return f"{', '.join(wrong)} missing or changed" if wrong else None


def _digests(path: Path) -> dict[str, str]:
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and file.name != MANIFEST)
    return {str(file.relative_to(path)): _sha256(file) for file in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
