"""Shared repository with optimistic concurrency: the map from conversation to handles on a Redis or Valkey server, shared by
routers. Needs the extra `redis`.

A change is worked out on a copy of one record, or two, by the rules of `MemoryLedger`, and written if nobody has changed them
meanwhile, else worked out again on what is there now. What holds beyond those rules:
- a handle that reading uses up is handed to one turn of all routers', whatever fails: one that was filed in an earlier life of
  the data is not handed out, since somebody may have taken it in a state that is lost;
- a shared handle is not counted across routers: one that supersedes it may release it while another's turn is about to read. D
  confirms every read at that moment, so this costs the reuse, and nothing else;
- a server that does not answer costs reuse. A take finds nothing (`Reason.LEDGER_UNAVAILABLE`); of what could not be filed is
  released what certainly is not on file, and the rest is left to the end of its lease;
- each router sweeps what it has filed. What is left of a router that is gone ends with its leases, and records by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from ..report import Reason
from . import digests
from .records import Branch, Held, Key, Taken
from .redis_copy import Limits, WorkingCopy
from .redis_link import LedgerUnavailable, RedisLink
from .redis_local import FiledHandles, HandleRefCounts, RecordLocks, TurnNumbers
from .redis_records import Keys, Name, Snapshot, handles_in, moved, name_in, with_body
from .redis_scripts import COMMIT, FIND, LOAD, MOVE_EPOCH

log = logging.getLogger("backhaul")

_T = TypeVar("_T")
_PATIENCE_S = 5.0
"""For how long a change that nobody waits for is tried: others may be faster each time."""
_EARLY_S = 0.001
"""Handles are swept so long before their deadline, which has been from one clock to the other and back."""
_AT_ONCE = 16
"""Records that are looked through at a time."""


@dataclass(frozen=True)
class _Changed(Generic[_T]):
    """What came of a change."""

    result: _T
    offset: float
    """The server's time less this router's."""
    dropped: tuple[Held, ...] = ()
    """By the change itself: flushed, or of the records that made room. In the server's time."""
    body: bytes = b""

    def here(self, handles: Iterable[Held]) -> tuple[Held, ...]:
        """The same handles in this router's time."""
        return tuple(moved(held, -self.offset) for held in handles)


