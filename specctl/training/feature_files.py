"""Target features on disk: safetensors shards, each written completely or not at all, and read through a memory map.

    <features.dir>/<key>/manifest.json                describes target and data; the key is its digest
                         00003.safetensors            a shard

Features depend on target and data, not on the drafter or on the number of processes. They are kept next to the data by
default, and all runs over the same sequences share them. Each process reads only the shards it needs. Another target,
other taps or other data give another key. So does a server that computes the features, because an engine rounds
differently. The engine's name and version are in its shards and not in the key, so a run can continue with another
address or version.
"""

import hashlib
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specctl import regular_files
from specctl.drafters.checkpoint import write_tensors
from specctl.errors import CheckpointError, SpecctlError
from specctl.lock import Lock
from specctl.progress import log, warn
from specctl.recipe import FeatureRecipe
from specctl.runs import atomic_write, make_dir, publish, to_json

OPEN = 16  # shards mapped at a time: mapped pages count as resident until the kernel reclaims them
MANIFEST, LOCK = "manifest.json", "writer.lock"
DTYPES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}  # names that safetensors uses
ON_DISK = {"cached", "server"}  # modes that keep features in files
FP8, LARGEST = torch.float8_e4m3fn, 448.0  # the fp8 type and its largest number
USABLE = 0.95  # share of a disk's free space that may be used
GB = 2**30


@dataclass(frozen=True)
class Features:
    """Features of a sequence of S tokens with a prompt of P tokens, in S−2 slots (slot i also needs tokens i+1 and
    i+2).

    Attributes:
        taps: [S−2, F] tapped states of positions 0 .. S−3.
        teacher: [S−P−1, Ht] final hidden states of positions P .. S−2, which predict tokens P+1 .. S−1.
        best: [S−P−1] int32, the target's most probable next token at every teacher position.
    """

    taps: Tensor
    teacher: Tensor
    best: Tensor


