"""Publish a drafter to running servers: either all servers take it, or all keep their previous drafter."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specctl import progress
from specctl.engines.records import (
    AdminCall,
    DrafterRejected,
    EngineError,
    ExportedDrafter,
    LoadedDrafter,
    MalformedResponse,
    NoResponse,
    WeightUpdateDialect,
    parsing,
)
from specctl.engines.vllm_worker import DrafterMismatch, contents, fingerprint, read_layout
from specctl.errors import SpecctlError, UsageError
from specctl.formats import head_directory

Asked = Callable[[AdminCall], Awaitable[Any]]
"""Sends a call to a server and returns the document of the response. Raises EngineError, MalformedResponse."""


@dataclass(frozen=True)
class PublicationServer:
    """A server that a drafter is published to, as publication sees it.

    Attributes:
        call: sends an administration call to this server.
        published_directories: directory of each version that was published from here.
    """

    url: str
    publisher: WeightUpdateDialect
    call: Asked
    published_directories: dict[str, str]


class SwapFailed(Exception):
    """A swap that failed. `changed`: whether the server may now draft with another drafter."""

    def __init__(self, error: EngineError, changed: bool):
        super().__init__(error.message)
        self.error, self.changed = error, changed


def read_exported(directory: Path, *, tensors: bool) -> ExportedDrafter:
    """Read a drafter to publish; `tensors`: including its weights. Raises UsageError, CheckpointError."""
    directory = directory.absolute()
    try:
        form, found = read_layout(directory), fingerprint(contents(directory))
    except DrafterMismatch as error:
        raise UsageError(str(error), "publish a directory written by `specctl export --to vllm` (or sglang)") from error
    return ExportedDrafter(directory, found, form, head_directory.read(directory).tensors if tensors else {})


async def loaded_drafter(place: PublicationServer) -> LoadedDrafter:
    """The drafter that a server uses now. Raises EngineError."""
    try:
        answers = [await place.call(call) for call in place.publisher.LOADED_CALLS]
        with parsing("report on its drafter"):
            now = place.publisher.parse_loaded(answers)
        if not all(isinstance(name, str | None) for name in (now.version, now.directory, now.started)):
            raise MalformedResponse("its report on its drafter has values of other types than names")
    except (EngineError, MalformedResponse) as error:
        raise with_address(place, error) from error
    if now.directory is None and now.version in place.published_directories:
        return replace(now, directory=place.published_directories[now.version])
    return now


async def publish(places: Sequence[PublicationServer], directory: Path, version: str) -> None:
    """Make every server draft with `directory`, as version `version`.

    If a server fails, all servers get their previous drafter back. Raises UsageError, CheckpointError, EngineError. The
    message tells which server did not take the drafter and why, and which drafters run now.
    """
    if version in ("", "default"):
        raise UsageError(
            f"{version!r} is not a version name",
            'use a name such as "7"; only the drafter of the server\'s start has none',
        )
    drafter = read_exported(directory, tensors=any(place.publisher.SENDS_WEIGHTS for place in places))
    before = await asyncio.gather(*(loaded_drafter(place) for place in places))
    for place, now in zip(places, before, strict=True):
        try:
            first = _first(now) if place.publisher.SENDS_WEIGHTS else None
            for call in place.publisher.compatibility_calls(drafter, first, now):
                place.publisher.check_response(call, await place.call(call))
        except (EngineError, MalformedResponse) as error:
            raise with_address(place, error) from error
    changed: list[tuple[PublicationServer, LoadedDrafter]] = []
    for place, now in zip(places, before, strict=True):
        try:
            seconds = await _swap(place, drafter, version, now)
        except SwapFailed as stopped:
            outcome = await _put_back([*changed, *([(place, now)] if stopped.changed else [])])
            raise EngineError(f"{place.url}: {stopped.error.message}{outcome}", stopped.error.hint) from stopped
        except BaseException:  # a signal
            await _put_back([*changed, (place, now)])
            raise
        place.published_directories[version] = str(drafter.directory)
        changed.append((place, now))
        progress.log(f"{place.url} drafts with {version}; its requests were paused for {seconds:.2f} s")


def _first(now: LoadedDrafter) -> ExportedDrafter | None:
    """The drafter that an engine was started with, or None if its directory is not on this machine."""
    if now.started is None or not Path(now.started).is_dir():
        return None
    with suppress(SpecctlError):
        return read_exported(Path(now.started), tensors=True)
    return None


async def _swap(place: PublicationServer, drafter: ExportedDrafter, version: str | None, now: LoadedDrafter) -> float:
    """Swap a server's drafter. Returns the seconds that the server stood still: its own figure, or as measured here.

    Raises SwapFailed.
    """
    publisher, changed = place.publisher, False
    started, reported = time.perf_counter(), None
    failed: EngineError | MalformedResponse | None = None
    after: list[AdminCall] = []
    try:
        for call in publisher.swap_calls(drafter, version, now):
            changed = changed or call.changes
            try:
                reported = publisher.check_response(call, await place.call(call)) or reported
            except EngineError as error:
                if call.after and isinstance(error, NoResponse):
                    after.append(call.after)
                raise
            if call.after:
                after.append(call.after)
    except (EngineError, MalformedResponse) as error:
        failed = error
    finally:  # also after a signal
        for call in reversed(after):
            try:
                publisher.check_response(call, await place.call(call))
            except (EngineError, MalformedResponse) as error:
                failed = failed or error
    if failed is not None:
        why = EngineError(str(failed), getattr(failed, "hint", None))
        raise SwapFailed(why, changed and not isinstance(failed, DrafterRejected)) from failed
    return time.perf_counter() - started if reported is None else reported


async def _put_back(changed: Sequence[tuple[PublicationServer, LoadedDrafter]]) -> str:
    """Give servers their previous drafters back. Returns the end of an error message, which reports the outcome."""
    outcomes = []
    for place, old in reversed(changed):
        what = old.version or "the drafter that it was started with"
        try:
            if old.directory is None:
                raise EngineError("its directory is unknown here")
            drafter = read_exported(Path(old.directory), tensors=place.publisher.SENDS_WEIGHTS)
            if old.fingerprint not in ("", drafter.fingerprint):
                raise EngineError(f"{old.directory} has changed since then")
            await _swap(place, drafter, old.version, old)
            outcomes.append(f"{place.url} drafts with {what} again")
        except (SwapFailed, SpecctlError) as error:
            outcomes.append(f"{place.url} could not be switched back to {what} ({error})")
    return "".join(f"; {one}" for one in outcomes)


def with_address(place: PublicationServer, error: EngineError | MalformedResponse) -> EngineError:
    """Prefix an error with the server's address."""
    return EngineError(f"{place.url}: {error}", getattr(error, "hint", None))
