"""Hidden states that an engine computed: read from its file or its answer, and not believed before they are checked."""

from __future__ import annotations

import asyncio
import fcntl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specctl import regular
from specctl.engines.records import Dialect, EngineError, Malformed, Wanted

POLL_S = 0.005  # how long a file may be finished before it is noticed


class Source(Protocol):
    """The server that states came from."""

    url: str
    dialect: Dialect


async def states(
    server: Source, found: str | list[Any] | None, sent: list[int], wanted: Wanted, timeout_s: float
) -> Tensor:
    """Hidden states [tokens, layers, width] of the text `sent`; a file that held them is deleted.

    Args:
        found: where they are, as `Dialect.captured` says.
        timeout_s: how long its server may write a file.

    Raises:
        EngineError: the server cannot give what is wanted, whoever asks.  Malformed: another try may bring it.
    """
    if found is None:
        raise EngineError(f"{server.url} hands out no hidden states", started(server, wanted))
    if not isinstance(found, str):
        return _checked(server, await asyncio.to_thread(_rows, server, found, wanted), sent, wanted)
    path = Path(found)
    await _written(server, path, timeout_s)
    tensors = await asyncio.to_thread(_loaded, server, path)
    ids, rows = tensors.get("token_ids"), tensors.get("hidden_states")
    if ids is None or rows is None:
        raise EngineError(f"{server.url}: {path} holds no hidden_states with their token_ids")
    if ids.tolist() != sent:
        raise EngineError(
            f"{server.url} hands out the states of {len(ids)} other tokens than the {len(sent)} that were sent",
            f"start it with {server.dialect.UNCACHED}",
        )
    checked = _checked(server, rows, sent, wanted)
    for file in (path, _lock(path)):  # only now is it known to be ours to delete, whatever the server called it
        with suppress(OSError):
            file.unlink()
    return checked


def started(server: Source, wanted: Wanted) -> str:
    """How a server that gives what is wanted is started, as a hint."""
    command = server.dialect.capturing(wanted)
    assert command is not None  # `Client.check_states` has refused the others
    return f"start it with: {command}"


def _lock(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


async def _written(server: Source, path: Path, timeout_s: float) -> None:
    """Wait for the writer, who holds the lock from before its answer until the file is whole. Asked again and again
    rather than slept on: a thread that sleeps in the kernel could not be given up."""
    until = time.monotonic() + timeout_s
    try:
        with regular.opened(_lock(path)) as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise Malformed(f"{path} is not finished after {timeout_s:g} s") from None
                    await asyncio.sleep(POLL_S)
    except FileNotFoundError as error:
        if not path.exists():  # else it writes without locks
            raise _unreadable(server, path, error) from error
    except OSError as error:
        raise _unreadable(server, path, error) from error


def _loaded(server: Source, path: Path) -> dict[str, Tensor]:
    try:
        regular.check(path)
        return load_file(path)
    except FileNotFoundError as error:
        raise Malformed(f"{path} was not written: is its disk full?") from error
    except SafetensorError as error:
        raise Malformed(f"{path} is not whole: {error}") from error
    except OSError as error:
        raise _unreadable(server, path, error) from error


def _unreadable(server: Source, path: Path, error: OSError) -> EngineError:
    return EngineError(
        f"{server.url} wrote hidden states to {path}, which cannot be read here ({error.strerror or error})",
        "run on the server's machine as its user, whose alone the file is, or give it a directory that both may use "
        "(shared_storage_path of its kv_connector_extra_config)",
    )


def _rows(server: Source, found: list[Any], wanted: Wanted) -> Tensor:
    try:
        return torch.tensor(found, dtype=torch.float32).unflatten(1, (-1, wanted.width))
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        width = len(found[0]) if isinstance(found[0], list) else 0
        if width % wanted.width or not width:
            raise _other_layers(server, f"rows of {width} values", wanted) from error
        raise _not_finite(server) from error  # JSON has no number for NaN


def _checked(server: Source, rows: Tensor, sent: list[int], wanted: Wanted) -> Tensor:
    """The rows, if they are as many, of as many layers and as wide as they have to be, and finite."""
    expected = (len(wanted.ids), wanted.width)
    if rows.ndim != 3 or rows.shape[1:] != expected or not rows.is_floating_point():
        raise _other_layers(server, f"states of shape {list(rows.shape)} ({rows.dtype})", wanted)
    if len(rows) != len(sent):
        raise EngineError(
            f"{server.url} hands out the states of {len(rows)} of {len(sent)} tokens",
            f"a prefix cache leaves out those that it has: start the server with {server.dialect.UNCACHED}",
        )
    if not rows.float().sum().isfinite():
        raise _not_finite(server)
    return rows


def _not_finite(server: Source) -> EngineError:
    return EngineError(
        f"{server.url} hands out states that are not finite",
        "fp16 overflows in many models: start the server with --dtype bfloat16",
    )


def _other_layers(server: Source, what: str, wanted: Wanted) -> EngineError:
    return EngineError(
        f"{server.url} hands out {what}, where layers {list(wanted.ids)} of width {wanted.width} are needed",
        started(server, wanted),
    )
