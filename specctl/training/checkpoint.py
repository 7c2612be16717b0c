"""Checkpoints from which `train-drafter` or `specctl online` can resume, each written completely or not at all.

    <output>.checkpoints/step-00000200/   state.safetensors, trainer.json, manifest.json (sha256 of each, written last)

`RunState` is the state of `train-drafter` in trainer.json.

A checkpoint is written next to its final place and renamed. Resuming takes the newest checkpoint with a manifest that
verifies and a valid trainer.json. A manifest does not protect from an attacker who writes both it and the files, so a
checkpoint holds nothing but data: JSON and tensors.
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specctl import regular_files
from specctl.distillation.store import differences
from specctl.drafters.checkpoint import TRAINING, read_json, untied_cpu_copies, write_tensors
from specctl.errors import CheckpointError, RecipeError, UsageError, one_line
from specctl.progress import warn
from specctl.recipe import TrainRecipe, yaml_file
from specctl.runs import PRIVATE_DIRECTORY, RESOLVED, atomic_write, make_dir, publish, sha256, to_json
from specctl.training import portable_state
from specctl.training.outcome import deciding

MANIFEST, STATE, TENSORS = "manifest.json", "trainer.json", "state.safetensors"
State = TypeVar("State")
Count = Annotated[int, Field(ge=0, lt=2**53)]
"""Non-negative number of steps, tokens or bytes in a state."""
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass
class RunState:
    """Everything that a resumed run needs in addition to the engine's state."""

    step: Count = 0
    epoch: Count = 0
    place: Count = 0  # batches of the epoch that were trained with this number of processes
    # Earlier in the epoch, with other numbers of processes: (processes, batches).
    taken: list[tuple[Count, Count]] = field(default_factory=list)
    first: Count = 0  # step at which the number of processes changed last
    begun: Amount = 0.0  # share of the schedule that was done then
    tokens: Count = 0
    seconds: Amount = 0.0  # in training steps, summed over all resumes
    loss: float = math.nan
    best_mat: Amount = 0.0
    best_expected: Amount = 0.0  # replaces `best_mat` if the target's layers are not loaded
    reported_expected: Amount = 0.0  # of the same weights, on the half that reports
    recipe: str = ""
    made_of: dict[str, str] = field(default_factory=dict)  # digests of the files that the recipe only names
    run: str = ""  # directory of the run that saved this state
    metrics: Count = 0  # bytes of that run's metrics.jsonl that belong to this state
    world: Count = 1  # number of processes


def check_same(recipe: TrainRecipe, path: Path, there: RunState, now: RunState) -> None:
    """Raise UsageError if a checkpoint belongs to another recipe, or if data, target or init have changed since."""
    if there.recipe != now.recipe:
        raise UsageError(
            f"{path} was made with a different recipe{_changes(recipe, Path(there.run))}",
            "resume with the original recipe, including its length, or start over with --overwrite",
        )
    names = {
        "data": f"the data in {', '.join(map(str, recipe.data_dirs if recipe.corpus is None else [recipe.corpus]))}",
        "target": f"the weights of target {recipe.target.name}",
        "init": f"the drafter {recipe.init}",
    }
    for key, digest in now.made_of.items():
        if there.made_of.get(key) != digest:
            raise UsageError(
                f"{names[key]} changed since {path} was made", "restore the original, or start over with --overwrite"
            )


def _changes(recipe: TrainRecipe, run: Path) -> str:
    """The settings in which `recipe` differs from the recipe of an earlier run, or "" if that run's files are gone."""
    now = deciding(recipe)
    try:
        earlier = yaml_file.load(regular_files.read_text(run / RESOLVED), RESOLVED)[0]
    except (OSError, ValueError, RecipeError):
        return ""
    there = {key: earlier.get(key) for key in now}
    changed = "; ".join(differences(there, now))
    return f": {changed}" if changed else ""


def directory(output: Path) -> Path:
    return output.with_name(output.name + TRAINING)


