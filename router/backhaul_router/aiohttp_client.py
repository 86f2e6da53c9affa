"""HTTP to the engines over aiohttp: a pool of kept-alive connections for each event loop."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType
from typing import Final
from weakref import WeakSet

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from .engine_client import EngineAnswer, EngineCall, EngineFailure, FailureKind

KEEPALIVE_S: Final = 3.0
"""Idle connections are given up after this long. vLLM's server closes them after VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 5 s by
default (vllm/envs.py; uvicorn's `timeout_keep_alive`); a request written just then fails in a way that does not tell
whether the engine ran it, so this side has to be the one that closes."""

_LARGE_BODY: Final = 2**20
"""Bytes. Larger bodies are given to aiohttp as files: it writes those in pieces, between which the event loop runs."""

_FRAMING: Final = ("connection", "content-length", "host", "transfer-encoding")
"""Headers that describe the connection or the body's length on it: aiohttp's to set, whatever a caller carries over."""


class AiohttpClient:
    """An `EngineClient` for use from any number of event loops and threads at a time.

    Only `FailureKind.REFUSED` says that the engine cannot have seen the request. A connection that ends unanswered is
    `BROKEN` even where it had been idle in the pool, and no POST is sent twice; a GET, which changes nothing, is.

    Each loop's connections close with the loop, or with `aclose()`. Private certificate authorities are those of
    OpenSSL's `SSL_CERT_FILE`. Proxies in the environment are not used, redirects are not followed, cookies not kept.
    """

    def __init__(
        self, *, connect_timeout_s: float = 5.0, api_key: str | None = None, pool_limit: int | None = None
    ) -> None:
        """`connect_timeout_s` covers name resolution, TLS, and waiting for a connection to become free where
        `pool_limit`, the connections that one event loop may have open at a time, is set."""
        self._connect_timeout_s = connect_timeout_s
        self._authorization = None if api_key is None else f"Bearer {api_key}"
        self._pool_limit = pool_limit
        self._pools: dict[asyncio.AbstractEventLoop, _Pool] = {}
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"event_loops={len(self._pools)}"
        return f"<{type(self).__name__} {state}>"

    async def call(self, request: EngineCall) -> EngineAnswer:
        try:
            async with asyncio.timeout(request.timeout_s):
                stream = await self._send(request, silence_s=None)
                body = b"".join([chunk async for chunk in stream])
        except TimeoutError:
            raise EngineFailure(
                FailureKind.TIMEOUT, f"{_name(request.url)}: no complete answer within {request.timeout_s:g} s"
            ) from None
        return EngineAnswer(stream.status, stream.headers, body)

    async def open(self, request: EngineCall) -> AiohttpStream:
        try:
            async with asyncio.timeout(request.timeout_s):
                return await self._send(request, silence_s=request.timeout_s)
        except TimeoutError:
            raise EngineFailure(
                FailureKind.TIMEOUT, f"{_name(request.url)}: no answer began within {request.timeout_s:g} s"
            ) from None

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

    async def _send(self, request: EngineCall, *, silence_s: float | None) -> AiohttpStream:
        pool = await self._pool(request.url)
        headers = CIMultiDict(request.headers)
        for name in _FRAMING:
            headers.popall(name, None)
        headers["Accept-Encoding"] = "identity"
        if self._authorization is not None:
            headers["Authorization"] = self._authorization
        data: bytes | io.BytesIO | None = request.body
        if request.body is not None:
            headers.setdefault("Content-Type", "application/json")
            if len(request.body) > _LARGE_BODY:
                data = io.BytesIO(request.body)
        try:
            response = await pool.session.request(
                "GET" if data is None else "POST", request.url, data=data, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, HttpProcessingError) as error:
            raise self._not_answered(request.url, error) from error
        return AiohttpStream(request.url, response, pool, silence_s)

    async def _pool(self, url: str) -> _Pool:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            with self._lock:
                if self._closed:
                    raise RuntimeError(f"{_name(url)}: this client is closed; make a new one")
                ended = [p for p in self._pools.values() if p.loop.is_closed() or p.session.closed]
                for p in ended:
                    del self._pools[p.loop]
                pool = self._pools[loop] = _Pool(loop, self._new_session())
            await pool.start()
            for p in ended:
                await p.session.close()
        if pool.session.closed:
            raise EngineFailure(FailureKind.REFUSED, f"{_name(url)}: not called, the event loop is shutting down")
        return pool

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._pool_limit or 0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, connect=self._connect_timeout_s),
        )

    def _not_answered(self, url: str, error: Exception) -> EngineFailure:
        refused = FailureKind.REFUSED
        match error:
            case aiohttp.ClientConnectorDNSError():
                kind, what = refused, f"cannot resolve the host's name ({_reason(error.os_error)})"
            case aiohttp.ClientConnectorCertificateError():
                kind, what = refused, f"the TLS certificate is not valid ({error.certificate_error})"
            case aiohttp.ClientConnectorSSLError():
                kind, what = refused, f"the TLS handshake failed ({error.os_error})"
            case aiohttp.ClientConnectorError():
                kind, what = refused, f"cannot connect ({_reason(error.os_error)})"
            case aiohttp.ConnectionTimeoutError():
                kind, what = refused, f"no connection within {self._connect_timeout_s:g} s"
                if self._pool_limit:
                    what += f" (of at most {self._pool_limit} at a time)"
            case aiohttp.InvalidURL():
                kind, what = refused, "this is not a usable URL"
            case _:
                kind, what = FailureKind.BROKEN, _how_it_broke(error)
        return EngineFailure(kind, f"{_name(url)}: {what}")


class AiohttpStream:
    """An `EngineStream`. To stop waiting for a chunk, by cancelling, ends the exchange as `aclose()` does."""

    def __init__(self, url: str, response: aiohttp.ClientResponse, pool: _Pool, silence_s: float | None) -> None:
        self.status: Final = response.status
        self.headers: Final = _plain(response.headers)
        self._url = url
        self._response = response
        self._silence_s = silence_s
        self._pool = pool
        self._aborted = False
        pool.streams.add(self)

    def __aiter__(self) -> AiohttpStream:
        return self

    async def __anext__(self) -> bytes:
        try:
            if self._silence_s is None:
                chunk = await self._response.content.readany()
            else:
                async with asyncio.timeout(self._silence_s):
                    chunk = await self._response.content.readany()
        except TimeoutError:
            self.abort()
            raise EngineFailure(
                FailureKind.TIMEOUT,
                f"{_name(self._url)}: the answer fell silent for {self._silence_s:g} s before its end",
            ) from None
        except (aiohttp.ClientError, HttpProcessingError, RuntimeError) as error:
            connection = self._response.connection
            if isinstance(error, RuntimeError) and not (connection is None or connection.closed):
                raise  # two tasks wait for chunks of one stream; what aiohttp says of closed ones is a RuntimeError too
            what = "the answer was cut off on this side" if self._aborted else _how_it_broke(error)
            self.abort()
            raise EngineFailure(FailureKind.BROKEN, f"{_name(self._url)}: {what}") from error
        except BaseException:
            self.abort()
            raise
        if not chunk:
            self._pool.streams.discard(self)
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Closes the connection without waiting for anything, if the answer has not fully arrived."""
        self._pool.streams.discard(self)
        connection = self._response.connection
        if connection is None:
            return
        self._aborted = True
        if connection.transport is not None:
            connection.transport.abort()
        self._response.close()


class _Pool:
    """One event loop's session, which closes in that loop and not after it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, session: aiohttp.ClientSession) -> None:
        self.loop = loop
        self.session = session
        self.streams: WeakSet[AiohttpStream] = WeakSet()
        self._life = _live(session, self.streams)

    async def start(self) -> None:
        await anext(self._life)

    async def aclose(self) -> None:
        await self._life.aclose()


async def _live(session: aiohttp.ClientSession, streams: WeakSet[AiohttpStream]) -> AsyncGenerator[None]:
    """Holds `session` open until the generator is closed, collected, or its event loop is about to end: then the loop
    closes the asynchronous generators that were begun in it (`loop.shutdown_asyncgens`, as `asyncio.run` calls it)."""
    try:
        yield
    finally:
        for stream in list(streams):
            stream.abort()
        await session.close()


def _plain(headers: CIMultiDictProxy[str]) -> Mapping[str, str]:
    """Lower-case names; the values of a repeated header in one list, as RFC 9110 (5.3) has it."""
    plain: dict[str, str] = {}
    for name, value in headers.items():
        name = name.lower()
        plain[name] = f"{plain[name]}, {value}" if name in plain else value
    return MappingProxyType(plain)


def _name(url: str) -> str:
    """What messages call the endpoint: no query, no credentials."""
    parts = URL(url)
    return f"{parts.origin()}{parts.path}"


def _how_it_broke(error: Exception) -> str:
    match error:
        case aiohttp.ServerDisconnectedError():
            return "the engine closed the connection without an answer"
        case aiohttp.ClientPayloadError():
            return "the connection ended before the answer was complete"
        case aiohttp.ClientResponseError() | HttpProcessingError():
            return "the answer is not valid HTTP"
        case RuntimeError():
            return "the connection is closed"
        case OSError():
            return f"the connection broke ({_reason(error)})"
        case _:
            return f"the connection broke ({type(error).__name__})"


def _reason(error: OSError) -> str:
    """The system's words where it has any, not a library's, which may quote what was sent."""
    return os.strerror(error.errno).lower() if error.errno else str(error.strerror or error)
