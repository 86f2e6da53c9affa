"""Restart fence: no turn reads by a handle of a process that is gone. What it made is dropped as soon as another one is seen."""

from __future__ import annotations

from .. import wire
from ..engines.client import EngineClient
from ..engines.describe import process_began
from ..fleet.engine import Engine, Role
from ..fleet.fleet import Fleet
from ..fleet.restarts import ProcessMatch
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
        restarts = self._fleet.restarts
        if not restarts.in_doubt(decode, engine_id):
            return True
        restarts.warn_of_fixed(decode, engine_id)
        fence = restarts.fence(decode)
        began = await process_began(self._client, decode)
        matched = restarts.match(decode, began, engine_id)
        if matched is ProcessMatch.SAME:
            restarts.confirmed(decode, fence)
        elif matched is ProcessMatch.ANOTHER and began is not None:
            await self._void(decode, began, engine_id)
        else:
            restarts.showed(decode, began)
            return False
        return True

    async def described(self, engine: Engine) -> None:
        """An engine has been described again: what is on file there is void unless it is the process that made it."""
        began = engine.started_at
        if engine.role is Role.DECODE and began is not None and began != self._fleet.restarts.began(engine.url):
            await self._void(engine.url, began)

    async def _void(self, decode: str, began: float, engine_id: str = "") -> None:
        """Drops what D's process before the one that `began` then has made. It is gone with that process; where nobody knew when
        that one began, it may be the same, and what it holds is released."""
        fleet, handles = self._fleet, self._handles
        known = fleet.restarts.is_known(decode)
        fleet.restarts.void(decode)  # until all is dropped, the doubt stays
        for made_by in filter(None, {fleet.restarts.engine_id(decode), wire.process_of(engine_id)}):
            dropped = await arrived(handles.ledger.drop_engine(decode, made_by))
            if known:
                handles.void(decode, dropped)
            else:
                handles.drop(dropped, why=Cause.UNUSABLE)
        fleet.restarts.replaced(decode, began)
