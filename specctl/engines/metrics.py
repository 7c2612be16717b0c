"""Parse counters in the Prometheus text format."""

import math
import re
from contextlib import suppress

from prometheus_client.parser import text_string_to_metric_families

from specctl.engines.records import DraftCounters

_PLACE = re.compile(r"[0-9]{1,3}")  # position of a token in a draft


def samples(page: str, name: str) -> list[tuple[dict[str, str], float]]:
    """(labels, value) of every sample of a metric. A port that serves several engines has several samples.

    Values that are not finite are skipped, such as the NaN of a metric without observations.
    """
    with suppress(ValueError, LookupError):  # a page of something else
        return [
            (sample.labels, sample.value)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and math.isfinite(sample.value)
        ]
    return []


def total(page: str, name: str) -> float | None:
    """The sum of a metric's samples, or None if it has no samples."""
    values = [value for _, value in samples(page, name)]
    return sum(values) if values else None


def draft_counters(page: str, prefix: str) -> DraftCounters | None:
    """Sum of the draft counters of all engines that share the port, or None if they do not draft.

    vLLM and llama.cpp use the same names after a `prefix`.
    """
    prefix += "spec_decode_num_"
    rounds = total(page, f"{prefix}drafts_total")
    if rounds is None:
        return None
    places: dict[int, float] = {}
    for labels, value in samples(page, f"{prefix}accepted_tokens_per_pos_total"):
        if _PLACE.fullmatch(labels.get("position", "")):
            place = int(labels["position"])
            places[place] = places.get(place, 0) + value
    return DraftCounters(
        rounds=int(rounds),
        drafted=int(total(page, f"{prefix}draft_tokens_total") or 0),
        accepted=int(total(page, f"{prefix}accepted_tokens_total") or 0),
        accepted_at=[int(places.get(place, 0)) for place in range(max(places, default=-1) + 1)],
    )
