"""Run directories: the record that every command leaves, and the only input of reports.

recipe.resolved.yaml   the recipe with every default filled in
run.json               argv, versions, git sha, hardware, seed, target identity
metrics.jsonl          append-only, one JSON object per line; a resumed run has each line once
result.json            the result document, written last
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from specctl import lock, progress, regular_files, threads
from specctl.errors import SpecctlError, UsageError, redacted, without_passwords
from specctl.subcommands import SUBCOMMANDS

SCHEMA_VERSION = 1
METRICS = "metrics.jsonl"
RESOLVED = "recipe.resolved.yaml"
PRIVATE, PRIVATE_DIRECTORY = 0o600, 0o700  # permissions if a run holds users' texts
MOST_THREADS = 4096  # largest count of threads that is believed
_LEFT = re.compile(r"\.(?P<name>.+)\.(?P<pid>[1-9][0-9]{0,6})(-[0-9a-f]+)?\.tmp")
VERSIONED = ("torch", "transformers", "deepspeed", "specctl")


class Run:
    """One run directory. Under `torchrun` only rank 0 writes; the other ranks hold the same object and stay silent."""

    def __init__(self, dir: Path, command: str = "", target: str | None = None, seed: int | None = None):
        self.dir = Path(dir)
        self.command, self.target, self.seed = command, target, seed
        self._started, self._others = time.monotonic(), threads.OtherProcesses()
        self._writes = progress.is_rank_zero()
        self._private = False  # whether it holds users' texts
        self._recipe: Any = None  # set until the run begins
        self._earlier = b""  # first metrics, from the resumed run
        self._new = True  # whether the directory was made for this run

    @classmethod
    def create(cls, command: str, recipe: Any, output_dir: str | Path | None = None) -> Run:
        """Make the directory (default `./runs/<command>-<time>-<id>/`), which may hold an earlier run.

        The earlier run's files stay until this run begins, because the command may still be refused. `recipe` is one of
        the models of `specctl.recipe`.

        Raises SpecctlError if the directory cannot be written. Raises UsageError if it holds a run of another command,
        which this run could neither resume nor replace completely.
        """
        private = holds_user_texts(command, recipe)
        mode = PRIVATE_DIRECTORY if private else 0o777
        directory = Path(output_dir) if output_dir else _new_name(Path("runs"), command, mode)
        run = cls(directory, command, recipe.target.name, recipe_seed(recipe))
        run._recipe, run._private = recipe, private
        if run._writes:
            run._new = make_dir(run.dir, mode) or output_dir is None
            check_same_command(run.dir, command)
        return run

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the directory's lock during the block. Raises UsageError if another process uses the directory."""
        with lock.hold(self.dir / lock.NAME, self.dir, self._new):
            remove_leftovers(self.dir)
            yield

    @property
    def replaces_earlier(self) -> bool:
        """Whether the directory holds an earlier run, and this run has not begun."""
        return self._recipe is not None and (self.dir / "run.json").exists()

    def resume_from(self, earlier: Path, size: int) -> None:
        """Resume the run in the directory `earlier`, which may be this one: keep its first metrics and its threads.

        `size`: bytes of its metrics.jsonl to keep, the `metrics_size` that was stored with its state. Later lines are
        dropped, because the resumed run writes them again.
        """
        threads.resume_threads(threads_of(earlier))
        path = earlier / METRICS
        with suppress(OSError):  # without readable metrics the run starts with none
            if not self._writes or not path.is_file():
                return
            with regular_files.open_regular(path) as file:
                kept = file.read(min(size, path.stat().st_size))
            self._earlier = kept[: kept.rfind(b"\n") + 1]  # a crash may have cut the last line

    @property
    def metrics_size(self) -> int:
        """Present size of metrics.jsonl in bytes."""
        path = self.dir / METRICS
        return path.stat().st_size if path.exists() else 0

    def _begin(self) -> None:
        """Begin the run: write the resolved recipe and run.json, and delete an earlier run's result and metrics.

        The metrics that `resume_from` has read are kept.
        """
        progress.interrupts.begin_work()
        recipe, self._recipe = self._recipe, None
        if recipe is None or not self._writes:
            return
        (self.dir / "result.json").unlink(missing_ok=True)
        if self._earlier:
            self._write(METRICS, self._earlier)
        else:
            (self.dir / METRICS).unlink(missing_ok=True)
        resolved = {"command": self.command, **recipe.model_dump(mode="json")}
        text = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True)
        self._write(RESOLVED, text)
        about = {"schema_version": SCHEMA_VERSION, "command": self.command, **environment(self.seed)}
        self._write_json("run.json", about)

    def annotate(self, **fields: Any) -> None:
        """Add `fields` (e.g. the target's identity) to run.json.

        The first call begins the run. A resumed run calls it only after all checks have passed.
        """
        self._begin()
        if self._writes:
            self._write_json("run.json", without_passwords(_about(self.dir) | fields))

    def metrics(self, **fields: Any) -> None:
        """Append one line to metrics.jsonl, with `elapsed_s`, the seconds since this process began."""
        self._begin()
        if self._writes:
            line = to_json(without_passwords({"elapsed_s": round(self.elapsed_s, 3), **fields}))
            path = self.dir / METRICS
            options: dict[str, Any] = {"follow": False, "permissions": self._permissions}
            with path_in_errors(path), regular_files.open_regular(path, "a", encoding="utf-8", **options) as file:
                file.write(line + "\n")

    def result(self, doc: dict[str, Any]) -> dict[str, Any]:
        """Add the fields of every result to `doc`, write it to result.json, and return it.

        Passwords in addresses are removed.
        """
        self._begin()
        common = {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "run_dir": str(self.dir),
            "target": self.target,
            "seed": self.seed,
            "elapsed_s": round(self.elapsed_s, 3),
            "machine": self._machine(),
        }
        document = without_passwords(common | doc)
        if self._writes:
            self._write_json("result.json", document)
        return document

    def _machine(self) -> dict[str, Any]:
        """Return the cores, the command's threads, and how many cores other processes kept busy during the run.

        With busy cores, a measured speed says little about the machine.
        """
        import torch

        busy = self._others.busy()
        about = {"cores": threads.cores(), "threads": torch.get_num_threads()}
        return about | {"others_busy": None if busy is None else round(busy, 2)}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def _write_json(self, name: str, document: dict[str, Any]) -> None:
        self._write(name, to_json(document, indent=2) + "\n")

    def _write(self, name: str, content: bytes | str) -> None:
        atomic_write(self.dir / name, content, self._permissions)

    @property
    def _permissions(self) -> int:
        return PRIVATE if self._private else 0o666


