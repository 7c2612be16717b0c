"""Decoding engine: requests that come and go, decoded as one batch. Every command that decodes runs this loop.

`decode` and `stream` decode a given list of requests.
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch

from specctl import processes, progress, threads
from specctl.decoding.cache import RECOMPUTE, CatchUp
from specctl.decoding.controllers import Fixed
from specctl.decoding.device import rounds
from specctl.decoding.host_runner import HostRunner, prefill
from specctl.decoding.prefix_cache import PrefixCache
from specctl.decoding.protocols import Controller, OnPrefill, OnRound, Proposer
from specctl.decoding.records import Decoded, Event, Request, RoundResult, Sequence
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.timing import Stopwatch
from specctl.decoding.verify import MAX_NODES, budget_for
from specctl.errors import DataError, UsageError

EXACT_ROWS = 8  # rows of every step in exact mode: as cheap as one row in bf16 on a CPU
IDLE_SHARE = 1 / 16  # largest fraction of a GPU's memory for the caches of an engine without sequences
TWO_ROUNDS_TOKENS = 2 * (MAX_NODES + 1)  # most tokens that two rounds commit: one may be under way on the device


def idle_bytes(device: torch.device) -> float:
    """Most bytes of the caches of an engine without sequences."""
    if device.type != "cuda":
        return float("inf")
    return IDLE_SHARE * torch.cuda.get_device_properties(device).total_memory


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine.

    Attributes:
        slots: most sequences at a time; other requests wait (default: all at once).
        share_rows: the sequences of a batch share the rows that cost little more than one (`SHARED_ROWS`). Drafts get
            shorter, throughput gets higher. False: drafts are as long as for one sequence, to measure those drafts.
        exact: fixed shapes, so that speculative and plain decoding are bitwise equal in bf16, too (chains only). All
            slots must be taken by the first step.
        catch_up: how much of a text a lagging drafter reads (also at its first use, when it has read nothing).
        keeps_hidden: keep the target's hidden states at every new position (`DecodeState.hidden`).
        on_host: run every round from the host, so that contenders can be compared. Otherwise rounds run on the device
            if they can (device/rounds.py).
        prefix_cache: cached texts of earlier calls. A prefix that a prompt shares with a cached text or an earlier
            prompt is not prefilled again.
    """

    slots: int | None = None
    share_rows: bool = True
    exact: bool = False
    catch_up: CatchUp = RECOMPUTE
    keeps_hidden: bool = False
    on_host: bool = False
    prefix_cache: PrefixCache | None = None


DEFAULT_OPTIONS = EngineOptions()


