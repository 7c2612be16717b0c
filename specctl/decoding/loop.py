"""The decoding loop. `generate`, `distill`, `train-drafter`'s acceptance check and `eval` all run this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from specctl import threads
from specctl.decoding.catch_up import RECOMPUTE, CatchUp
from specctl.decoding.device_round import device_rounds
from specctl.decoding.draft import Controller, Drafter, DraftTree, Fixed, NoDraft
from specctl.decoding.prefixes import Prefixes
from specctl.decoding.sampling import Sampling
from specctl.decoding.state import DecodeState, Request
from specctl.decoding.target import Target
from specctl.decoding.verify import Verdict, check_logits, verify
from specctl.errors import DataError

MAX_NODES = 63  # ancestor bitmasks are int64 with a sign: the root and 62 nodes
# Rows of a step of several sequences, which share them: up to so many a step costs little more than one row. On a CPU
# measured on the built-in target with 8 sequences. On a GPU not measured yet: by its data sheet an H100 computes about
# 300 rows in the time in which it reads the weights.
SHARED_ROWS = {"cpu": 24, "cuda": 256}
EXACT_ROWS = 8  # rows of every step in exact mode: as cheap as one row in bf16 on a CPU


@dataclass(frozen=True)
class Decoded:
    """One finished sequence; `index` is its prompt's place among the prompts.

    Counts are EOS-trimmed and leave out the token of the prefill pass. `prefill_s` and `decode_s` are wall-clock of all
    sequences until this one was given out; from `decode`, of the whole call. `replays` counts the rounds of all
    sequences until then that were replays of a CUDA graph.
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
    index: int = 0
    replays: int = 0

    @property
    def decoded_tokens(self) -> int:
        """Tokens of the decode phase: mat = Σ decoded_tokens ÷ Σ target_passes."""
        return len(self.output_ids) - 1


OnRound = Callable[[DecodeState, DraftTree, Verdict], None]


def decode(target: Target, prompts: list[list[int]], **options: Any) -> list[Decoded]:
    """Generate the texts of all prompts, in their order. Options and errors are those of `stream`."""
    together = min(options.get("slots") or len(prompts), len(prompts))
    with threads.suited(target.row_flops * together):
        found = list(stream(target, prompts, **options))
    prefill_s, decode_s = found[-1].prefill_s, found[-1].decode_s
    whole = [replace(one, prefill_s=prefill_s, decode_s=decode_s) for one in found]
    return sorted(whole, key=lambda one: one.index)


@torch.inference_mode()
def stream(
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
    slots: int | None = None,
    share_rows: bool = True,
    catch_up: CatchUp = RECOMPUTE,
    on_round: OnRound | None = None,
    host: bool = False,
    ends: frozenset[int] = frozenset(),
    prefixes: Prefixes | None = None,
) -> Iterator[Decoded]:
    """Generate texts, each given out when it is finished.

    Args:
        prompts: lists of ids, any lengths.
        sampling, max_new_tokens: one for all sequences, or one each.
        seeds: one per sequence; the text depends on the seed, never on the batch or (match rule) on the drafter.
        drafter: drafts every round; None = plain decoding. A `controller` chooses per round instead; it then names the
            `taps` its drafters read.
        exact: fixed shapes, so that speculative and plain decoding are bitwise equal also in bf16 (chains).
        slots: so many sequences at a time; a finished one makes room for the next prompt at once. None = all.
        share_rows: the sequences of a batch share the rows that cost little more than one (`SHARED_ROWS`): shorter
            drafts, more tokens a second. False: drafts as long as they are for one sequence, to measure those.
        catch_up: how much of a text a drafter reads that has fallen behind, its beginning included.
        on_round: called after every commit.
        host: every round is the host's, as it is where `on_round` or a controller looks on: for decoding that is
            compared with such. Else rounds run on the device where they can (device_round.py).
        ends: ids that end a text, next to the target's own; it stops with "eos" there, too.
        prefixes: texts of earlier calls; what prompts have in common with them, and with each other, is not read again.

    Raises:
        DataError: a prompt is empty or leaves no room in the target's context.
        CheckpointError: the target's logits are not finite.
    """
    controller = controller or Fixed(drafter or NoDraft())
    if taps is None:
        taps = drafter.taps if drafter is not None else ()
    clock = Clock()
    rows = EXACT_ROWS if exact else 0
    state = _start(target, prompts, sampling, max_new_tokens, seeds, taps, rows, slots, catch_up, ends)
    _prefill(target, state, list(range(state.batch)), prefixes)
    _admit(target, state, prefixes)
    state.shrink()
    clock.prefilled()
    yield from clock.stamp(state)
    device = None
    if type(controller) is Fixed and on_round is None and not host:  # unwatched, rounds can run ahead of the host
        device = device_rounds(target, state, controller.drafter, lambda: _budget(state, share_rows))
    while state.unfinished:
        if device is None or not device.advance():
            chosen = controller.choose(state)
            draft = chosen.propose(state, _budget(state, share_rows))
            verdict = verify(target, state, draft)
            state.commit(verdict)
            controller.observe(state, draft, verdict)
            if on_round is not None:
                on_round(state, draft, verdict)
        clock.decoded()
        _admit(target, state, prefixes)
        clock.prefilled()
        state.shrink()
        yield from clock.stamp(state)


