"""The last reports of each conversation and their running totals: what a server can be asked after a turn.

Bounded twice: so many reports of a conversation, so many conversations, of which the one that was silent for longest goes
first; at most half of them are without a name. Totals count every turn, also those whose report is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..report import ReuseReport

MAX_CONVERSATIONS = 1_000
MAX_REPORTS = 100
"""Of each conversation."""


@dataclass
class Total:
    """A conversation so far, in the words of the SDK's `ReuseTotal`."""

    turns: int = 0
    prompt: int = 0
    reused: int = 0
    computed: int = 0
    offered: int = 0
    generated: int = 0
    errors: int = 0
    """Turns that ended early, by whoever's fault."""
    saved_ms: float | None = None
    routes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    known_prompt: int = 0
    known_cached: int = 0

    @property
    def hit_rate(self) -> float | None:
        """`reused / prompt` over the turns that know both; `None` when none does."""
        return self.known_cached / self.known_prompt if self.known_prompt else None

    def add(self, report: ReuseReport) -> None:
        self.turns += 1
        self.prompt += report.prompt or 0
        self.reused += report.reused
        self.computed += report.computed or 0
        self.offered += report.offered
        self.generated += report.generated or 0
        self.errors += report.error is not None
        self.routes[str(report.route)] += 1
        if report.reason is not None:
            self.reasons[str(report.reason)] += 1
        if report.saved_ms is not None:
            self.saved_ms = (self.saved_ms or 0.0) + report.saved_ms
        if report.prompt and report.cached is not None:
            self.known_prompt += report.prompt
            self.known_cached += report.cached

    def sums(self) -> dict[str, Any]:
        """What can be added up over conversations' parts, as JSON types."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        return {**known, "routes": dict(self.routes), "reasons": dict(self.reasons)}

    @classmethod
    def of_sums(cls, sums: Mapping[str, Any]) -> Total:
        """As `sums` gave it, or several of them added up."""
        return cls(**{**sums, "routes": Counter(sums.get("routes")), "reasons": Counter(sums.get("reasons"))})

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        names = ("turns", "prompt", "reused", "computed", "offered", "generated", "errors", "hit_rate", "saved_ms")
        numbers = {name: getattr(self, name) for name in names}
        return {**numbers, "routes": dict(self.routes), "reasons": dict(self.reasons)}


@dataclass
class Recorded:
    """What is on record of one conversation."""

    id: str
    reports: deque[ReuseReport]
    """The last ones, in the order in which their turns ended."""
    total: Total = field(default_factory=Total)
    last_active: float = 0.0
    """When its last turn ended, in seconds of the log's clock."""

    def summary(self) -> dict[str, Any]:
        return {"id": self.id, "last_active": self.last_active, "total": self.total.to_dict()}


class ReportLog:
    """Takes a router's reports (`Router(on_report=log.record)`). Belongs to one event loop."""

    def __init__(
        self,
        *,
        max_conversations: int = MAX_CONVERSATIONS,
        max_reports: int = MAX_REPORTS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_conversations = max_conversations
        self._max_reports = max_reports
        self._clock = clock
        self._recorded: OrderedDict[str, Recorded] = OrderedDict()
        self._unnamed: OrderedDict[str, None] = OrderedDict()
        self._awaited: dict[tuple[str, int], set[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def __repr__(self) -> str:
        return f"<ReportLog of {len(self)} conversations>"

    def record(self, report: ReuseReport) -> None:
        """Keeps a report; one without a conversation is nothing that anybody could ask for."""
        if report.conversation is None:
            return
        recorded = self._recorded.get(report.conversation)
        if recorded is None:
            recorded = Recorded(report.conversation, deque(maxlen=self._max_reports))
            self._recorded[report.conversation] = recorded
        self._recorded.move_to_end(report.conversation)
        recorded.reports.append(report)
        recorded.total.add(report)
        recorded.last_active = self._clock()
        if report.identity_source == "history":
            self._unnamed[report.conversation] = None
            self._unnamed.move_to_end(report.conversation)
        if len(self._unnamed) > max(1, self._max_conversations // 2):
            self.forget(next(iter(self._unnamed)))
        while len(self._recorded) > self._max_conversations:
            self.forget(next(iter(self._recorded)))
        for waiter in self._awaited.pop((report.conversation, report.turn), ()):
            if not waiter.done():
                waiter.set_result(None)

    def get(self, conversation: str) -> Recorded | None:
        return self._recorded.get(conversation)

    def newest_first(self) -> list[Recorded]:
        return list(reversed(self._recorded.values()))

    def forget(self, conversation: str) -> bool:
        """Whether there was anything to forget."""
        self._unnamed.pop(conversation, None)
        return self._recorded.pop(conversation, None) is not None

    def has(self, conversation: str, turn: int) -> bool:
        recorded = self._recorded.get(conversation)
        return recorded is not None and any(report.turn == turn for report in recorded.reports)

    async def wait_for(self, conversation: str, turn: int, limit_s: float) -> None:
        """Returns when the turn's report is there, or after `limit_s`: a client that leaves early hears of its turn."""
        if self.has(conversation, turn):
            return
        key = (conversation, turn)
        waiter = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(key, set()).add(waiter)
        try:
            await asyncio.wait((waiter,), timeout=limit_s)
        finally:
            waiters = self._awaited.get(key)
            if waiters is not None:
                waiters.discard(waiter)
                if not waiters:
                    del self._awaited[key]


class ReportLogs:
    """A log for each tenant, so that none of them sees or crowds out another's; where there are no tenants, one for all."""

    def __init__(self, make: Callable[[], ReportLog] = ReportLog) -> None:
        self._make = make
        self._logs: dict[str, ReportLog] = {}

    def __repr__(self) -> str:
        return f"<ReportLogs of {sum(map(len, self._logs.values()))} conversations>"

    def of(self, tenant: str = "") -> ReportLog:
        """One tenant's."""
        log = self._logs.get(tenant)
        if log is None:
            log = self._logs[tenant] = self._make()
        return log

    def record(self, report: ReuseReport) -> None:
        """Keeps a report in its tenant's log."""
        self.of(report.tenant).record(report)
