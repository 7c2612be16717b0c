"""The table of foreign formats: who reads each, and of which families it holds drafters. All else is in its module.

Nothing heavy is imported here, as help texts and recipes read the table, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from specctl.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from specctl.formats.foreign import Foreign
    from specctl.formats.head import Files, Head, LengthRange, Serving, TargetFacts


@dataclass(frozen=True)
class Format:
    """Directories of one kind.

    Attributes:
        module: a `FormatModule`, imported when a directory is read or written.
        families: of the drafters that it holds.
        readers: engines and repositories that read it, `--to` of `specctl export`.
    """

    module: str
    families: tuple[str, ...]
    readers: tuple[str, ...]


class FormatModule(Protocol):
    """The functions of a format's file."""

    def claims(self, found: Foreign) -> bool:
        """Whether a directory is of this format."""
        ...

    def read(self, found: Foreign, facts: TargetFacts) -> Head:
        """The head of a directory. CheckpointError for what our head cannot represent or does not fit the target."""
        ...

    def write(self, head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
        """The files of a head for the reader `to`, drafting `tokens` a round. CheckpointError: it could not feed it."""
        ...

    def serving(
        self, head: Head, to: str, place: Path, facts: TargetFacts, tokens: int, schedule: Sequence[LengthRange] = ()
    ) -> Serving:
        """How the directory of a head at `place` is put to use: no command, and the reason, where `to` refuses it.
        `schedule`: draft lengths by load, of those that an engine can change while it runs."""
        ...


FORMATS: dict[str, Format] = {
    "speculators": Format("specctl.formats.speculators", ("eagle3", "peagle", "dflash", "mtp"), ("speculators",)),
    "mtp": Format("specctl.formats.mtp", ("mtp",), ("vllm", "sglang")),
    "dflash": Format("specctl.formats.dflash", ("dflash",), ("vllm", "sglang")),
    "hydra": Format("specctl.formats.hydra", ("hydra",), ("hydra",)),
    "medusa": Format("specctl.formats.medusa", ("medusa",), ("vllm", "medusa")),
    "peagle": Format("specctl.formats.peagle", ("peagle",), ("vllm",)),
    "eagle3": Format("specctl.formats.eagle3_raw", ("eagle3",), ("vllm", "sglang", "eagle")),
    "eagle": Format("specctl.formats.eagle1", ("eagle",), ("vllm", "sglang", "eagle")),
    "hf": Format("specctl.formats.hf", ("lm",), ("vllm", "sglang", "hf")),
}
"""In the order in which a directory is offered to them."""
ENGINES = ("vllm", "sglang", "speculators", "hf")  # what most people export for


def readers() -> list[str]:
    """Engines and repositories that drafters are written for, engines first."""
    return list(dict.fromkeys([*ENGINES, *sorted(to for row in FORMATS.values() for to in row.readers)]))


def load(name: str) -> FormatModule:
    """The module of a format."""
    return cast(FormatModule, importlib.import_module(FORMATS[name].module))


def detect(found: Foreign) -> str:
    """The name of the format of a directory. CheckpointError where it is none."""
    for name in FORMATS:
        if load(name).claims(found):
            return name
    some = ", ".join(sorted(found.tensors)[:5])
    raise CheckpointError(
        f"{found.file}: no known format of draft heads (tensors {some}, …)",
        hint=f"formats: {', '.join(FORMATS)}; --format overrides the detection",
    )


def writer(family: str, to: str) -> FormatModule:
    """The format in which drafters of a family are written for `to`. UsageError: it has no use for the family."""
    names = {reader: name for name, row in FORMATS.items() if family in row.families for reader in row.readers}
    if to not in names:
        those = f"--to {', '.join(sorted(names))}" if names else "no engine reads its files"
        raise UsageError(f"{family} drafters cannot be written for {to}", hint=those)
    return load(names[to])
