"""Thread that owns a decoding engine. The event loop gives it requests, and gets parts of texts back."""

import asyncio
import queue
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specctl import progress, threads
from specctl.decoding.engine import Engine
from specctl.decoding.logprobs import LogprobRecorder, PromptLogprobs, TokenLogprob
from specctl.decoding.records import Decoded, Event, Request, RoundResult
from specctl.decoding.state import DecodeState
from specctl.gateway.faults import where
from specctl.gateway.learning import ServingLearner
from specctl.gateway.metrics import Meter
from specctl.gateway.text_stream import TextStream, decoder

TRIES = 2  # restarts of a text after failed steps of a batch for which no single text is to blame
PART = 64  # tokens of a prompt that are read at a time on a CPU; more are not faster (decoding/models/native.py)
FINISHED = {"eos": "stop", "length": "length"}


@dataclass(frozen=True)
class TextPart:
    """New text of one answer.

    Attributes:
        index: number of the answer in its request.
        ids: new tokens.
        finish: "stop" or "length" at the end.
        stats: counts of the whole text, at its end.
    """

    index: int
    text: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    error: Exception | None = None
    stats: Decoded | None = None

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


class Channel:
    """Parts of the answers to one request, on their way from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._parts: deque[TextPart] = deque()
        self._wake = asyncio.Event()

    def put(self, part: TextPart) -> None:
        """Append a part. Called in the event loop."""
        self._parts.append(part)
        self._wake.set()

    async def take(self) -> list[TextPart]:
        """Wait for parts, and return all that have come."""
        await self._wake.wait()
        self._wake.clear()
        parts = list(self._parts)
        self._parts.clear()
        return parts


@dataclass(eq=False)
class Generation:
    """One text to be generated.

    Attributes:
        stops: strings that end the text.
        least: number of tokens in which no stop string ends the text.
        shows_stop: the text includes the stop string or stop token that ends it.
        echo: text that comes before the answer, or None.
        scores: log probabilities of the prompt, which come with the echo. Texts of one prompt share them.
        top_logprobs: number of likely tokens to report with each token, or None without log probabilities.
        unread: number of tokens of the prompt that are still to be read.
        ahead: number of tokens of the prompt that were read before its prefill, in parts.
        cached: number of tokens of the prompt that were in a prefix cache before any of it was read.
    """

    request: Request
    channel: Channel
    index: int = 0
    stops: tuple[str, ...] = ()
    least: int = 0
    shows_stop: bool = False
    echo: str | None = None
    scores: PromptLogprobs | None = None
    top_logprobs: int | None = None
    unread: int = 0
    ahead: int = 0
    cached: int = 0
    tries: int = 0
    began: float = field(default_factory=time.perf_counter)
    before: float | None = None  # time of the latest part
    tokens: list[int] = field(default_factory=list)
    text: TextStream | None = None
    arms: Counter[str] = field(default_factory=Counter)  # rounds by drafter

    def remaining(self) -> Request:
        """Request for the rest of the text. It continues in the same way: draws depend on seed and position."""
        prompt, begun = self.request.prompt + self.tokens, len(self.tokens)
        return replace(self.request, prompt=prompt, max_new_tokens=self.request.max_new_tokens - begun, begun=begun)


Command = tuple[str, Generation | None]


class EngineThread:
    """Runs an engine's steps while there are texts to decode.

    A text that makes a step fail costs that text alone: after a failed step, every text of the batch is tried by
    itself, and the others go on together.

    Args:
        drafter: name of the drafter of all rounds, or None if the controller chooses (`note_round` is told then).
        on_death: called in this thread if it ends by an error.

    Attributes:
        open: texts that have not ended; only the event loop may read or change it.
        learner: observes rounds and steps, and exchanges drafters of the engine; or None. Set it before `start`.
    """

    learner: ServingLearner | None = None

    def __init__(
        self,
        engine: Engine,
        meter: Meter,
        drafter: str | None,
        on_death: Callable[[BaseException], None] = lambda error: None,
    ):
        self.engine, self.meter, self.drafter, self.on_death = engine, meter, drafter, on_death
        self.open: set[Generation] = set()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._arrived: list[Generation] = []  # texts that the engine does not know yet
        self._began = False  # whether texts were added before the last step
        self._passed = False  # whether a prompt was read before the oldest one
        self._active: dict[int, Generation] = {}
        self._by_query: dict[str, Generation] = {}
        self._decode = decoder(engine.target.tokenizer)
        self._logprobs = LogprobRecorder()
        self._parts: list[tuple[Generation, TextPart]] = []
        self._threads, self._rows = ExitStack(), 0
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        engine.on_round, engine.on_prefill = self._on_round, self._on_prefill
        meter.watch(lambda: len(engine.texts), lambda: max(0, len(self.open) - len(engine.texts)))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        """Ask for a text. Called in the event loop."""
        self.open.add(generation)
        self._commands.put(("add", generation))

    def cancel(self, generation: Generation) -> None:
        """Drop a text, if it has not ended. Called in the event loop."""
        if generation in self.open:
            self.open.discard(generation)
            self._commands.put(("cancel", generation))

    def stop(self, seconds: float = 10.0) -> None:
        """End the thread after its present step."""
        self._commands.put(("stop", None))
        if self._thread.is_alive():
            self._thread.join(seconds)

    def note_round(self, query: str, drafter: str, committed: int, accepted: int, depth: int) -> None:
        """Count a round of the text with the label `query`."""
        self.meter.drafter(drafter).add(committed, accepted, depth)
        if self.learner is not None:
            self.learner.note_round(query, drafter)
        if (generation := self._by_query.get(query)) is not None:
            generation.arms[drafter] += 1

    def _main(self) -> None:
        try:
            while self._take_commands():
                try:
                    self._count_threads()
                    began = time.perf_counter()
                    events = self.engine.step()
                    seconds = time.perf_counter() - began
                except Exception as error:  # a step runs models and drafters, which may raise anything
                    self._isolate(error)
                else:
                    self._report_all(events)
                    self._deliver()
                    if self.learner is not None:
                        self.learner.after_step(self.engine, seconds)
                self._deliver()
        except BaseException as error:
            self.on_death(error)
            self._fail_all(error)
            raise
        finally:
            self._threads.close()

    def _take_commands(self) -> bool:
        """Carry out the event loop's commands; wait for one if there is nothing to do. Returns False at the end."""
        while True:
            while not (self.engine.busy or self._arrived) or not self._commands.empty():
                command, generation = self._commands.get()
                if generation is None:
                    return False
                if command == "add":
                    self._arrive(generation)
                else:
                    self._cancel(generation)
            self._begin_texts()
            self._deliver()
            if self.engine.busy:
                return True

    def _arrive(self, generation: Generation) -> None:
        """Take in a text, and compare its prompt with the cached ones."""
        prompt, prefix_cache = generation.request.prompt, self.engine.options.prefix_cache
        known = 0
        if prefix_cache is not None and generation.scores is None:
            known = prefix_cache.known(prompt, self.engine.state.taps)
        generation.unread = len(prompt) - known
        self._arrived.append(generation)

    def _begin_texts(self) -> None:
        """Add texts that have arrived to the engine.

        On a CPU, prompts run in turns, and long ones in parts. There, equal prompts are added at a time, if they find
        a slot. Between two prompts or parts there is a round of the texts that are running.
        """
        engine, begun = self.engine, self._arrived[:]
        if begun and engine.target.device.type == "cpu":
            full = engine.options.slots == len(engine.texts)
            if engine.texts and (self._began or full):
                self._began = False
                return
            first = self._next_to_read()
            begun = [one for one in begun if one.request.prompt == first.request.prompt and one.scores is first.scores]
            if self._read_ahead(first):
                first.unread -= PART
                first.ahead += PART
                return
        self._began = bool(begun)
        for generation in begun:
            self._arrived.remove(generation)
            if self._echo(generation):
                self._add(generation, generation.request)

    def _next_to_read(self) -> Generation:
        """In turns the oldest text, so that it cannot wait forever, and the text with the least left to read.

        Half-read prompts are in the prefix cache: no other prompt is read that would displace the oldest one.
        """
        oldest, shortest = self._arrived[0], min(self._arrived, key=lambda one: one.unread)
        self._passed = not self._passed and shortest is not oldest and self._fit(oldest, shortest)
        return shortest if self._passed else oldest

    def _fit(self, *generations: Generation) -> bool:
        """Whether the prefix cache can hold all these prompts."""
        engine, tokens = self.engine, sum(len(one.request.prompt) for one in generations)
        prefix_cache = engine.options.prefix_cache
        return prefix_cache is None or prefix_cache.has_room(engine.target, engine.state.taps, tokens)

    def _read_ahead(self, generation: Generation) -> bool:
        """Read a part of a long prompt. Returns False if the engine should read the rest."""
        prefix_cache, target, scores = self.engine.options.prefix_cache, self.engine.target, generation.scores
        try:
            with threads.step_threads(target.row_flops * PART):
                if scores is not None:
                    return scores.read_ahead(PART)
                if prefix_cache is None:
                    return False
                return prefix_cache.read_ahead(target, generation.request.prompt, self.engine.state.taps, PART)
        except Exception:  # the engine fails this text alone if it cannot read the prompt
            return False

    def _echo(self, generation: Generation) -> bool:
        """Send the prompt, if its client asks for it. Returns whether an answer is to follow."""
        scores, prefix_cache = generation.scores, self.engine.options.prefix_cache
        if generation.echo is None:
            return True
        if scores is not None:
            generation.ahead = len(generation.request.prompt)
            try:
                scores.read(scores.unread)
                if prefix_cache is not None and (text := scores.cached()) is not None:
                    prefix_cache.add(text)
            except Exception as error:  # as when the engine cannot read a prompt
                self._fail(generation, error)
                return False
        finish = None if generation.request.max_new_tokens else FINISHED["length"]
        found = None if scores is None else scores.found
        self._parts.append((generation, TextPart(generation.index, generation.echo, [], found, finish)))
        if finish is not None:
            self.meter.finished(finish)
        return finish is None

    def _count_threads(self) -> None:
        """Compute with as many threads as the batch keeps busy."""
        rows = len(self.engine.texts) + len(self.engine.waiting)
        rows = min(rows, self.engine.options.slots or rows)
        if rows != self._rows:
            self._threads.close()
            self._threads.enter_context(threads.step_threads(self.engine.target.row_flops * rows))
            self._rows = rows

    def _add(self, generation: Generation, request: Request) -> None:
        try:
            id = self.engine.add(request)
        except Exception as error:  # the request cannot be served
            self._fail(generation, error)
            return
        self._active[id] = generation
        if generation.top_logprobs is not None:
            self._logprobs.wanted[id] = generation.top_logprobs
        if generation.text is None:
            decode, ends = self._decode, request.ends
            if ends and not generation.shows_stop:
                decode = lambda ids: self._decode([id for id in ids if id not in ends])  # noqa: E731
            generation.text = TextStream(decode, generation.stops, generation.least, generation.shows_stop)
        if request.label is not None:
            self._by_query[request.label.query] = generation

    def _cancel(self, generation: Generation) -> None:
        if generation in self._arrived:
            self._arrived.remove(generation)
            self.meter.finished("abort")
            return
        for id, known in self._active.items():
            if known is generation:
                self.engine.cancel(id)
                self._forget(id, generation)
                self.meter.finished("abort")
                return

    def _forget(self, id: int, generation: Generation) -> None:
        del self._active[id]
        self._logprobs.forget(id)
        if generation.request.label is not None:
            self._by_query.pop(generation.request.label.query, None)

    def _on_prefill(self, state: DecodeState, slots: list[int], logits: Tensor) -> None:
        self._logprobs.on_prefill(state, slots, logits)
        for row in [state.rows[slot] for slot in slots]:
            generation = self._active.get(row.index)
            if generation is not None and not generation.tokens:  # otherwise its own tokens are cached
                generation.cached = max(0, row.cached - generation.ahead)

    def _on_round(self, state: DecodeState, result: RoundResult) -> None:
        if self._logprobs.wanted:
            self._logprobs.on_round(state, result)
        if self.drafter is not None:
            for b, counts in result.counts.items():
                label = state.rows[b].request.label
                query = label.query if label is not None else ""
                self.note_round(query, self.drafter, counts.committed, counts.accepted, counts.depth)
        if self.learner is not None:
            self.learner.observe(state, result)

    def _report_all(self, events: list[Event]) -> None:
        """Pass on the events of a step. A text that cannot be passed on fails alone."""
        for event in events:
            try:
                self._report(event)
            except Exception as error:  # tokenizers may raise anything
                self.meter.fault("text")
                progress.warn(f"a text failed: {where(error)}")
                generation = self._active.get(event.id)
                if generation is not None:
                    if event.ended is None:
                        self.engine.cancel(event.id)
                    self._forget(event.id, generation)
                    self._fail(generation, error)

    def _report(self, event: Event) -> None:
        """Pass on an event of the engine; a text that a stop string ends is taken from the engine."""
        generation = self._active.get(event.id)
        if generation is None:  # cancelled
            return
        if event.error is not None:
            self._forget(event.id, generation)
            self._fail(generation, event.error)
            return
        assert generation.text is not None
        stream = generation.text
        known, generation.tokens = len(generation.tokens), generation.tokens + event.tokens
        text, now = stream.add(event.tokens), time.perf_counter()
        self._time(generation, now, bool(event.tokens))
        if event.ended is not None:
            text += stream.finish()
        finish = "stop" if stream.stopped is not None else None
        if event.ended is not None:
            finish = finish or FINISHED[event.ended.stop]
        used = event.tokens[: stream.used - known]
        logprobs = None
        if generation.top_logprobs is not None:
            logprobs = self._logprobs.take(event.id)[: len(used)]
        stats = event.ended
        if finish is not None and stats is None:
            stats = self.engine.texts[event.id].decoded(0.0, 0.0, 0, 0, 0)
        self._parts.append((generation, TextPart(generation.index, text, used, logprobs, finish, stats=stats)))
        self.meter.tokens.inc(len(used))
        if finish is None:
            return
        if event.ended is None:
            self.engine.cancel(event.id)
        self._forget(event.id, generation)
        self._finish(generation, finish, now)

    def _time(self, generation: Generation, now: float, tokens: bool) -> None:
        if generation.before is not None:
            self.meter.between_s.observe(now - generation.before)
        elif tokens:
            self.meter.first_s.observe(now - generation.began)
        generation.before = now

    def _finish(self, generation: Generation, finish: str, now: float) -> None:
        self.meter.finished(finish)
        self.meter.whole_s.observe(now - generation.began)
        arms = generation.arms
        name = self.drafter or (max(arms, key=lambda arm: arms[arm]) if arms else None)
        if name is not None:
            self.meter.drafter(name).texts += 1

    def _fail(self, generation: Generation, error: Exception) -> None:
        self.meter.finished("error")
        self._parts.append((generation, TextPart(generation.index, "", error=error)))

    def _fail_all(self, error: BaseException) -> None:
        """End all texts, because this thread ends: their clients would wait for nothing."""
        while not self._commands.empty():
            command, generation = self._commands.get()
            if command == "add" and generation is not None:
                self._arrived.append(generation)
        self._parts.clear()
        for generation in [*self._active.values(), *self._arrived]:
            self._fail(generation, RuntimeError(where(error)))
        self._deliver()

    def _deliver(self) -> None:
        """Hand the parts of this step to the event loops, with one call for each loop."""
        if not self._parts:
            return
        parts, self._parts = self._parts, []
        by_loop: dict[Any, list[tuple[Generation, TextPart]]] = defaultdict(list)
        for generation, part in parts:
            by_loop[generation.channel.loop].append((generation, part))
        for loop, own in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._put, own)
            except RuntimeError:  # the loop has ended, and its clients with it
                continue

    def _put(self, parts: list[tuple[Generation, TextPart]]) -> None:
        for generation, part in parts:
            if generation in self.open:
                if part.last:
                    self.open.discard(generation)
                generation.channel.put(part)

    def _isolate(self, error: Exception) -> None:
        """After a failed step, find the texts that fail alone, and let the others go on."""
        self.meter.fault("engine step")
        progress.warn(f"a step of the engine failed; its texts are tried one by one: {where(error)}")
        suspects = [self._active[id] for id in self.engine.texts if id in self._active]
        others = [generation for generation in self._active.values() if generation not in suspects]
        self._abandon()
        several = len(suspects) > 1
        sound = [generation for generation in suspects if several and self._runs_alone(generation)]
        if not several:
            for generation in suspects:
                self._fail(generation, error)
        elif len(sound) == len(suspects):  # together they fail, for example by lack of memory
            for generation in sound:
                generation.tries += 1
        for generation in [*sound, *others]:
            if generation.tries > TRIES:
                self._fail(generation, error)
            else:
                self._add(generation, generation.remaining())

    def _runs_alone(self, generation: Generation) -> bool:
        """Decode a text by itself for a prefill and a round. Returns whether it has succeeded and is to go on."""
        self._add(generation, generation.remaining())
        try:
            for _ in range(2):
                if self.engine.busy:
                    self._report_all(self.engine.step())
        except Exception as error:
            self._abandon()
            self._fail(generation, error)
            return False
        goes_on = generation in self._active.values()
        self._abandon()
        return goes_on

    def _abandon(self) -> None:
        """Empty the engine."""
        for id, generation in list(self._active.items()):
            self._forget(id, generation)
        with torch.inference_mode():
            self.engine.abandon()
