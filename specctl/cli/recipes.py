"""`specctl recipes`: list, show and copy the recipes in the package, and check an edited recipe."""

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.command import command, command_group
from specctl.cli.output import cell, output, records
from specctl.errors import UsageError

GRAFANA = "Dashboard of Grafana, for the metrics of serve"
GROUP = command_group("recipes", "ls | show | cp | validate.")
Name = Annotated[str, typer.Argument(help="A name from `specctl recipes ls`, or a file.")]


@command("ls", group=GROUP)
def ls() -> None:
    """List the recipes in the package."""
    from specctl.recipe.resolve import shipped

    rows = [{"name": name, "about": _about(text)} for name, text in shipped().items()]
    names = "\n".join(row["name"] for row in rows)
    output.result(
        {"recipes": rows}, lambda doc: records(doc["recipes"], {"name": "recipe", "about": "for"}), brief=names
    )


@command("show", group=GROUP)
def show(name: Name) -> None:
    """Print a recipe."""
    from specctl.recipe.resolve import read

    text, _ = read(name)
    output.result({"name": name, "text": text}, lambda doc: cell(doc["text"].rstrip()), brief=text.rstrip())


@command("cp", group=GROUP)
def cp(name: Name, to: Annotated[Path, typer.Argument(help="The file to write, or a directory.")]) -> None:
    """Copy a recipe, to edit it and pass it to --recipe."""
    from specctl.recipe.resolve import read
    from specctl.runs import atomic_write

    text, _ = read(name)
    script = ".py" if "python" in text.partition("\n")[0] else ".sbatch"
    suffix = ".json" if text.lstrip().startswith("{") else script if text.startswith("#!") else ".yaml"
    target = to / f"{name.rsplit('/', 1)[-1].removesuffix(suffix)}{suffix}" if to.is_dir() else to
    if target.exists():
        raise UsageError(f"{target} exists", hint="choose another name")
    if not target.parent.is_dir():
        raise UsageError(f"there is no directory {target.parent}", hint="make it, or choose another place")
    atomic_write(target, text)
    document = {"name": name, "written": str(target)}
    output.result(document, lambda doc: f"wrote {cell(doc['written'])}", brief=str(target))


@command("validate", group=GROUP)
def validate(name: Name) -> None:
    """Check a recipe, and report all its problems at once, with file and line."""
    from specctl.recipe.resolve import command_for, command_of, resolve

    command_name = command_for(resolve(command_of(name), name, environ={}))
    document = {"recipe": name, "command": command_name, "valid": True}
    output.result(document, lambda doc: f"{cell(doc['recipe'])} is a valid recipe for {doc['command']}", brief=name)


def _about(text: str) -> str:
    """Return the purpose of a recipe, from its first comment after the interpreter of a script. JSON has none."""
    if text.startswith("{"):
        return GRAFANA if '"panels"' in text else "DeepSpeed, for train-drafter: deepspeed=NAME"
    first = next(line for line in text.lstrip().splitlines() if not line.startswith("#!"))
    return first.lstrip("# ") if first.startswith("#") else ""