class Clock:
    """Seconds of prefills and of rounds, without those between a text given out and the next one asked for."""

    def __init__(self) -> None:
        self.prefill_s = self.decode_s = 0.0
        self.mark = time.perf_counter()

    def prefilled(self) -> None:
        self.prefill_s += self._lap()

    def decoded(self) -> None:
        self.decode_s += self._lap()

    def _lap(self) -> float:
        now = time.perf_counter()
        lap, self.mark = now - self.mark, now
        return lap

    def stamp(self, state: DecodeState) -> Iterator[Decoded]:
        """The sequences that have finished, as they are given out."""
        finished = state.take_finished()
        for row in finished:
            yield Decoded(
                row.ids[: row.prompt_length],
                row.output,
                str(row.stop),
                row.target_passes,
                row.accepted,
                row.rejections,
                row.drafted,
                row.accepted_by_depth,
                row.offered_by_depth,
                self.prefill_s,
                self.decode_s,
                row.index,
                state.replays,
            )
        if finished:
            self.mark = time.perf_counter()


def _start(
    target: Target,
    prompts: list[list[int]],
    sampling: Sampling | list[Sampling],
    max_new_tokens: int | list[int],
    seeds: list[int],
    taps: tuple[int, ...],
    exact_rows: int,
    slots: int | None,
    catch_up: CatchUp,
    ends: frozenset[int],
) -> DecodeState:
    """Check the prompts; the state that holds the first of them."""
    for prompt in prompts:
        if not prompt or len(prompt) >= target.context_length:
            raise DataError(
                f"a prompt has {len(prompt)} tokens; target {target.name} takes 1 to {target.context_length - 1}",
                "shorten the prompt",
            )
    new = max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens] * len(prompts)
    samplings = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    requests = [
        Request(prompt, how, min(len(prompt) + count, target.context_length), seed)
        for prompt, how, count, seed in zip(prompts, samplings, new, seeds, strict=True)
    ]
    return DecodeState(
        target,
        requests,
        slots=slots or len(requests),
        taps=taps,
        spare=max(MAX_NODES, exact_rows),
        exact_rows=exact_rows,
        catch_up=catch_up,
        ends=ends,
    )


def _admit(target: Target, state: DecodeState, prefixes: Prefixes | None) -> None:
    """Fill the slots of finished sequences with waiting texts, until none of them ends with its first token."""
    if prefixes is not None:
        prefixes.keep(state)
    while slots := state.admit():
        _prefill(target, state, slots, prefixes)
        if prefixes is not None:
            prefixes.keep(state)


def _prefill(target: Target, state: DecodeState, slots: list[int], prefixes: Prefixes | None) -> None:
    """Run the prompts that stand in `slots` and commit the first token of each."""
    prompts = [state.rows[b].ids for b in slots]
    with threads.suited(target.row_flops * sum(map(len, prompts))):
        if prefixes is None:
            logits, _, tapped = target.prefill(prompts, state.cache, state.taps, slots)
        else:
            logits, tapped = prefixes.prefill(target, prompts, state.cache, state.taps, slots)
    check_logits(target, logits)
    positions = torch.tensor([[len(prompt)] for prompt in prompts])
    draws = state.draws.select(slots)
    logits = draws.penalise(logits.unsqueeze(1), prompts, [[] for _ in prompts], positions[:, :0])
    first = draws.draw(logits, positions)
    state.begin(slots, [row[0] for row in first.tolist()], tapped)


def _budget(state: DecodeState, share: bool) -> int:
    """Draft nodes a step has room for."""
    if state.exact_rows:
        return state.exact_rows - 1
    if share and state.batch > 1:
        return nodes_within(SHARED_ROWS["cpu" if state.device.type == "cpu" else "cuda"], state.batch)
    return MAX_NODES - 1


def nodes_within(rows: int, batch: int) -> int:
    """Draft nodes of each sequence of a batch whose step has `rows` rows, roots included; one at least."""
    return min(max(rows // batch, 2), MAX_NODES) - 1
