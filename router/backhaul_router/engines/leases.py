"""Lease client: what engines keep for the router is renewed, listed and given back.

A lease is a decode engine's promise to keep a handle's blocks until a time. One that runs our connector is told by name
(`LeaseOperation`), in batches: a lease that a turn has superseded waits a moment for the next request to that engine, which takes
it along (`ReleaseQueue`), and is else sent by itself. A stock engine makes no such promise: it is
told by way of one of the other role, which is made to reject a request that carries the handle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from backhaul_protocol.leases import LeaseAnswer, LeaseOperation, LeaseRow, read_lease_answer

from .. import wire
from ..errors import LeaseError
from ..fleet.engine import Engine, Holder, Role
from ..fleet.fleet import Fleet
from ..ledger.records import Held
from ..turn.effects import EndLease, Release
from .client import EngineCall, EngineClient, EngineFailure

log = logging.getLogger("backhaul")

_TIMEOUT_S = 5.0
_AT_ONCE = 64
"""Requests that release stock handles at a time: each needs a connection."""
_RIDE_S = 0.1
"""For how long a superseded lease waits for a request that takes it along."""
_RANK_HEADER = "x-data-parallel-rank"

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(frozen=True, kw_only=True)
class EngineLeases:
    """Listing of the leases of one decode engine, over all of its data-parallel ranks."""

    decode: str
    count: int = 0
    blocks: int = 0
    leases: tuple[LeaseRow, ...] = ()
    error: str | None = None
    """Why the engine did not say."""


@dataclass(frozen=True)
class Renewal:
    """Outcome of renewing leases."""

    remaining: Mapping[tuple[str, str], float]
    """Seconds by `Held.name`, of those whose engines did it; 0 where it does not know the lease any more."""
    failure: LeaseError | None
    """Of an engine that did not."""


class Leases:
    """Lease client: ends, renews and lists. Failures to end one are counted and logged: it ends with its TTL."""

    def __init__(self, client: EngineClient, fleet: Fleet, spawn: Spawn) -> None:
        self._client = client
        self._fleet = fleet
        self._spawn = spawn
        self.closed = False
        self._waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, set[Holder]] = WeakKeyDictionary()
        self._at_once: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    # --- handles that nobody needs any more

    def end(self, dropped: Iterable[Held], *, ride: bool = False) -> None:
        """Begins to release. With `ride` leases may wait a moment for a request that takes them along."""
        for holder in self._note(dropped, self._spawn):
            self.end_soon(holder, ride=ride)

    def end_soon(self, holder: Holder, *, ride: bool = True) -> None:
        """Sends what is due there, unless a request takes it along."""
        if not ride or holder.rank is not None:
            self._end_due(holder)
            return
        # One timer for all that is due there by then: a turn leaves a lease each time, and a timer costs more than the rest.
        loop = asyncio.get_running_loop()
        waiting = self._waiting.setdefault(loop, set())
        if holder not in waiting:
            waiting.add(holder)
            loop.call_later(_RIDE_S, self._end_after_wait, waiting, holder)

    def _end_after_wait(self, waiting: set[Holder], holder: Holder) -> None:
        waiting.discard(holder)
        self._end_due(holder)

    async def end_now(self, dropped: Iterable[Held]) -> None:
        """Returns when everything is released, or has failed to."""
        stock: list[Coroutine[Any, Any, None]] = []
        holders = self._note(dropped, stock.append)
        await asyncio.gather(*stock, *(self._send_due(holder) for holder in holders))

    def end_one(self, lease: EndLease) -> None:
        """A lease whose turn has no use for it."""
        self._fleet.releases.add(lease.holder, [lease.id])
        self._end_due(lease.holder)

    def end_waiting(self) -> None:
        """Sends what is waiting for a request to take it along."""
        for holder in self._fleet.releases.holders:
            self._end_due(holder)

    def _note(self, dropped: Iterable[Held], stock: Callable[[Coroutine[Any, Any, None]], object]) -> set[Holder]:
        holders = set()
        for held in dropped:
            if held.leased:
                holder = Holder.of(held.decode, held.handle.engine_id)
                self._fleet.releases.add(holder, [held.handle.request_id])
                holders.add(holder)
            elif (via := self._fleet.pick(Role.PREFILL)) is not None:
                stock(self.release(Release(held.handle.params, via)))
        return holders

    def _end_due(self, holder: Holder) -> None:
        if holder in self._fleet.releases.holders:
            self._spawn(self._send_due(holder))

    async def _send_due(self, holder: Holder) -> None:
        while leases := self._fleet.releases.take(holder):
            failure: LeaseError | None = None
            try:
                await self.operate(holder, LeaseOperation(release=leases))
            except LeaseError as error:
                failure = error
                log.warning(
                    "%d leases could not be released, their blocks stay pinned until their TTL: %s", len(leases), error
                )
            self._fleet.counters.count_release(len(leases), failed=failure is not None)

    # --- by way of another engine

    async def release(self, release: Release) -> None:
        """Frees a stock engine's blocks, by way of a second engine where the first one cannot."""
        another = self._fleet.pick(release.via.role, None, {release.via.url})
        async with self._at_once.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE)):
            why = await self._release_via(release.via, release.params)
            if why is not None and another is not None:
                why = await self._release_via(another, release.params)
        self._fleet.counters.count_release(failed=why is not None)
        if why is not None:
            log.warning("a handle could not be released, its blocks stay pinned until their TTL: %s", why)

    async def _release_via(self, engine: Engine, params: bytes) -> str | None:
        """Why it failed, or `None`."""
        if self.closed:  # a turn was still running
            return "the router is closed"
        url = f"{engine.url}{wire.Endpoint.COMPLETIONS}"
        call = EngineCall(url, wire.release_body(params), timeout_s=_TIMEOUT_S)
        try:
            answer = await self._client.call(call)
        except EngineFailure as failure:
            return failure.message
        # The request is made to be rejected; that is what makes the engine notify the holder of the blocks.
        return None if answer.status in (400, 404) else f"{engine} answered {answer.status}"

    # --- operations

    async def operate(self, holder: Holder, operation: LeaseOperation) -> LeaseAnswer:
        """Raises `LeaseError`."""
        engine = self._fleet.get(holder.decode)
        if self.closed or engine is None:
            raise LeaseError("the router is closed" if self.closed else f"{holder.decode} is not configured")
        headers = {} if holder.rank is None else {_RANK_HEADER: holder.rank}
        body = operation.body(engine.models[0])
        call = EngineCall(f"{engine.url}{wire.Endpoint.COMPLETIONS}", body, headers, _TIMEOUT_S)
        try:
            answer = await self._client.call(call)
        except EngineFailure as failure:
            raise LeaseError(failure.message) from None
        if answer.status != 200:
            raise LeaseError(f"{engine} answered {answer.status}: {wire.error_message(answer.body)}")
        try:
            found = read_lease_answer(answer.body)
        except msgspec.DecodeError as error:
            raise LeaseError(f"{engine} sent an answer that cannot be read: {error}") from None
        if found is None:
            raise LeaseError(f"{engine} does not know lease operations: was it restarted without our connector?")
        return found

    async def renew(self, held: Sequence[Held], ttl_s: float) -> Renewal:
        """Asks all of their engines; one that does not do it costs the others nothing."""
        by_holder: dict[Holder, list[Held]] = {}
        for one in held:
            holder = Holder.of(one.decode, one.handle.engine_id)
            by_holder.setdefault(holder, []).append(one)
        answers = await asyncio.gather(
            *(
                self.operate(holder, LeaseOperation(renew=[one.handle.request_id for one in these], ttl_s=ttl_s))
                for holder, these in by_holder.items()
            ),
            return_exceptions=True,
        )
        remaining: dict[tuple[str, str], float] = {}
        failure: LeaseError | None = None
        for these, answer in zip(by_holder.values(), answers, strict=True):
            if isinstance(answer, LeaseError):
                failure = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                remaining |= {one.name: answer.renewed.get(one.handle.request_id, 0.0) for one in these}
        return Renewal(remaining, failure)

    async def flush(self) -> None:
        """Has every decode engine of ours end every lease, other routers' too. Raises `LeaseError` when one did not."""
        holders = [holder for engine in self._ours() for holder in self._fleet.restarts.holders(engine)]
        for holder in holders:
            while self._fleet.releases.take(holder):
                pass  # it ends with all others
        results = await asyncio.gather(
            *(self.operate(holder, LeaseOperation(flush=True)) for holder in holders), return_exceptions=True
        )
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            raise failed[0]

    async def listing(self) -> tuple[EngineLeases, ...]:
        """What the decode engines of ours hold, for whomever."""
        return tuple(await asyncio.gather(*(self._list(engine) for engine in self._ours())))

    async def _list(self, engine: Engine) -> EngineLeases:
        try:
            answers = [
                await self.operate(holder, LeaseOperation(list=True)) for holder in self._fleet.restarts.holders(engine)
            ]
        except LeaseError as error:
            return EngineLeases(decode=engine.url, error=str(error))
        return EngineLeases(
            decode=engine.url,
            count=sum(answer.count or 0 for answer in answers),
            blocks=sum(answer.blocks or 0 for answer in answers),
            leases=tuple(lease for answer in answers for lease in answer.leases or ()),
        )

    def _ours(self) -> list[Engine]:
        return [engine for engine in self._fleet.decode if engine.connector is not None]
