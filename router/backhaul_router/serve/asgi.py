"""The router as a bare ASGI application, for any ASGI server; `server` runs it on uvicorn.

Beside what `Router` answers there are

    GET    /health                          200 while the process is alive; engines per role, connected and configured
    GET    /ready                           200 while it can take turns, else 503 with the reason
    GET    /metrics                         what Prometheus scrapes; needs the extra `server`
    GET    /backhaul/conversations          what is on record, the conversation that was active last first
    GET    /backhaul/conversations/{id}     its reports; ?turn=N for one turn's, with &wait=S for one that is about to end
    DELETE /backhaul/conversations/{id}     ends it: what the engines hold for it is released
    POST   /backhaul/conversations/{id}/renew   keeps what they hold for another ?ttl_s=S seconds; how long it can be used
    POST   /backhaul/conversations/{id}/pause   keeps it over a pause of ?seconds=S, or releases it now

`admin` has those under /backhaul/admin.

With API keys (`tenants`) everything but /health, /ready and /metrics takes one, and those under /backhaul show and end its
tenant's conversations. Without any, they are everybody's, so they answer to loopback addresses only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from types import AsyncGeneratorType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote

import msgspec

from ..config import RouterConfig
from ..drive import logs
from ..drive.router import Reply, Request, Router
from ..drive.spans import Tracing
from ..engines.client import EngineFailure
from ..errors import ConfigError, LeaseError
from ..identity.hints import MAX_PAUSE_S, checked_pause
from ..report import WITHHELD, ReuseReport, View
from ..wire import Endpoint, api_of
from ..wire.endpoint import Api
from .access import Refusal, admit, refusal_of_head, refusal_of_key, refusal_of_turn
from .admin import MAX_BODY_BYTES as MAX_ADMIN_BYTES
from .admin import PATH as ADMIN
from .admin import Admin
from .admission import Admission, Limits, Refused
from .conversation_log import OwnRecord, Record
from .metrics_page import AUDIT_EVERY_S, MetricsPage
from .metrics_page import PATH as METRICS
from .readiness import readiness
from .report_log import ReportLogs
from .team import TeamError
from .tenants import NO_TENANTS, Tenant, Tenants

if TYPE_CHECKING:
    from .team_app import Colleagues

log = logging.getLogger("backhaul")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CONVERSATIONS = "/backhaul/conversations"
MAX_WAIT_S = 5.0
_MOST_TURNS = 2**53
"""No conversation has so many; workers can still tell each other such a number."""
_LINGER_S = 2.0
"""How long a refused body is still read and thrown away: a client that is writing sees the refusal only afterwards."""

_JSON = ("content-type", "application/json")
_OPENAI = Endpoint.CHAT.api
_ERROR_EVENTS = (b'data: {"error"', b"event: error")


class _ClientGone(Exception):
    """The client left before its request was complete."""


class _BodyTooLarge(Exception):
    """The request's body exceeds the limit, of which no more than the limit was read."""


class _OwnReport:
    """Catches the report of one request's turn. It names no conversation: that is up to the request."""

    id = ""

    def __init__(self) -> None:
        self.report: ReuseReport | None = None

    def record(self, report: ReuseReport) -> None:
        self.report = report


