"""Read and write specctl's drafter directory: written atomically, verified before its contents are used.

config.json         family, architecture, identity of the target
model.safetensors   weights (no other weight format is ever opened)
drafter.json        domain, data fingerprint, recipe hash, measured mat per domain, license
README.md           model card
adapter_*           of a LoRA adapter: the same weights for peft, which applies them to the base drafter's module
manifest.json       size and sha256 of every other file, written last
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specctl import progress, regular_files, replaced_directories
from specctl.decoding.target_text import TargetText
from specctl.drafters.card import adapters_of, model_card
from specctl.errors import CheckpointError, SpecctlError, brief, near_path
from specctl.runs import atomic_write, backup, make_dir, publish, sha256, to_json

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
MANIFEST, INFO = replaced_directories.MARKS["drafter"]
PROMPTS = "prompts"  # key of drafter.json: statistics of the training prompts (training/outcome.py)
REQUIRED = (CONFIG, WEIGHTS, INFO)
TRAINING = ".checkpoints"  # suffix of the directory next to a drafter that holds its training checkpoints
FORMAT = 1
RECOPY_HINT = "copy it again or train it again with --overwrite"


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a drafter directory as read from disk; `path` is the directory."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    info: dict[str, Any]
    path: Path


@dataclass(frozen=True)
class _Kind:
    mean: Annotated[list[FiniteFloat], Field(min_length=1)]
    error: Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True)
class _Prompts:
    taps: list[int]
    kinds: dict[str, _Kind]


@dataclass(frozen=True)
class _Info:
    """Types of the keys of drafter.json that are read again. It may have others."""

    domain: str | list[str] | None = None
    train_tokens: int | None = None
    mat: dict[str, FiniteFloat] | None = None
    expected_mat: dict[str, FiniteFloat] | None = None
    prompts: _Prompts | None = None


_INFO = TypeAdapter(_Info)


def save(
    directory: str | Path,
    *,
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    info: dict[str, Any],
    overwrite: bool = False,
) -> Path:
    """Write a drafter directory next to its final place, then move it there; a crash leaves the old one usable.

    Args:
        config: "family", "architecture" and "target" (`Target.identity`), plus any keys the family needs.
        overwrite: replace an existing drafter. A directory that is not a drafter is never replaced.

    Raises:
        UsageError: the place is taken, or another output is inside it.
        SpecctlError: the file system refused (full disk, read-only); an old drafter is untouched.
    """
    place = Path(directory).absolute()
    replaced_directories.check_free(place, overwrite)
    with staged(place) as draft:
        own = untied_cpu_copies(tensors)
        write_tensors(draft / WEIGHTS, own)
        if "lora" in config:
            named = {f"base_model.model.{name}": tensor for name, tensor in own.items()}  # peft's names
            write_tensors(draft / "adapter_model.safetensors", named, {"format": "pt"})
            atomic_write(draft / "adapter_config.json", to_json(_peft_settings(config["lora"], own), indent=2) + "\n")
        atomic_write(draft / CONFIG, to_json(config, indent=2) + "\n")
        atomic_write(draft / INFO, to_json(info, indent=2) + "\n")
        atomic_write(draft / CARD, model_card(place.name, config, info))
        atomic_write(draft / MANIFEST, to_json({"format": FORMAT, "files": digests(draft)}, indent=2) + "\n")
    return place


def _peft_settings(lora: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Content of adapter_config.json for the section `lora` of config.json and the adapter's weights."""
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": (lora.get("base") or {}).get("path"),
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "target_modules": sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}),
        "inference_mode": True,
    }


@contextmanager
def staged(place: Path) -> Iterator[Path]:
    """Yield a temporary directory next to `place`; move it there on success, remove it on failure.

    Raises SpecctlError if the file system refuses; the old content of `place` is untouched.
    """
    make_dir(place.parent)
    draft = place.with_name(f".{place.name}.{os.getpid()}-{secrets.token_hex(2)}.tmp")
    try:
        draft.mkdir()
        yield draft
        publish(draft, place)
    except Exception as error:
        if isinstance(error, SpecctlError) or not (isinstance(error, OSError | SafetensorError) or _refused(error)):
            raise
        system = error.strerror if isinstance(error, OSError) else None
        first = system or str(error).partition("\n")[0]
        raise SpecctlError(
            f"cannot write {place}: {first}", hint="free space, or choose another --output-dir"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _refused(error: Exception) -> bool:
    """Whether the file system refused to write for `torch.save` or `tokenizers`, which raise no OSError."""
    return re.search(r"PytorchStreamWriter|inline_container|\(os error \d+\)", str(error)) is not None


def load(directory: str | Path) -> Checkpoint:
    """Read a drafter directory after verifying its manifest.

    Raises:
        CheckpointError: the directory is missing or not in our format, or a file is missing, changed, truncated or
            outside the directory. The message names the file.
    """
    path = existing_directory(Path(directory))
    verify(path)
    try:
        tensors = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path / WEIGHTS} is not a safetensors file: {error}", hint=RECOPY_HINT) from error
    config = read_json(path / CONFIG)
    if not isinstance(config.get("family"), str) or not isinstance(config.get("target"), dict):
        raise CheckpointError(
            f'{path / CONFIG} lacks "family" or "target"', hint="use a drafter that specctl has written"
        )
    return Checkpoint(config, tensors, read_info(path), path)