class FeatureFiles:
    """{example index: Features} for all processes of a run; each process writes some of the shards and reads any.

    `about` describes target and data. `shards` lists the examples of every shard: index → (number of slots, number of
    response tokens to predict). These are the lengths of their `Features`.

    A shard that is opened must have the size that its header states, and the expected names, shapes and types.
    `is_intact` also compares its bytes with their sha256, once per run: about a second per GB.
    """

    def __init__(
        self, root: Path, about: Mapping[str, Any], shards: list[dict[int, tuple[int, int]]], fp8: bool = False
    ):
        self.about = {**about, **({"numbers": "fp8"} if fp8 else {})}
        self.fp8, self.width = fp8, about["target"]["hidden_size"]
        self.key = hashlib.sha256(to_json(self.about).encode()).hexdigest()[:16]
        self.dir = Path(root) / self.key
        self._shards = shards
        self.shard_of = {index: number for number, shard in enumerate(shards) for index in shard}
        self.opened: OrderedDict[int, Any] = OrderedDict()  # most recently used shards, mapped

    def __contains__(self, index: int) -> bool:
        return index in self.shard_of

    def __getitem__(self, index: int) -> Features:
        """Features of an example, as views of the mapped file. CheckpointError if the shard is damaged."""
        number = self.shard_of[index]
        if number not in self.opened:
            self.opened[number] = self._checked(number)
            if len(self.opened) > OPEN:
                self.opened.popitem(last=False)
        self.opened.move_to_end(number)
        file = self.opened[number]
        taps, teacher, best = (file.get_tensor(f"{index}.{name}") for name in ("taps", "teacher", "best"))
        if self.fp8:
            dtype = getattr(torch, self.about["dtype"].removeprefix("torch."))
            scales = (file.get_tensor(f"{index}.{name}_scale") for name in ("taps", "teacher"))
            taps, teacher = (dequantize_fp8(*pair, dtype) for pair in zip((taps, teacher), scales, strict=True))
        return Features(taps, teacher, best)

    def is_intact(self, number: int) -> bool:
        """Whether a shard is on disk, intact to the last bit. A damaged shard gets a warning and counts as missing."""
        if not self._path(number).exists():
            return False
        try:
            file = self._checked(number)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
            if (file.metadata() or {}).get("sha256") != _digest(tensors):
                raise self._damaged(number, "its contents have changed since it was written")
        except CheckpointError as error:
            warn(f"{error.message}; the file is computed again")
            return False
        return True

    def _damaged(self, number: int, problem: str) -> CheckpointError:
        return CheckpointError(
            f"the file of target features {self._path(number)} is damaged: {problem}",
            "start again with --resume: damaged files are computed again",
        )

    def _checked(self, number: int) -> Any:
        """The mapped file of a shard. CheckpointError if it is damaged, or has another key or other examples."""
        try:
            regular_files.check(self._path(number))
            file = safe_open(self._path(number), framework="pt")  # raises if the file's size contradicts its header
            problem = self._problem(file, number)
        except (OSError, SafetensorError) as error:
            problem = str(error)
        if problem is not None:
            raise self._damaged(number, problem)
        return file

    def _problem(self, file: Any, number: int) -> str | None:
        """The first difference between a shard and its expected contents, or None if they agree."""
        if (file.metadata() or {}).get("key") != self.key:
            return "it belongs to different data or a different target"
        dtype, taps = "F8_E4M3" if self.fp8 else DTYPES[self.about["dtype"]], len(self.about["taps"])
        expected: dict[str, tuple[list[int], str]] = {}
        for index, (slots, asked) in self._shards[number].items():
            expected[f"{index}.taps"] = [slots, taps * self.width], dtype
            expected[f"{index}.teacher"] = [asked, self.width], dtype
            expected[f"{index}.best"] = [asked], "I32"
            if self.fp8:
                expected |= {
                    f"{index}.taps_scale": ([slots, taps], "F32"),
                    f"{index}.teacher_scale": ([asked, 1], "F32"),
                }
        if expected.keys() != set(file.keys()):
            return "it has different examples"
        for name, wanted in expected.items():
            part = file.get_slice(name)
            if (part.get_shape(), part.get_dtype()) != wanted:
                return f"{name} is {part.get_dtype()} {part.get_shape()}, not {wanted[1]} {wanted[0]}"
        return None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the directory against other runs. One process of a run holds the lock while all of its processes write.
        UsageError names the holder of the lock."""
        make_dir(self.dir, hint="set another features.dir")
        lock = Lock(self.dir / LOCK, hint="wait until that run has ended, or set another features.dir")
        try:
            atomic_write(self.dir / MANIFEST, to_json(self.about, indent=2) + "\n")
            yield
        finally:
            lock.release()

    def check_visible(self, numbers: list[int]) -> None:
        """Raise SpecctlError if this process does not see all shards that the run's processes have just written."""
        if not all(self._path(number).exists() for number in numbers):
            raise SpecctlError(
                f"{self.dir} is not shared by all processes: features written by other processes are missing",
                "set features.dir to a file system that all nodes share, or features.mode=online",
            )

    def write(self, number: int, examples: Mapping[int, Features], origin: Mapping[str, str]) -> None:
        """Write a shard to a temporary file and rename it. SpecctlError if the disk refuses.

        `origin` says which servers computed the features; it is stored in the shard's metadata.
        """
        path = self._path(number)
        draft = path.with_name(f".{path.name}.tmp")  # may overwrite the leftover of a killed run: the lock is held
        tensors = {
            f"{i}.{name}": tensor.cpu()
            for i, features in examples.items()
            for name, tensor in self._stored(features).items()
        }
        try:
            write_tensors(draft, tensors, {"key": self.key, "sha256": _digest(tensors), **origin})
            publish(draft, path)
        except (OSError, SafetensorError) as error:
            draft.unlink(missing_ok=True)
            raise SpecctlError(
                f"cannot write target features to {path}: {error}", "free space, or set features.mode=online"
            ) from error

    def _stored(self, features: Features) -> dict[str, Tensor]:
        tensors = dict(vars(features))
        for name in ("taps", "teacher") if self.fp8 else ():
            tensors[name], tensors[f"{name}_scale"] = quantize_fp8(tensors[name], self.width)
        return tensors

    def _path(self, number: int) -> Path:
        return self.dir / f"{number:05d}.safetensors"


