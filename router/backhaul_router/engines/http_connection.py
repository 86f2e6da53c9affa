"""HTTP/1.1 connection to an engine, the response stream of one exchange on it, and the keep-alive pool of an event loop.

`http_client` makes and uses them. Streams are chunks as they come, with backpressure and a limit on silence.

Longer than most modules: a connection and the stream on it know when the other may be used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import httptools

from ..errors import FailureKind
from .client import EngineFailure

_READ_AHEAD: Final = 2**20
"""Bytes of an answer that wait for their reader before no more are taken off the socket."""

Address = tuple[bool, str, int]
"""Whether TLS is used, host, port."""


@dataclass(frozen=True)
class Target:
    """A URL, taken apart."""

    address: Address
    name: str
    """What messages call it: no query, no credentials."""
    get_lines: str
    post_lines: str
    """Everything of a request's head that is always the same."""
    rank: str | None = None
    """Data-parallel rank that the URL names."""


class Carrier(Protocol):
    """Connection that an answer comes on, as its stream sees it."""

    loop: asyncio.AbstractEventLoop

    def read_on(self, stream: HttpStream) -> None:
        """Takes more off the socket again."""

    def leave(self, stream: HttpStream) -> None:
        """Has the engine notice that nobody waits any more; what it had sent by then still comes."""

    def abort(self) -> None:
        """Closes at once."""


