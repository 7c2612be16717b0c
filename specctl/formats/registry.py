"""The table of foreign formats: their modules, drafter families and readers.

It imports nothing heavy, since help texts and recipes read the table too.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from specctl.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from specctl.formats.head import Deployment, Files, Head, Serving, TargetFacts
    from specctl.formats.head_directory import HeadDirectory


@dataclass(frozen=True)
class Format:
    """A format of head directories.

    Attributes:
        module: a `FormatModule`, imported when a directory is read or written.
        families: drafter families that the format can hold.
        readers: engines and repositories that read it, for `--to` of `specctl export`.
    """

    module: str
    families: tuple[str, ...]
    readers: tuple[str, ...]


class FormatModule(Protocol):
    """The functions of a format's module."""

    def claims(self, found: HeadDirectory) -> bool:
        """Whether a directory has this format."""
        ...

    def read(self, found: HeadDirectory, facts: TargetFacts) -> Head:
        """Read the head of a directory.

        Raises CheckpointError if our head cannot represent it, or it does not fit the target.
        """
        ...

    def write(self, head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
        """Files of a head for the reader `to`, drafting `tokens` per round.

        Raises CheckpointError if `to` cannot run it.
        """
        ...

    def serving(self, head: Head, to: str, use: Deployment) -> Serving:
        """Commands that serve the head. If `to` refuses it, there is no command, and a note with the reason."""
        ...


FORMATS: dict[str, Format] = {
    "llama.cpp": Format("specctl.formats.llamacpp", ("eagle3", "dflash"), ("llama.cpp",)),
    "speculators": Format("specctl.formats.speculators", ("eagle3", "peagle", "dflash", "mtp"), ("speculators",)),
    "mtp": Format("specctl.formats.mtp", ("mtp",), ("vllm", "sglang")),
    "dflash": Format("specctl.formats.dflash", ("dflash",), ("vllm", "sglang")),
    "hydra": Format("specctl.formats.hydra", ("hydra",), ("hydra",)),
    "medusa": Format("specctl.formats.medusa", ("medusa",), ("vllm", "medusa")),
    "peagle": Format("specctl.formats.peagle", ("peagle",), ("vllm",)),
    "eagle3": Format("specctl.formats.eagle3", ("eagle3",), ("vllm", "sglang", "eagle")),
    "eagle": Format("specctl.formats.eagle1", ("eagle",), ("vllm", "sglang", "eagle")),
    "hf": Format("specctl.formats.hf", ("lm",), ("vllm", "sglang", "hf")),
}
"""Formats in the order in which a directory is offered to them."""
ENGINES = ("vllm", "sglang", "llama.cpp", "speculators", "hf")  # the most common export targets


def readers() -> list[str]:
    """Engines and repositories that drafters can be written for, engines first."""
    return list(dict.fromkeys([*ENGINES, *sorted(to for row in FORMATS.values() for to in row.readers)]))


def load(name: str) -> FormatModule:
    """The module of a format."""
    return cast(FormatModule, importlib.import_module(FORMATS[name].module))


def detect(found: HeadDirectory) -> str:
    """Name of a directory's format. Raises CheckpointError if no format claims it."""
    for name in FORMATS:
        if load(name).claims(found):
            return name
    some = ", ".join(sorted(found.tensors)[:5])
    raise CheckpointError(
        f"{found.file}: unknown format of draft heads (tensors {some}, …)",
        hint=f"formats: {', '.join(FORMATS)}; --format overrides the detection",
    )


def writer(family: str, to: str) -> FormatModule:
    """The format in which drafters of a family are written for `to`.

    Raises UsageError if `to` cannot use the family.
    """
    names = {reader: name for name, row in FORMATS.items() if family in row.families for reader in row.readers}
    if to not in names:
        hint = f"--to {', '.join(sorted(names))}" if names else "no engine reads its files"
        raise UsageError(f"{family} drafters cannot be written for {to}", hint)
    return load(names[to])