def holds_user_texts(command: str, recipe: Any) -> bool:
    """Whether the run directory of a command holds users' texts: their requests, or prompts and answers."""
    traffic = getattr(recipe, "traffic", None)
    requests = recipe.log if command == "distill" else traffic is not None and (traffic.listen or traffic.log)
    requests = requests or (command == "serve" and recipe.learn.enabled and recipe.server.urls)
    return bool(command == "generate" or getattr(recipe, "save_outputs", False) or requests)


def _new_name(runs: Path, command: str, mode: int = 0o777) -> Path:
    """Make a new run directory with a unique name, because the jobs of an array start within one second."""
    while True:
        place = runs / f"{command}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        if not progress.is_rank_zero():  # the other ranks write nothing
            return place
        make_dir(runs)
        with suppress(FileExistsError):
            place.mkdir(mode)
            return place


def check_same_command(directory: Path, command: str) -> None:
    """Raise UsageError if the directory holds a run of another command, unless `command` was a mode of that command, or
    that command is a part of `command` today.

    A run of `command` could neither resume it nor replace it completely.
    """
    there = _about(directory).get("command")
    if there is None:
        return  # no run, or one without the name of its command
    row = SUBCOMMANDS.get(command)
    if there not in (command, *((row.earlier, row.formerly) if row else ())):
        hint = f"--resume and --overwrite need a run of specctl {command}: choose another --output-dir, or delete it"
        raise UsageError(f"{directory} holds a run of specctl {there}", hint)


def _about(directory: Path) -> dict[str, Any]:
    """The content of run.json in a directory, or nothing if the file is missing or damaged."""
    try:
        found = regular_files.read_json(directory / "run.json")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def threads_of(directory: Path) -> int | None:
    """Return the number of threads of the run in a directory, or None if it is not recorded."""
    hardware = _about(directory).get("hardware")
    count = hardware.get("threads") if isinstance(hardware, dict) else None
    return count if type(count) is int and 0 < count <= MOST_THREADS else None


def recipe_seed(recipe: Any) -> int | None:
    """Return the seed to report with a result: from the section `sampling`, else from `data`, else None."""
    section = getattr(recipe, "sampling", None) or getattr(recipe, "data", None)
    return section.seed if section else None


