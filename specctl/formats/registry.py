"""The formats that there are: who writes a family for whom, who reads which directory, and how the result is served."""

from __future__ import annotations

import json
import pkgutil
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

from specctl.errors import CheckpointError, UsageError
from specctl.families import FAMILIES
from specctl.formats import eagle1, eagle3_raw, engines, hf, reference, speculators
from specctl.formats.foreign import Foreign
from specctl.formats.head import Files, Head, TargetFacts


class Reader(NamedTuple):
    """Whether a directory is of this format, and the head that is in it."""

    claims: Callable[[Foreign], bool]
    read: Callable[[Foreign, TargetFacts], Head]


READERS: dict[str, Reader] = {
    "speculators": Reader(speculators.claims, speculators.read),
    "hydra": Reader(reference.claims_hydra, reference.read_hydra),
    "medusa": Reader(reference.claims_medusa, reference.read_medusa),
    "eagle3": Reader(eagle3_raw.claims, eagle3_raw.read),
    "eagle": Reader(eagle1.claims, eagle1.read),
    "hf": Reader(hf.claims, hf.read),
}
"""In the order in which they are asked."""


def detect(found: Foreign) -> str:
    """The name of the format of a directory. CheckpointError where it is none."""
    for name, reader in READERS.items():
        if reader.claims(found):
            return name
    some = ", ".join(sorted(found.tensors)[:5])
    raise CheckpointError(
        f"{found.file}: no known format of draft heads (tensors {some}, …)",
        hint=f"formats: {', '.join(READERS)}; --format overrides the detection",
    )


def write(head: Head, to: str, facts: TargetFacts, tokens: int) -> Files:
    """The files of `head` for an engine or repository, drafting `tokens` a round.

    Raises UsageError: it has no use for the family. CheckpointError: it could not feed this head.
    """
    exports = FAMILIES[head.family].exports
    if to not in exports:
        raise UsageError(
            f"{head.family} drafters cannot be written for {to}", hint=f"--to {', '.join(sorted(exports)) or 'nothing'}"
        )
    return cast(Files, pkgutil.resolve_name(exports[to].write)(head, facts, tokens))


def read_back(to: str, family: str) -> Reader:
    """The reader of what `write` writes."""
    return READERS[FAMILIES[family].exports[to].read]


def notes(to: str, family: str, facts: TargetFacts) -> list[str]:
    """Sentences about who serves a written directory, for people who are about to put it to use."""
    return [note for note in (engines.refusal(to, family, facts), FAMILIES[family].exports[to].note) if note]


def commands(to: str, family: str, place: Path, facts: TargetFacts, tokens: int) -> list[str]:
    """How a written directory is put to use, as it stands on a command line or in Python: nothing where the engine
    would refuse it."""
    if engines.refusal(to, family, facts):
        return []
    if to == "hf":
        return [line for engine in ("vllm", "sglang") for line in commands(engine, family, place, facts, tokens)]
    use = FAMILIES[family].exports[to].use
    target, head = shlex.quote(facts.name), shlex.quote(str(place))
    revision = f" --revision {shlex.quote(facts.revision)}" if facts.revision else ""
    if to in ("vllm", "speculators"):
        spec = json.dumps({"method": use, "model": str(place), "num_speculative_tokens": tokens})
        found = [f"vllm serve {target}{revision} --speculative-config {shlex.quote(spec)}"]
        # vLLM refuses a verifier that is a local path when such a directory is served by itself.
        if to == "speculators" and not Path(facts.name).is_dir():
            found.append(f"vllm serve {head}")
        return found
    if to == "sglang":
        return [
            f"python -m sglang.launch_server --model-path {target}{revision} --speculative-algorithm {use} "
            f"--speculative-draft-model-path {head} --speculative-num-steps {tokens} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {tokens + 1}"
        ]
    return [use.format(target=facts.name, place=str(place))]
