"""Write the reference of tests/golden anew: `python -m tests.golden.regenerate`, from the root of the checkout."""

import json
import tempfile
from pathlib import Path

from tests.golden import commands, interface
from tests.golden.commands import Documents
from tests.toys.shallow import write_shallow

HERE = Path(__file__).parent


def everything(place: Path) -> dict[str, Documents]:
    """Name of a reference file → its documents; the small runs write to `place`, with seven layers of the built-in
    target and without drawing."""
    with tempfile.TemporaryDirectory() as other, commands.alone(place) as patch:
        small = write_shallow(Path(other) / "target", layers=7)
        patch.setattr("specctl.decoding.models.loading.builtin_path", lambda: small)
        patch.setattr("specctl.reporting.plots.png", lambda figure: b"")
        found = {"recipes": interface.recipe_keys(), "options": interface.options(), "shipped": interface.shipped()}
        found |= {"results": commands.results(), "files": commands.kept(place)}
        found["environment"] = interface.environment(patch.setenv)
    return found


def write(name: str, documents: Documents) -> None:
    """Replace a reference file."""
    text = json.dumps(documents, indent=1, sort_keys=True, ensure_ascii=False)
    (HERE / f"{name}.json").write_text(text + "\n")


def reference(name: str) -> Documents:
    """The documents of a reference file."""
    return json.loads((HERE / f"{name}.json").read_text())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for name, documents in everything(Path(place)).items():
            write(name, documents)
