"""Stands in for `backhaul_router.drive.router.Router`: answers from a script, and records what it was asked to do."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from backhaul_router.drive.router import Request
from backhaul_router.report import Reason, ReuseReport, Route

JSON = ("content-type", "application/json")
SSE = ("content-type", "text/event-stream; charset=utf-8")

Chunks = AsyncIterator[bytes]


class FakeReply:
    """A reply over an async generator of chunks; `ended` says how it ended: `complete` or `closed`."""

    def __init__(
        self, router: FakeRouter, request: Request, status: int, headers: Sequence[Any], chunks: Chunks
    ) -> None:
        self.status = status
        self.headers = list(headers)
        self.ended: str | None = None
        self._router, self._request, self._chunks = router, request, chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks:
                yield chunk
            self._end("complete")
        finally:
            self._end("closed")

    async def aclose(self) -> None:
        self._end("closed")

    def _end(self, how: str) -> None:
        if self.ended is None:
            self.ended = how
            if self._request.scope is not None:
                error = None if how == "complete" else "client_gone"
                self._request.scope.record(report(self._request.scope.id, error=error))
            self._router.reply_ended.set()


Script = Callable[["FakeRouter", Request], Awaitable[FakeReply]]


class FakeRouter:
    def __init__(self, script: Script | None = None) -> None:
        self.script = script or answer_ok
        self.requests: list[Request] = []
        self.replies: list[FakeReply] = []
        self.ended: list[str] = []
        self.endings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.closed = 0
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.reply_ended = threading.Event()
        self.was_closed = threading.Event()
        self.end_conversation_error: Exception | None = None
        self.on_report = None
        self.tracing = None

    def __repr__(self) -> str:
        return "<FakeRouter>"

    async def handle(self, request: Request) -> FakeReply:
        self.requests.append(request)
        self.loops.append(asyncio.get_running_loop())
        reply = await self.script(self, request)
        self.replies.append(reply)
        return reply

    async def end_conversation(self, conversation: str) -> None:
        await asyncio.sleep(0)  # as real releases do, so that a cancellation could get in between
        if self.end_conversation_error is not None:
            raise self.end_conversation_error
        self.ended.append(conversation)
        self.endings.put(conversation)

    async def aclose(self) -> None:
        self.closed += 1
        self.was_closed.set()


async def _chunks(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def replying(*parts: bytes, status: int = 200, headers: Sequence[tuple[str, str]] = (JSON,)) -> Script:
    """A script that answers every request with `parts`."""

    async def script(router: FakeRouter, request: Request) -> FakeReply:
        return FakeReply(router, request, status, headers, _chunks(parts))

    return script


answer_ok = replying(b'{"ok": true}')


def stalling_after(*parts: bytes) -> Script:
    """A script whose stream stops saying anything after `parts`."""

    async def chunks() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        await asyncio.Event().wait()

    async def script(router: FakeRouter, request: Request) -> FakeReply:
        return FakeReply(router, request, 200, [SSE], chunks())

    return script


async def never(router: FakeRouter, request: Request) -> FakeReply:
    """A script that never gives a head."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def report(conversation: str, **values: Any) -> ReuseReport:
    given = {"turn": 1, "route": Route.COLD, "reason": Reason.FIRST_TURN, "prompt": 100, "cached": 0, "computed": 100}
    return ReuseReport(conversation=conversation, **{**given, **values})


def event(data: Any) -> bytes:
    """One server-sent event, as vLLM writes it."""
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data, separators=(",", ":")).encode()) + b"\n\n"
