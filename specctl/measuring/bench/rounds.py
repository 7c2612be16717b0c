"""Benchmark of rounds on the device: their time relative to reading the weights, and their overhead."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from specctl.decoding.controllers import NoDraft
from specctl.decoding.device import graphs
from specctl.decoding.device.rounds import DeviceRounds, possible
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Request
from specctl.decoding.sampling import Sampling
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.timing import medians
from specctl.decoding.verify import MAX_NODES
from specctl.drafters.eagle3.drafter import FAMILY as eagle3
from specctl.progress import Progress, interrupts
from specctl.recipe import BenchRecipe, TrainRecipe

NEW_TOKENS = 256  # tokens of room after the context; rounds of a finished sequence cost the same


@dataclass(frozen=True)
class RoundRow:
    """Time of a round of one sequence with `context` tokens in the cache, and `rows` rows in the target's step.

    Attributes:
        target_ms: the target's step alone.
        overhead: share of the round outside of the target's step: drafting, verification rule and commit.
        of_weights: time of the round ÷ time to read the target's weights once.
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
    """Time plain decoding and every drafter that runs on the device; empty if rounds run on the host (a CPU).

    Raises Interrupted: SIGTERM arrived.
    """
    rows = []
    for name, drafter in {"vanilla": NoDraft(), **drafters}.items():
        interrupts.check()
        rounds = _begin(recipe, target, drafter)
        if rounds is not None:
            rows.append(_row(recipe, name, rounds, weights_ms))
        bar.update(1)
    return rows


def random_head(recipe: BenchRecipe, target: Target) -> Drafter:
    """EAGLE-3 head of the target's size, as initialized for training.

    Its proposals are worth little, but it takes the same time as a trained head.
    """
    head = eagle3.build(TrainRecipe(), target, lambda count: list(range(count)))
    return eagle3.make_drafter(head, target, recipe.drafting)


def _begin(recipe: BenchRecipe, target: Target, drafter: Drafter) -> DeviceRounds | None:
    """Start rounds of one sequence of random tokens. Returns None if they cannot run on the device alone: a text
    drafter drafts on the host."""
    generator = torch.Generator().manual_seed(recipe.data.seed)
    context = min(recipe.context, target.context_length - NEW_TOKENS)
    prompt = torch.randint(5, target.vocab_size, (context,), generator=generator).tolist()
    request = Request(prompt, Sampling.of(recipe.sampling), NEW_TOKENS, recipe.data.seed)
    state = DecodeState(target, taps=drafter.taps, spare=MAX_NODES)
    state.assign_slots([state.sequence(request)])
    rounds = DeviceRounds(target, state, lambda *_: MAX_NODES - 1, lambda *_: None)
    if not possible(target) or not rounds.supports(drafter):
        return None
    logits, _, tapped = target.prefill([prompt], state.cache, state.taps)
    state.begin([0], logits.argmax(-1).tolist(), tapped)
    rounds.load(drafter)
    return None if rounds.draft.reads_text else rounds


def _row(recipe: BenchRecipe, name: str, rounds: DeviceRounds, weights_ms: float) -> RoundRow:
    span = graphs.span_for(rounds.state.cached[0] + NEW_TOKENS + rounds.draft.reach, rounds.state.capacity)
    draft = rounds.draft.propose(rounds.sequences, span)
    parts: dict[str, Callable[[], object]] = {
        "round": partial(rounds.round, span),
        "target": partial(rounds.step, draft, span),
    }
    context = rounds.state.cached[0]
    if captured := rounds.capture:
        try:
            parts = {part: graphs.replay_of(run, rounds.state.device) for part, run in parts.items()}
        except Exception as error:  # as in decoding: a driver may raise any error
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
