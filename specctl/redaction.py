"""Removal of passwords and API keys from plans, resolved recipes, reports and messages."""

import re
from typing import Any

STARS = "***"
NAMES = (
    r"(?:(?:api|access|auth|secret|private|hf)[_-]?(?:key|token)|(?<![A-Za-z0-9_-])(?:token|secret|password|passwd))"
)

_IN_ADDRESS = re.compile(r"(:/{1,2}(?:[^/\s'\"?#:@]*:)?)[^/\s'\"?#]*@")
_NAMED = re.compile(
    rf"((?:{NAMES}(?:=|['\"]: ?)|[{{,] ?{NAMES}: ?)['\"]?)[^\s'\"&,}}]+", re.IGNORECASE
)  # in an address or an override, in JSON, in YAML between braces; not in a sentence
_ADDRESS = re.compile(r"https?://\S+")
_KEY = re.compile(NAMES, re.IGNORECASE)


def redacted(value: Any) -> Any:
    """Replace secrets by `***`: `http://user:***@host`, `?api_key=***`, `{"token": "***"}`.

    Lists and mappings are redacted item by item.
    """
    if isinstance(value, str):
        if ":/" in value:  # an address that was read as a path has one slash left
            value = _IN_ADDRESS.sub(rf"\1{STARS}@", value)
        return _NAMED.sub(rf"\1{STARS}", value)
    if isinstance(value, dict):
        return {
            key: STARS if isinstance(item, str) and item and _secret(key) else redacted(item)
            for key, item in value.items()
        }
    return [redacted(item) for item in value] if isinstance(value, list) else value


def without_passwords(document: Any) -> Any:
    """Replace secrets by `***` in every string and key of a document that is an address: `http://user:***@host`.

    All other texts stay unchanged, even if they contain a secret.
    """
    if isinstance(document, str):
        return redacted(document) if _ADDRESS.fullmatch(document) else document
    if isinstance(document, dict):
        return {without_passwords(key): without_passwords(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        parts = [without_passwords(value) for value in document]
        return parts if isinstance(document, list) else tuple(parts)
    return document


def _secret(key: Any) -> bool:
    return isinstance(key, str) and _KEY.fullmatch(key) is not None
