"""Run directories as reports read them. Files may be missing (a run that was stopped, an older version): what is there
is used; a result that is there and broken is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from specctl import regular
from specctl.errors import RecipeError, SpecctlError, UsageError
from specctl.recipe import yaml_file
from specctl.reporting.tables import doubts

RUNS = Path("runs")
MARKS = ("run.json", "result.json")


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run directory. `number` tells runs of one command apart in a report (0: it is the only one).

    `info` is run.json, `result` result.json, `recipe` the text of recipe.resolved.yaml; empty where the file is
    missing. `notes` says what a reader of the report should know about gaps.
    """

    dir: Path
    command: str
    info: dict[str, Any]
    result: dict[str, Any]
    recipe: str
    number: int = 0
    notes: list[str] = field(default_factory=list)

    def named(self, name: str) -> str:
        """`name` as a label beside those of other runs of the command."""
        return f"{name} #{self.number}" if self.number else name

    def keys(self) -> dict[str, Any]:
        """The recipe as `{"sampling.seed": 0, …}`; empty where it cannot be read."""
        try:
            return dict(flat(yaml_file.load(self.recipe, "recipe.resolved.yaml")[0]))
        except RecipeError:
            self.notes.append("recipe.resolved.yaml is not a recipe")
            return {}

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The objects of a .jsonl file, none where it is missing. A line that was cut off by a kill is left out."""
        path, broken = self.dir / name, 0
        if not path.is_file():
            return
        with regular.opened(path, "r", encoding="utf-8", errors="replace") as file:
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
    """The runs of directories, each once; those of one command are numbered from 1 where there are several.

    Raises UsageError for what is no run directory, SpecctlError for one whose run.json or result.json is broken.
    """
    unique = list({path.resolve(): path for path in directories}.values())
    runs = [_read(path) for path in unique]
    commands = [run.command for run in runs]
    for index, run in enumerate(runs):
        if commands.count(run.command) > 1:
            number = commands[: index + 1].count(run.command)
            runs[index] = RunRecord(**{**vars(run), "number": number})
    return runs


def newest(root: Path = RUNS) -> Path:
    """The run directory below `root` that was started last. Raises UsageError where there is none."""
    runs = [path for path in root.iterdir() if is_run(path)] if root.is_dir() else []
    if not runs:
        raise UsageError(f"no run directory below ./{root}", hint="name one: specctl report RUN")
    return max(runs, key=_started)


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in MARKS)


def parse(text: str | bytes) -> Any:
    """JSON whose strings can be written again: half of a surrogate pair, which UTF-8 has not, becomes `?`.

    Raises ValueError.
    """
    value = regular.parsed(text)
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def flat(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"a": {"b": 1}}` as `("a.b", 1)`."""
    for key, value in document.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read(directory: Path) -> RunRecord:
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory", hint="specctl report takes run directories")
    if not is_run(directory):
        inside = f"; its runs: specctl report {directory}/*" if any(map(is_run, directory.iterdir())) else ""
        raise UsageError(f"{directory} is not a run directory: no {' or '.join(MARKS)}{inside}")
    info, result = (_object(directory / name) for name in MARKS)
    recipe = directory / "recipe.resolved.yaml"
    run = RunRecord(
        dir=directory,
        command=str(result.get("command") or info.get("command") or "unknown"),
        info=info,
        result=result,
        recipe=regular.text(recipe, errors="replace") if recipe.is_file() else "",
    )
    missing = [name for name, there in ((MARKS[0], info), (recipe.name, run.recipe)) if not there]
    run.notes.extend(f"there is no {name}" for name in missing)
    if not result:
        run.notes.append("there is no result.json: the run was stopped or is still going on")
    run.notes.extend(doubts(result))
    return run


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = parse(regular.content(path))
    except ValueError as error:
        raise SpecctlError(f"{path} is not JSON: {error}", hint="repeat the run, or leave it out") from error
    if not isinstance(value, dict):
        raise SpecctlError(f"{path} holds no JSON object", hint="repeat the run, or leave it out")
    return value


def _started(directory: Path) -> tuple[float, str]:
    """Seconds since 1970, from run.json where it says so; the name decides between equals."""
    mark = next(directory / name for name in MARKS if (directory / name).is_file())
    try:
        return datetime.fromisoformat(parse(regular.content(mark))["started"]).timestamp(), directory.name
    except (ValueError, KeyError, TypeError):
        return mark.stat().st_mtime, directory.name
