"""The formats that there are: who writes a family for whom, who reads which directory, and how the result is served."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from specctl.errors import CheckpointError, UsageError
from specctl.formats import eagle1, eagle3_raw, engines, hf, reference, speculators
from specctl.formats.foreign import Foreign
from specctl.formats.head import Facts, Files, Head


class Reader(NamedTuple):
    """Whether a directory is of this format, and the head that is in it."""

    claims: Callable[[Foreign], bool]
    read: Callable[[Foreign, Facts], Head]


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


def write(head: Head, to: str, facts: Facts, tokens: int) -> Files:
    """The files of `head` for an engine or repository, drafting `tokens` a round.

    Raises UsageError: it has no use for the family. CheckpointError: it could not feed this head.
    """
    writers: dict[tuple[str, str], Callable[[Head, Facts], Files]] = {
        ("vllm", "eagle3"): eagle3_raw.write,
        ("sglang", "eagle3"): eagle3_raw.write,
        ("eagle", "eagle3"): _reference_eagle3,
        ("speculators", "eagle3"): partial(speculators.write, tokens=tokens),
        ("vllm", "eagle"): eagle1.write,
        ("sglang", "eagle"): partial(eagle1.write, sglang=True),
        ("eagle", "eagle"): eagle1.write,
        **{(engine, "lm"): hf.write for engine in ("vllm", "sglang", "hf")},
        ("medusa", "medusa"): reference.write_medusa,
        ("vllm", "medusa"): reference.write_medusa_for_vllm,
        ("hydra", "hydra"): reference.write_hydra,
    }
    if (to, head.family) not in writers:
        fitting = ", ".join(sorted(name for name, family in writers if family == head.family)) or "nothing"
        raise UsageError(f"{head.family} drafters cannot be written for {to}", hint=f"--to {fitting}")
    return writers[to, head.family](head, facts)


def written_as(to: str, family: str) -> str:
    """The reader of what `write` writes."""
    return to if to == "speculators" else "hf" if family == "lm" else family


def notes(to: str, family: str, facts: Facts) -> list[str]:
    """Sentences about who serves a written directory, for people who are about to put it to use."""
    about = {
        ("vllm", "medusa"): engines.MEDUSA,
        ("medusa", "medusa"): f"{engines.NOT_SERVED}; --to vllm is served",
        ("hydra", "hydra"): engines.NOT_SERVED,
    }
    return [note for note in (engines.refusal(to, family, facts), about.get((to, family))) if note]


def commands(to: str, family: str, place: Path, facts: Facts, tokens: int) -> list[str]:
    """How a written directory is put to use, as it stands on a command line or in Python: nothing where the engine
    would refuse it."""
    if engines.refusal(to, family, facts):
        return []
    target, head = shlex.quote(facts.name), shlex.quote(str(place))
    if to in ("vllm", "speculators") or (to, family) == ("hf", "lm"):
        method = {"lm": "draft_model"}.get(family, family)
        spec = json.dumps({"method": method, "model": str(place), "num_speculative_tokens": tokens})
        revision = f" --revision {shlex.quote(facts.revision)}" if facts.revision else ""
        found = [f"vllm serve {target}{revision} --speculative-config {shlex.quote(spec)}"]
        # vLLM refuses a verifier that is a local path when such a directory is served by itself.
        if to == "speculators" and not Path(facts.name).is_dir():
            found.append(f"vllm serve {head}")
        return found if to != "hf" else found + commands("sglang", family, place, facts, tokens)
    if to == "sglang":
        algorithm = {"eagle3": "EAGLE3", "eagle": "EAGLE", "lm": "STANDALONE"}[family]
        revision = f" --revision {shlex.quote(facts.revision)}" if facts.revision else ""
        return [
            f"python -m sglang.launch_server --model-path {target}{revision} --speculative-algorithm {algorithm} "
            f"--speculative-draft-model-path {head} --speculative-num-steps {tokens} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {tokens + 1}"
        ]
    if to == "eagle":
        return [
            f"EaModel.from_pretrained(use_eagle3={family == 'eagle3'}, base_model_path={facts.name!r}, "
            f"ea_model_path={str(place)!r})  # python, eagle.model.ea_model"
        ]
    model = {"medusa": "MedusaModel", "hydra": "HydraModel"}[family]
    return [f"{model}.from_pretrained({str(place)!r})  # python, {family}.model.{family}_model"]


def _reference_eagle3(head: Head, facts: Facts) -> Files:
    """The reference code taps fixed layers: it has no key for others."""
    taps = tuple(head.architecture["taps"])
    if taps != facts.default_taps:
        raise CheckpointError(
            f"the head taps hidden_states {list(taps)}, the reference code always {list(facts.default_taps)}",
            hint="--to vllm or --to sglang can serve it",
        )
    return eagle3_raw.write(head, facts)