def add_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add `prefix` to the names of tensors; `strip_prefix` is the inverse."""
    return {f"{prefix}{name}": value for name, value in tensors.items()}


def strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with names that begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def save_tensors(root: Path, step: int, state: dict[str, Any], tensors: dict[str, Tensor], *, keep: int) -> None:
    """Save `state` and tensors of a single process; the `keep` newest checkpoints stay. OSError leaves earlier ones
    intact."""
    draft, place = root / f".step-{step:08d}.tmp", root / f"step-{step:08d}"
    make_dir(root, PRIVATE_DIRECTORY)  # it holds token ids of users' texts
    for left in root.glob(".step-*"):  # left by a killed run
        shutil.rmtree(left, ignore_errors=True)
    try:
        draft.mkdir()
        write_tensors(draft / TENSORS, untied_cpu_copies(tensors))
        atomic_write(draft / STATE, to_json(state, indent=2) + "\n")
        atomic_write(draft / MANIFEST, to_json(digests(draft), indent=2) + "\n")
        publish(draft, place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    # A later checkpoint is one that a resumed run has found damaged: it must not take the place of an intact one.
    for old in [path for path in _found(root) if path.name <= place.name][keep:]:
        shutil.rmtree(old, ignore_errors=True)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load a checkpoint's tensors onto the CPU. CheckpointError if they cannot be read."""
    try:
        regular_files.check(path / TENSORS)
        return load_file(path / TENSORS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path / TENSORS} cannot be loaded: {one_line(error)}", "start again with --overwrite"
        ) from error


def newest(root: Path, kind: type[State]) -> tuple[Path, State] | None:
    """The newest checkpoint that verifies, with its state as a `kind`; returns None if there are no checkpoints.

    Damaged checkpoints are skipped with a warning. Raises CheckpointError if all are damaged: silently starting again
    would lose work.
    """
    checkpoints = _found(root)
    for path in checkpoints:
        try:
            _verify(path)
            return path, _state(path / STATE, kind)
        except _Damaged as damage:
            warn(f"checkpoint {path} is damaged ({damage}); trying the previous one")
    if checkpoints:
        raise CheckpointError(f"all checkpoints in {root} are damaged", "start again with --overwrite")
    return None


def load(engine: Any, path: Path) -> None:
    """Restore model and optimizer (all ranks call this). CheckpointError if the checkpoint does not fit this engine."""
    try:
        portable_state.restore(engine, load_tensors(path))
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint {path} does not fit this run: {error}", "start again with --overwrite"
        ) from error


def _found(root: Path) -> list[Path]:
    return sorted(root.glob("step-*"), reverse=True)


class _Damaged(Exception):
    """Raised for a checkpoint that cannot be used; the message names file and key."""


def _verify(path: Path) -> None:
    """Check that a checkpoint has exactly the files of its manifest, with their digests. Raises _Damaged."""
    try:
        expected, present = read_json(path / MANIFEST), digests(path)
    except (CheckpointError, OSError) as error:
        raise _Damaged(str(error)) from error
    if STATE not in expected:
        raise _Damaged(f"{MANIFEST} does not list {STATE}")
    wrong = [name for name, digest in expected.items() if present.get(name) != digest]
    wrong += present.keys() - expected.keys()
    if wrong:
        raise _Damaged(f"{min(wrong)!r:.100} is missing, changed, or not in {MANIFEST}")


def _state(path: Path, kind: type[State]) -> State:
    """Read the state from a checkpoint's trainer.json. Raises _Damaged, naming the key that is wrong."""
    try:
        return TypeAdapter(kind).validate_json(regular_files.read_bytes(path), strict=True)
    except OSError as error:
        raise _Damaged(f"{path.name}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = f", {'.'.join(map(str, first['loc']))[:100]!r}" if first["loc"] else ""
        raise _Damaged(f"{path.name}{key}: {first['msg']:.200}") from error


def digests(path: Path) -> dict[str, str]:
    """sha256 of every file except the manifest. OSError if anything else is in the directory, such as a pipe."""
    files = [file for file in sorted(path.rglob("*")) if not file.is_dir() and file != path / MANIFEST]
    if strange := next((file for file in files if not file.is_file()), None):
        raise OSError(f"{strange.name!r} is not a regular file")
    return {str(file.relative_to(path)): sha256(file) for file in files}
