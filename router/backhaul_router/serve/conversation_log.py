"""Repositories of conversations, as the endpoints ask them: what this process has on record, or what all have on Redis."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from ..identity.ids import fits
from ..ledger.redis_link import LedgerUnavailable
from .report_log import ReportLogs
from .shared_reports import SharedReports

_LOOK_S = 0.05
"""How often others are asked for a report that is waited for."""

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

    async def listed(self, whose: str) -> list[Shown]:
        return [recorded.summary() for recorded in self._logs.of(whose).newest_first()]

    async def shown(self, whose: str, conversation: str, turn: int | None, wait_s: float) -> Shown | None:
        log = self._logs.of(whose)
        if turn is not None and wait_s:
            await log.wait_for(conversation, turn, wait_s)
        recorded = log.get(conversation)
        if recorded is None:
            return None
        reports = [report.to_dict() for report in recorded.reports if turn is None or report.turn == turn]
        return {**recorded.summary(), "reports": reports}

    async def forget(self, whose: str, conversation: str) -> bool:
        return self._logs.of(whose).forget(conversation)


class SharedRecord:
    """What all replicas have on record; while the server that they share does not answer, what this process has."""

    def __init__(self, logs: ReportLogs, shared: SharedReports) -> None:
        self._logs = logs
        self._own = OwnRecord(logs)
        self._shared = shared

    async def listed(self, whose: str) -> list[Shown]:
        try:
            return await self._shared.listed(whose)
        except LedgerUnavailable:
            return await self._own.listed(whose)

    async def shown(self, whose: str, conversation: str, turn: int | None, wait_s: float) -> Shown | None:
        if not fits(conversation):
            return None
        clock = asyncio.get_running_loop().time
        until, log = clock() + wait_s, self._logs.of(whose)
        while True:
            left_s = until - clock()
            try:
                shown = await self._shared.shown(whose, conversation, turn)
            except LedgerUnavailable:
                return await self._own.shown(whose, conversation, turn, max(0.0, left_s))
            if turn is None or left_s <= 0 or (shown is not None and shown["reports"]):
                return shown
            if log.has(conversation, turn):
                await asyncio.sleep(min(_LOOK_S, left_s))  # nobody has it any more
            else:
                await log.wait_for(conversation, turn, min(_LOOK_S, left_s))

    async def forget(self, whose: str, conversation: str) -> bool:
        if not fits(conversation):
            return False
        here = self._logs.of(whose).forget(conversation)
        try:
            return await self._shared.forget(whose, conversation)
        except LedgerUnavailable:
            return here
