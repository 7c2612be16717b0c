"""Result document of `specctl export`, the check of its output directory, and the upload to the Hugging Face hub."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from specctl.drafters import checkpoint
from specctl.engines.corpora import PublishedCorpus
from specctl.errors import SpecctlError, UsageError, one_line
from specctl.measuring.served_costs import Tuning
from specctl.recipe import ExportRecipe

RECORD = "export.json"
"""File in the output directory that says where the export comes from. A directory with this file may be overwritten."""

TOKEN_HINT = "run `hf auth login`, or set HF_TOKEN to a token that may write"


@dataclass(frozen=True)
class ExportResult:
    """The result document of `export`.

    Attributes:
        output: the output directory. It is the drafter's own directory, with no files written, if servers were given a
            corpus or the engine drafts from our format.
        max_difference: largest difference between the weights of the original and of the drafter read back from the
            output; null without --check.
        commands: shell commands that put the output to use.
        published: corpora that servers were given.
        pushed: address of the repository that has the files, or None without --push.
    """

    drafter: str
    family: str
    to: str
    output: str
    files: list[str]
    params: int
    tokens: int
    max_difference: float | None
    tuning: Tuning | None
    commands: list[str]
    notes: list[str]
    published: list[PublishedCorpus] = field(default_factory=list)
    pushed: str | None = None


def record(recipe: ExportRecipe, drafter: checkpoint.Checkpoint, commands: list[str]) -> dict[str, Any]:
    """Content of export.json."""
    origin = {"drafter": str(recipe.source.absolute()), "to": recipe.to, "target": drafter.config["target"]}
    return origin | {"commands": commands}


def check_free(place: Path, overwrite: bool) -> None:
    """Raise UsageError if the output directory is taken; only an earlier export is ever replaced."""
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    if not (place / RECORD).is_file():
        raise UsageError(f"{place} exists and was not written by specctl export", hint="choose another --output-dir")
    if not overwrite:
        raise UsageError(f"{place} exists", hint="--overwrite replaces it")


def push(directory: Path, name: str, private: bool) -> str:
    """Upload a directory into a model repository, which is created if it is missing. Returns its address.

    export.json stays here: it holds paths of this machine. The token comes from `hf auth login` or `HF_TOKEN`.

    Raises SpecctlError if the hub cannot be reached or refuses; the directory remains.
    """
    api = HfApi()
    remains = f"the files remain in {directory}"
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=directory, ignore_patterns=[RECORD], commit_message="Upload by specctl export"
        )
    except LocalTokenNotFoundError as error:
        raise SpecctlError(f"no token of the hub; {remains}", TOKEN_HINT) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = str(error.server_message or one_line(error)).replace("\n", " ")
        hint = TOKEN_HINT if status in (401, 403) else f"hf upload {name} {directory} tries again"
        raise SpecctlError(f"{api.endpoint} answered {status}: {reason:.200}; {remains}", hint) from error
    except Exception as error:  # the hub's client raises errors of httpx or httpx2, by its version
        hint = f"run `hf upload {name} {directory}` on a machine that reaches the hub"
        raise SpecctlError(f"the upload to {api.endpoint} failed: {one_line(error)}; {remains}", hint) from error
    return str(url)
