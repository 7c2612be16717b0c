"""Served traffic to learn from: texts that engines write for requested prompts, or lines of a proxy's growing log."""

import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specctl import progress, regular_files
from specctl.adaptation.stream import EncodedPrompt, PromptStream
from specctl.decoding.target_text import TargetText
from specctl.distillation import logs
from specctl.distillation.line_streams import MAX_LINE_BYTES, json_object
from specctl.distillation.rejections import Rejections
from specctl.engines.client import Client
from specctl.engines.records import DraftCounters, GenerationRequest, GenerationResult
from specctl.errors import DataError
from specctl.recipe import LearnFromServerRecipe

POLL_S = 0.2
LATEST = 1e12  # latest plausible time of a request, in seconds since 1970
MAX_BACKLOG_CHUNKS = 4  # chunks of texts that may wait; beyond that the oldest texts are passed over


@dataclass(frozen=True)
class ServedText:
    """A text that an engine has written.

    Attributes:
        drafting: counters of its drafts, or None if the engine does not report them.
        baseline: counters of the same prompt on an engine that does not learn, or None without such an engine.
        began: time of the request, in seconds since 1970; 0 if unknown.
        server: address of the server that wrote it, if a policy has chosen that; otherwise empty.
    """

    id: str
    domain: str
    prompt_ids: list[int]
    output_ids: list[int]
    drafting: DraftCounters | None = None
    baseline: DraftCounters | None = None
    began: float = 0.0
    server: str = ""


def parse_served_text(row: Mapping[str, Any], target: TargetText, options: dict[str, Any]) -> ServedText:
    """Read the text in a line of a log: the ids that the engine reports, or the ids that the target's template makes.

    Raises ValueError if the line has no text to learn from.
    """
    turn = logs.turns(dict(row))[-1]
    kept = logs.record(turn, "traffic", target, options)
    prompt, output = kept["prompt_ids"], kept["response_ids"]
    if len(output) < 2:
        raise ValueError("has a response that is too short to learn from")
    drafting = turn.engine_ids.answer.drafting if turn.engine_ids else None
    began = row.get("began")
    began = float(began) if isinstance(began, (int, float)) and 0 <= began <= LATEST else 0.0
    server = str(row.get("server", ""))
    return ServedText(kept["prompt_id"], "traffic", prompt, output, drafting, began=began, server=server)


@dataclass(frozen=True)
class LogPosition:
    """A place in a log: the inode of the file, and the number of bytes read."""

    inode: int = 0
    offset: int = 0


class Tail:
    """Reader for the lines of a file. After a log rotation, the rest of the old file comes first.

    `grows`: whether a last line without a line end is still being written. Otherwise it is a line, too.
    """

    def __init__(self, path: Path, grows: bool = True):
        self.path, self.grows = path, grows
        self.place = LogPosition()
        self.start = 0  # byte at which the last line begins
        self._file: Any = None
        self._rest, self._length = b"", 0  # the incomplete line, and the number of bytes read of it

    def seek(self, place: LogPosition) -> None:
        """Go to an earlier `place`, in this file or in the rotated file PATH.1."""
        for path in (self.path, self.path.with_name(self.path.name + ".1")):
            if path.exists() and path.stat().st_ino == place.inode and path.stat().st_size >= place.offset:
                self._file = regular_files.open_regular(path)
                self._file.seek(place.offset)
                self.place = place

    def lines(self) -> Iterator[bytes | None]:
        """The complete lines that have not been read yet. A line above `MAX_LINE_BYTES` is not held, but None."""
        while True:
            if self._file is None and not self._begin():
                return
            while part := self._file.readline(MAX_LINE_BYTES):
                self._length += len(part)
                self._rest = self._rest + part if self._length <= MAX_LINE_BYTES else b""
                if part.endswith(b"\n"):
                    yield self._line()
            if self._length and not self.grows:
                yield self._line()
            if self._same():
                return
            self.close()

    def _line(self) -> bytes | None:
        line = self._rest if self._length <= MAX_LINE_BYTES else None
        self.start = self.place.offset
        self.place = LogPosition(self.place.inode, self.start + self._length)
        self._rest, self._length = b"", 0
        return line

    def _begin(self) -> bool:
        if not self.path.exists():
            return False
        self._file, self._rest, self._length = regular_files.open_regular(self.path), b"", 0
        self.place = LogPosition(os.fstat(self._file.fileno()).st_ino, 0)
        return True

    def _same(self) -> bool:
        """Whether the open file is still the one at its path, and was not truncated."""
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return True  # it is being rotated at this moment
        return now.st_ino == self.place.inode and now.st_size >= self.place.offset

    def close(self) -> None:
        """Close the file; the next line is the first one of the file that is at the path then."""
        if self._file is not None:
            self._file.close()
        self._file = None


