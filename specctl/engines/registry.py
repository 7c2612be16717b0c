"""The supported engines, and detection of the engine that runs at an address."""

from typing import Any, cast

import httpx

from specctl import regular_files
from specctl.engines import llamacpp, sglang, vllm
from specctl.engines.records import Dialect, EndpointFacts, EngineError, WeightUpdateDialect, is_count
from specctl.errors import UsageError

DIALECTS: dict[str, Dialect] = {one.NAME: cast(Dialect, one) for one in (vllm, sglang, llamacpp)}
PUBLISHERS: dict[str, WeightUpdateDialect] = {one.NAME: cast(WeightUpdateDialect, one) for one in (vllm, sglang)}
SAYS_VERSION = {"vllm": ("/version",), "sglang": ("/server_info", "/get_server_info")}
OWN = "specctl"
"""Owner of the model that `specctl serve` lists."""
GIVE_URL = "give the URL of vLLM, SGLang or llama-server, such as http://host:8000"


def publisher(engine: str, url: str) -> WeightUpdateDialect:
    """The calls that replace the drafter of a server. Raises UsageError if its engine has none."""
    if engine not in PUBLISHERS:
        raise UsageError(
            f"{url} is {engine}, which cannot replace its drafter while it runs",
            "use vLLM or SGLang; for llama.cpp, export the new drafter and restart the server",
        )
    return PUBLISHERS[engine]


async def facts(http: httpx.AsyncClient, url: str, engine: str = "auto") -> EndpointFacts:
    """Detect the engine at `url`, its version and its models.

    Raises EngineError if it is no engine, and httpx.RequestError if no server answers.
    """
    served = await _json(http, f"{url}/v1/models")
    if isinstance(served, httpx.Response):
        raise EngineError(f"{url} is not the URL of an engine: {_words(served)}", GIVE_URL)
    try:
        models = [entry["id"] for entry in served["data"] if not entry.get("parent")]
        adapters = [entry["id"] for entry in served["data"] if entry.get("parent")]
        longest = served["data"][0].get("max_model_len")
        if not all(isinstance(name, str) for name in models + adapters):
            raise TypeError("a model without a name")
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise EngineError(f"{url}/v1/models lists no models", GIVE_URL) from error
    if served["data"][0].get("owned_by") == OWN:
        raise EngineError(f"{url} is specctl serve, not an engine", GIVE_URL)
    if engine == llamacpp.NAME or (engine == "auto" and served["data"][0].get("owned_by") == llamacpp.OWNER):
        return llamacpp.facts(await _json(http, url + llamacpp.PROPERTIES), url, models + adapters)
    context = longest if is_count(longest) and longest else None
    for name, paths in SAYS_VERSION.items():
        for path in paths if engine in ("auto", name) else ():
            about = await _json(http, url + path)
            if isinstance(about, dict) and isinstance(about.get("version"), str):
                return EndpointFacts(name, about["version"], models + adapters, context)
    if engine != "auto":
        return EndpointFacts(engine, "unknown", models + adapters, context)
    raise EngineError(
        f"{url} serves {', '.join(models)}, but is neither vLLM nor SGLang nor llama-server",
        "set server.engine=vllm (or sglang, llama.cpp) to treat it as one",
    )


async def _json(http: httpx.AsyncClient, address: str) -> Any:
    """The JSON at an address; the response itself if its status is not 200 or it is not JSON."""
    response = await http.get(address)
    try:
        return regular_files.parse_json(response.content) if response.status_code == 200 else response
    except ValueError:
        return response


def _words(response: httpx.Response) -> str:
    kind = response.headers.get("content-type", "").split(";")[0]
    if response.status_code in (401, 403):
        return f"it requires an API key (status {response.status_code})"
    return f"status {response.status_code}" if response.status_code != 200 else f"{kind or 'something'} instead of JSON"