def read_info(directory: str | Path) -> dict[str, Any]:
    """Read a drafter's description, drafter.json, without its weights. Raises CheckpointError."""
    path = existing_directory(Path(directory)) / INFO
    info = read_json(path)
    try:
        _INFO.validate_json(json.dumps(info), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"][:4]))
        raise CheckpointError(f"{path}: {key}: {first['msg']}", hint=RECOPY_HINT) from error
    return info


def fingerprint(directory: str | Path) -> str:
    """Return the sha256 of the manifest; it changes with any file of the drafter, as the manifest lists all digests."""
    return sha256(_inside(existing_directory(Path(directory)), MANIFEST))


def verify(directory: str | Path) -> None:
    """Compare every file with the manifest. Raises CheckpointError naming the first one that differs."""
    root = Path(directory)
    if not os.path.lexists(root / MANIFEST):
        raise CheckpointError(f"{root / MANIFEST} is missing: not a complete specctl drafter", hint=RECOPY_HINT)
    manifest = read_json(root / MANIFEST)
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict):
        raise CheckpointError(
            f"{root / MANIFEST} does not have format {FORMAT}", hint="use the specctl version that wrote it"
        )
    check_files(root, files, REQUIRED, MANIFEST)


def check_files(root: Path, files: dict[str, Any], required: Sequence[str], record: str) -> None:
    """Compare the files of a directory with their `digests`, stored in its file `record`. Raises CheckpointError."""
    for name in required:
        if name not in files:
            raise CheckpointError(f"{root / record} does not list {name}", hint=RECOPY_HINT)
    for name, expected in files.items():
        path = _inside(root, name)
        size = path.stat().st_size
        if not isinstance(expected, dict) or size != expected.get("bytes"):
            wanted = expected.get("bytes") if isinstance(expected, dict) else None
            raise CheckpointError(f"{path} has {size} bytes, but its manifest says {wanted}", hint=RECOPY_HINT)
        if sha256(path) != expected.get("sha256"):
            raise CheckpointError(f"{path} is damaged: its sha256 differs from the manifest's", hint=RECOPY_HINT)


def check_target(config: dict[str, Any], target: TargetText, name: str = "", what: str = "drafter") -> None:
    """Raise CheckpointError if a drafter with this `config` was made for another target, warn if for another adapter.

    The target's name may differ (a moved directory, a fine-tuned target); vocabulary, hidden size and depth may not.
    `what` names the kind of model in the message.
    """
    made_for, given = config["target"], target.identity
    wrong = [key for key in ("vocab_hash", "hidden_size", "num_layers") if made_for.get(key) != given[key]]
    if wrong:
        differences = ", ".join(f"{key} {made_for.get(key)} ≠ {given[key]}" for key in wrong)
        raise CheckpointError(
            f"{what} {name or config.get('family')} was made for {made_for.get('name')}, but target {given['name']} is "
            f"another model ({differences})",
            hint=f"use --target {made_for.get('name')}, or train a {what} for {given['name']}",
        )
    if not adapters_of(given).keys() <= adapters_of(made_for).keys():
        progress.warn(
            f"{what} {name or config.get('family')} was made for a target with {named_adapter(made_for)}, not with "
            f"{named_adapter(given)}: fewer draft tokens may be accepted"
        )


def named_adapter(identity: Mapping[str, Any]) -> str:
    """The adapters of a target in words, from its `identity`."""
    return " or ".join(f"adapter {one}" if one else "no adapter" for one in adapters_of(identity).values())


