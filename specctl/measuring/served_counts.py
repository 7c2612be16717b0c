"""Verification counters of texts that engines wrote, compared with a server that keeps its drafter."""

from collections.abc import Mapping, Sequence
from typing import Any

from specctl.adaptation.traffic import ServedText
from specctl.measuring.measured import Measured, Parts, relative

COUNTS = "counts.jsonl"
"""File with one line per text: the counters of its drafts, and of the baseline's drafts."""


def counts(text: ServedText) -> dict[str, Any]:
    """A text's line of `counts.jsonl`: rounds and accepted tokens, null if the engine does not report them."""
    sides = {"": text.drafting, "baseline_": text.baseline}
    return {"id": text.id, "domain": text.domain} | {
        f"{side}{name}": getattr(drafting, name, None)
        for side, drafting in sides.items()
        for name in ("rounds", "accepted")
    }


def mat_of(texts: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens per round, bonus token included, over the lines of `counts.jsonl` with counters."""
    told = [text for text in texts if text["rounds"]]
    rounds = sum(text["rounds"] for text in told)
    return 1 + sum(text["accepted"] for text in told) / rounds if rounds else None


def over_baseline(texts: Sequence[Mapping[str, Any]]) -> Measured:
    """mat relative to a server that keeps its drafter, paired by prompt."""
    both = [text for text in texts if text["rounds"] and text["baseline_rounds"]]

    def parts(side: str) -> Parts:
        rounds = [text[f"{side}rounds"] for text in both]
        return [n + text[f"{side}accepted"] for n, text in zip(rounds, both, strict=True)], rounds

    return relative([text["id"] for text in both], parts(""), parts("baseline_"))
