"""Texts that engines write, as they come: for prompts that they are asked for, or out of a log that grows, as a proxy
or a gateway writes it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specctl import progress, regular
from specctl.adaptation.stream import Arrival, PromptStream
from specctl.decoding.target_text import TargetText
from specctl.distillation import logs
from specctl.distillation.prompts import Rejections, json_object
from specctl.engines.client import Client
from specctl.engines.records import Answer, Ask, Drafting
from specctl.errors import DataError
from specctl.recipe import OnlineRecipe

POLL_S = 0.2
BACKLOG = 4  # chunks of texts that may wait; of more the oldest are passed over


@dataclass(frozen=True)
class ServedText:
    """A text that an engine has written.

    Attributes:
        drafting: what became of its drafts; None where the engine does not say.
        baseline: of the same prompt by an engine that does not learn; None where there is none.
        began: when it was asked for, in seconds since 1970; 0 where nobody knows.
    """

    id: str
    domain: str
    prompt_ids: list[int]
    output_ids: list[int]
    drafting: Drafting | None = None
    baseline: Drafting | None = None
    began: float = 0.0


def text_of(row: Mapping[str, Any], target: TargetText, options: dict[str, Any]) -> ServedText:
    """The text in a line of a log: the ids that the engine gives, or those that the target's template makes of it.

    Raises ValueError where there is none to learn from.
    """
    turn = logs.turns(dict(row))[-1]
    kept = logs.record(turn, "traffic", target, options)
    prompt, output = kept["prompt_ids"], kept["response_ids"]
    if len(output) < 2:
        raise ValueError("is too short to learn from")
    drafting = turn.given.answer.drafting if turn.given else None
    began = row.get("began")
    began = float(began) if isinstance(began, (int, float)) else 0.0
    return ServedText(kept["prompt_id"], "traffic", prompt, output, drafting, began=began)


@dataclass(frozen=True)
class LogPlace:
    """A place in a log: which file, by its number on the disk, and how many of its bytes are read."""

    inode: int = 0
    offset: int = 0


class Tail:
    """The lines of a file that grows. Where it is put aside and begun anew, what is left of the old one comes first."""

    def __init__(self, path: Path):
        self.path = path
        self.place = LogPlace()
        self._file: Any = None
        self._rest = b""

    def seek(self, place: LogPlace) -> None:
        """Go to a place that was told before: of this file, or of that which was put aside as PATH.1."""
        for path in (self.path, self.path.with_name(self.path.name + ".1")):
            if path.exists() and path.stat().st_ino == place.inode and path.stat().st_size >= place.offset:
                self._file = regular.opened(path)
                self._file.seek(place.offset)
                self.place = place

    def lines(self) -> Iterator[bytes]:
        """The whole lines that are there and have not been read."""
        while True:
            if self._file is None and not self._begin():
                return
            for line in self._file:
                if not line.endswith(b"\n"):
                    self._rest += line
                    continue
                line, self._rest = self._rest + line, b""
                self.place = LogPlace(self.place.inode, self.place.offset + len(line))
                yield line
            if self._same():
                return
            self.close()

    def _begin(self) -> bool:
        if not self.path.exists():
            return False
        self._file, self._rest = regular.opened(self.path), b""
        self.place = LogPlace(os.fstat(self._file.fileno()).st_ino, 0)
        return True

    def _same(self) -> bool:
        """Whether the file is still the one at its path, and has not been cut off."""
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return True  # it is being put aside at this moment
        return now.st_ino == self.place.inode and now.st_size >= self.place.offset

    def close(self) -> None:
        """Close the file; the next line is the first of the one that is at the path then."""
        if self._file is not None:
            self._file.close()
        self._file = None


@dataclass
class LogTraffic:
    """Chunks of the texts in a log, as they come.

    Learning goes on with what is new: where it is slower than the traffic, the oldest texts that wait are passed over.

    Attributes:
        size: texts in a chunk; the last one may have fewer.
        follow: wait for lines that are not there yet; without, the end of the file is the end.
        limit: texts in all, passed over or not; None = no end but a signal.
        passed_over: texts that nothing was learnt from for want of time.
        stdin, total: as those of a stream of prompts.
    """

    path: Path
    target: TargetText
    options: dict[str, Any]
    rejections: Rejections
    size: int
    follow: bool = True
    limit: int | None = None
    passed_over: int = 0
    stdin: bool = False
    _count: int = 0
    _place: LogPlace = field(default_factory=LogPlace)

    @property
    def total(self) -> int | None:
        """Texts that are to come in all."""
        return self.limit

    def position(self) -> dict[str, Any]:
        """Behind the last chunk that was given out; JSON-able, for `resume`."""
        return {"prompts": self._count, "passed_over": self.passed_over, "place": asdict(self._place)}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on behind a `position`, as far as the log still has what is there."""
        self._count, self.passed_over = position["prompts"], position["passed_over"]
        self._place = LogPlace(**position["place"])

    def chunks(self) -> Iterator[list[ServedText]]:
        """The chunks, each when it is full. Raises Interrupted, DataError (too many lines that are no texts)."""
        tail = Tail(self.path)
        tail.seek(self._place)
        waiting: deque[tuple[ServedText, LogPlace]] = deque()
        try:
            while True:
                self._read(tail, waiting)
                left = self.size if self.limit is None else self.limit - self._count - self.passed_over
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
                    time.sleep(POLL_S)
                progress.interrupts.check()
        finally:
            tail.close()

    def _read(self, tail: Tail, waiting: deque[tuple[ServedText, LogPlace]]) -> None:
        """Take what is new, up to what may wait."""
        for line in tail.lines():
            if not line.strip():
                continue
            self.rejections.seen += 1
            try:
                waiting.append((text_of(json_object(line), self.target, self.options), tail.place))
            except ValueError as error:
                where = f"{self.path}, byte {tail.place.offset - len(line)}"
                self.rejections.add(where, str(error), line.decode("utf-8", "replace"))
            full = len(waiting) >= BACKLOG * self.size
            if full and not self.follow:
                return  # a file that has ended is read whole, piece by piece
            if len(waiting) > BACKLOG * self.size:
                waiting.popleft()
                self.passed_over += 1