class App:
    """An ASGI application over a router. Made by `make_app`; its lifespan connects the router and closes it."""

    def __init__(
        self,
        router: Router,
        reports: ReportLogs,
        tenants: Tenants = NO_TENANTS,
        metrics: MetricsPage | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.router = router
        self.reports = reports
        self.tenants = tenants
        """May be replaced while the application runs: the next request is asked for a key of the new ones."""
        self.metrics = metrics
        self.admission = Admission(limits)
        self.admin = Admin(router)
        self.record: Record = OwnRecord(reports)
        self.team: Colleagues | None = None
        """The other processes that serve the same address, where there are any."""
        self.stopping = False
        """Requests are answered as before, but new ones had better go elsewhere."""

    def __repr__(self) -> str:
        return f"<App {self.router} {self.reports}>"

    async def connect(self) -> None:
        """Connects the router, and begins what runs beside it. Raises `ConfigError`."""
        await self.router.connect()
        if self.metrics is not None and self.team is None:  # one of several knows a part of what the engines count
            self.metrics.start()

    async def aclose(self) -> None:
        """Ends that, and closes the router."""
        try:
            if self.metrics is not None:
                await self.metrics.aclose()
            await self.admin.aclose()
        finally:
            await self.router.aclose()
            if self.router.tracing is not None:
                await asyncio.to_thread(self.router.tracing.shutdown)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            raise RuntimeError(f"Backhaul serves HTTP, not {scope['type']}")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.connect()
                except ConfigError as error:
                    await self.aclose()
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if self.stopping:
            send = _closing(send)
        if (refusal := refusal_of_head(path, scope["headers"])) is not None:
            await self._refuse(receive, send, refusal)
        elif path == "/health" and scope["method"] == "GET":
            await self._health(send)
        elif path == "/ready" and scope["method"] == "GET":
            ready = await readiness(self.router, stopping=self.stopping)
            await _send_json(send, ready.status, ready.to_dict())
        elif path == ADMIN or path.startswith(f"{ADMIN}/"):
            await self._administer(scope, receive, send)
        elif path == METRICS and scope["method"] == "GET" and self.metrics is not None:
            await self._metrics(self.metrics, scope, send)
        elif self.tenants:
            await self._for_tenant(scope, receive, send)
        elif path == "/backhaul" or path.startswith("/backhaul/"):
            await self._backhaul(scope, send)
        else:
            await self._routed(scope, receive, send)

    async def _for_tenant(self, scope: Message, receive: Receive, send: Send) -> None:
        """A request whose key says whose it is; from here on nobody sees the key."""
        path = scope["path"]
        tenant, headers = admit(self.tenants, path, scope["headers"])
        scope = {**scope, "headers": headers}
        if tenant is None:
            await self._refuse(receive, send, refusal_of_key(path))
        elif path == "/backhaul" or path.startswith("/backhaul/"):
            await self._backhaul(scope, send, tenant)
        elif scope["method"] != "POST":
            await self._routed(scope, receive, send, tenant)
        else:
            try:
                with self.admission.request(tenant.name, tenant.max_concurrent_turns):
                    await self._routed(scope, receive, send, tenant)
            except Refused as refused:
                await self._refuse(receive, send, refusal_of_turn(path, refused))

    # --- what the router answers

    async def _routed(self, scope: Message, receive: Receive, send: Send, tenant: Tenant | None = None) -> None:
        try:
            body = await self._body(scope, receive)
        except _ClientGone:
            return
        except _BodyTooLarge:
            await self._refuse_body(receive, send, scope["path"])
            return
        own = _OwnReport()
        out = _Out(send, () if is_loopback(scope.get("client")) else self.router.engine_urls, scope["path"])
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

    async def _admitted(self, request: Request, own: _OwnReport, out: _Out) -> None:
        """Answers once there is a place for the turn."""
        with logs.request():
            if request.method != "POST":
                await self._answer(request, own, out)
                return
            try:
                async with self.admission.turn(request.tenant):
                    await self._answer(request, own, out)
            except Refused as refused:
                await out.refused(refused)

    async def _body(self, scope: Message, receive: Receive, limit: int | None = None) -> bytes:
        limit = self.router.config.max_body_bytes if limit is None else limit
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > limit:
                raise _BodyTooLarge
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _BodyTooLarge
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _refuse_body(self, receive: Receive, send: Send, path: str) -> None:
        message = f"the body has more than {self.router.config.max_body_bytes} bytes, the limit (max_body_bytes)"
        body = _error(413, message, "body_too_large", api_of(path))
        await self._refuse(receive, send, Refusal(413, body))

    async def _refuse(self, receive: Receive, send: Send, refusal: Refusal) -> None:
        """Answers without having read the body, which is thrown away."""
        body = refusal.body
        again = "true" if refusal.retry else "false"
        headers = [_JSON, ("x-should-retry", again), ("connection", "close"), *refusal.headers]
        await send(_start(refusal.status, [*headers, ("content-length", str(len(body)))]))
        await send({"type": "http.response.body", "body": body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})

    async def _answer(self, request: Request, own: _OwnReport, out: _Out) -> None:
        try:
            if self.team is not None:
                await self.team.learn(request)
            reply = await self.router.handle(request)
        except TeamError as error:
            await out.error(503, str(error), "workers_unavailable")
            return
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

    # --- what the server answers

    async def _health(self, send: Send) -> None:
        config = self.router.config
        try:
            fleet = self.router.fleet
        except RuntimeError:
            prefill, decode = 0, 0
        else:
            prefill, decode = len(fleet.prefill), len(fleet.decode)
        state: dict[str, Any] = {
            "status": "ok",
            "prefill": {"connected": prefill, "configured": len(config.prefill)},
            "decode": {"connected": decode, "configured": len(config.decode)},
        }
        if self.team is not None:
            state.update(self.team.name)
        await _send_json(send, 200, state)

    async def _metrics(self, metrics: MetricsPage, scope: Message, send: Send) -> None:
        accept = ",".join(value.decode("latin-1") for name, value in scope["headers"] if name == b"accept")
        on_loopback = is_loopback(scope.get("client"))
        if self.team is None:
            status, body, content_type = metrics.page(accept, on_loopback=on_loopback)
        else:
            try:
                status, body, content_type = await self.team.metrics_page(metrics, accept, on_loopback=on_loopback)
            except TeamError as error:
                status, body, content_type = 503, f"{error}\n".encode(), "text/plain; charset=utf-8"
        await _send_whole(send, status, [("content-type", content_type), ("cache-control", "no-store")], body)

    async def _administer(self, scope: Message, receive: Receive, send: Send) -> None:
        answer = self.admin.refusal(scope["headers"], on_loopback=is_loopback(scope.get("client")))
        if answer is not None:
            headers = (*answer.headers, ("cache-control", "no-store"))
            await self._refuse(receive, send, Refusal(answer.status, msgspec.json.encode(answer.value), headers))
            return
        try:
            body = await self._body(scope, receive, MAX_ADMIN_BYTES)
        except _ClientGone:
            return
        except _BodyTooLarge:
            too_large = f"the body has more than {MAX_ADMIN_BYTES} bytes"
            await self._refuse(receive, send, Refusal(413, _error(413, too_large, "body_too_large")))
            return
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        try:
            admin = self.admin if self.team is None else self.team.admin
            answer = await admin.answer(scope["method"], scope["path"], query, body)
        except TeamError as error:
            await _send_error(send, 503, str(error), "workers_unavailable")
            return
        except Exception:
            log.exception("%s %s failed, and Backhaul is at fault", scope["method"], scope["path"])
            await _send_error(send, 500, "an internal error of the router; its log has the details", "internal_error")
            return
        await _send_json(send, answer.status, answer.value)

    async def _backhaul(self, scope: Message, send: Send, tenant: Tenant | None = None) -> None:
        here = is_loopback(scope.get("client"))
        if not here and tenant is not None:
            send = _withholding(send, self.router.engine_urls)
        elif not here:
            await _send_error(send, 403, "/backhaul answers to clients on the router's own machine only", "forbidden")
            return
        try:
            await self._of_conversations(scope, send, tenant.name if tenant else "")
        except TeamError as error:
            await _send_error(send, 503, str(error), "workers_unavailable")

    async def _of_conversations(self, scope: Message, send: Send, whose: str) -> None:
        method, path = scope["method"], _raw_path(scope)
        _, found, name = path.partition(f"{CONVERSATIONS}/")
        of, _, verb = name.rpartition("/")
        if path == CONVERSATIONS and method == "GET":
            await _send_json(send, 200, {"conversations": await self.record.listed(whose)})
        elif found and name and method == "GET":
            await self._show(unquote(name), parse_qs(scope.get("query_string", b"").decode("latin-1")), send, whose)
        elif found and name and method == "DELETE":
            await self._end(unquote(name), send, whose)
        elif of and verb in ("renew", "pause") and method == "POST":
            await self._keep(unquote(of), verb, parse_qs(scope.get("query_string", b"").decode("latin-1")), send, whose)
        elif path == CONVERSATIONS or (found and name):
            await _send_error(send, 405, f"{method} is not for {path}", "method_not_allowed")
        else:
            await _send_error(send, 404, f"{path} is not there; see {CONVERSATIONS}", "not_found")

    async def _show(self, conversation: str, query: dict[str, list[str]], send: Send, whose: str) -> None:
        try:
            turn = int(query["turn"][-1]) if "turn" in query else None
            wait_s = float(query.get("wait", ["0"])[-1])
            if not (turn is None or 1 <= turn <= _MOST_TURNS) or math.isnan(wait_s):
                raise ValueError
        except ValueError:
            rule = f"turn= takes a number from 1 to {_MOST_TURNS}, and wait= a number of seconds"
            await _send_error(send, 400, rule, "malformed_query")
            return
        wait_s = min(max(wait_s, 0.0), MAX_WAIT_S)
        shown = await self.record.shown(whose, conversation, turn, wait_s)
        if shown is None:
            await _send_unknown(send, conversation)
            return
        await _send_json(send, 200, shown)

    async def _keep(self, conversation: str, verb: str, query: dict[str, list[str]], send: Send, whose: str) -> None:
        """`renew` and `pause`. What is not on record has nothing that could be kept, which the answers say."""
        name = "ttl_s" if verb == "renew" else "seconds"
        try:
            given = checked_pause(float(query[name][-1])) if name in query or verb == "pause" else None
        except (KeyError, ValueError):
            rule = f"{name}= takes a number of seconds above 0 and at most {MAX_PAUSE_S:,.0f}"
            await _send_error(send, 400, rule, "malformed_query")
            return
        try:
            if verb == "pause" and given is not None:
                await _send_json(send, 200, await self.router.pause(conversation, given, whose))
            else:
                await _send_json(send, 200, {"remaining_s": await self.router.renew(conversation, given, whose)})
        except LeaseError as error:
            await _send_error(send, 502, str(error), "lease_failed")

    async def _end(self, conversation: str, send: Send, whose: str) -> None:
        known = await self.record.forget(whose, conversation)
        await self.router.end_conversation(conversation, whose)
        if known:
            await send(_start(204, []))
            await send({"type": "http.response.body", "body": b""})
        else:
            await _send_unknown(send, conversation)


class _Out:
    """One answer on its way to its client. Error messages go without the engines' URLs to clients elsewhere."""

    def __init__(self, send: Send, withheld: Sequence[bytes], path: str) -> None:
        self._send = send
        self._api = api_of(path)
        self._withheld = withheld
        self._streaming = False
        self._complete = False

    async def whole(self, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        self._complete = True
        await _send_whole(self._send, status, headers, self._shown(body) if status >= 400 else body)

    async def error(self, status: int, message: str, code: str) -> None:
        await self.whole(status, [_JSON, ("x-should-retry", "false")], _error(status, message, code, self._api))

    async def refused(self, refused: Refused) -> None:
        """The turn was not begun."""
        type_ = "rate_limit_error" if refused.status == 429 else "server_error"
        body = self._api.error(str(refused), type_=type_, code=refused.code)
        await self.whole(refused.status, [_JSON, *refused.headers], body)

    async def begin(self, status: int, headers: Sequence[tuple[str, str]]) -> None:
        self._streaming = True
        await self._send(_start(status, headers))

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
        return _without(self._withheld, message)


async def _relay(reply: Reply, chunks: AsyncIterator[bytes], own: _OwnReport, out: _Out) -> None:
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


def _without(urls: Sequence[bytes], message: bytes) -> bytes:
    for url in urls:
        message = message.replace(url, WITHHELD.encode())
    return message


async def _cancel(*tasks: asyncio.Future[None]) -> None:
    """Cancels those that are not done, and waits for them."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def make_app(
    config: RouterConfig,
    tenants: Tenants = NO_TENANTS,
    *,
    metrics_public: bool = True,
    tracing: Tracing | None = None,
    audit_every_s: float = AUDIT_EVERY_S,
    limits: Limits | None = None,
    log_turns: bool = True,
) -> App:
    """An application with a router of its own, which an ASGI server's lifespan connects and closes. With `tenants` every
    request takes one of their keys. Without `metrics_public` `/metrics` answers to loopback addresses only. With `log_turns`
    each turn is a line in the log (`backhaul.turns`, INFO). `tracing` is shut down with the application."""
    reports = ReportLogs()
    router = Router(config, tracing=tracing)
    metrics = MetricsPage(router, public=metrics_public, audit_every_s=audit_every_s)

    def record(report: ReuseReport) -> None:
        reports.record(report)
        metrics.record(report)
        if log_turns:
            logs.log_turn(report)

    router.on_report = record
    return App(router, reports, tenants, metrics, limits)


def is_loopback(client: Sequence[Any] | None) -> bool:
    """Whether an ASGI `client` (host and port) is on this machine. One that the server does not know is not."""
    try:
        address = ipaddress.ip_address(str(client[0]).partition("%")[0]) if client else None
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address is not None and address.is_loopback


def _closing(send: Send) -> Send:
    """Has the client make another connection for its next request, and so ask the load balancer in between."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [(name, value) for name, value in message.get("headers", ()) if name.lower() != b"connection"]
            message = {**message, "headers": [*kept, (b"connection", b"close")]}
        await send(message)

    return closing


def _withholding(send: Send, urls: Sequence[bytes]) -> Send:
    """Takes the engines' URLs, which are nothing to clients elsewhere, out of an answer whose body is sent at once."""
    head: Message = {}

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            head.update(message)
            return
        body = _without(urls, message["body"])
        length = [(b"content-length", str(len(body)).encode())] if body else []
        headers = [(name, value) for name, value in head["headers"] if name != b"content-length"]
        await send({**head, "headers": headers + length})
        await send({**message, "body": body})

    return sent


def _request(scope: Message, body: bytes, own: _OwnReport, tenant: Tenant | None) -> Request:
    query = scope.get("query_string", b"").decode("latin-1")
    return Request(
        method=scope["method"],
        path=_raw_path(scope) + (f"?{query}" if query else ""),
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


def _raw_path(scope: Message) -> str:
    raw: bytes | None = scope.get("raw_path")
    return quote(scope["path"]) if raw is None else raw.partition(b"?")[0].decode("latin-1")


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


def _start(status: int, headers: Sequence[tuple[str, str]]) -> Message:
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
    return {"type": "http.response.start", "status": status, "headers": encoded}


async def _send_whole(send: Send, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
    await send(_start(status, [*headers, ("content-length", str(len(body)))]))
    await send({"type": "http.response.body", "body": body})


async def _send_json(send: Send, status: int, value: object) -> None:
    await _send_whole(send, status, [_JSON, ("cache-control", "no-store")], msgspec.json.encode(value))


async def _send_error(send: Send, status: int, message: str, code: str) -> None:
    await _send_whole(send, status, [_JSON], _error(status, message, code))


def _error(status: int, message: str, code: str, api: Api = _OPENAI) -> bytes:
    type_ = "server_error" if status >= 500 else "invalid_request_error"
    return api.error(message, type_=type_, code=code)


async def _send_unknown(send: Send, conversation: str) -> None:
    await _send_error(send, 404, f"no conversation {conversation!r} is on record here", "unknown_conversation")
