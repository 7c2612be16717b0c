"""Training checkpoints: what DeepSpeed needs to go on, whole or not at all.

    <output>.checkpoints/step-00000200/   the engine's files, trainer.json, manifest.json (sha256 of each, written last)

A checkpoint is written beside its final place and renamed; resuming takes the newest one whose manifest verifies.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from specctl.errors import CheckpointError
from specctl.formats.checkpoint import TRAINING
from specctl.progress import warn
from specctl.runs import atomic_write, make_dir, to_json

MANIFEST, STATE = "manifest.json", "trainer.json"


def directory(output: Path) -> Path:
    """Where the checkpoints of the drafter at `output` are kept."""
    return output.with_name(output.name + TRAINING)


def save(root: Path, engine: Any, step: int, state: dict[str, Any], *, keep: int) -> None:
    """Save the engine and `state` (all ranks call this); the `keep` newest checkpoints stay."""
    name, draft = f"step-{step:08d}", f".step-{step:08d}.tmp"
    lead = dist.get_rank() == 0
    if lead:
        make_dir(root)
        shutil.rmtree(root / draft, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(str(root), tag=draft, save_latest=False)
    dist.barrier()
    if lead:
        atomic_write(root / draft / STATE, to_json(state, indent=2) + "\n")
        atomic_write(root / draft / MANIFEST, to_json(_digests(root / draft), indent=2) + "\n")
        shutil.rmtree(root / name, ignore_errors=True)
        (root / draft).rename(root / name)
        for old in _found(root)[keep:]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


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