def to_json(document: Any, indent: int | None = None, ascii: bool = False) -> str:
    """Serialize to JSON that every reader accepts: NaN and infinity become null, paths become strings.

    `ascii`: escape all characters beyond ASCII.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(document), indent=indent, ensure_ascii=ascii, default=str)


def atomic_write(path: str | Path, content: bytes | str, permissions: int = 0o666) -> None:
    """Write a file whole or not at all: temporary file in the same directory, then `publish`. OSErrors name `path`.

    A symbolic link at `path` is replaced. `permissions`: mode bits of the file, before the umask.
    """
    path = Path(path)
    # Texts name files, which need not be UTF-8.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    # A new file with an unguessable name: a link that another user has put there would redirect the content.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with regular_files.create_file(temporary, permissions=permissions) as file:
            file.write(data)
        publish(temporary, path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        with suppress(OSError):  # a read-only file system refuses even for a file that is not there
            temporary.unlink()


def publish(draft: Path, place: Path) -> None:
    """Move a complete file or directory from `draft` to `place`, in the same folder, and replace an old one.

    The contents are on disk before they get this name: otherwise a power loss could leave empty files under it. No
    system call replaces a directory that has files, so the old one is renamed to its `backup` before.
    """
    directory, old = draft.is_dir(), backup(place)
    for path in [*draft.rglob("*"), draft] if directory else [draft]:
        sync(path)
    if directory and place.exists():
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    try:
        draft.rename(place)
    except BaseException:  # Ctrl-C, too
        if directory and old.exists() and not place.exists():
            old.rename(place)
        raise
    sync(place.parent)
    if directory:
        shutil.rmtree(old, ignore_errors=True)


def backup(place: Path) -> Path:
    """Return the path at which the old directory is found after a crash between the two renames of `publish`."""
    return place.with_name(f".{place.name}.old")


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to disk (fsync). Some network file systems cannot flush directories."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def remove_leftovers(directory: Path, name: str = "") -> None:
    """Remove temporary files and directories that killed processes have left in a directory.

    They come from `atomic_write` and `drafters.checkpoint.staged`. `name`: only the leftovers of this output; empty =
    of all outputs. The caller must hold the lock on the output. Under torchrun only rank 0 removes anything.
    """
    if not progress.is_rank_zero() or not directory.is_dir():
        return
    import psutil

    for path in directory.iterdir():
        left = _LEFT.fullmatch(path.name)
        if left is None or name not in ("", left["name"]) or psutil.pid_exists(int(left["pid"])):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def path_in_errors(path: Path) -> Iterator[None]:
    """Name `path` in an OSError of the block if the operating system names no file, as on a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def make_dir(path: Path, mode: int = 0o777, hint: str = "choose another --output-dir") -> bool:
    """Create a directory to write into, and return whether there was none.

    Raises SpecctlError if the file system refuses, UsageError if a file is there.

    `mode`: permissions of a new directory, before the umask; an existing directory keeps its permissions.
    `hint`: remedy for errors.
    """
    new = not os.path.lexists(path)
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        taken = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
        kind = "a link that leads nowhere" if taken.is_symlink() and not taken.exists() else "a file, not a directory"
        raise UsageError(f"{taken} is {kind}", hint) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"cannot create {path}: {error.strerror}", hint="choose a shorter name") from error
        raise SpecctlError(f"cannot create {path}: {error.strerror}", hint) from error
    if not os.access(path, os.W_OK):
        raise SpecctlError(f"cannot write to {path}: read-only", hint)
    return new


def environment(seed: int | None) -> dict[str, Any]:
    """Return the facts needed to repeat the run: argv, versions, git sha of the checkout, hardware, seed."""
    return {
        "argv": redacted(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seed": seed,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in VERSIONED}},
        "git": git_sha(),
        "hardware": hardware(),
    }


def sha256(path: Path) -> str:
    """Return the SHA-256 digest of a file, 64 hex digits."""
    with regular_files.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # IO lacks readinto


def version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None. Only its metadata is read."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def git_sha() -> str | None:
    """Return the commit of this package's checkout, with `+dirty` for local changes, or None without a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> dict[str, Any]:
    """Return CPU model, usable cores, threads of this command, memory in GiB, and CUDA devices."""
    import psutil
    import torch

    return {
        "cpu": cpu_model(),
        "cores": threads.cores(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def cpu_model() -> str:
    """Return the model of the first processor in /proc/cpuinfo, or else the name that Python has for the processor."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()
