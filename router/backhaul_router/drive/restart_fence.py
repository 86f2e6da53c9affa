"""Restart fence: no turn reads by a handle of a process that is gone. What it made is dropped as soon as another one is seen."""

from __future__ import annotations

from .. import wire
from ..engines.client import EngineClient
from ..engines.describe import process_began
from ..fleet.fleet import Engine, Fleet, Role
from ..fleet.restarts import Verdict
from ..fleet.retention import Cause
from ..ledger.protocol import arrived
from .handles import Handles


class RestartFence:
    """Fence by when an engine's process began, which its `/metrics` say (`fleet.restarts` has the rules)."""

    def __init__(self, client: EngineClient, fleet: Fleet, handles: Handles) -> None:
        self._client = client
        self._fleet = fleet
        self._handles = handles

    async def is_same(self, decode: str, engine_id: str) -> bool:
        """Whether D is the process that made a handle, by the engine id in it. Drops what is on file where D is seen to be
        another one. Returns `False` where it is not to be known."""
        processes = self._fleet.processes
        if not processes.in_doubt(decode, engine_id):
            return True
        processes.warn_of_fixed(decode, engine_id)
        asked = processes.asked(decode)
        began = await process_began(self._client, decode)
        verdict = processes.verdict(decode, began, engine_id)
        if verdict is Verdict.SAME:
            processes.confirmed(decode, asked)
        elif verdict is Verdict.ANOTHER and began is not None:
            await self._void(decode, began, engine_id)
        else:
            processes.showed(decode, began)
            return False
        return True

    async def described(self, engine: Engine) -> None:
        """An engine has been described again: what is on file there is void unless it is the process that made it."""
        began = engine.started_at
        if engine.role is Role.DECODE and began is not None and began != self._fleet.processes.began(engine.url):
            await self._void(engine.url, began)

    async def _void(self, decode: str, began: float, engine_id: str = "") -> None:
        """Drops what D's process before the one that `began` then has made. It is gone with that process; where nobody knew when
        that one began, it may be the same, and what it holds is released."""
        fleet, handles = self._fleet, self._handles
        known = fleet.processes.is_known(decode)
        fleet.processes.void(decode)  # until all is dropped, the doubt stays
        for made_by in filter(None, {fleet.engine_id(decode), wire.process_of(engine_id)}):
            dropped = await arrived(handles.ledger.drop_engine(decode, made_by))
            if known:
                handles.void(decode, dropped)
            else:
                handles.drop(dropped, why=Cause.UNUSABLE)
        fleet.replaced(decode, began)
