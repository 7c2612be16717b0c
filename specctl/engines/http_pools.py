"""Rotating HTTP clients, so that each connection pool stays small.

httpcore scans all connections of a pool when a request begins and when it ends, and scans them again for every idle
connection. With 64 requests in flight in one pool, these scans took most of a request's time.
"""

import asyncio
import itertools
import ssl
from typing import Any

import httpx

CONNECTIONS = 8  # per pool, approximately


class HttpPools:
    """HTTP clients with equal httpx `options`. `verify` loads certificates once: loading takes a second."""

    def __init__(self, connections: int, *, verify: bool, **options: Any):
        """`connections`: approximate number of open connections over all clients."""
        checked: ssl.SSLContext | bool = httpx.create_ssl_context() if verify else False
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        count = -(-connections // CONNECTIONS)
        self._clients = [httpx.AsyncClient(verify=checked, limits=limits, **options) for _ in range(count)]
        self._turns = itertools.cycle(self._clients)

    @property
    def http(self) -> httpx.AsyncClient:
        """The next client in turn."""
        return next(self._turns)

    async def aclose(self) -> None:
        """Close all connections."""
        await asyncio.gather(*[client.aclose() for client in self._clients])
