"""Response stream of one exchange with an engine: chunks as they come, with backpressure, and a limit on silence."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

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
