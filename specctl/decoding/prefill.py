"""Prompts into the cache, so many rows at a time: what a forward of them needs beside the weights is bounded."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.decoding.cache import KVCache
from specctl.decoding.models.model import Model
from specctl.decoding.pages import beginnings
from specctl.decoding.plan import plan_rows

# Rows of a forward, padding included. An H100 is busy with a few hundred; of an 8B target 8,192 take some 2 GB of
# activations, where 64 prompts of 4,096 tokens at once take 60.
ROWS = 8192


def groups(lengths: list[int], slots: list[int], rows: int, starts: list[int] | None = None) -> list[range]:
    """Places of prompts that are run together, in order: neighbours in the cache that begin at the same place of
    `starts`, padded to the longest of them within so many rows. One that is longer stands alone."""
    found: list[range] = []
    for place, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        if found:
            begun = found[-1]
            padded = max(*lengths[begun.start : begun.stop], length) * (len(begun) + 1)
            same = starts is None or starts[place] == starts[place - 1]
            if padded <= rows and slot == slots[place - 1] + 1 and same:
                found[-1] = range(begun.start, place + 1)
                continue
        found.append(range(place, place + 1))
    return found


def prefill(
    model: Model,
    prompts: list[list[int]],
    cache: KVCache,
    taps: tuple[int, ...],
    slots: list[int],
    starts: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run prompts into `slots` of the cache, those that it holds up to `starts` from there on. Returns (logits of each
    last row [n, V], h [n, P, H], taps [n, P, F]), zero where a prompt was not run and behind its end.

    A CPU gains nothing from a batch of prompts, and padding is work: one by one.
    """
    lengths = [len(prompt) for prompt in prompts]
    logits: list[Tensor] = []
    hidden: Tensor | None = None
    tapped: Tensor | None = None
    starts = starts or [0] * len(prompts)
    for places in groups(lengths, slots, 0 if model.device.type == "cpu" else ROWS, starts):
        within = [lengths[place] for place in places]
        begin = starts[places.start]
        tokens = torch.zeros(len(places), max(within) - begin, dtype=torch.long)
        for row, place in enumerate(places):
            tokens[row, : lengths[place] - begin] = torch.tensor(prompts[place][begin:])
        tokens = tokens.to(model.device)
        part = cache.part(slots[places.start], slots[places.stop - 1] + 1)
        step = max(ROWS // len(places), 1)
        for start in range(begin, max(within), step):
            rows = tokens[:, start - begin : start - begin + step]
            plan = plan_rows([start] * len(places), rows.shape[1], device=model.device, dtype=model.dtype)
            states, kept = model.forward(rows, part, plan, taps)
            hidden = _stored(states, hidden, lengths, places, start)
            tapped = _stored(kept, tapped, lengths, places, start)
        assert hidden is not None
        last = torch.tensor(within, device=model.device) - 1
        logits.append(model.logits(hidden[torch.tensor([*places], device=model.device), last]))
    assert hidden is not None
    return torch.cat(logits), hidden, tapped


def _stored(
    states: Tensor | None, whole: Tensor | None, lengths: list[int], places: range, start: int
) -> Tensor | None:
    """`whole` [n, P, F], made where there is none yet, with `states` [b, t, F] of the rows from `start` on of the
    prompts in `places`."""
    if states is None:
        return None
    if whole is None:
        if len(lengths) == 1 and states.shape[1] == lengths[0]:
            return states
        whole = states.new_zeros(len(lengths), max(lengths), states.shape[-1])
    for row, place in enumerate(places):
        stop = min(lengths[place], start + states.shape[1])
        if start < stop:
            whole[place, start:stop] = states[row, : stop - start]
    return whole


def prefill_shared(model: Model, prompts: list[list[int]], cache: KVCache, slots: list[int]) -> Tensor:
    """As `prefill`, but for full pages that prompts begin with and that others have filled, in earlier calls or in this
    one: of prompts that begin alike here the first goes ahead. Returns the logits of each last row [n, V], which is
    always run."""
    names = [beginnings(prompt[:-1]) for prompt in prompts]
    ahead = {own[0]: place for place, own in reversed([*enumerate(names)]) if own}
    first = [place for place, own in enumerate(names) if not own or ahead[own[0]] == place]
    others = [place for place in range(len(prompts)) if place not in first]
    logits = []
    for places in filter(None, (first, others)):
        starts = [cache.share(slots[place], names[place]) for place in places]
        texts = [prompts[place] for place in places]
        logits.append(prefill(model, texts, cache, (), [slots[place] for place in places], starts)[0])
        for place in places:
            cache.publish(slots[place], names[place])
    order = torch.tensor([*first, *others], device=model.device).argsort()
    return torch.cat(logits)[order]
