"""SGLang's server: its own `/generate`, which takes and gives token ids. No SGLang runs on a CPU: this is written after
its schemas, and tested against a server that answers by them."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

from specctl.engines.records import Answer, Ask, Call, Drafting, EngineError, Malformed, Wanted

NAME = "sglang"
GENERATE = "/generate"
NORMED = True
UNCACHED = "--disable-radix-cache"
STOPS = {"stop": "eos", "length": "length"}


def body(ask: Ask, model: str) -> dict[str, Any]:
    """`sampling_seed` counts under --enable-deterministic-inference only; elsewhere the engine draws as it likes."""
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


def answer(document: Any, ask: Ask) -> Answer:
    """The text's ids, and what is said of its drafts. Raises Malformed."""
    try:
        about, ids = document["meta_info"], document["output_ids"]
        reason, read = about["finish_reason"]["type"], about["prompt_tokens"]
        matched, written = about["finish_reason"].get("matched"), about["completion_tokens"]
    except (KeyError, TypeError) as error:
        raise Malformed(f"no output_ids in its answer ({type(error).__name__}: {error})") from error
    if read != len(ask.prompt_ids):
        raise Malformed(f"it read {read} prompt tokens, {len(ask.prompt_ids)} were sent")
    if reason not in STOPS:
        raise Malformed(f"the text ended with {reason!r}")
    if type(matched) is int and isinstance(ids, list) and len(ids) == written - 1:
        ids = [*ids, matched]  # the token that ended the text, where it is cut off with it
    return Answer(ids, STOPS[reason], _own_drafting(about))


def _own_drafting(about: dict[str, Any]) -> Drafting | None:
    histogram = about.get("spec_correct_drafts_histogram")
    if not isinstance(histogram, list) or not about.get("spec_verify_ct"):
        return None
    return Drafting.of_histogram(histogram, int(about.get("spec_num_proposed_drafts") or 0))


def streamed(body: dict[str, Any]) -> dict[str, Any]:
    """The same request, to be answered piece by piece."""
    return body | {"stream": True}


def begun(piece: Any) -> bool:
    """Whether there is a token in a piece."""
    return bool(piece.get("output_ids"))


def joined(pieces: list[Any]) -> Any:
    """Pieces hold all there is so far, or (--incremental-streaming-output) what is new. Raises Malformed."""
    try:
        last, written = pieces[-1], pieces[-1]["meta_info"]["completion_tokens"]
        if len(last["output_ids"]) >= written - 1:
            return last
        return last | {"output_ids": [token for piece in pieces for token in piece["output_ids"]]}
    except (KeyError, TypeError, IndexError) as error:
        raise Malformed(f"no output_ids in its stream ({type(error).__name__}: {error})") from error


def drafting(page: str) -> Drafting | None:
    """Its metrics hold means, no counters: acceptance comes with the answers."""
    return None


def probe(ids: list[int], model: str) -> dict[str, Any]:
    """The request of log probabilities of a prompt's own tokens."""
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def logprobs(document: Any) -> list[float]:
    """Log probabilities of the prompt's tokens, but for the first. Raises Malformed."""
    try:
        return [float(row[0]) for row in document["meta_info"]["input_token_logprobs"][1:]]
    except (KeyError, TypeError, IndexError) as error:
        raise Malformed("no input_token_logprobs in its answer") from error


def publishing(directory: Path, version: str, ranks: int) -> list[Call]:
    """A session that changes the draft model alone, while requests stand still and keep what they have."""
    from safetensors.torch import load_file  # with torch, which nothing else here needs

    tensors = [one for path in sorted(directory.glob("*.safetensors")) for one in load_file(path).items()]
    # Bytes, where its own serialiser passes handles of shared memory on, which other machines cannot open.
    payload = base64.b64encode(pickle.dumps(tensors)).decode()
    update = {"serialized_named_tensors": [payload] * ranks, "selector": "draft", "flush_cache": False}
    return [
        Call("/pause_generation", {"mode": "in_place"}),
        Call("/begin_weight_update", {"selector": "draft"}),
        Call("/update_weights_from_tensor", update | {"weight_version": version}),
        Call("/end_weight_update", {}, always=True),
        Call("/continue_generation", {}, always=True),
    ]


def refused(call: Call, status: int, document: Any) -> tuple[str, str | None] | None:
    """Its own words."""
    if status == 404:
        return f"it has no {call.path}, with which weights are exchanged", "SGLang 0.5.23 has"
    said = document if isinstance(document, dict) else {}
    if status == 200 and said.get("success", True):
        return None
    return (
        f"{call.path} failed (status {status}): {said.get('message') or said.get('error') or 'no reason given'}",
        None,
    )


def asking_version() -> tuple[str, dict[str, Any] | None]:
    """A page that is only read."""
    return "/model_info", None


def version(document: Any) -> str | None:
    """The name of the last update; SGLang starts with "default". Raises Malformed."""
    told = document.get("weight_version") if isinstance(document, dict) else None
    if not isinstance(told, str):
        raise Malformed("no weight_version in its answer")
    return None if told == "default" else told


def capturing(wanted: Wanted) -> str | None:
    """States of the last layer alone: those of others (--enable-return-aux-hidden-states) come in their place, and a
    head that reads others needs both."""
    if len(wanted.ids) > 1:
        return None
    return f"python -m sglang.launch_server --model-path {wanted.place} --enable-return-hidden-states {UNCACHED}"


def capture(ids: list[int], model: str) -> dict[str, Any]:
    """One token more than the text is the least that it writes."""
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_hidden_states": True,
    }


def captured(document: Any, sent: int) -> list[Any] | None:
    """Rows of numbers: a list of them for every part of the prompt that was read at once, single ones for what was
    written. Raises Malformed, and EngineError where a part of the prompt was not read, but found in the cache."""
    try:
        about = document["meta_info"]
        read, known = about["prompt_tokens"], about.get("cached_tokens")
    except (KeyError, TypeError, AttributeError) as error:
        raise Malformed(f"no meta_info in its answer ({type(error).__name__}: {error})") from error
    if read != sent:
        raise Malformed(f"it read {read} prompt tokens, {sent} were sent")
    if known:
        raise EngineError(
            f"the server took {known} of {sent} tokens from its prefix cache, and has no states of them",
            f"start it with {UNCACHED}",
        )
    parts = about.get("hidden_states")
    if not isinstance(parts, list) or not parts:
        return None
    rows: list[Any] = []
    for part in parts:
        rows += part if isinstance(part, list) and part and isinstance(part[0], list) else [part]
    return rows


def keeps_prefixes(page: str) -> bool:
    """Its metrics do not say; every answer does."""
    return False