class Engine:
    """Decodes requests, which may be added and cancelled between any two steps. An engine may live as long as its
    caller decodes: when all sequences have ended, it frees their memory and waits for more.

    The text of a request does not depend on the other requests of the batch. This holds token for token in fp32; in
    half precision two nearly equal logits may change places. Every request ends with exactly one event that has `ended`
    set.

    Args:
        controller: chooses the drafter of every round (default: plain decoding).
        on_round: called after the controller has observed a round.

    Attributes:
        on_prefill: called after first tokens are drawn, with their slots and logits, or None.
    """

    def __init__(
        self,
        target: Target,
        controller: Controller | None = None,
        options: EngineOptions = DEFAULT_OPTIONS,
        on_round: OnRound | None = None,
    ):
        self.target, self.options, self.on_round = target, options, on_round
        self.on_prefill: OnPrefill | None = None
        self.controller = controller or Fixed.of(None)
        self.waiting: dict[int, Sequence] = {}
        self.texts: dict[int, Sequence] = {}  # sequences that have a slot, or an end that no event has reported yet
        self.clock = Stopwatch()
        # A weak reference, so that an engine that is dropped frees its caches at once.
        self._report = partial(Engine._observe, weakref.proxy(self))
        self.host = HostRunner(target, options.share_rows, self._report)
        # Rounds can run ahead of the host if the controller can wait for their results. Skipped slots have no masks
        # there (`plan_at`), and tensor-parallel ranks compare every round on the host.
        late = self.controller.accepts_late_counts and options.keeps_hidden >= self.controller.keeps_hidden
        on_host = options.on_host or options.exact or options.catch_up != RECOMPUTE or processes.group_size() > 1
        self._ahead = late and not on_host and rounds.possible(target)
        self._added = 0
        self._start()

    def _start(self) -> None:
        """Begin without sequences and without memory."""
        options, rows = self.options, EXACT_ROWS if self.options.exact else 0
        self.state = DecodeState(
            self.target,
            taps=self.controller.taps,
            spare=max(MAX_NODES, rows),
            exact_rows=rows,
            catch_up=options.catch_up,
            keeps_hidden=options.keeps_hidden,
        )
        self.device = self._device_rounds()

    def _device_rounds(self) -> rounds.DeviceRounds | None:
        budget = partial(budget_for, self.options.share_rows)
        return rounds.DeviceRounds(self.target, self.state, budget, self._report) if self._ahead else None

    def add(self, request: Request) -> int:
        """Add a request and return its id. A later step prefills it and draws its first token.

        Raises DataError if the target cannot answer it (`Target.check_request`), or if it needs more memory than there
        is.
        """
        self.target.check_request(request)
        sequence = self.state.sequence(request, self._added)
        if self.options.exact and self.state.batch and sequence.limit + self.state.spare >= self.state.capacity:
            raise DataError(
                f"in exact mode a sequence of up to {sequence.limit} tokens must be added before the first step"
            )
        if not self.state.could_hold(sequence):
            raise DataError(
                f"the KV cache of a sequence of up to {sequence.limit} tokens does not fit in memory",
                "ask for fewer new tokens, shorten the prompt, or raise SPECCTL_KV_GIB",
            )
        if not self.busy:
            self.clock = Stopwatch()
        self._added += 1
        self.state.any_sampled |= request.sampling.temperature > 0
        self.waiting[sequence.index] = sequence
        return sequence.index

    def cancel(self, id: int) -> None:
        """End a sequence at its current length; the next step reports it. A sequence that a pending round has ended
        already is left alone. UsageError if no sequence with this id is being decoded."""
        if id in self.waiting:
            self.texts[id] = self.waiting.pop(id)
        text = self.texts.get(id)
        if text is None:
            raise UsageError(f"sequence {id} has ended" if 0 <= id < self._added else f"there is no sequence {id}")
        self._drain()
        text.stop = text.stop or "cancelled"

    @property
    def busy(self) -> bool:
        """Whether a step has work to do or events to report."""
        return bool(self.waiting or self.texts)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Prefill the waiting requests that find a slot. If none does, run one round of all sequences. Returns the
        events."""
        self.clock.start()
        if slots := self._admit():
            logits = prefill(self.target, self.state, slots, self._shares, self.options.prefix_cache)
            if self.on_prefill is not None:
                self.on_prefill(self.state, slots, logits)
            self._clear_up()
            self.clock.prefilled()
        else:
            if self.state.unfinished:
                self._round()
            self._clear_up()
            self.clock.decoded()
        if processes.group_size() > 1:
            processes.check_same("the texts", [(text.ids[text.reported :], text.stop) for text in self.texts.values()])
        events = list(self._events())
        if not self.busy:
            self._free_batch()
        return events

    def abandon(self) -> None:
        """Drop all sequences without events, after an error."""
        for text in self.texts.values():
            if text.controller_begun:
                self.controller.end(text)
        self.waiting.clear()
        self.texts.clear()
        self._start()

    def exchange(self, controller: Controller, dropped: Iterable[Proposer]) -> None:
        """Draft with another controller from the next round on. Texts go on: a drafter that has no memory of them reads
        them first.

        Args:
            controller: reads the same hidden states of the target as the present one.
            dropped: drafters that draft no more. Their memory of the texts and their graphs are freed.
        """
        assert set(controller.taps) <= set(self.controller.taps), "the kept features lack hidden states"
        self._drain()
        self.controller = controller
        for drafter in dropped:
            drafter.invalidate(self.state)
            self.state.memory.pop(drafter, None)  # a hybrid also keeps counts of the texts
        self.device = self._device_rounds()  # graphs hold the addresses of weights

    def _round(self) -> None:
        """Run one round: choose a drafter, propose, verify, commit, observe."""
        state, device = self.state, self.device
        if state.needs_room(TWO_ROUNDS_TOKENS):
            self._drain()
            state.reserve(TWO_ROUNDS_TOKENS)
        # Pending rounds may end the last sequence.
        proposer = self.controller.choose(state) if state.unfinished else None
        if proposer is None and device is not None:
            device.wait()
            proposer = self.controller.choose(state) if state.unfinished else None
        if proposer is None or (device is not None and device.play(proposer)):
            return
        if state.unfinished:
            self.host.play(state, proposer)

    def _observe(self, state: DecodeState, result: RoundResult) -> None:
        """Let the controller, and then the listener, observe a round."""
        self.controller.observe(state, result)
        if self.on_round is not None and result.counts:
            self.on_round(state, result)

    def _drain(self) -> None:
        """Wait for pending rounds, so that the host may change the batch."""
        if self.device is not None:
            self.device.drain()

    def _admit(self) -> list[int]:
        """Give free slots to waiting requests. Returns the slots to prefill."""
        count = len(self.waiting)
        if self.options.slots is not None:
            count = min(count, self.options.slots - len(self.state.live))
        count = self._count_fitting(count)
        if not count:
            return []
        self._drain()
        if not self.texts:
            self._begin_batch(count)
        texts = [self.waiting.pop(id) for id in list(islice(self.waiting, count))]
        for text in texts:
            self.texts[text.index] = text
            try:
                self.controller.begin(text)
                text.controller_begun = True
            except Exception as error:  # the controller cannot take this sequence
                text.fail(error)
        self.clock.decoded()  # the controller's `begin` does not count as prefill time
        self.clock.start()
        taken = [text for text in texts if text.stop is None]
        return self.state.assign_slots(taken, self._shares) if taken else []

    @property
    def _shares(self) -> bool:
        """Whether sequences share the pages of common prefixes. They cannot if drafters read features: the prefill of
        each sequence computes these."""
        return self.state.pool is not None and not self.state.taps and self.options.prefix_cache is None

    def _count_fitting(self, count: int) -> int:
        """Number of waiting requests, among the first `count`, that fit into memory. If none fits and this engine holds
        no memory itself, the first request fails: another engine holds the memory and would not free it while this one
        waits."""
        texts = list(islice(self.waiting.values(), max(count, 0)))
        fitting = self.state.count_fitting(texts)
        if texts and not fitting and not self.texts:
            text = self.waiting.pop(texts[0].index)
            self.texts[text.index] = text
            text.fail(
                DataError(
                    f"no room for the KV cache of a sequence of {text.limit} tokens: other sequences hold the memory",
                    "run fewer or shorter sequences at once, or raise SPECCTL_KV_GIB",
                )
            )
        return fitting

    def _begin_batch(self, count: int) -> None:
        """Prepare for the first `count` sequences of a batch: in exact mode make room for the longest one to come."""
        if self.options.exact and not self.state.batch:
            longest = max(text.limit for text in self.waiting.values())
            self.state.capacity = longest + self.state.spare + 1
        elif self.state.batch and not self.options.exact:
            self.state.restart(count)
            self.state.any_sampled = any(text.request.sampling.temperature > 0 for text in self.waiting.values())
        if self.device is not None:
            self.device.batch = self.state.width(count)

    def _free_batch(self) -> None:
        """Free the memory of a batch with all its sequences ended. Caches that graphs were made for are kept, unless
        they take much memory: a capture takes as long as some tens of rounds."""
        if self.device is not None and self.device.tracks and self.state.nbytes <= idle_bytes(self.state.device):
            self._drain()
            self.state.rounds = self.state.ahead = self.state.replays = 0
        else:
            self._start()

    def _clear_up(self) -> None:
        """Cache finished texts as prefixes, release their memory, and drop idle slots if they are too many."""
        state = self.state
        if thin := state.mostly_idle and not self.waiting:
            self._drain()
        ended = [b for b, row in enumerate(state.rows) if row.stop is not None and row.index in self.texts]
        failed = [b for b in ended if state.rows[b].stop == "failed"]
        if self.options.prefix_cache is not None:
            self.options.prefix_cache.keep(state, [b for b in ended if b not in failed])
        state.release(ended)
        if failed:
            state.discard(failed)
        if thin:
            state.shrink()

    def _events(self) -> Iterator[Event]:
        """Yield the events of all sequences with something new to report."""
        state, clock = self.state, self.clock
        for text in list(self.texts.values()):
            tokens, text.reported = text.ids[text.reported :], len(text.ids)
            if text.stop is None:
                if tokens:
                    yield Event(text.index, tokens)
                continue
            del self.texts[text.index]
            if text.controller_begun:
                self.controller.end(text)
            decoded = text.decoded(clock.prefill_s, clock.decode_s, state.replays, state.ahead, state.rounds)
            yield Event(text.index, tokens, decoded, text.error)


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