class RedisLedger:
    """Ledger that routers share. Methods that have to ask the server return coroutines."""

    shared = True

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 0.05,
        prefix: str = "backhaul",
        max_conversations: int = 10_000,
        max_branches: int = 8,
        max_idle_s: float = 3600.0,
        max_conversations_per_tenant: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s` bounds every wait for an answer, and that for earlier changes of the same conversation. Raises
        `ConfigError`."""
        self._link = RedisLink(url, timeout_s)
        self._timeout_s = timeout_s
        self._keys = Keys(prefix)
        self._limits = Limits(
            max_conversations=max_conversations,
            max_conversations_per_tenant=max_conversations_per_tenant,
            max_branches=max_branches,
            max_idle_s=max_idle_s,
        )
        self._clock = clock
        self._filed = FiledHandles()
        self._ref_counts = HandleRefCounts()
        self._turns = TurnNumbers()
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, RecordLocks] = WeakKeyDictionary()
        self.flushes = 0
        """How often all routers' handles were flushed, when the server was asked last."""
        self._background: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """Conversations that this router has left something for."""
        return len(self._filed)

    def __repr__(self) -> str:
        return f"<RedisLedger at {self._link.address}, {len(self.handles())} handles of this router's>"

    @property
    def failures(self) -> int:
        """Calls to the server that failed, or were not tried while it was known not to answer."""
        return self._link.failures

    @property
    def available(self) -> bool:
        return not self._link.down

    def handles(self) -> tuple[Held, ...]:
        """Those that this router has filed and does not know to be gone."""
        return self._filed.handles()

    # --- turns

    async def take(
        self,
        key: Key,
        chain: bytes,
        now: float,
        usable: Callable[[Held], Reason | None],
        parent: str | None = None,
    ) -> Taken:
        """As `MemoryLedger.take`. A caller that is cancelled meanwhile has taken nothing."""
        work = asyncio.create_task(self._take(key, chain, usable, parent))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self._in_background(self._untake(key, work))
            raise

    async def _take(self, key: Key, chain: bytes, usable: Callable[[Held], Reason | None], parent: str | None) -> Taken:
        names = [Name.of(key)]
        if parent is not None and parent != key.conversation:
            names.append(Name(key.tenant, parent))
        try:
            changed = await self._change(
                names,
                lambda copy, now: copy.take_after(self._turns.last(key), key, chain, now, usable, parent),
                wait_s=self._timeout_s,
                body_of=lambda copy, taken: copy.place_of(taken, key),
            )
        except LedgerUnavailable:
            turn = self._turns.next_blind(key)
            return Taken(turn=turn, reason=Reason.LEDGER_UNAVAILABLE, flushes=self.flushes)
        taken = changed.result
        self._turns.note(key, taken.generation, taken.turn)
        branch = taken.branch
        if branch is not None:
            branch = with_body(branch, changed.body)
            branch = msgspec.structs.replace(branch, held=next(iter(changed.here(filter(None, [branch.held]))), None))
        held = next(iter(changed.here(filter(None, [taken.held]))), None)
        self._ref_counts.took(held)
        drop = self._ref_counts.free(changed.here((*taken.drop, *changed.dropped)))
        return msgspec.structs.replace(taken, branch=branch, held=held, drop=drop)

    async def _untake(self, key: Key, work: asyncio.Task[Taken]) -> None:
        """Nobody waits for what was taken. What the ledger dropped meanwhile ends with its lease."""
        await self.give_back(key, await work)

    async def give_back(self, key: Key, taken: Taken) -> tuple[Held, ...]:
        """As `MemoryLedger.give_back`."""
        if taken.held is None:
            return ()
        if taken.held.shared:
            return self._ref_counts.done(taken.held)
        held = taken.held
        return await self._dropped(
            Name.of(_filed_under(key, taken)),
            lambda copy, _: copy.give_back(key, msgspec.structs.replace(taken, held=moved(held, copy.offset))),
            unfiled=held,
        )

    async def lost(self, key: Key, taken: Taken, reason: Reason) -> tuple[Held, ...]:
        """As `MemoryLedger.lost`."""
        dropped = await self._dropped(Name.of(_filed_under(key, taken)), lambda copy, _: copy.lost(key, taken, reason))
        return dropped + self._ref_counts.done(taken.held)

    async def settle(self, key: Key, taken: Taken, branch: Branch, now: float) -> tuple[Held, ...]:
        """As `MemoryLedger.settle`. A turn that could not take files what it leaves all the same."""
        left = branch.held
        if left is not None and self._ref_counts.has_dropped(left):  # dropped while the turn ran
            branch, left = msgspec.structs.replace(branch, held=None, missing=Reason.NO_HANDLE), None

        def file(copy: WorkingCopy, now: float) -> tuple[Held, ...]:
            filed = branch
            if left is not None:
                filed = msgspec.structs.replace(branch, held=moved(left, copy.offset))
            if taken.reason is Reason.LEDGER_UNAVAILABLE and taken.branch is None:
                return copy.settle_late(key, taken.flushes, filed, now)
            return copy.settle(key, taken, filed, now)

        dropped = await self._dropped(Name.of(key), file, unfiled=left)
        return dropped + self._ref_counts.done(taken.held)

    # --- conversations

    async def find(self, key: Key, chain: bytes) -> str | None:
        """As `MemoryLedger.find`; nothing is found while the server does not answer."""
        stops = range(len(chain) - digests.SIZE, 0, -digests.SIZE)
        ends = [self._keys.end(key, chain[stop - digests.SIZE : stop]) for stop in stops]
        try:
            epoch, *found = await self._link.run(FIND, [self._keys.epoch, *ends])
        except LedgerUnavailable:
            return None
        self.flushes = int(epoch)
        return found[0].decode() if found else None

    async def forget(self, conversation: str, tenant: str = "") -> tuple[Held, ...]:
        """As `MemoryLedger.forget`. Where the server does not answer the conversation ends with its record's time to live."""
        return await self._dropped(Name(tenant, conversation), lambda copy, _: copy.forget(conversation, tenant))

    async def held_for(self, conversation: str, tenant: str = "") -> tuple[Held, ...]:
        """As `MemoryLedger.held_for`; nothing, while the server does not answer."""
        name = Name(tenant, conversation)
        try:
            loaded = await self._load([self._keys.record(name)])
        except LedgerUnavailable:
            return ()
        copy = WorkingCopy([name], loaded, self._limits, self._keys)
        offset = copy.offset
        return tuple(moved(held, -offset) for held in copy.held_for(conversation, tenant))

    async def drop_for(
        self, conversation: str, condition: Callable[[Held], bool], reason: Reason, tenant: str = ""
    ) -> tuple[Held, ...]:
        """As `MemoryLedger.drop_for`."""
        return await self._dropped(
            Name(tenant, conversation), lambda copy, _: copy.drop_for(conversation, condition, reason, tenant)
        )

    async def renewed(
        self,
        conversation: str,
        deadlines: Mapping[tuple[str, str], float],
        now: float | None = None,
        tenant: str = "",
    ) -> None:
        """As `MemoryLedger.renewed`; where the server does not answer the deadlines stay as they were."""

        def renew(copy: WorkingCopy, there: float) -> tuple[Held, ...]:
            offset = copy.offset
            shared = {name: deadline + offset for name, deadline in deadlines.items()}
            copy.renewed(conversation, shared, None if now is None else there, tenant)
            return ()

        await self._dropped(Name(tenant, conversation), renew)

    # --- all of them

    def sweep(self, now: float) -> tuple[Held, ...] | Coroutine[Any, Any, tuple[Held, ...]]:
        """As `MemoryLedger.sweep`, of what this router has filed. Silent conversations end by themselves."""
        due = self._filed.due(now + _EARLY_S)
        return self._sweep(due) if due else ()

    async def _sweep(self, due: Mapping[Name, frozenset[tuple[str, str]]]) -> tuple[Held, ...]:
        renewed: dict[Name, dict[tuple[str, str], Held]] = {}

        def sweep(copy: WorkingCopy, there: float) -> tuple[Held, ...]:
            dropped = copy.sweep(there + _EARLY_S)
            renewed[copy.names[0]] = {one.name: moved(one, -copy.offset) for one in copy.handles()}
            return dropped

        dropped = await self._each(due, sweep)
        for name, on_file in renewed.items():
            self._filed.note([name], on_file, dict.fromkeys(due[name] & on_file.keys(), name))
        return dropped

    async def drop_engine(self, decode: str, engine_id: str) -> tuple[Held, ...]:
        """As `MemoryLedger.drop_engine`."""
        return await self._everywhere(lambda copy, _: copy.drop_engine(decode, engine_id))

    async def flush(self) -> tuple[Held, ...]:
        """As `MemoryLedger.flush`, for every router: no handle that is on file now is handed out after this. Raises
        `LedgerUnavailable` when that is not certain."""
        self.flushes = await self._link.run(MOVE_EPOCH, [self._keys.epoch])
        return await self._everywhere(lambda copy, _: copy.flush())

    async def aclose(self) -> None:
        """Closes the connections of this event loop. What is on file stays, for other routers."""
        loop = asyncio.get_running_loop()
        while tasks := [task for task in tuple(self._background) if task.get_loop() is loop]:
            await asyncio.wait(tasks)
        self._filed.clear()
        await self._link.aclose()

    async def _everywhere(self, work: Callable[[WorkingCopy, float], tuple[Held, ...]]) -> tuple[Held, ...]:
        dropped: tuple[Held, ...] = ()
        try:
            async for keys in self._link.scan(self._keys.every_record):
                heads = await self._link.read(keys, "h")
                dropped += await self._each({name for head in heads if (name := name_in(head)) is not None}, work)
        except LedgerUnavailable as error:
            log.warning("not all conversations could be looked through, what they hold ends with its leases: %s", error)
        return dropped

    async def _each(
        self, names: Iterable[Name], work: Callable[[WorkingCopy, float], tuple[Held, ...]]
    ) -> tuple[Held, ...]:
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def one(name: Name) -> tuple[Held, ...]:
            async with at_once:
                return await self._dropped(name, work)

        return tuple(held for dropped in await asyncio.gather(*map(one, names)) for held in dropped)

    # --- changes

    async def _dropped(
        self, name: Name, work: Callable[[WorkingCopy, float], tuple[Held, ...]], *, unfiled: Held | None = None
    ) -> tuple[Held, ...]:
        """What can be released after a change. `unfiled` is what it was to file: released too when it certainly did not."""
        try:
            changed = await self._change([name], work)
        except LedgerUnavailable as error:
            return () if unfiled is None or error.unknown else (unfiled,)
        return self._ref_counts.free(changed.here((*changed.result, *changed.dropped)))

    async def _change(
        self,
        names: Sequence[Name],
        work: Callable[[WorkingCopy, float], _T],
        *,
        wait_s: float | None = None,
        body_of: Callable[[WorkingCopy, _T], tuple[int, str]] = lambda copy, result: (0, ""),
    ) -> _Changed[_T]:
        """Does `work` on a copy of the records, as often as it takes. Raises `LedgerUnavailable`."""
        keys = [self._keys.record(name) for name in names]
        async with self._record_locks().turn(keys, wait_s):
            loaded = await self._load(keys)
            give_up = time.monotonic() + (wait_s or _PATIENCE_S)
            while True:
                copy = WorkingCopy(names, loaded, self._limits, self._keys)
                result = work(copy, loaded.now)
                changes = copy.changes(body_of(copy, result))
                if changes is None:
                    return _Changed(result, copy.offset)
                answer = await self._link.run(COMMIT, [self._keys.epoch, *keys], changes)
                if answer[0] == 1:
                    room = tuple(held for head in answer[2:] for held in handles_in(head, loaded))
                    self._note(names, copy)
                    return _Changed(result, copy.offset, (*copy.flushed, *room), answer[1])
                if time.monotonic() > give_up:
                    raise LedgerUnavailable("others change the conversation all the time")
                loaded = Snapshot.of(answer[1:], self._clock())

    async def _load(self, keys: Sequence[str]) -> Snapshot:
        try:
            answer = await self._link.run(LOAD, [self._keys.epoch, *keys])
        except LedgerUnavailable as error:
            raise LedgerUnavailable(str(error)) from None  # it was read alone
        loaded = Snapshot.of(answer, self._clock())
        self.flushes = loaded.epoch
        return loaded

    def _note(self, names: Sequence[Name], copy: WorkingCopy) -> None:
        on_file = {held.name: moved(held, -copy.offset) for held in copy.handles()}
        self._filed.note(names, on_file, copy.filed)

    def _record_locks(self) -> RecordLocks:
        return self._locks.setdefault(asyncio.get_running_loop(), RecordLocks())

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _filed_under(key: Key, taken: Taken) -> Key:
    return taken.forked_from[0] if taken.forked_from is not None else key
