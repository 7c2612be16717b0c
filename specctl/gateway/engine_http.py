"""HTTP connections from the gateway to running engines. Bodies pass without a change.

aiohttp parses in C. A request to a stand-in engine costs 210 µs of CPU time with it, and 700 with httpx. A part of a
stream costs 20 µs, and 90 to 170 with httpx.
"""

import base64
from collections.abc import Iterable

import aiohttp
import httpx
from yarl import URL

CONNECT_S = 10.0
KEPT_S = 4.0  # seconds that an idle connection is kept; uvicorn, which most engines use, closes it after 5
READ_BYTES = 2**16  # of an answer: at twice this number, reading waits for the client
LINE_BYTES = 2**16  # longest header of an answer
HEADERS = 128  # of an answer
HOP_BY_HOP = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"proxy-authorization"}
HOP_BY_HOP |= {b"proxy-connection", b"proxy-authenticate"}
REBUILT_HEADERS = {b"host", b"content-length", b"accept-encoding", b"expect"}
AUTOMATIC_HEADERS = ("accept", "accept-encoding", "content-type", "user-agent")  # added by aiohttp to other requests

NotConnected = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Errors of a request that has not reached an engine."""

RawHeaders = list[tuple[bytes, bytes]]


class EngineHttp:
    """Connections to engines. Redirects are not followed, answers not unpacked, cookies not kept."""

    def __init__(self, urls: Iterable[str], key: str | None = None):
        """`key`: API key for the engines, or None to pass on the client's key."""
        self._key = key
        self._engines = {url: _address(url) for url in urls}
        self._opened: aiohttp.ClientSession | None = None

    async def send(
        self, url: str, target: str, method: str, given: RawHeaders, content: bytes
    ) -> aiohttp.ClientResponse:
        """The beginning of an engine's answer to a client's request, `given` its headers. The caller closes it.

        `target`: path and query. Raises aiohttp.ClientError.
        """
        address, credentials = self._engines[url]
        return await self._session.request(
            method,
            URL(address + target, encoded=True),
            headers=self._onward(given, credentials),
            data=content or None,
            allow_redirects=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._opened is not None:
            await self._opened.close()
            self._opened = None  # the next request may come in another event loop

    @property
    def _session(self) -> aiohttp.ClientSession:
        """The session, which belongs to the event loop of the first request."""
        if self._opened is None:
            checked = any(address.startswith("https:") for address, _ in self._engines.values())
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEPT_S, ssl=httpx.create_ssl_context() if checked else False
            )
            self._opened = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=AUTOMATIC_HEADERS,
                auto_decompress=False,
                read_bufsize=READ_BYTES,
                max_line_size=LINE_BYTES,
                max_field_size=LINE_BYTES,
                max_headers=HEADERS,
            )
        return self._opened

    def _onward(self, given: RawHeaders, credentials: bytes | None) -> list[tuple[str, str]]:
        """Headers for an engine: the client's headers, except headers of the connection. `credentials`: Authorization
        from the engine's address."""
        headers = [pair for pair in passed_on(given) if pair[0] not in REBUILT_HEADERS]
        own = credentials or (None if self._key is None else b"Bearer " + self._key.encode() if self._key else b"")
        if own is not None:
            headers = [pair for pair in headers if pair[0] != b"authorization"]
            headers += [(b"authorization", own)] if own else []
        headers.append((b"accept-encoding", b"identity"))
        return [(name.decode("latin-1"), value.decode("utf-8", "replace")) for name, value in headers]


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """Headers that a client may get: not the headers of a single connection, which the header Connection may also name,
    and not the headers that the gateway's server sets."""
    lower = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in lower if name == b"connection" for part in value.split(b",")}
    dropped = HOP_BY_HOP | named | {b"content-length", b"date"}
    return [pair for pair in lower if pair[0] not in dropped]


def _address(url: str) -> tuple[str, bytes | None]:
    """Split user and password from an address: (address, value of the header Authorization, or None)."""
    parsed = URL(url)
    if parsed.user is None and parsed.password is None:
        return url, None
    pair = f"{parsed.user or ''}:{parsed.password or ''}".encode()
    return str(parsed.with_user(None)).rstrip("/"), b"Basic " + base64.b64encode(pair)
