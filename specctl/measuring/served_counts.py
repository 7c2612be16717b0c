"""Rounds and accepted tokens of texts that engines wrote, beside those of a server that keeps its drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specctl.adaptation.traffic import ServedText
from specctl.decoding import metrics
from specctl.measuring.measured import Measured

COUNTS = "counts.jsonl"
"""The file with a line for every text: counters of its drafts, and of the baseline's."""


def counts(text: ServedText) -> dict[str, Any]:
    """A text's line of `counts.jsonl`: rounds and accepted tokens; None where the engine does not tell."""
    sides = {"": text.drafting, "baseline_": text.baseline}
    return {"id": text.id, "domain": text.domain} | {
        f"{side}{name}": getattr(drafting, name, None)
        for side, drafting in sides.items()
        for name in ("rounds", "accepted")
    }


def mat_of(texts: Sequence[Mapping[str, Any]], side: str = "") -> float | None:
    """Tokens of a round, the target's own included, of all lines of `counts.jsonl` that tell of this side."""
    told = [text for text in texts if text[f"{side}rounds"]]
    rounds = sum(text[f"{side}rounds"] for text in told)
    return 1 + sum(text[f"{side}accepted"] for text in told) / rounds if rounds else None


def over_baseline(texts: Sequence[Mapping[str, Any]]) -> Measured:
    """Mat over that of a server that keeps its drafter, paired by prompt."""
    both = [text for text in texts if text["rounds"] and text["baseline_rounds"]]
    ours, theirs = mat_of(both), mat_of(both, "baseline_")
    if ours is None or theirs is None:
        return Measured()
    prompts = [text["id"] for text in both]

    def rate(side: str) -> metrics.Statistic:
        rounds = [text[f"{side}rounds"] for text in both]
        return metrics.ratio_of_sums(
            prompts, [n + text[f"{side}accepted"] for n, text in zip(rounds, both, strict=True)], rounds
        )

    one, other = rate(""), rate("baseline_")
    interval = metrics.bootstrap(lambda drawn: one(drawn) / other(drawn), len(set(prompts)))
    return Measured(ours / theirs, interval)
