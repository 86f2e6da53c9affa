"""HTTP/1.1 client for the engines: asyncio's connections, httptools' parser (llhttp), a pool for each event loop.

A turn is two or three small requests to engines that the router talks to all the time, so what a client library spends on
each is most of what the router adds; docs/decisions/009 has the figures. Only what engines need is here: no redirects, cookies,
proxies, compression or HTTP/2.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import re
import socket
import ssl
import threading
from collections.abc import AsyncGenerator
from typing import Any, Final
from urllib.parse import quote

from .. import engine_key, ranks, urls
from ..errors import FailureKind
from .client import EngineAnswer, EngineCall, EngineFailure
from .http_connection import Connection, Connections, HttpStream, Target, reason_of
from .tls import client_context

_HAPPY_EYEBALLS_S: Final = 0.25
"""Before the next of a host's addresses is tried too (RFC 8305, 5)."""

_LATE_S: Final = 0.05
"""A limit that is noticed later than this passed while the event loop was blocked."""

_FRAMING: Final = frozenset({"connection", "content-length", "host", "transfer-encoding"})
"""Headers that describe the connection or the body's length on it: set here, whatever a caller carries over."""

_SECURE: Final = {"http": False, "https": True}
_RANK: Final = ranks.HEADER.lower()
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NOT_IN_VALUES: Final = re.compile(r"[\x00\r\n]")


class HttpClient:
    """An `EngineClient` for use from any number of event loops and threads at a time.

    Only `FailureKind.REFUSED` says that the engine cannot have seen the request. A connection that ends unanswered is
    `BROKEN` even where it had been idle in the pool, and no POST is sent twice; a GET, which changes nothing, is.

    Each loop's connections close with the loop, or with `aclose()`. Private certificate authorities are those in `ca_file`, or
    of OpenSSL's `SSL_CERT_FILE`.
    """

    def __init__(
        self, *, connect_timeout_s: float = 5.0, api_key: str | None = None, ca_file: str | None = None
    ) -> None:
        """`connect_timeout_s` covers name resolution and TLS. Raises `ConfigError` for a `ca_file` or an `api_key` that cannot be
        used."""
        if api_key is not None:
            engine_key.check(api_key)
        self._tls = None if ca_file is None else client_context(ca_file)
        self._connect_timeout_s = connect_timeout_s
        self._authorization = None if api_key is None else f"Bearer {api_key}"
        self._pools: dict[asyncio.AbstractEventLoop, _Pool] = {}
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"event_loops={len(self._pools)}"
        return f"<{type(self).__name__} {state}>"

    async def call(self, request: EngineCall) -> EngineAnswer:
        stream: HttpStream | None = None
        try:
            async with asyncio.timeout(request.timeout_s):
                stream = await self._send(request)
                body = await stream.read_all()
        except TimeoutError:
            if stream is not None:
                stream.abort()
            await _end(request)
            raise EngineFailure(
                FailureKind.TIMEOUT, f"{_target(request.url).name}: no complete answer within {request.timeout_s:g} s"
            ) from None
        return EngineAnswer(stream.status, stream.headers, body)

    async def open(self, request: EngineCall) -> HttpStream:
        try:
            async with asyncio.timeout(request.timeout_s):
                stream = await self._send(request)
        except TimeoutError:
            await _end(request)
            raise EngineFailure(
                FailureKind.TIMEOUT, f"{_target(request.url).name}: no answer began within {request.timeout_s:g} s"
            ) from None
        stream.silence_s = request.timeout_s
        return stream

    async def aclose(self) -> None:
        """Aborts what is in progress, in every event loop, and closes the connections. Calls after this raise
        `RuntimeError`."""
        with self._lock:
            self._closed = True
            pools = list(self._pools.values())
            self._pools.clear()
        here = asyncio.get_running_loop()
        elsewhere = []
        for pool in pools:
            if pool.loop is here:
                await pool.aclose()
            elif pool.loop.is_running():
                closing = pool.aclose()
                try:
                    elsewhere.append(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(closing, pool.loop)))
                except RuntimeError:  # that loop has just ended, and its pool with it
                    closing.close()
        if elsewhere:
            # A loop that stops meanwhile closes its pool itself and may never get to this.
            done, _ = await asyncio.wait(elsewhere, timeout=self._connect_timeout_s)
            for closed in done:
                if not closed.cancelled():
                    closed.result()

    async def _send(self, request: EngineCall) -> HttpStream:
        """Returns when the answer's head is there."""
        target = _target(request.url)
        head = self._head(target, request)
        connections = (await self._pool(target)).connections
        connection = connections.take(target.address)
        if connection is not None:
            stream = _stream(target, connection, request)
            try:
                await connection.exchange(stream, head, request.body)
            except EngineFailure:
                if request.body is not None or stream.status or not connection.lost:
                    raise
            else:
                return stream
        connection = await self._connect(target, connections)
        stream = _stream(target, connection, request)
        await connection.exchange(stream, head, request.body)
        return stream

    def _head(self, target: Target, request: EngineCall) -> bytes:
        lines = [target.get_lines if request.body is None else target.post_lines]
        typed = request.body is None
        for name, value in request.headers.items():
            lower = name.lower()
            if lower in _FRAMING or lower == "accept-encoding" or (lower == "authorization" and self._authorization):
                continue
            if target.rank is not None and lower == _RANK:
                continue
            if not _NAME.fullmatch(name) or _NOT_IN_VALUES.search(value):
                raise ValueError(f"{target.name}: {name!r} is not a header that can be sent")
            typed = typed or lower == "content-type"
            lines.append(f"{name}: {value}")
        if self._authorization is not None:
            lines.append(f"Authorization: {self._authorization}")
        if not typed:
            lines.append("Content-Type: application/json")
        if request.body is not None:
            lines.append(f"Content-Length: {len(request.body)}")
        lines.append("\r\n")
        return "\r\n".join(lines).encode()

    async def _connect(self, target: Target, connections: Connections) -> Connection:
        options: dict[str, Any] = {"ssl": self._tls or _tls()} if target.address[0] else {}
        if isinstance(connections.loop, asyncio.BaseEventLoop) and not _is_address(target.address[1]):
            options["happy_eyeballs_delay"] = _HAPPY_EYEBALLS_S  # uvloop tries one address after another
        try:
            connection = await self._connected(target, connections, options)
        except TimeoutError as error:
            raise _refused(target, reason_of(error)) from None
        except socket.gaierror as error:
            raise _refused(target, f"cannot resolve the host's name ({reason_of(error)})") from error
        except ssl.SSLCertVerificationError as error:
            raise _refused(target, f"the TLS certificate is not valid ({error.verify_message})") from error
        except ssl.SSLError as error:
            raise _refused(target, f"the TLS handshake failed ({reason_of(error)})") from error
        except UnicodeError:
            raise _refused(target, "this is not a usable URL") from None
        except OSError as error:
            in_handshake = bool(options.get("ssl")) and isinstance(error, ConnectionResetError)
            what = "the TLS handshake failed" if in_handshake else "cannot connect"
            raise _refused(target, f"{what} ({reason_of(error)})") from error
        if connection.lost or not connection.usable:
            raise _refused(target, "the connection closed before the request was sent")
        return connection

    async def _connected(self, target: Target, connections: Connections, options: dict[str, Any]) -> Connection:
        """Raises `TimeoutError` in words, the system's or its own.

        A limit that passed while something blocked the event loop says nothing about the engine: it gets another.
        """
        _, host, port = target.address
        loop = connections.loop
        limit = asyncio.timeout(None)
        timer: asyncio.TimerHandle

        def arm() -> asyncio.TimerHandle:
            return loop.call_later(self._connect_timeout_s, passed, loop.time() + self._connect_timeout_s)

        def passed(due: float) -> None:
            nonlocal timer
            if loop.time() - due > _LATE_S:
                timer = arm()
            else:
                limit.reschedule(due)

        timer = arm()
        try:
            async with limit:
                protocol = functools.partial(Connection, connections, target.address)
                _, connection = await loop.create_connection(protocol, host, port, **options)
                return connection
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(f"no connection within {self._connect_timeout_s:g} s") from None
        finally:
            timer.cancel()

    async def _pool(self, target: Target) -> _Pool:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            with self._lock:
                if self._closed:
                    raise RuntimeError(f"{target.name}: this client is closed; make a new one")
                for ended in [p for p in self._pools.values() if p.loop.is_closed() or p.connections.closed]:
                    del self._pools[ended.loop]
                pool = self._pools[loop] = _Pool(loop)
            await pool.start()
        if pool.connections.closed:
            raise _refused(target, "not called, the event loop is shutting down")
        return pool


