"""Decoding engine: requests that come and go, decoded as one batch. Every command that decodes runs this loop."""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch

from specctl import processes
from specctl.decoding.cache import RECOMPUTE, CatchUp
from specctl.decoding.controllers import Fixed
from specctl.decoding.device import rounds
from specctl.decoding.host_runner import HostRunner
from specctl.decoding.prefix_cache import PrefixCache
from specctl.decoding.protocols import Controller, OnPrefill, OnRound, Proposer
from specctl.decoding.records import Event, Request, RoundResult, Sequence
from specctl.decoding.state import DecodeState, no_room
from specctl.decoding.target import Target
from specctl.decoding.timing import Stopwatch
from specctl.decoding.verify import MAX_NODES, budget_for, first_tokens
from specctl.errors import UsageError

EXACT_ROWS = 8  # rows of every step in exact mode: as cheap as one row in bf16 on a CPU
TWO_ROUNDS_TOKENS = 2 * (MAX_NODES + 1)  # most tokens that two rounds commit: one may be under way on the device


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

        Raises the DataError of `Target.check_request` or `DecodeState.sequence`.
        """
        self.target.check_request(request)
        sequence = self.state.sequence(request, self._added)
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
            logits = first_tokens(self.target, self.state, slots, self._shares, self.options.prefix_cache)
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
        texts = self._admissible()
        if not texts:
            return []
        self._drain()
        if not self.texts:
            self.state.start(len(texts), list(self.waiting.values()))
            if self.device is not None:
                self.device.batch = self.state.width(len(texts))
        for text in texts:
            self.texts[text.index] = self.waiting.pop(text.index)
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

    def _admissible(self) -> list[Sequence]:
        """The first waiting requests for which there are slots and memory. If there is no memory for the first one and
        this engine holds none itself, it fails: another engine holds the memory and would not free it while this one
        waits."""
        slots = self.options.slots
        texts = list(islice(self.waiting.values(), None if slots is None else max(slots - len(self.state.live), 0)))
        fitting = self.state.count_fitting(texts)
        if texts and not fitting and not self.texts:
            text = self.texts[texts[0].index] = self.waiting.pop(texts[0].index)
            text.fail(no_room(text))
        return texts[:fitting]

    def _free_batch(self) -> None:
        """Free the memory of a batch with all its sequences ended. Caches that graphs were made for are kept, unless
        they take much memory: a capture takes as long as some tens of rounds."""
        if self.device is not None and self.device.worth_keeping:
            self.device.drain()
            self.state.rounds = self.state.ahead = self.state.replays = 0
        else:
            self._start()

    def _clear_up(self) -> None:
        """Cache finished texts as prefixes, release their memory, and drop idle slots if they are too many."""
        state = self.state
        if thin := state.mostly_idle and not self.waiting:
            self._drain()
        ended = [b for b, row in enumerate(state.rows) if row.stop is not None and row.index in self.texts]
        if self.options.prefix_cache is not None:
            self.options.prefix_cache.keep(state, ended)
        state.release(ended)
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
