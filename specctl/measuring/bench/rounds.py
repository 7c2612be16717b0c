"""Rounds on the device: what one costs beside reading the target's weights, and how much of it is not the target."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from specctl.decoding.device import graphs
from specctl.decoding.device.rounds import DeviceRounds, device_rounds
from specctl.decoding.engine import MAX_NODES
from specctl.decoding.plain import NoDraft
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Request
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.timing import medians
from specctl.drafters.eagle3 import drafter as eagle3
from specctl.measuring.contenders import filters
from specctl.progress import Progress
from specctl.recipe import BenchRecipe, TrainRecipe

NEW = 256  # tokens of room behind the context; rounds of a finished text cost the same


@dataclass(frozen=True)
class RoundRow:
    """A round of one sequence behind `context` tokens whose step has `rows` rows.

    `target_ms`: the target's step alone; `overhead`: the share of the rest, which is drafting, the rule and the commit.
    `of_weights`: the round over the time to read the target's weights once.
    """

    drafter: str
    rows: int
    context: int
    graphs: bool
    round_ms: float
    target_ms: float
    overhead: float
    of_weights: float


def measure(
    recipe: BenchRecipe, target: Target, drafters: dict[str, Drafter], weights_ms: float, bar: Progress
) -> list[RoundRow]:
    """Plain decoding and every drafter that runs on the device; nothing where rounds are the host's (a CPU)."""
    rows = []
    for name, drafter in {"vanilla": NoDraft(), **drafters}.items():
        rounds = _begin(recipe, target, drafter)
        if rounds is not None:
            rows.append(_row(recipe, name, rounds, weights_ms))
        bar.update(1)
    return rows


def random_head(recipe: BenchRecipe, target: Target) -> Drafter:
    """An EAGLE-3 head of the target's size as training would begin with it: its proposals are worth little, its time
    is that of any other."""
    head = eagle3.build(TrainRecipe(), target, lambda count: list(range(count)))
    return eagle3.drafter(head, target, recipe.drafting)


def _begin(recipe: BenchRecipe, target: Target, drafter: Drafter) -> DeviceRounds | None:
    """The rounds of one text of random tokens, or None where they do not run on the device."""
    generator = torch.Generator().manual_seed(recipe.data.seed)
    context = min(recipe.context, target.context_length - NEW)
    prompt = torch.randint(5, target.vocab_size, (context,), generator=generator).tolist()
    request = Request(prompt, filters(recipe.sampling), NEW, recipe.data.seed)
    state = DecodeState(target, taps=drafter.taps, spare=MAX_NODES)
    state.place([state.sequence(request)])
    rounds = device_rounds(target, state, drafter, lambda _: MAX_NODES - 1)
    if rounds is not None:
        logits, _, tapped = target.prefill([prompt], state.cache, state.taps)
        state.begin([0], logits.argmax(-1).tolist(), tapped)
        rounds.load()
    return rounds


def _row(recipe: BenchRecipe, name: str, rounds: DeviceRounds, weights_ms: float) -> RoundRow:
    span = graphs.span_for(rounds.state.cached[0] + NEW + rounds.draft.reach, rounds.state.capacity)
    draft = rounds.draft.propose(rounds.sequences, span)
    parts: dict[str, Callable[[], object]] = {
        "round": partial(rounds.round, span),
        "target": partial(rounds.step, draft, span),
    }
    context = rounds.state.cached[0]
    if captured := rounds.capture:
        try:
            parts = {part: graphs.replay_of(run, rounds.state.device) for part, run in parts.items()}
        except Exception as error:  # as in decoding, whatever a driver raises
            warnings.warn(f"rounds are timed without CUDA graphs: {error}", stacklevel=2)
            captured = False
    ms = {part: 1000 * seconds for part, seconds in medians(parts, recipe.repeats, rounds.state.device).items()}
    return RoundRow(
        drafter=name,
        rows=draft.size + 1,
        context=context,
        graphs=captured,
        round_ms=ms["round"],
        target_ms=ms["target"],
        overhead=1 - ms["target"] / ms["round"],
        of_weights=ms["round"] / weights_ms,
    )
