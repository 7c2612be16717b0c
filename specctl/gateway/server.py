"""HTTP server of the gateway: listens, and runs an application until a signal arrives."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from specctl import progress
from specctl.errors import UsageError
from specctl.gateway.connections import BACKLOG, ConnectionTable
from specctl.gateway.limits import Guard

POLL_S = 0.1  # longest delay of a signal
UNREAD_S = 60  # a connection is closed if its client reads nothing of an answer for this time
QUEUE = 2048  # connections that the system holds until they are accepted


@contextmanager
def listening(listen: str) -> Iterator[tuple[socket.socket, str]]:
    """Yield an open socket and its address.

    Raises UsageError if `listen` (HOST:PORT; port 0 = any free port) cannot be listened on.
    """
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio sends small packets at once on such sockets alone; others wait 40 ms for each.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
            place.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_S)
        try:
            place.bind((host.strip("[]"), int(port)))
        except (OSError, OverflowError) as error:  # OverflowError: ports beyond 65535
            why = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"cannot listen on {listen}: {why}", "use an address such as --listen 127.0.0.1:8100"
            ) from error
        place.listen(QUEUE)
        yield place, f"http://{host}:{place.getsockname()[1]}"


class _Server(uvicorn.Server):
    """uvicorn's server with a long queue for connections that the event loop accepts in small groups."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for place in sockets or []:
            place.listen(QUEUE)


def make_server(app: Guard) -> uvicorn.Server:
    """Make the server of an application, with the application's limits."""
    limits, table = app.limits, ConnectionTable(app.limits, app.meter)
    config = uvicorn.Config(
        app,
        http=table.protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        loop="asyncio",  # the transports of uvloop, which "auto" prefers, have no limit of what is read at once
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(limits.idle_s),
        timeout_graceful_shutdown=int(limits.stop_s),
        h11_max_incomplete_event_size=limits.header_bytes + 1024,
    )
    return _Server(config)


def run(app: Guard, place: socket.socket, watch: Callable[[uvicorn.Server], None] = lambda server: None) -> None:
    """Serve on an open socket until SIGINT or SIGTERM; then answer the requests in flight. `watch` gets the server."""
    server = make_server(app)
    watch(server)
    server.run([place])


def stop_after(wait: Callable[[], object]) -> Callable[[uvicorn.Server], None]:
    """Function for `server.run` that ends the server once `wait`, called in a thread, has returned."""

    def watch(http: uvicorn.Server) -> None:
        def work() -> None:
            wait()
            http.should_exit = True

        threading.Thread(target=work, daemon=True).start()

    return watch


def until_stopped() -> None:
    """Wait for a signal that `progress.interrupts` remembers."""
    while not progress.interrupts.requested():
        time.sleep(POLL_S)
