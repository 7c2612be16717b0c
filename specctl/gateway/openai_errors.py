"""Errors in the form of OpenAI's API."""

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import JSONResponse

LONGEST_NAME = 100  # characters of a field's name in a message
UNION_KINDS = {"str", "constrained-str"}  # and lists, in pydantic's places of faults
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error that a client gets.

    Attributes:
        param: the parameter at fault.
        code: OpenAI's name of the error, for programs.
        retry_s: seconds after which the client may try again.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ):
        super().__init__(message)
        self.message, self.status, self.param, self.code, self.retry_s = message, status, param, code, retry_s

    @property
    def document(self) -> dict[str, Any]:
        """The error object."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = " ".join(self.message.split())
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The response that carries the error."""
        headers = {} if self.retry_s is None else {"retry-after": str(self.retry_s)}
        headers |= {"www-authenticate": "Bearer"} if self.status == 401 else {}
        return JSONResponse(self.document, self.status, headers)


def of_validation(error: ValidationError) -> ApiError:
    """The first fault of a request body. The message names the field and never quotes its value."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first, names = found[0], _names(found[0])
    if len(first["loc"]) > len(names):  # a union has a fault for each of its kinds: take the kind that fits best
        faults = [one for one in found if one["loc"][0] == first["loc"][0]]
        first = max(faults, key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))
        names = _names(first)
    param = ".".join(names)
    if first["type"] == "extra_forbidden":
        return ApiError(f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter")
    return ApiError(f"Invalid value for '{param}': {first['msg']}", param=param or None, code="invalid_value")


def _names(fault: ErrorDetails) -> list[str]:
    """The place of a fault, without the kinds of a union."""
    return [
        str(part)[:LONGEST_NAME]
        for depth, part in enumerate(fault["loc"])
        if not (depth == 1 and isinstance(part, str) and (part in UNION_KINDS or "[" in part))
    ]
