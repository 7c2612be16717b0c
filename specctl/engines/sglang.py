"""Dialect of SGLang's server: `/generate`, which takes and returns token ids, and the calls that update draft weights.

SGLang does not run on a CPU. The module is written from SGLang's schemas, and tested against a mock server that follows
them.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

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
    is_count,
    parsing,
)
from specctl.engines.vllm_worker import differences

if TYPE_CHECKING:
    from torch import Tensor

NAME = "sglang"
VERSION = "SGLang 0.5.23"
GENERATE = "/generate"
HIDDEN_STATES_NORMED = True
NO_PREFIX_CACHE_FLAG = "--disable-radix-cache"
STOPS = {"stop": "eos", "length": "length"}
SENDS_WEIGHTS = True
LOADED_CALLS = (AdminCall("/server_info"), AdminCall("/model_info"))
METHODS = ("EAGLE", "EAGLE3")
UNNAMED = "default"  # version of weights that were never replaced
MOST_BYTES = 2**28  # of tensors in one request
RESUME = AdminCall("/continue_generation", {})
END_UPDATE = AdminCall("/end_weight_update", {})


def request_body(ask: GenerationRequest, model: str) -> dict[str, Any]:
    """Body of a generate request. `sampling_seed` has an effect only under --enable-deterministic-inference."""
    return {
        "input_ids": ask.prompt_ids,
        "sampling_params": {
            "max_new_tokens": ask.max_new_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k or -1,
            "sampling_seed": ask.seed % 2**31,
        },
    }


def parse_answer(document: Any, ask: GenerationRequest) -> GenerationResult:
    """Parse the text's token ids and draft counters. Raises MalformedResponse."""
    with parsing("output_ids in its answer"):
        about, ids = document["meta_info"], document["output_ids"]
        reason, read = about["finish_reason"]["type"], about["prompt_tokens"]
        matched, written = about["finish_reason"].get("matched"), about["completion_tokens"]
    if read != len(ask.prompt_ids):
        raise MalformedResponse(f"it read {read} prompt tokens, but {len(ask.prompt_ids)} were sent")
    if reason not in STOPS:
        raise MalformedResponse(f"unexpected finish reason {reason!r}")
    if type(matched) is int and isinstance(ids, list) and len(ids) == written - 1:
        ids = [*ids, matched]  # SGLang strips the token that ended the text: restore it
    cached = about.get("cached_tokens")
    return GenerationResult(ids, STOPS[reason], own_drafting(about), cached_tokens=cached if is_count(cached) else None)


def own_drafting(about: Mapping[str, Any]) -> DraftCounters | None:
    """The draft counters of one text, from its meta_info."""
    histogram = about.get("spec_correct_drafts_histogram")
    if not about.get("spec_verify_ct"):
        return None
    return DraftCounters.of_histogram(histogram, about.get("spec_num_proposed_drafts") or 0)


def with_streaming(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"stream": True}


def has_token(piece: Any) -> bool:
    return bool(piece.get("output_ids"))


def join_stream(pieces: list[Any]) -> Any:
    """Join pieces, which hold the whole output up to now, or only new tokens (--incremental-streaming-output).

    Raises MalformedResponse.
    """
    with parsing("output_ids in its stream"):
        last, written = pieces[-1], pieces[-1]["meta_info"]["completion_tokens"]
        if len(last["output_ids"]) >= written - 1:
            return last
        return last | {"output_ids": [token for piece in pieces for token in piece["output_ids"]]}


def parse_draft_counters(page: str) -> DraftCounters | None:
    """Return None: SGLang's metrics page has means, not counters. Each answer carries its own counters instead."""
    return None


def parse_prefix_cache(page: str) -> tuple[int, int] | None:
    """Return None: each answer says how much of its prompt was cached."""
    return None


def tokenize_request(text: str, model: str) -> dict[str, Any]:
    return {"model": model, "prompt": text, "add_special_tokens": False}


def logprobs_request(ids: list[int], model: str) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def parse_logprobs(document: Any) -> list[float]:
    """Log probabilities of the prompt's tokens except the first. Raises MalformedResponse."""
    with parsing("input_token_logprobs in its answer"):
        return [float(row[0]) for row in document["meta_info"]["input_token_logprobs"][1:]]


def capture_command(wanted: HiddenStatesSpec) -> str | None:
    """Command that starts a server which returns hidden states of the last layer, or None if other layers are wanted.

    With --enable-return-aux-hidden-states, states of other layers replace the last layer's states. A head that reads
    other layers needs both.
    """
    if len(wanted.ids) > 1:
        return None
    return (
        f"python -m sglang.launch_server --model-path {wanted.target_arguments} --enable-return-hidden-states "
        f"{NO_PREFIX_CACHE_FLAG}"
    )


def hidden_states_request(ids: list[int], model: str) -> dict[str, Any]:
    """Body of a request for a text's hidden states. One new token is the minimum that SGLang generates."""
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_hidden_states": True,
    }


def parse_hidden_states(document: Any, sent: int) -> list[Any] | None:
    """Rows of numbers, flattened: SGLang sends a list of rows per prefill chunk, and single rows for generated tokens.

    Raises MalformedResponse, and EngineError if a part of the prompt came from the prefix cache, for which there are no
    states.
    """
    with parsing("meta_info in its answer"):
        about = document["meta_info"]
        read, known = about["prompt_tokens"], about.get("cached_tokens")
    if read != sent:
        raise MalformedResponse(f"it read {read} prompt tokens, but {sent} were sent")
    if known:
        raise EngineError(
            f"the server took {known} of {sent} tokens from its prefix cache and has no states of them",
            f"start it with {NO_PREFIX_CACHE_FLAG}",
        )
    parts = about.get("hidden_states")
    if not isinstance(parts, list) or not parts:
        return None
    rows: list[Any] = []
    for part in parts:
        rows += part if isinstance(part, list) and part and isinstance(part[0], list) else [part]
    return rows