def fp8_share(width: int, dtype: torch.dtype) -> float:
    """Size of fp8 states with their scales (see `quantize_fp8`), relative to the size of the same states in `dtype`."""
    return (1 + 4 / width) / dtype.itemsize


def quantize_fp8(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Quantize states x [n, k·width] to e4m3, with fp32 scales [n, k] such that the largest number of a state becomes
    448."""
    states = x.float().unflatten(-1, (x.shape[-1] // width, width))
    scales = (states.abs().amax(-1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (states / scales[..., None]).clamp(-LARGEST, LARGEST).to(FP8).flatten(-2), scales


def dequantize_fp8(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize x [n, F] and scales [n, k], which `quantize_fp8` returned, to states [n, F] in `dtype`."""
    if not x.shape[-1]:
        return x.to(dtype)
    return (x.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2).to(dtype)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of the bytes of tensors on the CPU, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def free_bytes(path: Path) -> int:
    """Free bytes on the file system of `path`, which need not exist yet."""
    return shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists())).free


def would_keep(recipe: FeatureRecipe, size: int) -> bool:
    """Whether `choose_mode` would keep features of `size` bytes per process, provided that the disk has room for
    them."""
    if recipe.mode != "auto":
        return recipe.mode != "online"
    return size <= recipe.budget_gb * GB or recipe.dir is not None


def choose_mode(recipe: FeatureRecipe, place: Path, size: int, missing: int, free: int, switches: bool = False) -> str:
    """Choose `memory`, `cached`, `server` or `online`, and log the choice with its reason.

    `auto` writes to a disk only if features.dir is set: features of a large target are terabytes.

    Args:
        size: bytes of features per process.
        missing: bytes that all processes together still have to write to the disk of `place`.
        free: free bytes on that disk.
        switches: whether texts have different adapters of the target. Features are then never computed for every batch.

    Raises:
        SpecctlError: the requested mode does not fit, or no mode does.
    """
    fits, room = size <= recipe.budget_gb * GB, missing <= USABLE * free
    if recipe.mode == "memory" and not fits:
        raise SpecctlError(
            f"target features need {size / GB:.1f} GB of memory, but features.budget_gb is {recipe.budget_gb:g}",
            "raise features.budget_gb, or set features.mode to cached (on disk) or online",
        )
    if recipe.mode in ON_DISK and not room:
        raise SpecctlError(
            f"target features need {missing / GB:.1f} GB more in {place}, but only {free / GB:.1f} GB are free",
            "free space, set features.dir to another disk, lower max_length, or set features.mode=online",
        )
    budget = f"features.budget_gb is {recipe.budget_gb:g}"
    if recipe.mode != "auto":
        chosen, why = recipe.mode, f"features.mode={recipe.mode}"
    elif fits:
        chosen, why = "memory", budget
    elif recipe.dir is None:
        chosen, why = "online", f"{budget} and features.dir is not set; features.mode=cached keeps them on disk"
    elif room:
        chosen, why = "cached", budget
    else:
        chosen, why = "online", f"{budget}, and {place} has only {free / GB:.1f} GB free"
    if switches and chosen == "online":
        raise SpecctlError(
            f"target features of several adapters need {missing / GB:.1f} GB in {place}, but only "
            f"{free / GB:.1f} GB are free; computing them for every batch would read the target's weights anew",
            "free space, set features.dir to another disk, or raise features.budget_gb",
        )
    how = {"memory": "kept in memory", "online": "recomputed for every batch"}
    log(f"target features ({size / GB:.1f} GB per process) are {how.get(chosen, f'kept in {place}')}: {why}")
    return chosen
