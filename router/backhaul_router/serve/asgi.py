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
import logging
from typing import Any
from urllib.parse import parse_qs

import msgspec

from ..config import RouterConfig
from ..drive import logs
from ..drive.router import Router
from ..drive.run import Tracing
from ..errors import ConfigError
from ..report import ReuseReport
from .access import Refusal, admit, refusal_of_head, refusal_of_key, refusal_of_turn
from .admin import MAX_BODY_BYTES as MAX_ADMIN_BYTES
from .admin import PATH as ADMIN
from .admin import Admin
from .admission import Admission, Limits, Refused
from .answers import (
    BodyTooLarge,
    ClientGone,
    Message,
    Receive,
    Send,
    closing,
    error_body,
    is_loopback,
    read_body,
    refuse,
    send_error,
    send_json,
    send_whole,
)
from .conversation_endpoints import ConversationEndpoints
from .conversation_log import OwnRecord
from .metrics_page import AUDIT_EVERY_S, MetricsPage
from .metrics_page import PATH as METRICS
from .readiness import readiness
from .report_log import ReportLogs
from .sharing import Sharing
from .siblings import Siblings
from .tenants import NO_TENANTS, Tenants
from .turn_endpoint import TurnEndpoint

log = logging.getLogger("backhaul")


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
        self._turns = TurnEndpoint(router, self.admission)
        self._conversations = ConversationEndpoints(router, OwnRecord(reports))
        self._sharing: Sharing | None = None
        self._siblings: Siblings | None = None
        self.stopping = False
        """Requests are answered as before, but new ones had better go elsewhere."""

    def __repr__(self) -> str:
        return f"<App {self.router} {self.reports}>"

    def share(self, sharing: Sharing) -> None:
        """From now on it answers for all replicas, and they for it."""
        self._sharing = sharing
        self._conversations.record = sharing.record
        self.admission.shared = sharing.limits
        self.admin.replicas = sharing.replicas

    def join(self, siblings: Siblings) -> None:
        """It is one of several workers from now on."""
        self._siblings = self.admin.siblings = siblings
        siblings.does("reload", self.admin.reload_too)
        if self.metrics is not None:
            self.metrics.show_with(siblings)

    async def connect(self) -> None:
        """Connects the router, and begins what runs beside it. Raises `ConfigError`."""
        if self._sharing is not None:
            await self._sharing.replicas.begin()
        await self.router.connect()
        if self._sharing is not None:
            self._sharing.replicas.start()
        elif self.metrics is not None:  # one of several replicas knows a part of what the engines count
            self.metrics.start()
        if self._siblings is not None:
            await self._siblings.start()

    async def aclose(self) -> None:
        """Ends that, and closes the router."""
        try:
            if self._siblings is not None:
                await self._siblings.aclose()
            if self.metrics is not None:
                await self.metrics.aclose()
            await self.admin.aclose()
            if self._sharing is not None:
                await self._sharing.aclose()
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
            send = closing(send)
        if (refusal := refusal_of_head(path, scope["headers"])) is not None:
            await refuse(receive, send, refusal)
        elif path == "/health" and scope["method"] == "GET":
            await self._health(send)
        elif path == "/ready" and scope["method"] == "GET":
            ready = await readiness(self.router, stopping=self.stopping)
            await send_json(send, ready.status, ready.to_dict())
        elif path == ADMIN or path.startswith(f"{ADMIN}/"):
            await self._administer(scope, receive, send)
        elif path == METRICS and scope["method"] == "GET" and self.metrics is not None:
            await self._metrics(self.metrics, scope, send)
        elif self.tenants:
            await self._for_tenant(scope, receive, send)
        elif path == "/backhaul" or path.startswith("/backhaul/"):
            await self._conversations.answer(scope, send)
        else:
            await self._turns.answer(scope, receive, send)

    async def _for_tenant(self, scope: Message, receive: Receive, send: Send) -> None:
        """A request whose key says whose it is; from here on nobody sees the key."""
        path = scope["path"]
        tenant, headers = admit(self.tenants, path, scope["headers"])
        scope = {**scope, "headers": headers}
        if tenant is None:
            await refuse(receive, send, refusal_of_key(path))
        elif path == "/backhaul" or path.startswith("/backhaul/"):
            await self._conversations.answer(scope, send, tenant)
        elif scope["method"] != "POST":
            await self._turns.answer(scope, receive, send, tenant)
        else:
            try:
                async with self.admission.request(tenant.name, tenant.max_concurrent_turns):
                    await self._turns.answer(scope, receive, send, tenant)
            except Refused as refused:
                await refuse(receive, send, refusal_of_turn(path, refused))

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
        if self._siblings is not None:
            state["worker"] = self._siblings.number
        await send_json(send, 200, state)

    async def _metrics(self, metrics: MetricsPage, scope: Message, send: Send) -> None:
        accept = ",".join(value.decode("latin-1") for name, value in scope["headers"] if name == b"accept")
        status, body, content_type = await metrics.page(accept, on_loopback=is_loopback(scope.get("client")))
        await send_whole(send, status, [("content-type", content_type), ("cache-control", "no-store")], body)

    async def _administer(self, scope: Message, receive: Receive, send: Send) -> None:
        answer = self.admin.refusal(scope["headers"], on_loopback=is_loopback(scope.get("client")))
        if answer is not None:
            headers = (*answer.headers, ("cache-control", "no-store"))
            await refuse(receive, send, Refusal(answer.status, msgspec.json.encode(answer.value), headers))
            return
        try:
            body = await read_body(scope, receive, MAX_ADMIN_BYTES)
        except ClientGone:
            return
        except BodyTooLarge:
            too_large = f"the body has more than {MAX_ADMIN_BYTES} bytes"
            await refuse(receive, send, Refusal(413, error_body(413, too_large, "body_too_large")))
            return
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        try:
            answer = await self.admin.answer(scope["method"], scope["path"], query, body)
        except Exception:
            log.exception("%s %s failed, and Backhaul is at fault", scope["method"], scope["path"])
            await send_error(send, 500, "an internal error of the router; its log has the details", "internal_error")
            return
        await send_json(send, answer.status, answer.value)


def make_app(
    config: RouterConfig,
    tenants: Tenants = NO_TENANTS,
    *,
    metrics_public: bool = True,
    tracing: Tracing | None = None,
    audit_every_s: float = AUDIT_EVERY_S,
    limits: Limits | None = None,
    log_turns: bool = True,
    worker: int | None = None,
) -> App:
    """An application with a router of its own, which an ASGI server's lifespan connects and closes. With `tenants` every
    request takes one of their keys. Without `metrics_public` `/metrics` answers to loopback addresses only. With `log_turns`
    each turn is a line in the log (`backhaul.turns`, INFO). `tracing` is shut down with the application. With a `redis_url` it is
    one of all replicas there, which answer for each other; `worker`: which of its server's, as its reports say."""
    reports = ReportLogs()
    router = Router(config, tracing=tracing)
    metrics = MetricsPage(router, public=metrics_public, audit_every_s=audit_every_s)

    app = App(router, reports, tenants, metrics, limits)
    sharing = None
    if config.redis_url is not None:
        sharing = Sharing(router, reports, app.admin.engines, worker)
        metrics.count_lost(lambda: sharing.reports.lost)
        app.share(sharing)

    def record(report: ReuseReport) -> None:
        reports.record(report)
        if sharing is not None:
            sharing.reports.record(report)
        metrics.record(report)
        if log_turns:
            logs.log_turn(report)

    router.on_report = record
    return app