def family(directory: Path) -> str:
    """Family recorded in a drafter's config.json. Raises CheckpointError if it is missing."""
    name = read_json(directory / CONFIG).get("family")
    if not isinstance(name, str):
        raise CheckpointError(f'{directory / CONFIG} lacks "family"', hint="use a drafter that specctl has written")
    return name


def taps(directory: Path) -> list[int] | None:
    """Indices of the hidden states that a drafter reads, from its config.json alone, or None if it lists none."""
    shape = read_json(directory / CONFIG).get("architecture")
    found = shape.get("taps") if isinstance(shape, dict) else None
    return found if isinstance(found, list) and all(type(one) is int for one in found) else None


def weights_digest(directory: Path) -> str:
    """Return the sha256 of a drafter's weights from its manifest. Raises CheckpointError if it is not listed."""
    try:
        return str(read_json(directory / MANIFEST)["files"][WEIGHTS]["sha256"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / MANIFEST} does not list {WEIGHTS}", hint=RECOPY_HINT) from error


def is_drafter(path: Path) -> bool:
    """Whether a directory claims to be a drafter; it may still be damaged."""
    return any(os.path.isfile(path / name) for name in (MANIFEST, INFO))  # isfile is False for an impossible path


def untied_cpu_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous CPU copies of the tensors, with tied weights duplicated.

    safetensors refuses to store two names that share memory.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        found[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return found


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of the umask.

    The safetensors library makes its files readable for their owner alone, but an engine often runs as another user.
    Its errors of the file system, such as a full disk, become OSErrors.
    """
    with regular_files.create_file(path) as file:
        mode = os.fstat(file.fileno()).st_mode
    try:
        save_file(dict(tensors), path, metadata)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    path.chmod(mode)


def existing_directory(directory: Path, what: str = "drafter", command: str = "train-drafter") -> Path:
    """Return the directory, or its backup if a crash hit between the two renames of its replacement. A path may begin
    with `~`."""
    directory = directory.expanduser()
    place = directory.absolute()
    if os.path.isdir(place):  # False, without an error, if the name is too long
        return directory
    if not os.path.lexists(place) and os.path.isdir(backup(place)):
        return backup(place)
    hint = f"{near_path(directory)}give a directory written by specctl {command}"
    raise CheckpointError(regular_files.no_directory(f"{what} directory", directory), hint)


def _inside(root: Path, name: str) -> Path:
    """Path of the regular file `name` directly in `root`.

    The manifest is untrusted and may name any path. Raises CheckpointError if the file is missing or leads elsewhere.
    """
    path = root / name
    try:
        plain = (
            Path(name).name == name
            and name.isprintable()
            and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))
        )
        if not plain:
            raise CheckpointError(
                f"{root}: its file {brief(name)!r} points outside this directory",
                hint="a drafter consists of plain files",
            )
        regular_files.check(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", hint=RECOPY_HINT) from error
    except (OSError, RuntimeError, ValueError) as error:  # name too long, circular links, a NUL
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{root}: its file {brief(name)!r} cannot be read: {why}", hint=RECOPY_HINT) from error
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a checkpoint directory. Raises CheckpointError."""
    try:
        document = regular_files.read_json(_inside(path.parent, path.name))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}", hint=RECOPY_HINT) from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} does not contain a JSON object", hint=RECOPY_HINT)
    return document


def digests(root: Path) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file in a directory except its manifest."""
    files = sorted(path for path in root.iterdir() if path.name != MANIFEST)
    return {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}


def find_generalist(places: list[Path], family: str, target: str, output: Path) -> Path | None:
    """Return the most general drafter of a family and target among the direct children of `places`.

    It is the drafter trained on the most domains, at least two; ties go to the one trained on the most tokens. Adapters
    and `output` are ignored. Returns None if there is no such drafter.
    """
    found: dict[Path, tuple[int, int]] = {}
    for directory in sorted(path.parent for place in places for path in place.glob(f"*/{CONFIG}")):
        try:
            config, info = read_json(directory / CONFIG), read_info(directory)
        except CheckpointError:  # a sibling that is not a complete drafter
            continue
        made_for, domains = config.get("target"), info.get("domain")
        fits = config.get("family") == family and isinstance(made_for, dict) and made_for.get("name") == target
        count = len(domains) if isinstance(domains, list) else 0
        if fits and count > 1 and "lora" not in config and os.path.realpath(directory) != os.path.realpath(output):
            found[directory] = count, info.get("train_tokens") or 0
    return max(found, key=lambda directory: found[directory]) if found else None
