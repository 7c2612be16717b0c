"""Recipe section `server`: engines that are asked over HTTP, so that the target is not loaded here."""

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from specctl.recipe.sections import Name, Names, PositiveFloat, Section


def addresses(value: object) -> object:
    """Parse `http://host:8000/v1/, …` into a list of `http://host:8000`."""
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        return value
    for part in parts:
        if not _is_address(part):
            raise ValueError(f"{part!r} is not an address such as http://host:8000")
    addresses = [part.rstrip("/").removesuffix("/v1") for part in parts]
    if len(set(addresses)) < len(addresses):
        raise ValueError("an address is named twice")
    return addresses


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, half an IPv6 address
        return False
    return named and not re.search(r"\s", text)


def _host_and_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or re.search(r"\s", host) or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:8100")
    return value


Listen = Annotated[str, AfterValidator(_host_and_port)]
"""HOST:PORT of a proxy to the servers; port 0 = any free port."""


class ServerRecipe(Section):
    """vLLM, SGLang or llama.cpp servers of the target. The API key is read from the environment and never stored."""

    urls: Annotated[Names, BeforeValidator(addresses)] = []
    engine: Literal["auto", "vllm", "sglang", "llama.cpp"] = "auto"
    model: Name | None = None  # name of the model on the server (None = the first in its list)
    concurrency: PositiveInt = 64  # requests in flight, over all addresses
    retries: NonNegativeInt = 8  # per request, after failures that may be temporary
    timeout_s: PositiveFloat = 600.0  # seconds without a byte until a request fails
    wait_s: NonNegativeFloat = 0.0  # seconds to wait for a server that is still loading
    api_key_env: Annotated[str, Field(pattern=r"^\w+$")] = "SPECCTL_API_KEY"  # environment variable that holds the key
