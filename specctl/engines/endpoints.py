"""Ask a server about itself: its engine, model, tokenizer, metrics, and its log probabilities of a probe text."""

import asyncio
import math
import time
from dataclasses import dataclass, field

import httpx

from specctl import progress
from specctl.engines import registry, sglang
from specctl.engines.records import Dialect, EndpointFacts, EngineError, MalformedResponse
from specctl.engines.responses import describe_transport_error, parse_json
from specctl.errors import UsageError
from specctl.recipe import ServerRecipe

POLL_S = 0.2  # seconds between two tries while no server answers at an address
PROBE = "SELECT name, COUNT(*) FROM t WHERE café = 'naïve' GROUP BY 1;\n\tdef f(x): return x**2  # 数学 3.14"
MAX_LOGPROB_DIFFERENCE = 0.05  # nats: weights differ if the mean log probability of the probe's tokens differs by more


@dataclass
class Endpoint:
    """One address, and the server that runs there."""

    url: str
    facts: EndpointFacts
    dialect: Dialect
    model: str
    in_flight: int = 0
    logprobs: list[float] = field(default_factory=list)  # of the probe's tokens, when it was first asked
    # Directory of each version that was published from here.
    published_directories: dict[str, str] = field(default_factory=dict)


async def connect(http: httpx.AsyncClient, url: str, recipe: ServerRecipe) -> Endpoint:
    """Connect to the server at `url` and identify it. Waits up to `recipe.wait_s` for a server that is still starting.

    Raises EngineError if no server answers or it is no engine, and UsageError if it does not serve the recipe's model.
    """
    until = time.monotonic() + recipe.wait_s
    while True:
        try:
            facts = await registry.facts(http, url, recipe.engine)
            break
        except (httpx.InvalidURL, UnicodeError) as error:  # such as a host name with a symbol
            raise EngineError(f"{url} is not an address: {error}") from error
        except (httpx.RequestError, EngineError) as error:
            if time.monotonic() < until and not progress.interrupts.requested():
                await asyncio.sleep(POLL_S)
                continue
            if isinstance(error, EngineError):
                raise
            raise EngineError(
                f"no server responds at {url}: {describe_transport_error(error)}",
                "set SSL_CERT_FILE to the file with the certificates"
                if "CERTIFICATE" in str(error)
                else "check the address; server.wait_s=600 waits for an engine that is still loading",
            ) from error
    return Endpoint(url, facts, registry.DIALECTS[facts.engine], served(url, facts, recipe.model))


def served(url: str, facts: EndpointFacts, model: str | None) -> str:
    """The name of a model at a server, the first in its list for None. UsageError if the server does not list it, or
    would answer with another one."""
    if model is not None and model not in facts.models:
        raise UsageError(f"{url} does not serve model {model!r}", f"it serves {', '.join(facts.models)}")
    if facts.engine == sglang.NAME and model not in (None, facts.models[0]):
        raise UsageError(
            f"{url} is SGLang, whose requests name no model here: {facts.models[0]} would answer, not {model!r}",
            "use vLLM for it",
        )
    return model or facts.models[0]


async def probe_token_ids(http: httpx.AsyncClient, server: Endpoint) -> list[int] | None:
    """Token ids of the probe, or None if the server does not tokenize."""
    response = await http.post(f"{server.url}/tokenize", json=server.dialect.tokenize_request(PROBE, server.model))
    if response.status_code != 200:
        return None
    found = parse_json(response)
    return found.get("tokens") if isinstance(found, dict) else None


async def logprobs(http: httpx.AsyncClient, server: Endpoint, probe: list[int]) -> list[float]:
    """Log probabilities that the server computes for the probe; empty if it gives none."""
    response = await http.post(
        server.url + server.dialect.GENERATE, json=server.dialect.logprobs_request(probe, server.model)
    )
    try:
        return server.dialect.parse_logprobs(parse_json(response)) if response.status_code == 200 else []
    except MalformedResponse:
        return []


async def metrics(http: httpx.AsyncClient, server: Endpoint) -> str:
    """The server's page of metrics; empty if it has none."""
    response = await http.get(f"{server.url}/metrics")
    return response.text if response.status_code == 200 else ""


def distance(one: list[float], other: list[float]) -> float:
    """Mean difference of log probabilities: 0 if there is nothing to compare, infinite if one is NaN."""
    pairs = list(zip(one, other, strict=False))
    mean = sum(abs(a - b) for a, b in pairs if a != b) / len(pairs) if pairs else 0.0
    return math.inf if math.isnan(mean) else mean