@dataclass
class LoggedTexts:
    """The texts in a log, as they come."""

    path: Path
    target: TargetText
    options: dict[str, Any]
    rejections: Rejections

    def texts(self, tail: Tail) -> Iterator[tuple[ServedText, LogPosition]]:
        """The texts that have not been read yet, each with the place after it. Lines without a text are rejected."""
        for line in tail.lines():
            if line is not None and not line.strip():
                continue
            self.rejections.seen += 1
            try:
                text = parse_served_text(json_object(line), self.target, self.options)
            except ValueError as error:
                self.rejections.add(
                    f"{self.path}, byte {tail.start}", str(error), (line or b"").decode("utf-8", "replace")
                )
            else:
                yield text, tail.place


@dataclass
class LogTraffic(LoggedTexts):
    """Chunks of the texts in a log, as they come.

    If learning is slower than the traffic, the oldest waiting texts are passed over.

    Attributes:
        size: texts in a chunk; the last one may have fewer.
        follow: wait for more lines at the end of the file; otherwise the traffic ends there.
        total: texts in all, passed over or not (None = until a signal).
        passed_over: number of texts that there was no time to learn from.
        stdin: as in `PromptStream`.
        check: called while it waits; raises SpecctlError if the writer of the log has ended.
    """

    size: int
    follow: bool = True
    total: int | None = None
    passed_over: int = 0
    stdin: bool = False
    check: Callable[[], None] = lambda: None
    _count: int = 0
    _place: LogPosition = field(default_factory=LogPosition)

    def position(self) -> dict[str, Any]:
        """The position after the last chunk that was given out; JSON-able, for `resume`."""
        return {"prompts": self._count, "passed_over": self.passed_over, "place": asdict(self._place)}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on after a `position`, if the log still has it."""
        self._count, self.passed_over = position["prompts"], position["passed_over"]
        self._place = LogPosition(**position["place"])

    def chunks(self) -> Iterator[list[ServedText]]:
        """The chunks, each one when it is full. Raises Interrupted, or DataError (no texts, or too many bad lines)."""
        tail = Tail(self.path, self.follow)
        tail.seek(self._place)
        waiting: deque[tuple[ServedText, LogPosition]] = deque()
        try:
            while True:
                self._read(tail, waiting)
                left = self.size if self.total is None else self.total - self._count - self.passed_over
                wanted = min(self.size, left)
                if wanted <= 0:
                    return
                if len(waiting) >= wanted or (waiting and not self.follow):
                    taken = [waiting.popleft() for _ in range(min(wanted, len(waiting)))]
                    self._count, self._place = self._count + len(taken), taken[-1][1]
                    yield [text for text, _ in taken]
                elif not self.follow:
                    self.rejections.check()
                    if not self._count:
                        raise DataError(f"no texts in {self.path}", f"expected {logs.EXPECTED}")
                    return
                else:
                    self.check()
                    time.sleep(POLL_S)
                progress.interrupts.check()
        finally:
            tail.close()

    def _read(self, tail: Tail, waiting: deque[tuple[ServedText, LogPosition]]) -> None:
        """Take the new texts, up to the number that may wait."""
        for text in self.texts(tail):
            waiting.append(text)
            if len(waiting) >= MAX_BACKLOG_CHUNKS * self.size and not self.follow:
                return  # a file that does not grow is read whole, piece by piece
            if len(waiting) > MAX_BACKLOG_CHUNKS * self.size:
                waiting.popleft()
                self.passed_over += 1


@dataclass
class TrafficByServer(LoggedTexts):
    """Chunks of the texts of one server each, from the log of a gateway that chooses servers. It follows the log until
    a signal. Each server has its own queue, so the texts of a busy server displace no others.

    Attributes:
        sizes: texts in a chunk, by server; texts of other servers are passed over without being counted.
        passed_over_of: number of texts that there was no time to learn from, by server.
        check: as in `LogTraffic`.
    """

    sizes: Mapping[str, int]
    passed_over_of: Counter[str] = field(default_factory=Counter)
    check: Callable[[], None] = lambda: None

    def chunks(self) -> Iterator[list[ServedText]]:
        """The chunks, the next one of the server with most waiting chunks. Raises Interrupted, SpecctlError."""
        tail, waiting = Tail(self.path), defaultdict[str, deque[ServedText]](deque)
        try:
            while True:
                for text, _ in self.texts(tail):
                    self._wait(text, waiting[text.server])
                ready = {server: len(waiting[server]) / size for server, size in self.sizes.items()}
                first = max(ready, key=lambda server: ready[server])
                if ready[first] >= 1:
                    yield [waiting[first].popleft() for _ in range(self.sizes[first])]
                else:
                    self.check()
                    time.sleep(POLL_S)
                progress.interrupts.check()
        finally:
            tail.close()

    def _wait(self, text: ServedText, queue: deque[ServedText]) -> None:
        if text.server in self.sizes:
            queue.append(text)
            if len(queue) > MAX_BACKLOG_CHUNKS * self.sizes[text.server]:
                queue.popleft()
                self.passed_over_of[text.server] += 1


class RequestedTraffic:
    """Chunks of the texts that engines write for the prompts of a stream, on request.

    Attributes:
        passed_over, stdin, total: as in `LogTraffic`.
    """

    passed_over = 0

    def __init__(self, stream: PromptStream, recipe: LearnFromServerRecipe, client: Client, baseline: Client):
        """`baseline`: client of the servers that answer the same prompts for comparison; it may have no servers."""
        self.stream, self.recipe, self.client, self.baseline = stream, recipe, client, baseline
        self.stdin, self.total = stream.stdin, stream.total

    def position(self) -> dict[str, Any]:
        """The position after the last chunk that was given out; JSON-able, for `resume`."""
        return self.stream.position()

    def resume(self, position: dict[str, Any]) -> None:
        """Go on after a `position`."""
        self.stream.resume(position, rewind=not self.stdin)

    def chunks(self) -> Iterator[list[ServedText]]:
        """The answered chunks. Raises Interrupted, DataError, EngineError."""
        for arrivals in self.stream.chunks():
            asks = [self._ask(arrival) for arrival in arrivals]
            began = time.time()
            answers = self._answers(self.client, asks)
            others = self._answers(self.baseline, asks) if self.baseline.servers else {}
            yield [
                ServedText(
                    arrival.prompt.id,
                    arrival.prompt.domain,
                    arrival.ids,
                    answers[place].output_ids,
                    answers[place].drafting,
                    others[place].drafting if place in others else None,
                    began,
                )
                for place, arrival in enumerate(arrivals)
                if place in answers and len(answers[place].output_ids) > 1
            ]

    def _ask(self, arrival: EncodedPrompt) -> GenerationRequest:
        sampling, target = self.recipe.sampling, self.stream.target
        room = min(sampling.max_new_tokens, target.context_length - len(arrival.ids))
        seed = self.recipe.seeds[0]
        return GenerationRequest(arrival.ids, room, sampling.temperature, sampling.top_k, sampling.top_p, seed)

    def _answers(self, client: Client, asks: Sequence[GenerationRequest]) -> dict[int, GenerationResult]:
        """The answers, by index of the request. Refused requests are reported and left out."""
        found: dict[int, GenerationResult] = {}
        for place, answer in client.answers(asks):
            if isinstance(answer, GenerationResult):
                found[place] = answer
            else:
                self.stream.rejections.add(f"prompt {place + 1} of the chunk", answer.reason)
        progress.interrupts.check()
        return found
