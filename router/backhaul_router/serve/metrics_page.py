"""`GET /metrics` of a served router, and the audits behind some of it. Without the extra `server` it says what is missing."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ..drive.router import Router
from ..report import ReuseReport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from .metrics import RouterCollector, RouterMetrics

log = logging.getLogger("backhaul")

PATH = "/metrics"
AUDIT_EVERY_S = 60.0

Page = tuple[int, bytes, str]
"""Status, body, content type."""


class MetricsPage:
    """The metrics of one router. `public`: whether clients on other hosts get them, as Prometheus is one."""

    def __init__(self, router: Router, *, public: bool = True, audit_every_s: float = AUDIT_EVERY_S) -> None:
        self.public = public
        self._router = router
        self._audit_every_s = audit_every_s
        self._audits: asyncio.Task[None] | None = None
        self._missing = ""
        try:
            from .metrics import RouterMetrics
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "prometheus_client":
                raise
            self._missing = f"{PATH} needs {error.name}: pip install 'backhaul[server]'"
            return
        self._metrics: RouterMetrics = RouterMetrics()
        self._collector: RouterCollector = self._metrics.watch(router)

    def record(self, report: ReuseReport) -> None:
        if not self._missing:
            self._metrics.record(report)

    def page(self, accept: str, *, on_loopback: bool) -> Page:
        """The answer to a GET."""
        return self.refusal(on_loopback=on_loopback) or (200, *self._metrics.page(accept))

    @property
    def registry(self) -> CollectorRegistry | None:
        """What the series are in; `None` without the extra."""
        return None if self._missing else self._metrics.registry

    def refusal(self, *, on_loopback: bool) -> Page | None:
        """The answer to a GET that gets no metrics."""
        if not self.public and not on_loopback:
            return 403, b"/metrics answers to clients on the router's own machine only\n", "text/plain; charset=utf-8"
        if self._missing:
            return 501, f"{self._missing}\n".encode(), "text/plain; charset=utf-8"
        return None

    def start(self) -> None:
        """Begins to audit the engines now and then, on the running event loop."""
        if not self._missing and self._audits is None:
            self._audits = asyncio.get_running_loop().create_task(self._audit())
            self._audits.add_done_callback(_say_why_it_ended)

    async def aclose(self) -> None:
        """Ends the audits; before the router is closed."""
        if self._audits is not None:
            self._audits.cancel()
            await asyncio.wait((self._audits,))

    async def _audit(self) -> None:
        while True:
            await asyncio.sleep(self._audit_every_s)
            self._collector.audited(await self._router.audit())


def _say_why_it_ended(audits: asyncio.Task[None]) -> None:
    if not audits.cancelled() and (failure := audits.exception()) is not None:
        log.error("the engines are not audited any more, and Backhaul is at fault", exc_info=failure)
