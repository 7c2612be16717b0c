"""Dialect of vLLM's server: completions with token ids in both directions, draft counters, and weight updates.

Draft weights are replaced through the worker extension in `vllm_worker.py`.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from specctl.engines import responses
from specctl.engines.records import (
    AdminCall,
    DraftCounters,
    DrafterRejected,
    EngineError,
    ExportedDrafter,
    GenerationRequest,
    GenerationResult,
    HiddenStatesSpec,
    LoadedDrafter,
    MalformedResponse,
    parsing,
)

NAME = "vllm"
GENERATE = "/v1/completions"
HIDDEN_STATES_NORMED = False
NO_PREFIX_CACHE_FLAG = "--no-enable-prefix-caching"
STOPS = {"stop": "eos", "length": "length"}
STORAGE = '"$(mktemp -d -p /dev/shm)"'
"""A directory in memory that the shell creates. Any local user could create a fixed name first."""
RPC = "/collective_rpc"
EXTENSION = "specctl.engines.vllm_worker.DrafterSwap"
SENDS_WEIGHTS = False
LOADED_CALLS = (AdminCall(RPC, {"method": "drafter_loaded"}),)


def request_body(ask: GenerationRequest, model: str) -> dict[str, Any]:
    """Body of a completion request. Only the end-of-sequence token or the length ends the text."""
    return {
        "model": model,
        "prompt": ask.prompt_ids,
        "max_tokens": ask.max_new_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "top_k": ask.top_k,  # 0 and −1 both mean all
        "seed": ask.seed % 2**63,
        "return_token_ids": True,
    }


def parse_answer(document: Any, ask: GenerationRequest) -> GenerationResult:
    """Parse the only choice. Raises MalformedResponse."""
    with parsing("token ids in its answer"):
        (choice,) = document["choices"]
        ids, reason = choice["token_ids"], choice["finish_reason"]
        given = choice.get("prompt_token_ids", document.get("prompt_token_ids"))
    if given is not None and given != ask.prompt_ids:
        raise MalformedResponse(
            f"it read {len(given)} prompt tokens that differ from the {len(ask.prompt_ids)} tokens sent"
        )
    if reason not in STOPS:
        raise MalformedResponse(f"unexpected finish reason {reason!r}")
    return GenerationResult(ids, STOPS[reason], own_drafting(document))


def own_drafting(document: Mapping[str, Any]) -> DraftCounters | None:
    """The draft counters that --per-request-spec-decode-metrics adds to a response."""
    try:
        counters = document["metrics"]["speculative_decoding"]
        return DraftCounters.of_histogram(counters["acceptance_histogram"], counters["num_draft_tokens"])
    except (KeyError, TypeError):
        return None


def with_streaming(body: dict[str, Any]) -> dict[str, Any]:
    """Make a request's body ask for a streamed answer. The last piece has the metrics, if any."""
    return body | {"stream": True, "stream_options": {"include_usage": True}}


def has_token(piece: Any) -> bool:
    return bool(piece.get("choices") and piece["choices"][0].get("token_ids"))


def join_stream(pieces: list[Any]) -> Any:
    """Join pieces, which hold only new tokens. Raises MalformedResponse."""
    with parsing("token ids in its stream"):
        choices = [choice for piece in pieces for choice in piece["choices"]]
        whole = {
            "token_ids": [token for choice in choices for token in choice["token_ids"] or []],
            "finish_reason": next((one["finish_reason"] for one in reversed(choices) if one["finish_reason"]), None),
            "prompt_token_ids": next((one["prompt_token_ids"] for one in choices if one.get("prompt_token_ids")), None),
        }
    return {"choices": [whole], "metrics": next((one["metrics"] for one in pieces if one.get("metrics")), None)}


def parse_draft_counters(page: str) -> DraftCounters | None:
    """Sum of the draft counters of all engines that share the port, or None if they do not draft."""
    return responses.draft_counters(page, "vllm:")


def parse_prefix_cache(page: str) -> tuple[int, int] | None:
    """Tokens that were looked up in the prefix cache, and found."""
    asked = responses.total(page, "vllm:prefix_cache_queries_total")
    return None if asked is None else (int(asked), int(responses.total(page, "vllm:prefix_cache_hits_total") or 0))


def tokenize_request(text: str, model: str) -> dict[str, Any]:
    return {"model": model, "prompt": text, "add_special_tokens": False}


def logprobs_request(ids: list[int], model: str) -> dict[str, Any]:
    return {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}


def parse_logprobs(document: Any) -> list[float]:
    """Log probabilities of the prompt's tokens except the first. Raises MalformedResponse."""
    with parsing("prompt_logprobs in its answer"):
        rows = document["choices"][0]["prompt_logprobs"][1:]
        return [float(next(iter(row.values()))["logprob"]) for row in rows]


