"""`GET /metrics` of a served router, and the audits behind some of it. Without the extra `server` it says what is missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..drive.router import Router
from ..report import ReuseReport
from .siblings import Siblings

if TYPE_CHECKING:
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
        self.siblings: Siblings | None = None
        """The other workers of this server, whose series are shown too."""
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

    async def page(self, accept: str, *, on_loopback: bool) -> Page:
        """The answer to a GET."""
        if (refusal := self.refusal(on_loopback=on_loopback)) is not None:
            return refusal
        if self.siblings is None:
            return 200, *self._metrics.page(accept)
        from .worker_metrics import page

        of_workers = {self.siblings.number: await self._families(), **await self.siblings.ask("metrics")}
        return 200, *page(accept, of_workers, await self.siblings.workers())

    def show_with(self, siblings: Siblings) -> None:
        """From now on the page of each shows those of all."""
        self.siblings = siblings
        siblings.does("metrics", self._families)

    async def _families(self) -> list[Any]:
        from .worker_metrics import families_of

        return [] if self._missing else families_of(self._metrics.registry)

    def count_lost(self, lost: Callable[[], int]) -> None:
        """Shows how many reports were lost."""
        if not self._missing:
            self._metrics.count_lost(lost)

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
