"""Prefill of prompts into the KV cache, in chunks of rows that bound the memory for activations."""

import torch
from torch import Tensor

from specctl.decoding.cache import KVCache
from specctl.decoding.models.model import Model
from specctl.decoding.pages import page_names
from specctl.decoding.plan import plan_rows


def groups(lengths: list[int], slots: list[int], rows: int, starts: list[int] | None = None) -> list[range]:
    """Group prompts that run in one forward. A group consists of prompts in neighboring cache slots with the same entry
    in `starts`; padded to the longest, it has at most `rows` rows. A longer prompt is a group by itself. Returns ranges
    of prompt indices, in order."""
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
    """Run prompts into `slots` of the cache. Positions before `starts` are cached already and are not run. Returns
    (logits [n, V] of each prompt's last token, h [n, P, H], taps [n, P, F]). Positions that were not run, and padding,
    are zero.

    On a CPU, prompts run one by one: batching gains nothing there, and padding is work. Equal prompts run once.
    """
    if model.device.type == "cpu" and starts is None:
        places_of: dict[tuple[int, ...], int] = {}
        origins = [places_of.setdefault(tuple(prompt), place) for place, prompt in enumerate(prompts)]
        if len(places_of) < len(prompts):
            return _prefill_once(model, prompts, cache, taps, slots, origins)
    lengths = [len(prompt) for prompt in prompts]
    logits: list[Tensor] = []
    hidden: Tensor | None = None
    tapped: Tensor | None = None
    starts = starts or [0] * len(prompts)
    for places in groups(lengths, slots, 0 if model.device.type == "cpu" else model.prefill_rows, starts):
        within = [lengths[place] for place in places]
        begin = starts[places.start]
        tokens = torch.zeros(len(places), max(within) - begin, dtype=torch.long)
        for row, place in enumerate(places):
            tokens[row, : lengths[place] - begin] = torch.tensor(prompts[place][begin:])
        tokens = tokens.to(model.device)
        part = cache.sub_batch(slots[places.start], slots[places.stop - 1] + 1)
        step = max(model.prefill_rows // len(places), 1)
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


def _prefill_once(
    model: Model,
    prompts: list[list[int]],
    cache: KVCache,
    taps: tuple[int, ...],
    slots: list[int],
    origins: list[int],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`prefill` for prompts of which some are equal: prompt i equals prompt `origins[i]`, the first of its kind."""
    first = sorted({*origins})
    logits, hidden, tapped = prefill(
        model, [prompts[place] for place in first], cache, taps, [slots[place] for place in first]
    )
    for place, origin in enumerate(origins):
        if place != origin:
            cache.set_first_rows(slots[place], cache.first_rows(slots[origin], len(prompts[origin])))
    rows = torch.tensor([first.index(origin) for origin in origins])
    return logits[rows], hidden[rows], None if tapped is None else tapped[rows]


def _stored(
    states: Tensor | None, whole: Tensor | None, lengths: list[int], places: range, start: int
) -> Tensor | None:
    """Copy `states` [b, t, F] of the prompts in `places`, from row `start` on, into `whole` [n, P, F]. `whole` is
    allocated if it is None."""
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


def prefill_shared(
    model: Model, prompts: list[list[int]], cache: KVCache, slots: list[int]
) -> tuple[Tensor, list[int]]:
    """Prefill without the full pages of common prefixes that are already cached, from earlier calls or from this one.
    Among prompts with the same beginning, the first runs before the others. Returns the logits [n, V] of each prompt's
    last token, which always runs, and the number of tokens of each prompt that were cached."""
    names = [page_names(prompt[:-1]) for prompt in prompts]
    ahead = {own[0]: place for place, own in reversed([*enumerate(names)]) if own}
    first = [place for place, own in enumerate(names) if not own or ahead[own[0]] == place]
    others = [place for place in range(len(prompts)) if place not in first]
    logits, cached = [], [0] * len(prompts)
    for places in filter(None, (first, others)):
        starts = [cache.share(slots[place], names[place]) for place in places]
        texts = [prompts[place] for place in places]
        logits.append(prefill(model, texts, cache, (), [slots[place] for place in places], starts)[0])
        for place, start in zip(places, starts, strict=True):
            cached[place] = start
            cache.publish(slots[place], names[place])
    order = torch.tensor([*first, *others], device=model.device).argsort()
    return torch.cat(logits)[order], cached
