"""HTTP connections in several small pools."""

import asyncio
import ssl
from collections import Counter

import httpx
import pytest

from specctl.engines import http_pools
from specctl.engines.http_pools import CONNECTIONS, HttpPools


@pytest.mark.parametrize(("connections", "clients"), [(1, 1), (CONNECTIONS, 1), (CONNECTIONS + 1, 2), (64, 8)])
def test_requests_rotate_among_the_pools(connections, clients):
    some = HttpPools(connections, verify=False)
    taken = Counter(id(some.http) for _ in range(3 * clients))
    assert len(taken) == clients and set(taken.values()) == {3}
    asyncio.run(some.aclose())
    assert all(some.http.is_closed for _ in range(clients))


def test_certificates_are_read_once_and_only_if_they_are_verified(monkeypatch):
    read = []
    monkeypatch.setattr(http_pools.httpx, "create_ssl_context", lambda: read.append(1) or ssl.create_default_context())
    asyncio.run(HttpPools(64, verify=False).aclose())
    assert not read
    some = HttpPools(64, verify=True)
    assert len(read) == 1 and isinstance(some.http, httpx.AsyncClient)
    asyncio.run(some.aclose())
