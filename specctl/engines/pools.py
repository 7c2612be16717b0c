"""HTTP clients that take turns, so that each has few connections.

httpcore looks at all connections of a pool when a request begins and when it ends, and for every one that is idle at
all of them again. With 64 requests in flight in one pool that took most of a request's time.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from typing import Any

import httpx

CONNECTIONS = 8  # of a pool, about


class Pools:
    """Clients with the same options, which are httpx's. `verify` loads certificates, once: that takes a second."""

    def __init__(self, connections: int, *, verify: bool, **options: Any):
        """`connections`: about so many are open at once, over all clients."""
        checked: ssl.SSLContext | bool = httpx.create_ssl_context() if verify else False
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        count = -(-connections // CONNECTIONS)
        self._clients = [httpx.AsyncClient(verify=checked, limits=limits, **options) for _ in range(count)]
        self._turns = itertools.cycle(self._clients)

    @property
    def http(self) -> httpx.AsyncClient:
        """The client whose turn it is."""
        return next(self._turns)

    async def aclose(self) -> None:
        """Close all connections."""
        await asyncio.gather(*[client.aclose() for client in self._clients])
