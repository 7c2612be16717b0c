"""Read the hidden states that an engine computed, from its file or its answer, and check them before use."""

import asyncio
import fcntl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specctl import regular_files
from specctl.engines.endpoints import Endpoint
from specctl.engines.records import EngineError, HiddenStatesSpec, MalformedResponse

POLL_S = 0.005  # seconds between two checks whether a file is finished


async def states(
    server: Endpoint, found: str | list[Any] | None, sent: list[int], wanted: HiddenStatesSpec, timeout_s: float
) -> Tensor:
    """Hidden states [tokens, layers, width] of the text `sent`. Deletes the file that held them.

    Args:
        found: the rows, or the path of their file, as `Dialect.parse_hidden_states` returns them, or None.
        timeout_s: seconds that the server may take to finish its file.

    Raises:
        EngineError: the server cannot give the wanted states, for any text.  MalformedResponse: another try may
            succeed.
    """
    if found is None:
        raise EngineError(f"{server.url} returns no hidden states", start_hint(server, wanted))
    if not isinstance(found, str):
        return _checked(server, await asyncio.to_thread(_rows, server, found, wanted), sent, wanted)
    path = Path(found)
    await _written(server, path, timeout_s)
    tensors = await asyncio.to_thread(_loaded, server, path)
    ids, rows = tensors.get("token_ids"), tensors.get("hidden_states")
    if ids is None or rows is None:
        raise EngineError(f"{server.url}: {path} does not contain hidden_states and their token_ids")
    if ids.tolist() != sent:
        raise EngineError(
            f"{server.url} returns the states of {len(ids)} tokens that differ from the {len(sent)} tokens sent",
            f"start it with {server.dialect.NO_PREFIX_CACHE_FLAG}",
        )
    checked = _checked(server, rows, sent, wanted)
    for file in (path, _lock(path)):  # not earlier: a server could name any path
        with suppress(OSError):
            file.unlink()
    return checked


def start_hint(server: Endpoint, wanted: HiddenStatesSpec) -> str:
    """Hint that shows how to start a server that gives the wanted states."""
    command = server.dialect.capture_command(wanted)
    assert command is not None  # `Client.check_states` has refused engines without such a command
    return f"start it with: {command}"


def _lock(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


async def _written(server: Endpoint, path: Path, timeout_s: float) -> None:
    """Wait until the file is whole. Its writer holds the lock from before its answer until then.

    The lock is polled: a thread that blocks on it in the kernel could not be cancelled.
    """
    until = time.monotonic() + timeout_s
    try:
        with regular_files.open_regular(_lock(path)) as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise MalformedResponse(f"{path} is not complete after {timeout_s:g} s") from None
                    await asyncio.sleep(POLL_S)
    except FileNotFoundError as error:
        if not path.exists():  # if it exists, its writer does not use locks
            raise _unreadable(server, path, error) from error
    except OSError as error:
        raise _unreadable(server, path, error) from error


def _loaded(server: Endpoint, path: Path) -> dict[str, Tensor]:
    try:
        regular_files.check(path)
        return load_file(path)
    except FileNotFoundError as error:
        raise MalformedResponse(f"{path} was not written: is the server's disk full?") from error
    except SafetensorError as error:
        raise MalformedResponse(f"{path} is incomplete: {error}") from error
    except OSError as error:
        raise _unreadable(server, path, error) from error


def _unreadable(server: Endpoint, path: Path, error: OSError) -> EngineError:
    return EngineError(
        f"{server.url} wrote hidden states to {path}, which cannot be read here ({error.strerror or error})",
        "run on the server's machine as the server's user, who owns the file, or give the server a directory that both "
        "users can access (shared_storage_path of its kv_connector_extra_config)",
    )


def _rows(server: Endpoint, found: list[Any], wanted: HiddenStatesSpec) -> Tensor:
    try:
        return torch.tensor(found, dtype=torch.float32).unflatten(1, (-1, wanted.width))
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        width = len(found[0]) if isinstance(found[0], list) else 0
        if width % wanted.width or not width:
            raise _other_layers(server, f"rows of {width} values", wanted) from error
        raise _not_finite(server) from error  # JSON cannot encode NaN


def _checked(server: Endpoint, rows: Tensor, sent: list[int], wanted: HiddenStatesSpec) -> Tensor:
    """Return the rows if they are finite and have the expected shape [tokens, layers, width]."""
    expected = (len(wanted.ids), wanted.width)
    if rows.ndim != 3 or rows.shape[1:] != expected or not rows.is_floating_point():
        raise _other_layers(server, f"states of shape {list(rows.shape)} ({rows.dtype})", wanted)
    if len(rows) != len(sent):
        raise EngineError(
            f"{server.url} returns the states of {len(rows)} of {len(sent)} tokens",
            f"a prefix cache omits the states of cached tokens: start the server with "
            f"{server.dialect.NO_PREFIX_CACHE_FLAG}",
        )
    if not rows.float().sum().isfinite():
        raise _not_finite(server)
    return rows


def _not_finite(server: Endpoint) -> EngineError:
    return EngineError(
        f"{server.url} returns hidden states that are not finite",
        "fp16 overflows in many models: start the server with --dtype bfloat16",
    )


def _other_layers(server: Endpoint, what: str, wanted: HiddenStatesSpec) -> EngineError:
    return EngineError(
        f"{server.url} returns {what}, but layers {list(wanted.ids)} of width {wanted.width} are needed",
        start_hint(server, wanted),
    )
