"""Conversations on record with all workers: whichever runs a turn has its report, and a client asks any of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..drive.router import Request
from ..identity.ids import ResponseIds, fits
from ..wire import Endpoint
from .conversation_log import Shown, joined, to_join
from .team import LIMIT_S, Team, said
from .worker_link import Said, Whom

if TYPE_CHECKING:
    from .asgi import App


class TeamRecord:
    """`Record` of all workers. What cannot be on record, whatever its size, is nothing that workers ask each other."""

    def __init__(self, team: Team, app: App) -> None:
        self._team = team
        self._app = app
        for kind, work in (
            ("list", self._do_list),
            ("show", self._do_show),
            ("wait", self._do_wait),
            ("forget", self._do_forget),
        ):
            team.does(kind, work)

    async def listed(self, whose: str) -> list[Shown]:
        by_id: dict[str, dict[int, Shown]] = {}
        answers = (await self._team.ask("list", Whom.ALL, whose)).answers
        for worker, listed in answers.items():
            for one in listed:
                by_id.setdefault(one["id"], {})[worker] = one
        return sorted(map(joined, by_id.values()), key=lambda one: one["last_active"], reverse=True)

    async def shown(self, whose: str, conversation: str, turn: int | None, wait_s: float) -> Shown | None:
        if not fits(conversation):
            return None
        if turn is not None and wait_s and not self._app.reports.of(whose).has(conversation, turn):
            await self._team.ask("wait", Whom.UNTIL_ONE, [whose, conversation, turn, wait_s], wait_s + LIMIT_S)
        answers = (await self._team.ask("show", Whom.ALL, [whose, conversation, turn])).answers
        parts = {worker: one for worker, one in answers.items() if one is not None}
        return joined(parts) if parts else None

    async def forget(self, whose: str, conversation: str) -> bool:
        if not fits(conversation):
            return False
        answers = (await self._team.ask("forget", Whom.ALL, [whose, conversation])).answers
        return any(answers.values())

    # --- what a worker says of its own

    async def _do_list(self, whose: str) -> Said:
        return said([to_join(one, reports=False) for one in self._app.reports.of(whose).newest_first()])

    async def _do_show(self, what: list[Any]) -> Said:
        whose, conversation, turn = what
        recorded = self._app.reports.of(whose).get(conversation)
        return said(None if recorded is None else to_join(recorded, turn, reports=True))

    async def _do_wait(self, what: list[Any]) -> Said:
        whose, conversation, turn, wait_s = what
        log = self._app.reports.of(whose)
        await log.wait_for(conversation, turn, wait_s)
        return said(None, good=log.has(conversation, turn))

    async def _do_forget(self, what: list[Any]) -> Said:
        whose, conversation = what
        self._app.router.fleet.load.end_conversation(conversation, whose)
        return said(self._app.reports.of(whose).forget(conversation))


class _Names(msgspec.Struct):
    previous_response_id: str | None = None


_MARK = b"previous_response_id"
_decode_names = msgspec.json.Decoder(_Names).decode


class TeamResponses:
    """Which conversation a response belongs to is known where its turn ran; a request that goes on from it may come to another
    worker, which asks before the turn begins."""

    def __init__(self, team: Team, known: ResponseIds) -> None:
        self._team = team
        self._known = known
        team.does("response", self._do_find)

    async def learn(self, request: Request) -> None:
        """Makes known here what the request names, if any worker knows it. What cannot be an id is known to none."""
        if request.path.partition("?")[0] != Endpoint.RESPONSES or _MARK not in request.body:
            return
        try:
            before = _decode_names(request.body).previous_response_id
        except (msgspec.DecodeError, RecursionError):
            return  # which the router says
        if before is None or not fits(before) or self._known.conversation_of(before, request.tenant) is not None:
            return
        answers = (await self._team.ask("response", Whom.UNTIL_ONE, [before, request.tenant])).answers
        found = next((one for one in answers.values() if one is not None), None)
        if found is not None:
            self._known.note(before, found, request.tenant)

    async def _do_find(self, what: list[str]) -> Said:
        found = self._known.conversation_of(*what)
        return said(found, good=found is not None)
