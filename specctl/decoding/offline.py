"""Decoding of a given list of requests with an engine."""

from collections.abc import Iterator
from dataclasses import replace

from specctl import progress, threads
from specctl.decoding.engine import Engine
from specctl.decoding.records import Decoded, Request


def decode(engine: Engine, requests: list[Request], *, stoppable: bool = True) -> list[Decoded]:
    """Decode all requests and return the texts in order. Each text has the seconds of the whole call. Raises the errors
    of `stream`."""
    together = min(engine.options.slots or len(requests), len(requests))
    with threads.step_threads(engine.target.row_flops * together):
        decoded = list(stream(engine, requests, stoppable=stoppable))
    clock = engine.clock
    whole = [replace(text, prefill_s=clock.prefill_s, decode_s=clock.decode_s) for text in decoded]
    return sorted(whole, key=lambda text: text.index)


def stream(engine: Engine, requests: list[Request], *, stoppable: bool = True) -> Iterator[Decoded]:
    """Decode requests with an engine that is idle, and yield each text when it is finished. `Decoded.index` is the
    place of its request. The first failure ends the call.

    Raises:
        DataError: see `Engine.add`.
        Interrupted: a signal arrived, and the call is `stoppable`. A text can take minutes.
        CheckpointError: the target's logits are not finite.
    """
    places: dict[int, int] = {}
    try:
        for place, request in enumerate(requests):
            places[engine.add(request)] = place
        while engine.busy:
            if stoppable:
                progress.interrupts.check()
            for event in engine.step():
                if event.error is not None:
                    raise event.error
                if event.ended is not None:
                    yield replace(event.ended, index=places[event.id])
    finally:
        if engine.busy:
            engine.abandon()
