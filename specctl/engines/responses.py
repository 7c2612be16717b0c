"""Read the responses of servers: JSON, pieces of streams, error messages."""

import email.utils
import time
from typing import Any

import httpx

from specctl import regular_files
from specctl.engines.records import MalformedResponse
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
