"""Reverse proxy for requests that are no turns, which a decode engine answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from urllib.parse import unquote

from .. import wire
from ..config import RouterConfig
from ..engines.client import EngineCall, EngineClient, EngineFailure, EngineStream
from ..errors import error_event
from ..fleet.engine import Role
from ..fleet.fleet import Fleet
from ..turn.effects import Headers
from ..wire import cache_salt
from ..wire.stream import EventSplitter, cleaned
from .request import Reply, Request, WholeReply, error_reply
from .run import engine_headers

_GET = ("/v1/models", "/health", "/version")
POST = (
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
)


_SALTED = ("/v1/embeddings",)
"""Of those, what runs the model, and so fills and reads an engine's prefix cache."""


def is_passed_through(method: str, path: str) -> bool:
    """Whether a request is passed on to an engine."""
    if method == "GET":
        steps = set(unquote(path).split("/"))
        return path in _GET or (path.startswith("/v1/models/") and not steps & {".", ".."})
    return method == "POST" and path in POST


async def pass_through(
    request: Request, headers: Mapping[str, str], fleet: Fleet, client: EngineClient, config: RouterConfig
) -> Reply:
    """Gives a request to a decode engine, and its answer back."""
    path = request.path.partition("?")[0]
    engine = fleet.pick(Role.DECODE)
    if engine is None:
        return error_reply(path, 503, "no decode engine is configured", code="no_engine")
    try:
        body = wire.passed_body(request.body) if request.method == "POST" else None
        if body is not None and request.tenant and path in _SALTED:
            body = cache_salt.salted_body(body, request.tenant)
    except wire.MalformedBody as error:
        return error_reply(path, 400, str(error), code="malformed_body")
    call = EngineCall(engine.url + request.path, body, engine_headers(headers, None), config.decode_timeout_s)
    try:
        stream = await client.open(call)
        if stream.headers.get("content-type", "").startswith("text/event-stream"):
            return _PassedStream(stream)
        try:
            answer = b"".join([chunk async for chunk in stream])
        finally:
            await stream.aclose()
    except EngineFailure as failure:
        return error_reply(path, 502, failure.message, code="decode_failed")
    return WholeReply(stream.status, _passed_headers(stream), wire.without_handles(answer))


def _passed_headers(stream: EngineStream) -> Headers:
    return [(name, stream.headers[name]) for name in ("content-type", "retry-after") if name in stream.headers]


class _PassedStream:
    """An engine's events as they are, without handles."""

    def __init__(self, stream: EngineStream) -> None:
        self._stream = stream
        self.status = stream.status
        self.headers = _passed_headers(stream)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        splitter = EventSplitter()
        try:
            async for chunk in self._stream:
                for event in splitter.feed(chunk):
                    yield cleaned(event)
        except EngineFailure as failure:
            yield error_event(failure.message, type_="server_error", code="decode_failed")
        finally:
            await self._stream.aclose()

    async def aclose(self) -> None:
        await self._stream.aclose()
