"""The decoding loop. `generate`, `distill`, `train-drafter`'s acceptance check and `eval` all run this one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specctl.decoding.draft import Controller, Drafter, DraftTree, Fixed, NoDraft
from specctl.decoding.sampling import Sampling
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.verify import Verdict, verify
from specctl.errors import DataError

MAX_NODES = 63  # ancestor bitmasks are int64 with a sign: the root and 62 nodes
EXACT_ROWS = 8  # rows of every step in exact mode: as cheap as one row in bf16 on a CPU


@dataclass(frozen=True)
class Decoded:
    """One finished sequence. Counts are EOS-trimmed and leave out the token of the prefill pass.

    `prefill_s` and `decode_s` are wall-clock of the whole batch the sequence was part of.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    stop: str
    target_passes: int
    accepted: int
    rejections: int
    drafted: int
    accepted_by_depth: list[int]
    offered_by_depth: list[int]
    prefill_s: float
    decode_s: float

    @property
    def decoded_tokens(self) -> int:
        """Tokens of the decode phase: mat = Σ decoded_tokens ÷ Σ target_passes."""
        return len(self.output_ids) - 1


OnRound = Callable[[DecodeState, DraftTree, Verdict], None]


@torch.inference_mode()
def decode(
    target: Target,
    prompts: list[list[int]],
    *,
    sampling: Sampling | list[Sampling],
    max_new_tokens: int | list[int],
    seeds: list[int],
    drafter: Drafter | None = None,
    controller: Controller | None = None,
    taps: tuple[int, ...] | None = None,
    exact: bool = False,
    on_round: OnRound | None = None,
) -> list[Decoded]:
    """Generate one batch.

    Args:
        prompts: B lists of ids, any lengths.
        sampling, max_new_tokens: one for all sequences, or one each.
        seeds: one per sequence; the text depends on the seed, never on the batch or (match rule) on the drafter.
        drafter: drafts every round; None = plain decoding. A `controller` chooses per round instead; it then names the
            `taps` its drafters read.
        exact: fixed shapes, so that speculative and plain decoding are bitwise equal also in bf16 (chains).
        on_round: called after every commit.

    Raises:
        DataError: a prompt is empty or leaves no room in the target's context.
    """
    controller = controller or Fixed(drafter or NoDraft())
    if taps is None:
        taps = drafter.taps if drafter is not None else ()
    started = time.perf_counter()
    state = _start(target, prompts, sampling, max_new_tokens, seeds, taps, EXACT_ROWS if exact else 0)
    prefilled = time.perf_counter()
    while state.unfinished:
        chosen = controller.choose(state)
        draft = chosen.propose(state, _budget(state))
        verdict = verify(target, state, draft)
        state.commit(verdict)
        controller.observe(state, draft, verdict)
        if on_round is not None:
            on_round(state, draft, verdict)
        state.shrink()
    ended = time.perf_counter()
    return [
        Decoded(
            row.ids[: row.prompt_length],
            row.output,
            str(row.stop),
            row.target_passes,
            row.accepted,
            row.rejections,
            row.drafted,
            row.accepted_by_depth,
            row.offered_by_depth,
            prefilled - started,
            ended - prefilled,
        )
        for row in state.sequences()
    ]


def _start(
    target: Target,
    prompts: list[list[int]],
    sampling: Sampling | list[Sampling],
    max_new_tokens: int | list[int],
    seeds: list[int],
    taps: tuple[int, ...],
    exact_rows: int,
) -> DecodeState:
    """Check the prompts, prefill them and commit the first token of each."""
    for prompt in prompts:
        if not prompt or len(prompt) >= target.context_length:
            raise DataError(
                f"a prompt has {len(prompt)} tokens; target {target.name} takes 1 to {target.context_length - 1}",
                "shorten the prompt",
            )
    new = max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens] * len(prompts)
    state = DecodeState(
        target,
        prompts,
        samplings=sampling if isinstance(sampling, list) else [sampling] * len(prompts),
        limits=[min(len(p) + n, target.context_length) for p, n in zip(prompts, new, strict=True)],
        seeds=seeds,
        taps=taps,
        spare=max(MAX_NODES, exact_rows),
        exact_rows=exact_rows,
    )
    logits, _, tapped = target.prefill(prompts, state.cache, taps)
    positions = torch.tensor([[len(prompt)] for prompt in prompts])
    first = state.draws.draw(logits.unsqueeze(1), positions)
    state.begin([row[0] for row in first.tolist()], tapped)
    return state


def _budget(state: DecodeState) -> int:
    """Draft nodes a step has room for."""
    return (state.exact_rows or MAX_NODES) - 1