class HttpStream:
    """An `EngineStream`. To stop waiting for a chunk, by cancelling, ends the exchange as `aclose()` does, unless it is
    `detached`."""

    def __init__(self, target: Target, connection: Carrier, *, detached: bool = False) -> None:
        self.status = 0
        """0 until the head has arrived."""
        self.headers: Mapping[str, str] = {}
        self.silence_s: float | None = None
        """Longest wait for a chunk; `None` waits as long as it takes."""
        self._target = target
        self._connection = connection
        self._detached = detached
        self._chunks: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._done = False
        self._failure: EngineFailure | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __aiter__(self) -> HttpStream:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self._failure is not None:
                raise self._failure
            if self._done:
                raise StopAsyncIteration
            self._watch_silence()
            try:
                await self.wait()
            except BaseException:
                self.stopped_waiting()
                raise
        chunk = self._chunks.popleft()
        self._waiting_bytes -= len(chunk)
        if self._waiting_bytes <= _READ_AHEAD:
            self._connection.read_on(self)
        return chunk

    async def read_all(self) -> bytes:
        """The whole body. What was read of it before a cancelled wait can be read again."""
        parts: list[bytes] = []
        try:
            async for chunk in self:
                parts.append(chunk)  # noqa: PERF401 - they are needed when it ends early
        except asyncio.CancelledError:
            self._chunks.extendleft(reversed(parts))
            self._waiting_bytes += sum(map(len, parts))
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def aclose(self) -> None:
        self.abort()

    def leave(self) -> None:
        if self.open:
            self._connection.leave(self)

    def abort(self) -> None:
        """Closes the connection without waiting for anything, if the answer has not fully arrived."""
        if not (self._done or self._failure):
            self.fail(FailureKind.BROKEN, "the answer was cut off on this side")
            self._connection.abort()

    # --- for its connection

    def stopped_waiting(self) -> None:
        """Whoever waited was cancelled."""
        if not self._detached:
            self.abort()

    @property
    def open(self) -> bool:
        """Whether more is to come."""
        return not self._done and self._failure is None

    async def wait(self) -> None:
        """Until something has changed."""
        if self._waiter is not None:
            raise RuntimeError(f"{self._target.name}: two tasks wait for chunks of one answer")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def arrived(self, data: bytes) -> bool:
        """Returns whether to take more off the socket now."""
        self._chunks.append(data)
        self._waiting_bytes += len(data)
        return self._waiting_bytes <= _READ_AHEAD

    def complete(self) -> None:
        self._done = True
        self.wake()

    def fail(self, kind: FailureKind, what: str) -> None:
        if self.open:
            self._failure = EngineFailure(kind, f"{self._target.name}: {what}")
            self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._timer is not None and not self.open:
            self._timer.cancel()
            self._timer = None

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _watch_silence(self) -> None:
        """One timer watches over all waits: it looks at the deadline that the last of them has set."""
        if self.silence_s is not None:
            loop = self._connection.loop
            self._deadline = loop.time() + self.silence_s
            if self._timer is None:
                self._timer = loop.call_at(self._deadline, self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        if self._waiter is None or not self.open:
            return  # the next wait sets another
        loop = self._connection.loop
        if loop.time() < self._deadline:
            self._timer = loop.call_at(self._deadline, self._time_passed)
        else:
            self.fail(FailureKind.TIMEOUT, f"the answer fell silent for {self.silence_s:g} s before its end")
            self._connection.abort()


KEEPALIVE_S: Final = 3.0
"""Idle connections are given up after this long. vLLM's server closes them after VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 5 s by
default (vllm/envs.py; uvicorn's `timeout_keep_alive`); a request written just then fails in a way that does not tell
whether the engine ran it, so this side has to be the one that closes."""

_PIECE: Final = 2**18
"""Bytes. Larger bodies are written in pieces of this size, between which the event loop runs."""

_MAX_HEAD: Final = 2**16
"""Bytes of an answer's headers."""

_MOMENT_S: Final = 0.002
"""For what lies on a TLS connection that is about to be closed."""


class Connection(asyncio.Protocol):
    """Connection state machine, for one exchange at a time. Its methods named `on_…` are httptools' callbacks."""

    def __init__(self, connections: Connections, address: Address) -> None:
        self.address = address
        self.loop = connections.loop
        self.idle_since = 0.0
        self.lost = False
        self._connections = connections
        self._transport: Any = None
        self._parser: Any = None
        self._stream: HttpStream | None = None
        self._writable: asyncio.Future[None] | None = None
        self._paused = False
        self._forget_answer()

    def _forget_answer(self) -> None:
        self._fields: list[tuple[str, str]] = []
        self._head_bytes = 0
        self._before_head = 0
        """Bytes that came before the head was complete."""
        self._headed = False
        self._complete = False
        self._surplus = False
        self._writing = False
        self._kept_alive = False
        self._left = False
        self._until_close = False
        self._bodies: list[bytes] = []

    # --- its use

    async def exchange(self, stream: HttpStream, head: bytes, body: bytes | None) -> None:
        """Sends a request; returns when the head of the answer is there. Raises `EngineFailure`."""
        self._forget_answer()
        self._stream = stream
        try:
            if body is None or len(body) <= _PIECE:
                self._transport.write(head + body if body else head)
            else:
                await self._write_in_pieces(stream, head, body)
            while not stream.status and stream.open:
                await stream.wait()
        except asyncio.CancelledError:
            stream.stopped_waiting()
            raise
        except BaseException:
            self.abort()
            raise
        stream.raise_failure()

    async def _write_in_pieces(self, stream: HttpStream, head: bytes, body: bytes) -> None:
        """Ends early when the engine answers or goes while it is still being written to."""
        self._writing = True
        self._transport.write(head)
        view = memoryview(body)
        for start in range(0, len(body), _PIECE):
            self._transport.write(view[start : start + _PIECE])
            if self._writable is None:
                await asyncio.sleep(0)
            else:
                await self._writable
            if stream.status or not stream.open:
                return
        self._writing = False

    @property
    def usable(self) -> bool:
        """False from when the engine's end of the stream has been seen."""
        return not self._transport.is_closing()

    def read_on(self, stream: HttpStream) -> None:
        if self._paused and self._stream is stream and self.usable:
            self._paused = False
            self._transport.resume_reading()

    def leave(self, stream: HttpStream) -> None:
        """Closes this side's half. A server gives up what it still does when it reads that, after it has written what it has
        to say; TLS has no such half, and a request that is not out yet is not answered."""
        self._left = True
        if self._writing or not self.usable or self._transport.get_write_buffer_size():
            stream.abort()
        elif self.address[0]:
            self.loop.call_later(_MOMENT_S, stream.abort)
        else:
            try:
                self._transport.write_eof()
            except OSError:  # the engine's reset is there, unread
                stream.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)
        self._connections.opened(self)

    def pause_writing(self) -> None:
        self._writable = self.loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def data_received(self, data: bytes) -> None:
        stream = self._stream
        if stream is None:  # nothing was asked
            self.abort()
            return
        valid = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            valid = False
        if not self._headed:  # httptools tells of a field when it is complete
            self._before_head += len(data)
            valid = valid and self._before_head <= 2 * _MAX_HEAD
        if self._bodies:
            body = self._bodies[0] if len(self._bodies) == 1 else b"".join(self._bodies)
            self._bodies.clear()
            if not stream.arrived(body) and not self._complete:
                self._paused = True
                self._transport.pause_reading()
        if self._complete:
            # While a request is still being written, what is left of it would be taken for another one.
            self._answered(
                stream, reusable=valid and self._kept_alive and not (self._surplus or self._writing or self._left)
            )
        elif not valid:
            stream.fail(FailureKind.BROKEN, "the answer is not valid HTTP")
            self.abort()
        else:
            stream.wake()

    def _answered(self, stream: HttpStream, *, reusable: bool) -> None:
        self._stream = None
        stream.complete()
        if reusable:
            self._connections.put_back(self)
        else:
            self._transport.abort()
        self.resume_writing()

    def eof_received(self) -> None:
        """The engine says nothing more. What it has not read of a request by now it will not read."""
        if self._writing and not self._headed:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._connections.gone(self)
        self._parser = None
        stream, self._stream = self._stream, None
        if stream is not None and stream.open:
            if self._until_close and error is None and not self._connections.closed:
                stream.complete()
            elif error is not None:
                what = reason_of(error) if isinstance(error, OSError) else type(error).__name__
                stream.fail(FailureKind.BROKEN, f"the connection broke ({what})")
            elif self._headed:
                stream.fail(FailureKind.BROKEN, "the connection ended before the answer was complete")
            else:
                stream.fail(FailureKind.BROKEN, "the engine closed the connection without an answer")
        self.resume_writing()

    # --- httptools' callbacks

    def on_message_begin(self) -> None:
        self._surplus = self._surplus or self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _MAX_HEAD:
            raise ValueError("an answer's headers are too long")
        if not self._complete:
            self._fields.append((name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._complete or status < 200:  # an interim answer; 101 ends the parsing
            return
        self._headed = True
        headers: dict[str, str] = {}
        for name, value in self._fields:
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        self._until_close = "content-length" not in headers and "transfer-encoding" not in headers
        if self._stream is not None:
            self._stream.status, self._stream.headers = status, headers
        self.resume_writing()

    def on_body(self, body: bytes) -> None:
        if not self._complete:
            self._bodies.append(body)

    def on_message_complete(self) -> None:
        if self._headed:
            self._complete = True
            self._kept_alive = self._parser.should_keep_alive()
        else:
            self._fields = []


@dataclass
class Connections:
    """Keep-alive pool of one event loop, last in first out. It does not know the client that holds it, so that one that
    is dropped takes it along."""

    loop: asyncio.AbstractEventLoop
    closed: bool = False
    _all: set[Connection] = field(default_factory=set)
    _idle: dict[Address, list[Connection]] = field(default_factory=dict)
    _sweep: asyncio.TimerHandle | None = None

    def take(self, address: Address) -> Connection | None:
        """The connection that was used last."""
        idle = self._idle.get(address)
        oldest = self.loop.time() - KEEPALIVE_S
        while idle:
            connection = idle.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.abort()  # the loop was busy for so long that nobody has closed it, or has noticed the engine's end
        return None

    def put_back(self, connection: Connection) -> None:
        connection.idle_since = self.loop.time()
        self._idle.setdefault(connection.address, []).append(connection)
        if self._sweep is None:
            self._sweep = self.loop.call_later(KEEPALIVE_S, self._close_old)

    def opened(self, connection: Connection) -> None:
        if self.closed:
            connection.abort()
        self._all.add(connection)

    def gone(self, connection: Connection) -> None:
        self._all.discard(connection)
        idle = self._idle.get(connection.address, [])
        with contextlib.suppress(ValueError):
            idle.remove(connection)

    def close(self) -> None:
        self.closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in self._all:
            connection.abort()

    def _close_old(self) -> None:
        self._sweep = None
        oldest = self.loop.time() - KEEPALIVE_S
        kept = []
        for connection in self._waiting():
            if connection.idle_since <= oldest:
                connection.abort()
            else:
                kept.append(connection.idle_since)
        if kept:
            self._sweep = self.loop.call_at(min(kept) + KEEPALIVE_S, self._close_old)

    def _waiting(self) -> Iterator[Connection]:
        for idle in self._idle.values():
            yield from idle


def reason_of(error: OSError) -> str:
    """The system's words where it has any, not a library's, which may quote what was sent."""
    if isinstance(error, ssl.SSLError | socket.gaierror):
        return str(error.strerror or error)
    return os.strerror(error.errno).lower() if error.errno else str(error.strerror or error)
