"""What a server shows of conversations: the reports that it has on record, and those that others have of the same conversations.

`OwnRecord` is that of one process. Several that share a ledger each have the turns that ran there; `joined` puts them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from .report_log import Recorded, ReportLog, ReportLogs

_SUMS = ("turns", "prompt", "reused", "computed", "offered", "generated", "errors")
_KNOWN = ("known_prompt", "known_cached")
"""Of the turns that `hit_rate` is about; not shown."""
_MOST_REPORTS = 100

Shown = dict[str, Any]
"""A conversation as JSON types: `id`, `last_active`, `total`, and its `reports` where they were asked for."""


class Record(Protocol):
    """One tenant's conversations, by the tenant's name."""

    async def listed(self, whose: str) -> list[Shown]:
        """All of them without reports, the one that was active last first."""

    async def shown(self, whose: str, conversation: str, turn: int | None, wait_s: float) -> Shown | None:
        """One with the reports of all its turns or of one, for which it waits up to `wait_s`."""

    async def forget(self, whose: str, conversation: str) -> bool:
        """Whether there was anything to forget."""


class OwnRecord:
    """What this process has on record."""

    def __init__(self, logs: ReportLogs) -> None:
        self._logs = logs

    def of(self, whose: str) -> ReportLog:
        return self._logs.of(whose)

    async def listed(self, whose: str) -> list[Shown]:
        return [recorded.summary() for recorded in self._logs.of(whose).newest_first()]

    async def shown(self, whose: str, conversation: str, turn: int | None, wait_s: float) -> Shown | None:
        log = self._logs.of(whose)
        if turn is not None and wait_s:
            await log.wait_for(conversation, turn, wait_s)
        recorded = log.get(conversation)
        return None if recorded is None else whole(recorded, turn)

    async def forget(self, whose: str, conversation: str) -> bool:
        return self._logs.of(whose).forget(conversation)


def whole(recorded: Recorded, turn: int | None) -> Shown:
    reports = [report.to_dict() for report in recorded.reports if turn is None or report.turn == turn]
    return {**recorded.summary(), "reports": reports}


def to_join(recorded: Recorded, turn: int | None = None, *, reports: bool) -> Shown:
    """As `joined` takes it."""
    shown = whole(recorded, turn) if reports else recorded.summary()
    total = recorded.total
    known = dict(zip(_KNOWN, (total.known_prompt, total.known_cached), strict=True))
    return {**shown, "total": {**shown["total"], **known}}


def joined(parts: Mapping[int, Shown]) -> Shown:
    """One conversation by what each worker has on record of it; at least one has. Its reports say where the turns ran."""
    of_each = list(parts.values())
    shown = {
        "id": of_each[0]["id"],
        "last_active": max(one["last_active"] for one in of_each),
        "total": _sum([one["total"] for one in of_each]),
    }
    if "reports" in of_each[0]:
        reports = [{**report, "worker": worker} for worker, one in parts.items() for report in one["reports"]]
        shown["reports"] = sorted(reports, key=lambda report: report["turn"])[-_MOST_REPORTS:]
    return shown


def _sum(totals: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    totals = list(totals)
    total: dict[str, Any] = {name: sum(one[name] for one in totals) for name in _SUMS}
    prompt, cached = (sum(one[name] for one in totals) for name in _KNOWN)
    saved = [one["saved_ms"] for one in totals if one["saved_ms"] is not None]
    total["hit_rate"] = cached / prompt if prompt else None
    total["saved_ms"] = sum(saved) if saved else None
    for name in ("routes", "reasons"):
        counts: Counter[str] = Counter()
        for one in totals:
            counts.update(one[name])
        total[name] = dict(counts)
    return total
