"""Read the responses of servers: JSON, pieces of streams, error messages, counters in the Prometheus text format."""

import email.utils
import math
import re
import time
from contextlib import suppress
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from specctl import regular_files
from specctl.engines.records import DraftCounters, MalformedResponse
from specctl.errors import brief, redacted


def parse_json(response: httpx.Response) -> Any:
    """The JSON of a response. Raises MalformedResponse."""
    try:
        return regular_files.parse_json(response.content)
    except ValueError as error:
        what = "a web page" if "html" in response.headers.get("content-type", "") else "invalid or incomplete JSON"
        raise MalformedResponse(f"it returned {what}: {brief(response.text, 80)!r}") from error


def parse_piece(line: str) -> Any:
    """Parse a piece of a stream. Raises MalformedResponse."""
    try:
        found = regular_files.parse_json(line)
    except ValueError as error:
        raise MalformedResponse(f"incomplete piece of a stream: {brief(line, 80)!r}") from error
    if not isinstance(found, dict) or "error" in found:
        raise MalformedResponse(f"its stream ended with an error: {brief(line, 200)}")
    return found


def error_message(response: httpx.Response) -> str:
    """The message of an error response, in the server's words."""
    try:
        found = regular_files.parse_json(response.content)
    except ValueError:
        return redacted(brief(response.text.strip(), 200)) or response.reason_phrase
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return redacted(brief(found if isinstance(found, str) else str(found), 300))


def describe_transport_error(error: Exception) -> str:
    """Describe a failure of the connection to the server, or of the unpacking of its answer."""
    kind = "timeout" if isinstance(error, httpx.TimeoutException) else type(error).__name__
    return redacted(f"{kind}: {error}" if str(error) else kind)


def retry_after(response: httpx.Response) -> float | None:
    """Seconds that the server asks to wait, given as a number or as a date; at most two minutes."""
    value = response.headers.get("retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, ArithmeticError):
            return None
    return min(max(0.0, seconds), 120.0)


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