def _stream(target: Target, connection: Connection, request: EngineCall) -> HttpStream:
    stream = HttpStream(target, connection, detached=request.detached is not None)
    if request.detached is not None:
        request.detached.stream = stream
    return stream


async def _end(request: EngineCall) -> None:
    if request.detached is not None and request.detached.stream is not None:
        await request.detached.stream.aclose()


class _Pool:
    """One event loop's connections, which close in that loop and not after it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.connections = Connections(loop)
        self._life = _live(self.connections)

    async def start(self) -> None:
        await anext(self._life)

    async def aclose(self) -> None:
        await self._life.aclose()


async def _live(connections: Connections) -> AsyncGenerator[None]:
    """Keeps connections until the generator is closed, collected, or its event loop is about to end: then the loop
    closes the asynchronous generators that were begun in it (`loop.shutdown_asyncgens`, as `asyncio.run` calls it)."""
    try:
        yield
    finally:
        connections.close()
        # Transports close their sockets in the loop's next round.
        await asyncio.sleep(0)


@functools.lru_cache(maxsize=1024)
def _target(url: str) -> Target:
    url, rank = ranks.split(url)
    parts = urls.split(url)
    host = parts.hostname if parts is not None and parts.scheme in _SECURE else None
    try:
        ascii_host = (host or "").encode("ascii" if host and ":" in host else "idna").decode()
    except UnicodeError:
        host = None
    if parts is None or not host:
        raise EngineFailure(FailureKind.REFUSED, f"{urls.shown(url)}: this is not a usable URL")
    secure, port = _SECURE[parts.scheme], parts.port
    shown = f"[{ascii_host}]" if ":" in ascii_host else ascii_host
    if port not in (None, 443 if secure else 80):
        shown += f":{port}"
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = f"?{quote(parts.query, safe='/?%:@!$&()*+,;=~-._')}" if parts.query else ""
    same = (
        f" {path}{query} HTTP/1.1\r\nHost: {shown}\r\nAccept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: backhaul"
    )
    return Target(
        address=(secure, host, port or (443 if secure else 80)),
        name=f"{parts.scheme}://{shown}{path}",
        get_lines="GET" + same,
        post_lines="POST" + same + (f"\r\n{ranks.HEADER}: {rank}" if rank is not None else ""),
        rank=rank,
    )


def _is_address(host: str) -> bool:
    """There is nothing to race; and a race that is cancelled just as it is won leaves its socket open (CPython 3.11)."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@functools.cache
def _tls() -> ssl.SSLContext:
    return client_context(None)


def _refused(target: Target, what: str) -> EngineFailure:
    return EngineFailure(FailureKind.REFUSED, f"{target.name}: {what}")


__all__ = ["HttpClient", "HttpStream"]
