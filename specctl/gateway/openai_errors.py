"""Errors in the form of OpenAI's API."""

from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

LONGEST_NAME = 100  # characters of a field's name in a message
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
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    names = [str(part)[:LONGEST_NAME] for part in first["loc"]]
    param = ".".join(name for name in names if name != "str" and "[" not in name)  # without the kinds of a union
    if first["type"] == "extra_forbidden":
        return ApiError(f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter")
    return ApiError(f"Invalid value for '{param}': {first['msg']}", param=param or None, code="invalid_value")
