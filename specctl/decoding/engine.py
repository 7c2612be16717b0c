"""Decoding engine: requests that come and go, decoded as one batch. Every command that decodes runs this loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch

from specctl import processes, threads
from specctl.decoding.catch_up import RECOMPUTE, CatchUp
from specctl.decoding.controllers import Fixed, PerSequence, invalidate
from specctl.decoding.device.kept_caches import CacheKey, KeptCache, KeptCaches
from specctl.decoding.device.rounds import DeviceRounds, device_rounds
from specctl.decoding.plain import PLAIN
from specctl.decoding.prefixes import Prefixes
from specctl.decoding.protocols import Controller, Drafter, OnCommit, OnRound, Proposer
from specctl.decoding.records import Decoded, Event, Request, Sequence
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.verify import nonfinite_rows, verify
from specctl.errors import DataError, UsageError

MAX_NODES = 63  # ancestor bitmasks are signed int64: the root and 62 nodes
# Row budget of a step, shared by the sequences of a batch: up to this number, a step costs little more than one row.
# The CPU value was measured on the built-in target with 8 sequences. The GPU value is not measured yet: at two thirds
# of its peak, an H100 computes 200 rows in the time it needs to read the weights, and near that number both count. Idle
# rows are computed like the others, so they use up the budget, too.
SHARED_ROWS = {"cpu": 24, "cuda": 128}
EXACT_ROWS = 8  # rows of every step in exact mode: as cheap as one row in bf16 on a CPU
TWO_ROUNDS_TOKENS = 2 * (MAX_NODES + 1)  # most tokens that two rounds commit: one may be under way on the device


class Engine:
    """Decodes requests, which may be added and cancelled between any two steps.

    The text of a request does not depend on the other requests of the batch. This holds token for token in fp32; in
    half precision two nearly equal logits may change places. Every request ends with exactly one event that has `ended`
    set.
    """

    def __init__(
        self,
        target: Target,
        *,
        drafter: Drafter | None = None,
        controller: Controller | None = None,
        taps: tuple[int, ...] | None = None,
        exact: bool = False,
        slots: int | None = None,
        longest: int = 0,
        share_rows: bool = True,
        catch_up: CatchUp = RECOMPUTE,
        on_round: OnRound | None = None,
        on_commit: OnCommit | None = None,
        keeps_hidden: bool = False,
        host: bool = False,
        prefixes: Prefixes | None = None,
        kept_caches: KeptCaches | None = None,
    ):
        """
        Args:
            drafter: drafts every round (default: plain decoding). A `controller` chooses per round instead; `taps` must
                then cover the drafters of this controller and of the requests' own controllers.
            exact: fixed shapes, so that speculative and plain decoding are bitwise equal in bf16, too (chains only).
                Needs `longest`, and `slots` that are all taken by the first step.
            slots: most sequences at a time; other requests wait (default: all at once).
            longest: tokens of the longest text to come, prompt included. 0 = unknown; memory then grows with the texts.
            share_rows: the sequences of a batch share the rows that cost little more than one (`SHARED_ROWS`). Drafts
                get shorter, throughput gets higher. False: drafts are as long as for one sequence, to measure those
                drafts.
            catch_up: how much of a text a lagging drafter reads (also at its first use, when it has read nothing).
            on_round: called after every commit, with the draft and the target's verdict.
            on_commit: called when the host knows the committed tokens of a round, with the state alone.
            keeps_hidden: keep the target's hidden states at every new position (`DecodeState.hidden`).
            host: run every round from the host, as `on_round` or a controller that is not `accepts_late_counts`
                requires, so that both can be compared. Otherwise rounds run on the device if they can
                (device/rounds.py).
            prefixes: cached texts of earlier calls. A prefix that a prompt shares with a cached text or an earlier
                prompt is not prefilled again.
            kept_caches: caches and graphs of earlier calls with this drafter or controller, on the device.
        """
        self.target, self.slots, self.prefixes, self.kept_caches = target, slots, prefixes, kept_caches
        self.share_rows, self.on_round, self.on_commit = share_rows, on_round, on_commit
        self.controller = controller or Fixed(drafter or PLAIN)
        if taps is None:
            taps = drafter.taps if drafter is not None else ()
        rows = EXACT_ROWS if exact else 0
        spare = max(MAX_NODES, rows)
        capacity = longest + spare + 1 if exact else 0
        options: dict[str, Any] = {"taps": taps, "spare": spare, "exact_rows": rows, "catch_up": catch_up}
        self._new_state = partial(DecodeState, target, **options, capacity=capacity, keeps_hidden=keeps_hidden)
        self.state = self._new_state()
        self.waiting: dict[int, Sequence] = {}
        self.texts: dict[int, Sequence] = {}  # sequences that have a slot, or an end that no event has reported yet
        self._controllers: dict[int, Controller] = {}  # controllers of single requests, by id
        self.clock = Stopwatch()
        self._added = 0
        # If no caller needs verdicts, rounds can run ahead of the host. Tensor-parallel ranks compare every round on
        # the host.
        late = self.controller.accepts_late_counts and keeps_hidden >= self.controller.keeps_hidden
        self._ahead = late and on_round is None and not host and processes.group_size() == 1
        self._device: DeviceRounds | None = None

    def add(self, request: Request, controller: Controller | None = None) -> int:
        """Add a request and return its id. A later step prefills it and draws its first token.

        Args:
            controller: chooses the drafter for this request (default: the engine's controller).

        Raises:
            DataError: the prompt is empty, too long for the target's context or has an id outside of the vocabulary;
                `max_new_tokens` is below 1; `ends` has an id outside of the vocabulary; or the text needs more memory
                than there is.
        """
        target, size = self.target, len(request.prompt)
        if not 0 < size < target.context_length:
            raise DataError(
                f"a prompt has {size} tokens; target {target.name} takes 1 to {target.context_length - 1}",
                "shorten the prompt",
            )
        if request.max_new_tokens < 1:
            raise DataError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1")
        for name, ids in (("a prompt", request.prompt), ("ends", request.ends)):
            unknown = [id for id in ids if not 0 <= id < target.vocab_size]
            if unknown:
                raise DataError(
                    f"{name} contains token id {unknown[0]}; target {target.name} has ids 0 to {target.vocab_size - 1}"
                )
        sequence = self.state.sequence(request, self._added)
        if self.state.exact_rows and sequence.limit + self.state.spare >= self.state.capacity:
            raise DataError(
                f"a sequence may have up to {sequence.limit} tokens, more than `longest` allows in exact mode"
            )
        if not self.state.could_hold(sequence):
            raise DataError(
                f"the KV cache of a sequence of up to {sequence.limit} tokens does not fit in memory",
                "ask for fewer new tokens, shorten the prompt, or raise SPECCTL_KV_GIB",
            )
        self._added += 1
        self.state.any_sampled |= request.sampling.temperature > 0
        self.waiting[sequence.index] = sequence
        if controller is not None:
            self._controllers[sequence.index] = controller
        return sequence.index

    def cancel(self, id: int) -> None:
        """End a sequence at its current length; the next step reports it. UsageError if no sequence with this id is
        being decoded."""
        if id in self.waiting:
            self.texts[id] = self.waiting.pop(id)
        text = self.texts.get(id)
        if text is None or text.stop is not None:
            raise UsageError(f"sequence {id} has ended" if 0 <= id < self._added else f"there is no sequence {id}")
        self._drain()
        text.stop = text.stop or "cancelled"  # a pending round may have ended it

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
            self._prefill(slots)
            self._clear_up()
            self.clock.prefilled()
        else:
            if self.state.unfinished:
                self._round()
            self._clear_up()
            self.clock.decoded()
        if processes.group_size() > 1:
            processes.check_same("the texts", [(text.ids[text.reported :], text.stop) for text in self.texts.values()])
        told = list(self._events())
        if not self.busy:
            self._keep_caches()
        return told

    def _round(self) -> None:
        """Run one round: choose a drafter, propose, verify, commit, observe."""
        state = self.state
        if state.needs_room(TWO_ROUNDS_TOKENS):
            self._drain()
            state.reserve(TWO_ROUNDS_TOKENS)
            if not state.unfinished:  # the pending rounds have ended the last sequence
                return
        controllers = list(dict.fromkeys(self._controller(state.rows[b]) for b in state.live))
        ahead = self._ahead and controllers == [self.controller]
        if not ahead:
            self._drain()
        elif self._device is not None and self.controller.must_wait(state):
            self._device.wait()
        if not state.unfinished:
            return
        chosen = self._choose(controllers)
        if ahead and self._launched(chosen):
            return
        if not state.unfinished:  # the pending rounds have ended the last sequence
            self.controller.withdraw_choice(state)
            return
        state.rounds += 1
        for controller in controllers:
            controller.prepare_round(state)
        try:
            draft = chosen.propose(state, _budget_for(state, self.share_rows, chosen))
        except Exception as error:  # a drafter may raise anything; only the sequences it cannot draft for are failed
            for controller in controllers:
                controller.withdraw_choice(state)
            self._fail_undraftable(chosen, error)
            return
        if processes.group_size() > 1:  # ranks with different drafts would add up slices of different forwards
            processes.check_same("the drafts", [draft.tokens.tolist(), draft.parents.tolist()])
        verdict = verify(self.target, state, draft)
        state.commit(verdict)
        for controller in controllers:
            controller.observe(state, draft, verdict)
        if self.on_commit is not None:
            self.on_commit(state)
        if self.on_round is not None:
            self.on_round(state, draft, verdict)

    def _launched(self, chosen: Proposer) -> bool:
        """Launch a round that the host does not wait for. Returns False if this round must run on the host."""
        if self._device is None:
            budget = partial(_budget_for, self.state, self.share_rows)
            self._device = device_rounds(self.target, self.state, chosen, budget, self.controller, self.on_commit)
            if self._device is None:
                # a controller may choose another drafter, which can
                self._ahead = not isinstance(self.controller, Fixed)
                return False
        return self._device.advance(chosen)

    def _drain(self) -> None:
        """Wait for pending rounds, so that the host may change the batch."""
        if self._device is not None:
            self._device.drain()

    def _admit(self) -> list[int]:
        """Give free slots to waiting requests. Returns the slots to prefill."""
        count = len(self.waiting)
        if self.slots is not None:
            count = min(count, self.slots - len(self.state.live))
        count = self._count_fitting(count)
        if count <= 0:
            return []
        self._drain()
        if not self.state.batch:
            self._take_caches(count)
        texts = [self.waiting.pop(id) for id in list(islice(self.waiting, count))]
        for text in texts:
            self.texts[text.index] = text
            try:
                self._controller(text).begin(text)
                text.controller_begun = True
            except Exception as error:  # the controller cannot take this sequence
                text.fail(error)
        self.clock.decoded()  # the controllers' `begin` does not count as prefill time
        self.clock.start()
        taken = [text for text in texts if text.stop is None]
        return self.state.assign_slots(taken, self._shares) if taken else []

    @property
    def _shares(self) -> bool:
        """Whether sequences share the pages of common prefixes. They cannot if features are kept: the prefill must
        compute those for every sequence."""
        return self.state.pool is not None and not self.state.taps and self.prefixes is None

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
                    f"no room for the KV cache of a sequence of {text.limit} tokens: other sequences hold the memory"
                )
            )
        return fitting

    def _take_caches(self, count: int) -> None:
        """Take over the caches and graphs of an earlier call with the same batch size, if there are any."""
        if self.kept_caches is None or not self._ahead:
            return
        owner = self.controller.owner if isinstance(self.controller, Fixed) else self.controller
        kept = self.kept_caches.take(self.target, owner, self._cache_key(self.state.width(count)))
        if kept is not None:
            kept.state.any_sampled = self.state.any_sampled
            kept.state.rounds = kept.state.ahead = kept.state.replays = 0
            kept.rounds.controller, kept.rounds.on_commit = self.controller, self.on_commit
            self.state, self._device = kept

    def _keep_caches(self) -> None:
        """Hand the caches to `kept_caches` for the next call. All sequences have ended."""
        if self.kept_caches is None or self._device is None or not self._device.tracks or not self.state.batch:
            return
        self._drain()
        self._device.controller = self._device.on_commit = None
        self.kept_caches.keep(self._cache_key(self.state.batch), KeptCache(self.state, self._device))
        self.state, self._device = self._new_state(), None

    def _cache_key(self, batch: int) -> CacheKey:
        return CacheKey(batch, self.state.taps, self.state.keeps_hidden, self.share_rows)

    def _prefill(self, slots: list[int]) -> None:
        """Run the prompts in `slots` and commit the first token of each."""
        target, state = self.target, self.state
        prompts = [state.rows[b].ids for b in slots]
        with threads.step_threads(target.row_flops * sum(map(len, prompts))):
            if self._shares:
                logits, tapped = target.prefill_shared(prompts, state.cache, slots), None
            elif self.prefixes is None:
                logits, _, tapped = target.prefill(prompts, state.cache, state.taps, slots)
            else:
                logits, tapped = self.prefixes.prefill(target, prompts, state.cache, state.taps, slots)
        failed = nonfinite_rows(target, logits)
        positions = torch.tensor([[len(prompt)] for prompt in prompts])
        draws = state.draws.select(slots)
        logits = draws.penalise(logits.unsqueeze(1), prompts, [[] for _ in prompts], positions[:, :0])
        first = draws.draw(logits, positions)
        state.begin(slots, [row[0] for row in first.tolist()], tapped)
        for place, error in failed.items():
            row = state.rows[slots[place]]
            del row.ids[row.prompt_length :]  # drop the token: it was sampled from logits that are not finite
            row.fail(error)

    def _choose(self, controllers: list[Controller]) -> Proposer:
        """Ask each controller for a proposer for its sequences, and combine them into one."""
        chosen = {controller: controller.choose(self.state) for controller in controllers}
        if len(chosen) == 1:
            return chosen[controllers[0]]
        first = chosen[controllers[0]]  # also drafts for idle slots; these drafts are never used
        return PerSequence([chosen.get(self._controller(row), first) for row in self.state.rows])

    def _controller(self, text: Sequence) -> Controller:
        return self._controllers.get(text.index, self.controller)

    def _fail_undraftable(self, chosen: Proposer, error: Exception) -> None:
        """Fail the sequences for which drafting raises an error even alone. If drafting fails for no sequence alone,
        fail all of the batch."""
        state = self.state
        errors = {b: self._alone(chosen, b) for b in state.live} if len(state.live) > 1 else {}
        if not any(errors.values()):
            errors = dict.fromkeys(state.live, error)
        for b, reason in errors.items():
            if reason is not None:
                state.rows[b].fail(reason)
        invalidate(chosen, state)  # its state for the other sequences may be half written

    def _alone(self, chosen: Proposer, b: int) -> Exception | None:
        """Draft for sequence b alone, from the beginning. Returns the error, if one is raised."""
        own = chosen.drafters[b] if isinstance(chosen, PerSequence) else chosen
        alone = self.state.single(b)
        try:
            own.propose(alone, _budget(alone, self.share_rows))
        except Exception as error:
            return error
        return None

    def _clear_up(self) -> None:
        """Cache finished texts as prefixes, release their memory, and drop idle slots if they are too many."""
        state = self.state
        if thin := state.mostly_idle and not self.waiting:
            self._drain()
        ended = [b for b, row in enumerate(state.rows) if row.stop is not None and row.index in self.texts]
        failed = [b for b in ended if state.rows[b].stop == "failed"]
        if self.prefixes is not None:
            self.prefixes.keep(state, [b for b in ended if b not in failed])
        state.release(ended)
        if failed:
            state.discard(failed)
        if thin:
            state.shrink()

    def _events(self) -> Iterator[Event]:
        """Yield the events of all sequences with something new to report."""
        for text in list(self.texts.values()):
            tokens, text.reported = text.ids[text.reported :], len(text.ids)
            if text.stop is None:
                if tokens:
                    yield Event(text.index, tokens)
                continue
            del self.texts[text.index]
            if text.controller_begun:
                self._controller(text).end(text)
            self._controllers.pop(text.index, None)
            yield Event(text.index, tokens, self._decoded(text), text.error)

    def _decoded(self, text: Sequence) -> Decoded:
        return Decoded(
            text.ids[: text.prompt_length],
            text.output,
            str(text.stop),
            text.target_passes,
            text.accepted,
            text.rejections,
            text.drafted,
            text.accepted_by_depth,
            text.offered_by_depth,
            self.clock.prefill_s,
            self.clock.decode_s,
            text.index,
            self.state.replays,
            self.state.ahead,
            self.state.rounds,
        )


class Stopwatch:
    """Seconds spent in prefills and in rounds. The time between two steps does not count."""

    def __init__(self) -> None:
        self.prefill_s = self.decode_s = 0.0
        self.start()

    def start(self) -> None:
        self.mark = time.perf_counter()

    def prefilled(self) -> None:
        self.prefill_s += time.perf_counter() - self.mark

    def decoded(self) -> None:
        self.decode_s += time.perf_counter() - self.mark


def _budget_for(state: DecodeState, share: bool, chosen: Proposer) -> int:
    """Draft nodes per sequence for this proposer. A proposer with `weighs_rows` limits the rows of a batch itself, so
    it gets the full budget."""
    return _budget(state, share and not getattr(chosen, "weighs_rows", False))


def _budget(state: DecodeState, share: bool) -> int:
    """Draft nodes per sequence that a step has room for."""
    if state.exact_rows:
        return state.exact_rows - 1
    if share and state.batch > 1:
        return nodes_within(SHARED_ROWS["cpu" if state.device.type == "cpu" else "cuda"], state.batch)
    return MAX_NODES - 1


def nodes_within(rows: int, batch: int) -> int:
    """Draft nodes per sequence so that a step of the whole batch has `rows` rows, roots included; at least one."""
    return min(max(rows // batch, 2), MAX_NODES) - 1
