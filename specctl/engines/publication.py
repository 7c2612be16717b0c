"""Publish a drafter to running servers: either all servers take it, or all keep their previous drafter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl import progress
from specctl.engines.records import Call, EngineError, Exported, Loaded, Lost, Malformed, PublishingDialect, Untouched
from specctl.engines.vllm_worker import Unfit, contents, fingerprint, outline
from specctl.errors import UsageError
from specctl.formats import foreign

Asked = Callable[[Call], Awaitable[Any]]
"""Sends a call to a server and returns the document of the response. Raises EngineError, Malformed."""


@dataclass(frozen=True)
class Served:
    """A server that a drafter is published to, as publication sees it.

    Attributes:
        asked: sends an administration call to this server.
        kept: directory of each version that was published from here.
    """

    url: str
    publisher: PublishingDialect
    asked: Asked
    kept: dict[str, str]


class Stopped(Exception):
    """A swap that failed. `changed`: whether the server may now draft with another drafter."""

    def __init__(self, error: EngineError, changed: bool):
        super().__init__(error.message)
        self.error, self.changed = error, changed


def exported(directory: Path, *, tensors: bool) -> Exported:
    """Read a drafter to publish; `tensors`: including its weights. Raises UsageError, CheckpointError."""
    directory = directory.absolute()
    try:
        form, found = outline(directory), fingerprint(contents(directory))
    except Unfit as error:
        raise UsageError(str(error), "`specctl export --to vllm` (or sglang) writes what can be published") from error
    return Exported(directory, found, form, foreign.read(directory).tensors if tensors else {})


async def loaded(place: Served) -> Loaded:
    """The drafter that a server uses now. Raises EngineError."""
    try:
        now = place.publisher.loaded([await place.asked(call) for call in place.publisher.LOADED])
    except (EngineError, Malformed) as error:
        raise named(place, error) from error
    if now.directory is None and now.version in place.kept:
        return Loaded(now.version, place.kept[now.version], now.started, now.fingerprint, now.method, now.ranks)
    return now


async def publish(places: Sequence[Served], directory: Path, version: str) -> None:
    """Make every server draft with `directory`, as version `version`.

    If a server fails, all servers get their previous drafter back. Raises UsageError, CheckpointError, EngineError. The
    message tells which server did not take the drafter and why, and which drafters run now.
    """
    if version in ("", "default"):
        raise UsageError(f"{version!r} names no version", 'such as "7": what a server was started with has none')
    drafter = exported(directory, tensors=any(place.publisher.SENDS for place in places))
    before = await asyncio.gather(*(loaded(place) for place in places))
    for place, now in zip(places, before, strict=True):
        try:
            first = _first(now) if place.publisher.SENDS else None
            for call in place.publisher.fits(drafter, first, now):
                place.publisher.taken(call, await place.asked(call))
        except (EngineError, Malformed) as error:
            raise named(place, error) from error
    changed: list[tuple[Served, Loaded]] = []
    for place, now in zip(places, before, strict=True):
        try:
            seconds = await _swapped(place, drafter, version, now)
        except Stopped as stopped:
            told = await _put_back([*changed, *([(place, now)] if stopped.changed else [])])
            raise EngineError(f"{place.url}: {stopped.error.message}{told}", stopped.error.hint) from stopped
        except BaseException:  # a signal
            await _put_back([*changed, (place, now)])
            raise
        place.kept[version] = str(drafter.directory)
        changed.append((place, now))
        progress.log(f"{place.url} drafts with {version}; its requests stood still for {seconds:.2f} s")


def _first(now: Loaded) -> Exported | None:
    """The drafter that an engine was started with, or None if its directory is not on this machine."""
    if now.started is None or not Path(now.started).is_dir():
        return None
    with suppress(UsageError):
        return exported(Path(now.started), tensors=True)
    return None


async def _swapped(place: Served, drafter: Exported, version: str | None, now: Loaded) -> float:
    """Swap a server's drafter. Returns the seconds that the server stood still: its own figure, or as measured here.

    Raises Stopped.
    """
    publisher, changed = place.publisher, False
    started, told = time.perf_counter(), None
    failed: EngineError | Malformed | None = None
    after: list[Call] = []
    try:
        for call in publisher.swap(drafter, version, now):
            changed = changed or call.changes
            try:
                told = publisher.taken(call, await place.asked(call)) or told
            except EngineError as error:
                if call.after and isinstance(error, Lost):
                    after.append(call.after)
                raise
            if call.after:
                after.append(call.after)
    except (EngineError, Malformed) as error:
        failed = error
    finally:  # also after a signal
        for call in reversed(after):
            try:
                publisher.taken(call, await place.asked(call))
            except (EngineError, Malformed) as error:
                failed = failed or error
    if failed is not None:
        why = EngineError(str(failed), getattr(failed, "hint", None))
        raise Stopped(why, changed and not isinstance(failed, Untouched)) from failed
    return time.perf_counter() - started if told is None else told


async def _put_back(changed: Sequence[tuple[Served, Loaded]]) -> str:
    """Give servers their previous drafters back. Returns the end of an error message, which reports the outcome."""
    told = []
    for place, old in reversed(changed):
        what = old.version or "the drafter of its start"
        try:
            if old.directory is None:
                raise EngineError("its directory is not known here")
            drafter = exported(Path(old.directory), tensors=place.publisher.SENDS)
            if old.fingerprint not in ("", drafter.fingerprint):
                raise EngineError(f"{old.directory} was changed since")
            await _swapped(place, drafter, old.version, old)
            told.append(f"{place.url} drafts with {what} again")
        except (Stopped, EngineError, UsageError) as error:
            told.append(f"{place.url} could not be given {what} again ({error})")
    return "".join(f"; {one}" for one in told)


def named(place: Served, error: EngineError | Malformed) -> EngineError:
    """Prefix an error with the server's address."""
    return EngineError(f"{place.url}: {error}", getattr(error, "hint", None))
