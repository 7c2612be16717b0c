"""Read run directories for reports.

Files may be missing, because a run was stopped or is from an older version; the report uses the rest. A broken result
is an error.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from specctl import regular_files
from specctl.errors import RecipeError, SpecctlError, UsageError
from specctl.recipe import yaml_file
from specctl.reporting.tables import unusable_notes
from specctl.runs import RESOLVED

RUNS = Path("runs")
MARKS = ("run.json", "result.json")


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run directory. `number` distinguishes runs of one command in a report (0 = the only run).

    `info` is run.json, `result` is result.json, and `recipe` is the text of recipe.resolved.yaml; each is empty if the
    file is missing. `notes` tells the reader of the report about gaps.
    """

    dir: Path
    command: str
    info: dict[str, Any]
    result: dict[str, Any]
    recipe: str
    number: int = 0
    notes: list[str] = field(default_factory=list)

    def named(self, name: str) -> str:
        """Label for `name` that distinguishes it from other runs of the command."""
        return f"{name} #{self.number}" if self.number else name

    def stem(self, name: str) -> str:
        """Stem of a file name for `name` that distinguishes it from other runs of the command."""
        return f"{name}-{self.number}" if self.number else name

    def keys(self) -> dict[str, Any]:
        """Flatten the recipe to `{"sampling.seed": 0, …}`; empty if it cannot be read."""
        try:
            return dict(flat(yaml_file.load(self.recipe, RESOLVED)[0]))
        except RecipeError:
            self.notes.append(f"{RESOLVED} is not a recipe")
            return {}

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the objects of a .jsonl file, if it exists. Unreadable lines (cut off by a kill) are skipped."""
        path, broken = self.dir / name, 0
        if not path.is_file():
            return
        with regular_files.open_regular(path, "r", encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    value = parse(line)
                except ValueError:
                    value = None
                if isinstance(value, dict):
                    yield value
                else:
                    broken += 1
        if broken:
            self.notes.append(f"{name}: {broken} lines cannot be read and are left out")


def read(directories: Sequence[Path]) -> list[RunRecord]:
    """Read run directories, each once. If a command has several runs, they are numbered from 1.

    Raises UsageError for a path that is not a run directory, and SpecctlError if run.json or result.json is broken.
    """
    unique = list({os.path.realpath(path): path for path in directories}.values())
    runs = [_read(path) for path in unique]
    commands = [run.command for run in runs]
    for index, run in enumerate(runs):
        if commands.count(run.command) > 1:
            runs[index] = replace(run, number=commands[: index + 1].count(run.command))
    return runs


def newest(root: Path = RUNS) -> Path:
    """Return the most recently started run directory below `root`. Raises UsageError if there is no run directory."""
    runs = [path for path in root.iterdir() if is_run(path)] if root.is_dir() else []
    if not runs:
        raise UsageError(f"no run directory below ./{root}", hint="name one: specctl report RUN")
    return max(runs, key=_started)


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in MARKS)


def parse(text: str | bytes) -> Any:
    """Parse JSON into strings that can be encoded again: a lone surrogate, which UTF-8 cannot encode, becomes `?`.

    Raises ValueError.
    """
    value = regular_files.parse_json(text)
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def flat(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested objects: `{"a": {"b": 1}}` yields `("a.b", 1)`."""
    for key, value in document.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read(directory: Path) -> RunRecord:
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory", hint="specctl report takes run directories")
    if not is_run(directory):
        inside = f"; for the runs inside: specctl report {directory}/*" if any(map(is_run, directory.iterdir())) else ""
        raise UsageError(f"{directory} is not a run directory: no {' or '.join(MARKS)}{inside}")
    info, result = (_object(directory / name) for name in MARKS)
    recipe = directory / RESOLVED
    run = RunRecord(
        dir=directory,
        command=str(result.get("command") or info.get("command") or "unknown"),
        info=info,
        result=result,
        recipe=regular_files.read_text(recipe, errors="replace") if recipe.is_file() else "",
    )
    missing = [name for name, there in ((MARKS[0], info), (recipe.name, run.recipe)) if not there]
    run.notes.extend(f"there is no {name}" for name in missing)
    if not result:
        run.notes.append("there is no result.json: the run was stopped or is still running")
    run.notes.extend(unusable_notes(result))
    return run


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = parse(regular_files.read_bytes(path))
    except ValueError as error:
        raise SpecctlError(f"{path} is not JSON: {error}", hint="repeat the run, or leave it out") from error
    if not isinstance(value, dict):
        raise SpecctlError(f"{path} holds no JSON object", hint="repeat the run, or leave it out")
    return value


def _started(directory: Path) -> tuple[float, str]:
    """Sort key of a run directory: its start in seconds since 1970, from run.json or the file's time, then its name."""
    mark = next(directory / name for name in MARKS if (directory / name).is_file())
    try:
        return datetime.fromisoformat(parse(regular_files.read_bytes(mark))["started"]).timestamp(), directory.name
    except (ValueError, KeyError, TypeError):
        return mark.stat().st_mtime, directory.name
