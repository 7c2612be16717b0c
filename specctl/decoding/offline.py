"""Offline decoding of a given list of prompts: the entry points of `generate`, `distill`, `eval` and other commands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from specctl import threads
from specctl.decoding.engine import Engine
from specctl.decoding.records import Decoded, Label, Request
from specctl.decoding.sampling import Sampling
from specctl.decoding.target import Target


def decode(target: Target, prompts: list[list[int]], **options: Any) -> list[Decoded]:
    """Generate texts for all prompts and return them in order. Options and errors are the same as for `stream`."""
    together = min(options.get("slots") or len(prompts), len(prompts))
    with threads.step_threads(target.row_flops * together):
        found = list(stream(target, prompts, **options))
    prefill_s, decode_s = found[-1].prefill_s, found[-1].decode_s
    whole = [replace(one, prefill_s=prefill_s, decode_s=decode_s) for one in found]
    return sorted(whole, key=lambda one: one.index)


def stream(
    target: Target,
    prompts: list[list[int]],
    *,
    sampling: Sampling | list[Sampling],
    max_new_tokens: int | list[int],
    seeds: list[int],
    ends: frozenset[int] = frozenset(),
    labels: list[Label] | None = None,
    **options: Any,
) -> Iterator[Decoded]:
    """Generate texts and yield each when it is finished. The first failure ends the call.

    Args:
        prompts: lists of ids, any lengths.
        sampling, max_new_tokens: one for all sequences, or one each.
        seeds: one per sequence; the text depends on the seed, never on the batch or (match rule) on the drafter.
        ends: ids that end a text, in addition to the target's own.
        labels: one per sequence.
        options: options of `Engine`.

    Raises:
        DataError: see `Engine.add`.
        CheckpointError: the target's logits are not finite.
    """
    new = max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens] * len(prompts)
    samplings = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    known: list[Label] | list[None] = labels or [None] * len(prompts)
    requests = [
        Request(prompt, how, count, seed, ends, label=label)
        for prompt, how, count, seed, label in zip(prompts, samplings, new, seeds, known, strict=True)
    ]
    longest = max(min(len(one.prompt) + one.max_new_tokens, target.context_length) for one in requests)
    engine = Engine(target, longest=longest, **options)
    for request in requests:
        engine.add(request)
    while engine.busy:
        for event in engine.step():
            if event.error is not None:
                raise event.error
            if event.ended is not None:
                yield event.ended
