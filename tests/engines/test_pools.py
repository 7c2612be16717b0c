"""Connections in small pools."""

import asyncio
import ssl
from collections import Counter

import httpx
import pytest

from specctl.engines import pools
from specctl.engines.pools import CONNECTIONS, Pools


@pytest.mark.parametrize(("connections", "clients"), [(1, 1), (CONNECTIONS, 1), (CONNECTIONS + 1, 2), (64, 8)])
def test_clients_take_turns(connections, clients):
    some = Pools(connections, verify=False)
    taken = Counter(id(some.http) for _ in range(3 * clients))
    assert len(taken) == clients and set(taken.values()) == {3}
    asyncio.run(some.aclose())
    assert all(some.http.is_closed for _ in range(clients))


def test_certificates_are_read_once_and_only_where_they_are_checked(monkeypatch):
    read = []
    monkeypatch.setattr(pools.httpx, "create_ssl_context", lambda: read.append(1) or ssl.create_default_context())
    asyncio.run(Pools(64, verify=False).aclose())
    assert not read
    some = Pools(64, verify=True)
    assert len(read) == 1 and isinstance(some.http, httpx.AsyncClient)
    asyncio.run(some.aclose())
