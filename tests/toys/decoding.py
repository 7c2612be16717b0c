"""Decoding of prompts with a new engine, in one call."""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.offline import decode as decode_requests
from specctl.decoding.offline import stream as stream_requests
from specctl.decoding.records import Decoded, Request
from specctl.decoding.target import Target, load_target

WORDS = [3, 40, 41, 42, 43, 44, 45]  # the first ends a text


def target_of_few_words(directory: str, end_bias: float) -> Target:
    """A target that writes only `WORDS`, so that random drafts are often right. `end_bias` is for the logit of the end
    token, the others have 0."""
    target = load_target(directory, device="cpu", dtype="fp32")
    target.model.head.bias = torch.full((target.vocab_size,), -1e4)
    target.model.head.bias[WORDS] = 0.0
    target.model.head.bias[WORDS[0]] = end_bias
    return target


def engine_for(
    target, drafter=None, controller=None, taps=None, on_round=None, on_commit=None, **options: Any
) -> Engine:
    """An engine with a drafter or a controller. `on_commit(state)` and `on_round(state, draft, verdict)` are called
    after every round; `on_round` keeps the rounds on the host."""
    controller = controller or Fixed.of(drafter)
    if taps is not None:
        controller.taps = taps
    if on_round is not None:
        options["on_host"] = True

    def listener(state, result):
        if on_commit is not None:
            on_commit(state)
        if on_round is not None:
            on_round(state, result.draft, result.verdict)

    return Engine(target, controller, EngineOptions(**options), listener)


def requests(prompts, *, sampling, max_new_tokens, seeds, ends=frozenset(), labels=None) -> list[Request]:
    """One request per prompt. `sampling` and `max_new_tokens` are for all prompts, or one each."""
    count = len(prompts)
    new = max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens] * count
    how = sampling if isinstance(sampling, list) else [sampling] * count
    parts = zip(prompts, how, new, seeds, labels or [None] * count, strict=True)
    return [Request(prompt, one, most, seed, ends, label) for prompt, one, most, seed, label in parts]


def filling(buffer) -> dict[str, Any]:
    """Options of `decode` that fill a replay buffer."""
    return {"on_commit": buffer.observe, "keeps_hidden": buffer.keeps_hidden}


ASKED = ("sampling", "max_new_tokens", "seeds", "ends", "labels")


def decode(target, prompts, **options: Any) -> list[Decoded]:
    """Decode prompts, and return the texts in order. `engine`: an engine that lives longer than the call."""
    asked = {name: options.pop(name) for name in ASKED if name in options}
    engine = options.pop("engine", None) or engine_for(target, **options)
    return decode_requests(engine, requests(prompts, **asked))


def plain_answers(target, prompts, seeds, max_new_tokens):
    """`answers(sampling)`: the results of plain decoding, one prompt at a time."""

    @functools.cache
    def answers(sampling) -> list[Decoded]:
        return [
            decode(target, [prompt], sampling=sampling, max_new_tokens=max_new_tokens, seeds=[seed])[0]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    return answers


def whole(decoded):
    """The ids of prompt and output of each text."""
    return [one.prompt_ids + one.output_ids for one in decoded]


def stream(target, prompts, **options: Any) -> Iterator[Decoded]:
    """Decode prompts, and yield each text when it is finished."""
    asked = {name: options.pop(name) for name in ASKED if name in options}
    yield from stream_requests(engine_for(target, **options), requests(prompts, **asked))
