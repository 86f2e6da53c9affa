"""Interface of HTTP to the engines (a port), so that the client library can be changed without the router noticing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec

from ..errors import FailureKind


class EngineFailure(Exception):
    """Error: an engine did not answer. `message` names the engine's URL and says what happened."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class Detached(msgspec.Struct):
    """Detached exchange: it outlives its caller, who may be cancelled and reads then what had been sent to it."""

    stream: EngineStream | None = None


class EngineCall(msgspec.Struct, frozen=True):
    """Request to an engine over HTTP."""

    url: str
    body: bytes | None = None
    """JSON to POST; `None` makes it a GET."""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    timeout_s: float = 120.0
    """`call`: limit for the whole exchange. `open`: longest silence before the head and between chunks."""
    detached: Detached | None = None
    """Filled in when the request is sent. Then a cancelled wait does not end the exchange: whoever gave this does, by `leave()`
    and `aclose()`. A client that does not fill it in has ended the exchange itself."""


class EngineAnswer(msgspec.Struct, frozen=True):
    """Response that has been read to its end."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class EngineStream(Protocol):
    """Streaming response: its head has arrived and its body is still coming."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]:
        """Names in lower case."""

    def leave(self) -> None:
        """Has the engine notice at once that nobody waits any more. What it had sent by then can still be read."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Chunks as they come off the socket, never joined or split. Raises `EngineFailure`."""

    async def aclose(self) -> None:
        """Ends the exchange; an answer that is not complete yet is aborted, which the engine notices."""


class EngineClient(Protocol):
    """HTTP client, as the router uses it."""

    async def call(self, request: EngineCall) -> EngineAnswer:
        """Raises `EngineFailure`; any HTTP status is an answer."""

    async def open(self, request: EngineCall) -> EngineStream:
        """Returns when the head is there. Raises `EngineFailure`."""

    async def aclose(self) -> None: ...