class AskedTraffic:
    """Chunks of the texts that engines write for the prompts of a stream, which they are asked for.

    Attributes:
        passed_over, stdin, total: as those of `LogTraffic`.
    """

    passed_over = 0

    def __init__(self, stream: PromptStream, recipe: OnlineRecipe, client: Client, baseline: Client):
        """`baseline`: asked for the same prompts; a client without servers = nobody."""
        self.stream, self.recipe, self.client, self.baseline = stream, recipe, client, baseline
        self.stdin, self.total = stream.stdin, stream.total

    def position(self) -> dict[str, Any]:
        """Behind the last chunk that was given out; JSON-able, for `resume`."""
        return self.stream.position()

    def resume(self, position: dict[str, Any]) -> None:
        """Go on behind a `position`."""
        self.stream.resume(position, rewind=not self.stdin)

    def chunks(self) -> Iterator[list[ServedText]]:
        """The chunks, each when it is answered. Raises Interrupted, DataError, EngineError."""
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

    def _ask(self, arrival: Arrival) -> Ask:
        sampling, target = self.recipe.sampling, self.stream.target
        room = min(sampling.max_new_tokens, target.context_length - len(arrival.ids))
        seed = self.recipe.seeds[0]
        return Ask(arrival.ids, room, sampling.temperature, sampling.top_k, sampling.top_p, seed)

    def _answers(self, client: Client, asks: Sequence[Ask]) -> dict[int, Answer]:
        """By the place of the request. What an engine refuses is told, and left out."""
        found: dict[int, Answer] = {}
        for place, answer in client.answers(asks):
            if isinstance(answer, Answer):
                found[place] = answer
            else:
                self.stream.rejections.add(f"prompt {place + 1} of the chunk", answer.reason)
        progress.interrupts.check()
        return found
