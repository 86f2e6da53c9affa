"""Request and reply of a router, whatever HTTP library or server they come through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from .. import wire
from ..identity.hints import NO_HINTS, Hints
from ..identity.ids import Identity
from ..identity.scope import ConversationScope
from ..report import Route, View
from ..turn.effects import Headers


class Request(msgspec.Struct, frozen=True):
    """Request: what a client sent."""

    method: str
    path: str
    """Path below the host with its query, such as `/v1/chat/completions`."""
    headers: Sequence[tuple[str, str]]
    body: bytes = b""
    scope: ConversationScope | None = None
    """The conversation that the calling code is in; explicit ids in the request go before it."""
    route: Route | None = None
    """Overrides the configured route for this turn."""
    hints: Hints = NO_HINTS
    """Those of the calling code; the request's own headers go before them."""
    framework: Identity | None = None
    """What the framework around the calling code says (`frameworks.discover`); the scope goes before it."""
    tenant: str = ""
    """Whose it is: nothing is shared with or found by requests of another tenant (`cache_salt`)."""
    view: View = View.WHOLE
    """What the client may see of its turn's report."""


class Reply(Protocol):
    """Streaming reply that the client gets. It must be iterated to its end or closed: closing early aborts the engines."""

    status: int
    headers: Sequence[tuple[str, str]]

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    async def aclose(self) -> None: ...


class WholeReply:
    """Reply whose body is known."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._body

    async def aclose(self) -> None:
        pass


def error_reply(path: str, status: int, message: str, *, code: str, param: str | None = None) -> WholeReply:
    """An error of ours, in the shape of the API that the path belongs to."""
    type_ = "invalid_request_error" if status < 500 else "server_error"
    body = wire.api_of(path).error(message, type_=type_, code=code, param=param)
    return WholeReply(status, (("content-type", "application/json"), ("x-should-retry", "false")), body)
