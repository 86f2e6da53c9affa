"""The endpoint of turns and of what else is passed to engines: a place in the queue, the router's reply, the client's answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from types import AsyncGeneratorType

from ..drive import logs
from ..drive.router import Reply, Request, Router
from ..engines.client import EngineFailure
from ..errors import ConfigError
from ..report import ReuseReport, View
from ..wire import api_of
from .access import Refusal
from .admission import Admission, Refused
from .answers import (
    JSON,
    BodyTooLarge,
    ClientGone,
    Message,
    Receive,
    Send,
    error_body,
    is_loopback,
    raw_path,
    read_body,
    refuse,
    send_whole,
    start,
    without,
)
from .tenants import Tenant

log = logging.getLogger("backhaul")

_ERROR_EVENTS = (b'data: {"error"', b"event: error")


class _OwnReport:
    """Catches the report of one request's turn. It names no conversation: that is up to the request."""

    id = ""

    def __init__(self) -> None:
        self.report: ReuseReport | None = None

    def record(self, report: ReuseReport) -> None:
        self.report = report


class TurnEndpoint:
    """Of one application."""

    def __init__(self, router: Router, admission: Admission) -> None:
        self._router = router
        self._admission = admission

    async def answer(self, scope: Message, receive: Receive, send: Send, tenant: Tenant | None = None) -> None:
        try:
            body = await read_body(scope, receive, self._router.config.max_body_bytes)
        except ClientGone:
            return
        except BodyTooLarge:
            await self._refuse_body(receive, send, scope["path"])
            return
        own = _OwnReport()
        out = Out(send, () if is_loopback(scope.get("client")) else self._router.engine_urls, scope["path"])
        answer = asyncio.ensure_future(self._admitted(_request(scope, body, own, tenant), own, out))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # The server ends, and this request has had its grace time. Its client is told, so nothing is left to cancel.
            await _cancel(answer, gone)
            await out.break_off("the router was shut down while it answered")
            return
        await _cancel(answer, gone)
        for task in (answer, gone):
            if not task.cancelled():
                task.result()

    async def _admitted(self, request: Request, own: _OwnReport, out: Out) -> None:
        """Answers once there is a place for the turn."""
        with logs.request():
            if request.method != "POST":
                await self._answer(request, own, out)
                return
            try:
                async with self._admission.turn(request.tenant):
                    await self._answer(request, own, out)
            except Refused as refused:
                await out.refused(refused)

    async def _refuse_body(self, receive: Receive, send: Send, path: str) -> None:
        message = f"the body has more than {self._router.config.max_body_bytes} bytes, the limit (max_body_bytes)"
        body = error_body(413, message, "body_too_large", api_of(path))
        await refuse(receive, send, Refusal(413, body))

    async def _answer(self, request: Request, own: _OwnReport, out: Out) -> None:
        try:
            reply = await self._router.handle(request)
        except ConfigError as error:
            await out.error(503, str(error), "not_connected")
            return
        except Exception:
            log.exception("%s %s failed, and Backhaul is at fault", request.method, request.path)
            await out.error(500, "an internal error of the router; its log has the details", "internal_error")
            return
        chunks = aiter(reply)
        try:
            await _relay(reply, chunks, own, out)
        finally:
            await reply.aclose()
            if isinstance(chunks, AsyncGeneratorType):
                await chunks.aclose()


class Out:
    """One answer on its way to its client. Error messages go without the engines' URLs to clients elsewhere."""

    def __init__(self, send: Send, withheld: Sequence[bytes], path: str) -> None:
        self._send = send
        self._api = api_of(path)
        self._withheld = withheld
        self._streaming = False
        self._complete = False

    async def whole(self, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        self._complete = True
        await send_whole(self._send, status, headers, self._shown(body) if status >= 400 else body)

    async def error(self, status: int, message: str, code: str) -> None:
        await self.whole(status, [JSON, ("x-should-retry", "false")], error_body(status, message, code, self._api))

    async def refused(self, refused: Refused) -> None:
        """The turn was not begun."""
        type_ = "rate_limit_error" if refused.status == 429 else "server_error"
        body = self._api.error(str(refused), type_=type_, code=refused.code)
        await self.whole(refused.status, [JSON, *refused.headers], body)

    async def begin(self, status: int, headers: Sequence[tuple[str, str]]) -> None:
        self._streaming = True
        await self._send(start(status, headers))

    async def chunk(self, data: bytes) -> None:
        shown = self._shown(data) if data.startswith(_ERROR_EVENTS) else data
        await self._send({"type": "http.response.body", "body": shown, "more_body": True})

    async def end(self) -> None:
        self._complete = True
        await self._send({"type": "http.response.body", "body": b""})

    async def break_off(self, message: str) -> None:
        """Ends the answer wherever it is, with an error."""
        if self._complete:
            return
        if not self._streaming:
            await self.error(503, message, "shutting_down")
            return
        await self.broken(message, "shutting_down")
        await self.end()

    async def broken(self, message: str, code: str) -> None:
        """An error event in a stream."""
        await self.chunk(self._api.error_event(message, type_="server_error", code=code))

    def _shown(self, message: bytes) -> bytes:
        return without(self._withheld, message)


async def _relay(reply: Reply, chunks: AsyncIterator[bytes], own: _OwnReport, out: Out) -> None:
    headers = _with_turn(reply.headers, own.report)
    if not _is_stream(headers):
        try:
            body = b"".join([chunk async for chunk in chunks])
        except EngineFailure as failure:
            await out.error(502, failure.message, "decode_failed")
        else:
            await out.whole(reply.status, headers, body)
        return
    await out.begin(reply.status, headers)
    try:
        async for chunk in chunks:
            await out.chunk(chunk)
    except EngineFailure as failure:
        await out.broken(failure.message, "decode_failed")
    await out.end()


async def _cancel(*tasks: asyncio.Future[None]) -> None:
    """Cancels those that are not done, and waits for them."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _request(scope: Message, body: bytes, own: _OwnReport, tenant: Tenant | None) -> Request:
    query = scope.get("query_string", b"").decode("latin-1")
    return Request(
        method=scope["method"],
        path=raw_path(scope) + (f"?{query}" if query else ""),
        headers=[(name.decode("latin-1"), _text(value)) for name, value in scope["headers"]],
        body=body,
        scope=own,
        tenant=tenant.name if tenant else "",
        view=_view(scope, tenant),
    )


def _view(scope: Message, tenant: Tenant | None) -> View:
    """What `/backhaul/conversations` shows the client of its reports, its turns' answers do too."""
    if is_loopback(scope.get("client")):
        return View.WHOLE
    return View.SUMMARY if tenant is None else View.WITHOUT_ENGINES


def _text(value: bytes) -> str:
    """A header's value as the clients write it: UTF-8, and whatever is no UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_stream(headers: Sequence[tuple[str, str]]) -> bool:
    return any(n.lower() == "content-type" and v.startswith("text/event-stream") for n, v in headers)


def _with_turn(headers: Sequence[tuple[str, str]], report: ReuseReport | None) -> list[tuple[str, str]]:
    """A refusal is a turn too, with a report that can be asked for: its answer says which."""
    out = list(headers)
    named = any(name.lower() == "x-backhaul-turn" for name, _ in out)
    if report is not None and report.conversation is not None and not named:
        out += [("x-backhaul-route", str(report.route)), ("x-backhaul-turn", str(report.turn))]
        if report.reason is not None:
            out.append(("x-backhaul-reason", str(report.reason)))
    return out
