"""Composition root of one router: what its front door, its engine membership and the turns that it drives use in common.

With it: the fence that keeps turns from reading by a handle of a process that is gone, and the reading of late answers, which
engines send to clients that have left, for the handle in them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, Protocol, assert_never

import msgspec

from .. import wire
from ..config import RouterConfig
from ..engines.client import EngineClient, EngineFailure, EngineStream
from ..engines.describe import process_began
from ..engines.leases import Leases
from ..engines.load_polling import LoadPolling
from ..engines.pair_checks import PairChecks
from ..engines.recovery import RecoveryProbes
from ..engines.retention_polling import poll_retention
from ..fleet.breakers import PoisonList
from ..fleet.engine import Engine, Role
from ..fleet.fleet import Fleet
from ..fleet.restarts import ProcessMatch
from ..fleet.retention import Cause, Retention
from ..identity.ids import ConversationScope
from ..ledger.protocol import arrived, open_ledger, open_responses
from ..ledger.records import Branch, Held
from ..report import Reason, ReuseReport
from ..turn.effects import (
    Action,
    Actions,
    DropEngine,
    EndLease,
    GiveBack,
    Lost,
    NoteResponse,
    Record,
    Release,
    Respond,
    Send,
    Settle,
)
from .handles import Handles, PendingWrite


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


log = logging.getLogger("backhaul")

_LIMIT_S: Final = 0.25
"""For what an engine has said by the time that it is told. It closes the connection at once then; a proxy may not."""


class TakesLateAnswer(Protocol):
    """State of a turn whose engine may answer with a handle."""

    def overheard(self, status: int, content_type: str, data: bytes, *, whole: bool) -> Actions:
        """What frees the blocks that the engine keeps, by the rest of its answer (`whole`: up to its end). Raises
        `wire.MalformedBody` or `msgspec.DecodeError`."""


async def read_late_answer(state: TakesLateAnswer, stream: EngineStream, perform: Callable[[Action], None]) -> None:
    """Ends an exchange that has been left. `state` knows of what was read of it."""
    data: list[bytes] = []
    whole = False
    try:
        async with asyncio.timeout(_LIMIT_S):
            async for chunk in stream:
                data.append(chunk)  # noqa: PERF401 - they are needed when it ends early
        whole = True
    except (TimeoutError, EngineFailure) as end:
        log.debug("an engine's answer to a client that has left was cut off: %r", end)
    finally:
        await stream.aclose()
    try:
        content_type = stream.headers.get("content-type", "")
        for action in state.overheard(stream.status, content_type, b"".join(data), whole=whole):
            perform(action)
    except (wire.MalformedBody, msgspec.DecodeError) as error:
        log.info("an engine's answer to a client that has left cannot be read: %s", error)


_CHORES_S = 0.05
"""By so much later than it is due something may be dropped or asked."""


class Services:
    """Shared services of one router, and how an action of a turn's is performed. The fleet is empty until `Membership` has asked
    the engines. May be used from several event loops and threads."""

    def __init__(
        self,
        config: RouterConfig,
        client: EngineClient,
        clock: Callable[[], float],
        on_report: Callable[[ReuseReport], None] | None,
        seed: int,
    ) -> None:
        self.config = config
        self.client = client
        self.clock = clock
        self.on_report = on_report
        self.poison_list = PoisonList()
        ledger, retention = open_ledger(config, clock), Retention(config.retained_tokens_budget, config.one_shot_s)
        self.responses = open_responses(ledger)
        """Conversations by the ids of the responses that their turns were answered with."""
        self.fleet = Fleet((), seed, retention)
        self.fleet.restarts.shared = ledger.shared
        self.leases = Leases(client, self.fleet, self.spawn)
        self.handles = Handles(ledger, retention, self.leases, self.spawn, self._settled)
        self.fence = RestartFence(client, self.fleet, self.handles)
        self.pairs = PairChecks(client, self.fleet, config, clock, self.spawn)
        self.recovery = RecoveryProbes(client, self.fleet, self.leases.release, self.perform)
        self._polling = LoadPolling(client, self.fleet, config.load_interval_s)
        self._next_chores = -math.inf
        self._tasks: set[asyncio.Task[None]] = set()

    # --- in the background

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs it in the background; `settled` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def settled(self) -> None:
        """Returns when the releases that this event loop has begun are done."""
        self.handles.settle_all()
        self.leases.end_waiting()
        loop = asyncio.get_running_loop()
        while tasks := [task for task in tuple(self._tasks) if task.get_loop() is loop]:
            await asyncio.wait(tasks)

    async def aclose(self) -> None:
        """Releases every handle of this router, but those that it shares with others, and closes the connections."""
        self.handles.settle_all()
        self.pairs.close()
        await self.recovery.aclose()
        ledger = self.handles.ledger
        if not ledger.shared:
            await self.handles.end_now(ledger.flush())
        await self.settled()
        self.leases.closed = True
        await self.responses.aclose()
        await ledger.aclose()
        await self.client.aclose()

    def do_chores(self, now: float) -> None:
        """What time brings about, of which several turns in a row would find nothing."""
        if self.fleet.breakers.any_open:
            self.recovery.start()
        if now < self._next_chores:
            return
        self._next_chores = now + _CHORES_S
        self._sweep(now)
        if decodes := self.handles.retention.to_look_at(now):
            self.spawn(self._poll_retention(decodes))
        if self.pairs.due(now):
            self.spawn(self.pairs.check_unsafe_again())
        if self._polling.due(now):
            self.spawn(self._polling.poll(now))

    async def _poll_retention(self, decodes: Iterable[str]) -> None:
        await poll_retention(self.client, self.fleet, self.leases, decodes)
        self.handles.give_up_retained()

    def _sweep(self, now: float) -> None:
        self.handles.drop(self.handles.ledger.sweep(now), why=Cause.EXPIRED)

    # --- what turns need

    def usable(self, held: Held) -> Reason | None:
        """Why a handle on file cannot be used any more."""
        return (
            None if self.fleet.restarts.made_by_current(held.decode, held.handle.engine_id) else Reason.ENGINE_CHANGED
        )

    async def check(self, prefill: Engine, decode: str, engine_id: str = "") -> bool:
        """Finds out what stands in doubt before P reads from D: whether it can and, with the `engine_id` of a handle, whether D
        is the process that made it. Returns whether D has said so, or is not in doubt."""
        if engine_id and not await self.fence.is_same(decode, engine_id):
            return False
        if self.pairs.wanted(prefill.url, decode):
            await self.pairs.check(prefill, decode)
        return True

    # --- what turns do

    def perform(self, action: Action, scope: ConversationScope | None = None, pause_s: float | None = None) -> None:
        """Everything but the client's answer. What a turn leaves is filed when the answer is on its way, or as soon as anything
        looks at the ledger; `pause_s` is the caller's word on when the next turn comes."""
        handles = self.handles
        match action:
            case Release():
                self.spawn(self.leases.release(action))
            case EndLease():
                self.leases.end_one(action)
            case GiveBack(key, taken):
                retention = handles.retention
                handles.drop(handles.ledger.give_back(key, taken), lambda dropped: retention.gave_back(taken, dropped))
            case Lost(key, taken, reason):
                retention = handles.retention
                handles.drop(handles.ledger.lost(key, taken, reason), lambda dropped: retention.lost(taken, dropped))
            case Settle():
                handles.settle(PendingWrite(action, self.clock(), pause_s))
            case DropEngine(decode, engine_id):
                handles.void(decode, handles.ledger.drop_engine(decode, engine_id))
            case NoteResponse(response, conversation, tenant):
                self.responses.note(response, conversation, tenant)
            case Record(report):
                self.fleet.counters.count(report)
                for take in (scope.record if scope is not None else None, self.on_report):
                    _hand_over(report, take)
            case Respond() | Send():
                raise AssertionError("the client's answer is the run's own")
            case _:
                assert_never(action)

    def forget(self, conversation: str, tenant: str) -> None:
        """Forgets a conversation, and releases in the background what the engines hold for it."""
        self.fleet.load.end_conversation(conversation, tenant)
        self.handles.drop(self.handles.ledger.forget(conversation, tenant))

    def _settled(self, branch: Branch) -> None:
        """A turn's branch is on file."""
        held = branch.held
        if held is None:
            return
        one_shot = branch.by_history and not held.leased
        if one_shot and (left_s := held.deadline - self.clock()) <= self.config.one_shot_s:
            # released though no other request should come
            asyncio.get_running_loop().call_later(left_s, lambda: self._sweep(self.clock()))
        self._check_pair_in_time(branch.prefill, held.decode)

    def _check_pair_in_time(self, by: str | None, decode: str) -> None:
        """The next turn will read from this D by way of the same P, if it can: found out while the agent works."""
        prefill = self.fleet.get(by)
        if prefill is not None and self.pairs.wanted(prefill.url, decode):
            self.spawn(self.pairs.check(prefill, decode))


def _hand_over(report: ReuseReport, take: Callable[[ReuseReport], None] | None) -> None:
    """Gives a report to someone else's code, whose fault must not cost the client its answer."""
    if take is None:
        return
    try:
        take(report)
    except Exception:
        log.exception("a turn's report could not be handed over: %r", take)
