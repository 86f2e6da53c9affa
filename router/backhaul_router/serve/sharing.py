"""A facade of what served routers share on Redis beyond the ledger: reports, tenants' limits, and orders about engines."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from typing import Any

from ..drive.router import Router
from ..ledger.redis_ledger import RedisLedger
from .conversation_log import SharedRecord
from .replicas import Replicas
from .report_log import ReportLogs
from .shared_limits import SharedLimits
from .shared_reports import SharedReports


class Sharing:
    """One replica's part. `engines` says how its engines are; `worker`: which one of its server's it is."""

    def __init__(
        self, router: Router, logs: ReportLogs, engines: Callable[[], list[dict[str, Any]]], worker: int | None
    ) -> None:
        ledger = router.ledger
        if not isinstance(ledger, RedisLedger):
            raise TypeError(f"replicas share a ledger on Redis, not {ledger}")
        link, keys, replica = ledger.link, ledger.keys, uuid.uuid4().hex[:16]

        def ended(conversation: str, tenant: str) -> None:
            logs.of(tenant).forget(conversation)
            router.services.fleet.load.end_conversation(conversation, tenant)

        self.reports = SharedReports(link, keys, replica, worker)
        self.record = SharedRecord(logs, self.reports)
        self.limits = SharedLimits(link, keys, replica)
        self.replicas = Replicas(
            router,
            link,
            keys,
            replica=replica,
            name=f"{socket.gethostname()}:{os.getpid()}",
            engines=engines,
            ended=ended,
            refresh=self.limits.refresh,
        )

    async def aclose(self) -> None:
        """Tells the others what they have not been told, and leaves them."""
        await self.reports.aclose()
        await self.limits.aclose()
        await self.replicas.aclose()