def has_prefix_cache(page: str) -> bool:
    """Return False: SGLang's metrics do not tell. `parse_hidden_states` checks every answer instead."""
    return False


def parse_loaded(documents: list[Any]) -> LoadedDrafter:
    """The drafter in use, as far as SGLang tells. A published version has no directory.

    Raises EngineError, MalformedResponse.
    """
    try:
        started, version = documents[0], documents[1]["weight_version"]
        method, first = started["speculative_algorithm"], started["speculative_draft_model_path"]
        ranks = started["tp_size"]
    except (KeyError, TypeError) as error:
        raise MalformedResponse(f"no {error} in its server info") from error
    if method is None:
        raise EngineError("this engine does not draft: it was started without --speculative-algorithm")
    if method not in METHODS:
        raise EngineError(f"this engine drafts by {method}; only heads of {', '.join(METHODS)} can be replaced")
    version = None if version == UNNAMED else version
    return LoadedDrafter(version, first if version is None else None, first, method=method, ranks=ranks)


def compatibility_calls(drafter: ExportedDrafter, first: ExportedDrafter | None, now: LoadedDrafter) -> list[AdminCall]:
    """Compare the drafter with `first` here: SGLang does not check the weights it gets.

    Returns no calls. Raises DrafterRejected.
    """
    if first is None:
        raise DrafterRejected(
            f"the form of the running drafter is unknown: {now.started}, which SGLang was started with, cannot "
            "be read here",
            "publish from a machine that can read this directory",
        )
    wrong = differences(drafter.outline, first.outline)
    if wrong:
        raise DrafterRejected(f"{drafter.directory} differs in form from {now.started}: {'; '.join(wrong[:3])}")
    if "d2t" in drafter.tensors and not bool((drafter.tensors["d2t"] == first.tensors["d2t"]).all()):
        raise DrafterRejected(
            f"{drafter.directory} has a different draft vocabulary (d2t) from {now.started}, and SGLang reads "
            "it only when it starts",
            "train it with --init from the drafter that SGLang was started with, to keep its draft vocabulary",
        )
    return []


def swap_calls(drafter: ExportedDrafter, version: str | None, now: LoadedDrafter) -> list[AdminCall]:
    """Calls that pause generation in place, send the weights to every rank, and resume.

    Running requests keep their place, and resume even after a failure. Tensors shared with the target are not sent.
    """
    shared = {"embed_tokens.weight"} | ({"lm_head.weight"} if _shares_lm_head(drafter, now) else set())
    own = {name: tensor for name, tensor in drafter.tensors.items() if name not in shared}
    options = {"selector": "draft", "flush_cache": False, "weight_version": version or UNNAMED}
    return [
        AdminCall("/pause_generation", {"mode": "in_place"}, after=RESUME),
        AdminCall("/begin_weight_update", {"selector": "draft"}, after=END_UPDATE),
        *(
            AdminCall(
                "/update_weights_from_tensor",
                options | {"serialized_named_tensors": [serialized(part)] * now.ranks},
                changes=True,
            )
            for part in grouped_by_size(own)
        ),
    ]


def _shares_lm_head(drafter: ExportedDrafter, now: LoadedDrafter) -> bool:
    """Whether SGLang drafts with the target's lm_head. Loading a head's lm_head would then change the target."""
    return now.method == "EAGLE" or drafter.outline.config.get("draft_vocab_size") is None


def grouped_by_size(tensors: dict[str, Tensor]) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors, in order, by at most `MOST_BYTES`. A larger tensor forms a group alone."""
    group: list[tuple[str, Tensor]] = []
    for name, tensor in tensors.items():
        if group and sum(one.nbytes for _, one in group) + tensor.nbytes > MOST_BYTES:
            yield group
            group = []
        group.append((name, tensor))
    if group:
        yield group


def serialized(named: list[tuple[str, Tensor]]) -> str:
    """Serialize tensors for SGLang's `MultiprocessingSerializer`: a pickle in base64.

    The pickle holds the values themselves. A `ForkingPickler` would refer to shared memory of this machine instead.
    """
    return base64.b64encode(pickle.dumps([(name, tensor.contiguous().clone()) for name, tensor in named])).decode()


def check_response(call: AdminCall, document: Any) -> float | None:
    """Return None: SGLang reports no times. Raises EngineError if the call failed; MalformedResponse."""
    if call.path in ("/pause_generation", "/continue_generation"):
        return None  # their answers say nothing about success
    if not isinstance(document, dict) or not isinstance(document.get("success"), bool):
        raise MalformedResponse(f"{call.path} does not say whether it succeeded")
    if not document["success"]:
        raise error_for_status(call, 200, str(document.get("message")))
    return None


def error_for_status(call: AdminCall, status: int, text: str) -> EngineError:
    """The error for a status other than 200, or for a reported failure."""
    if status == 404:
        return EngineError(f"it does not have {call.path}", f"{VERSION} has it")
    if "already open" in text:
        return EngineError(
            "another update of its weights is in progress",
            f"if the process that began it has died: POST {END_UPDATE.path}, then {RESUME.path}",
        )
    return EngineError(f"{call.path} failed (status {status}): {text}")