def capture_command(wanted: HiddenStatesSpec) -> str:
    """Command that starts vLLM with its method `extract_hidden_states`, which writes a file per text.

    The layer ids are indices into `transformers`' hidden_states.
    """
    layers = {"eagle_aux_hidden_state_layer_ids": list(wanted.ids)}
    method = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "DIRECTORY"},
    }
    beside = shlex.quote(json.dumps(connector)).replace("DIRECTORY", f"'{STORAGE}'")  # a shell must expand it
    loras = [shlex.quote(f"{name}={directory or 'ADAPTER'}") for name, directory in wanted.adapters]
    served = f"--enable-lora --lora-modules {' '.join(loras)} " if loras else ""
    return (
        f"vllm serve {wanted.target_arguments} {NO_PREFIX_CACHE_FLAG} {served}"
        f"--speculative-config {shlex.quote(json.dumps(method))} --kv-transfer-config {beside}"
    )


def hidden_states_request(ids: list[int], model: str) -> dict[str, Any]:
    """Body of a request for a text's hidden states. One new token is the minimum that vLLM generates."""
    return {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}


def parse_hidden_states(document: Any, sent: int) -> str | None:
    """Path of the file with the hidden states. Raises MalformedResponse."""
    if not isinstance(document, dict) or not document.get("choices"):
        raise MalformedResponse("no choices in its answer")
    about = document.get("kv_transfer_params")
    path = about.get("hidden_states_path") if isinstance(about, dict) else None
    return path if isinstance(path, str) else None


def has_prefix_cache(page: str) -> bool:
    """Whether the cache configuration in the metrics enables the prefix cache."""
    return any(
        labels.get("enable_prefix_caching") == "True" for labels, _ in responses.samples(page, "vllm:cache_config_info")
    )


def parse_loaded(documents: list[Any]) -> LoadedDrafter:
    """The drafter that all ranks use. Raises EngineError, MalformedResponse."""
    drafting = _ranks(documents[0])
    first = drafting[0]
    if any(rank != first for rank in drafting):
        raise EngineError("its ranks draft with different weights", "restart the server")
    try:
        return LoadedDrafter(first["version"], first["directory"], fingerprint=first["fingerprint"])
    except KeyError as error:
        raise MalformedResponse(f"no {error} in the report on its drafter") from error


def compatibility_calls(drafter: ExportedDrafter, first: ExportedDrafter | None, now: LoadedDrafter) -> list[AdminCall]:
    """Call that asks every rank whether the directory has the form of the running drafter."""
    return [_call("drafter_fits", str(drafter.directory))]


def swap_calls(drafter: ExportedDrafter, version: str | None, now: LoadedDrafter) -> list[AdminCall]:
    """One call that makes every rank read the directory."""
    return [_call("drafter_swap", str(drafter.directory), version, drafter.fingerprint, changes=True)]


def check_response(call: AdminCall, document: Any) -> float | None:
    """Seconds of the slowest rank. Raises DrafterRejected if all ranks refused, EngineError if only some did;
    MalformedResponse."""
    times = [rank.get("seconds") for rank in _ranks(document)]
    return max((time for time in times if isinstance(time, float)), default=None)


def error_for_status(call: AdminCall, status: int, text: str) -> EngineError:
    if status == 404:
        return EngineError(
            f"it does not have {RPC}",
            "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment, on a private port only",
        )
    if "drafter_" in text and ("no attribute" in text or "not implemented" in text):
        return EngineError(
            "it runs without specctl's worker extension", f"start vLLM with --worker-extension-cls {EXTENSION}"
        )
    return EngineError(f"status {status}: {text}")


def _call(method: str, *arguments: str | None, changes: bool = False) -> AdminCall:
    return AdminCall(RPC, {"method": method, "args": list(arguments)}, changes=changes)


def _ranks(document: Any) -> list[dict[str, Any]]:
    """The answers of the ranks that have a drafter. Raises DrafterRejected if all refuse, EngineError if only some
    do."""
    with parsing("answers from its workers"):
        ranks = [rank for rank in document["results"] if rank.get("drafts", True)]
        refusals = [str(rank["refused"]) for rank in ranks if "refused" in rank]
    if not ranks:
        raise MalformedResponse("no worker of it drafts")
    if refusals:
        unread = (
            "the server needs to see the directory under the same path, and its user needs permission to read it; set "
            "publication.dir to another directory if only you can read the run directory"
        )
        kind = DrafterRejected if len(refusals) == len(ranks) else EngineError
        raise kind(refusals[0], unread if "cannot be read" in refusals[0] else None)
    return ranks
