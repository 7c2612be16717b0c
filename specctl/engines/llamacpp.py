"""Dialect of llama.cpp's `llama-server`: `/completion`, which takes and returns token ids.

It computes no hidden states and cannot replace a drafter while it runs. The forms of its answers were recorded from a
running server.
"""

from collections.abc import Mapping
from typing import Any

from specctl.engines import responses
from specctl.engines.records import (
    DraftCounters,
    EndpointFacts,
    EngineError,
    GenerationRequest,
    GenerationResult,
    HiddenStatesSpec,
    MalformedResponse,
    Refusal,
    is_count,
    parsing,
)

NAME = "llama.cpp"
OWNER = "llamacpp"  # `owned_by` in its list of models
GENERATE = "/completion"
PROPERTIES = "/props"
HIDDEN_STATES_NORMED = False
NO_PREFIX_CACHE_FLAG = "--no-cache-prompt"
STOPS = {"eos": "eos", "limit": "length"}
SEEDS = 2**32 - 1  # this number itself means a random seed
CANDIDATES = 64  # next tokens that are compared between servers


def facts(properties: Any, url: str, models: list[str]) -> EndpointFacts:
    """The facts of a server, from its `/props`. Raises EngineError if they lack the context of a slot."""
    try:
        context, slots = properties["default_generation_settings"]["n_ctx"], properties["total_slots"]
    except (KeyError, TypeError):
        context = slots = None
    if type(context) is not int or type(slots) is not int or context < 1 or slots < 1:
        raise EngineError(
            f"{url} is llama-server, but its {PROPERTIES} does not tell the number of slots and their context",
            "update llama.cpp, let a proxy in front of it pass /props on, or set SPECCTL_API_KEY if it needs a key",
        )
    return EndpointFacts(NAME, str(properties.get("build_info", "unknown")), models, context, slots)


def request_body(ask: GenerationRequest, model: str) -> dict[str, Any]:
    """Body of a completion request. It switches off all samplers that other engines do not have."""
    return {
        "model": model,
        "prompt": ask.prompt_ids,
        "n_predict": ask.max_new_tokens,
        "samplers": ["temperature", "top_k", "top_p"],
        "temperature": ask.temperature,
        "top_k": ask.top_k,
        "top_p": ask.top_p,
        "seed": ask.seed % SEEDS,
        "cache_prompt": False,
        "return_tokens": True,
    }


def parse_answer(document: Any, ask: GenerationRequest) -> GenerationResult | Refusal:
    """Parse the text's token ids and draft counters. Raises MalformedResponse.

    A text that has filled the context of its slot is a refusal: it ended too early.
    """
    with parsing("tokens in its answer"):
        ids, reason, read = document["tokens"], document["stop_type"], document["tokens_evaluated"]
    if read != len(ask.prompt_ids):
        raise MalformedResponse(f"it read {read} prompt tokens, but {len(ask.prompt_ids)} were sent")
    if reason not in STOPS:
        raise MalformedResponse(f"unexpected stop type {reason!r}")
    if document.get("truncated") and reason == "limit" and isinstance(ids, list) and len(ids) < ask.max_new_tokens:
        return Refusal(
            f"the context of a slot was full after {len(ids)} of {ask.max_new_tokens} new tokens: start llama-server "
            "with a larger --ctx-size, or with fewer slots (--parallel)"
        )
    return GenerationResult(ids, STOPS[reason], own_drafting(document))


def own_drafting(document: Mapping[str, Any]) -> DraftCounters | None:
    """The draft counters of one text, from the timings of its answer.

    The number of rounds follows from the number of tokens: the prompt gives one, and a round one more than it accepts.
    """
    timings = document.get("timings")
    timings = timings if isinstance(timings, dict) else {}
    drafted, accepted, written = (timings.get(key) for key in ("draft_n", "draft_n_accepted", "predicted_n"))
    if not (is_count(drafted) and is_count(accepted) and is_count(written)) or not drafted:
        return None
    return DraftCounters(max(written - 1 - accepted, 1), drafted, accepted)


def with_streaming(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"stream": True}


def has_token(piece: Any) -> bool:
    return bool(piece.get("tokens"))


def join_stream(pieces: list[Any]) -> Any:
    """Join pieces, which hold only new tokens; the last one says how the text ended. Raises MalformedResponse."""
    with parsing("tokens in its stream"):
        return pieces[-1] | {"tokens": [token for piece in pieces for token in piece["tokens"]]}


def parse_draft_counters(page: str) -> DraftCounters | None:
    """The draft counters of the server, or None if it does not draft. It counts only under --metrics."""
    found = responses.draft_counters(page, "llamacpp:")
    return found if found and found.rounds else None


def parse_prefix_cache(page: str) -> tuple[int, int] | None:
    """Return None: our requests switch the cache off, as its states depend on the requests before."""
    return None


def tokenize_request(text: str, model: str) -> dict[str, Any]:
    return {"model": model, "content": text, "add_special": False, "parse_special": False}


def logprobs_request(ids: list[int], model: str) -> dict[str, Any]:
    """Body of a request for the log probabilities of the most probable tokens after a prompt.

    llama-server gives none for the tokens of the prompt itself.
    """
    return {
        "model": model,
        "prompt": ids,
        "n_predict": 1,
        "temperature": 0,
        "n_probs": CANDIDATES,
        "cache_prompt": False,
    }


def parse_logprobs(document: Any) -> list[float]:
    """Log probabilities of the next token, in descending order. Raises MalformedResponse."""
    with parsing("completion_probabilities in its answer"):
        return [float(row["logprob"]) for row in document["completion_probabilities"][0]["top_logprobs"]]


def capture_command(wanted: HiddenStatesSpec) -> str | None:
    """Return None: llama-server gives out no hidden states."""
    return None


def hidden_states_request(ids: list[int], model: str) -> dict[str, Any]:
    """Raises EngineError: llama-server gives out no hidden states."""
    raise EngineError("llama-server gives out no hidden states", "use vLLM, or leave out --features-from")


def parse_hidden_states(document: Any, sent: int) -> None:
    """Return None: llama-server gives out no hidden states."""


def has_prefix_cache(page: str) -> bool:
    """Return False: requests switch the prefix cache off."""
    return False
