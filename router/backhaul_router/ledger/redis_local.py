"""Local state of a router on a shared ledger: what it has filed and has to sweep, which shared handles its turns are
reading, and in which order it changes a conversation."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from .deadlines import CalendarQueue
from .records import Held, Key
from .redis_link import LedgerUnavailable
from .redis_records import Name

_HandleName = tuple[str, str]


class _Mine(msgspec.Struct, eq=False, gc=False):
    """A handle that this router has filed."""

    name: Name
    held: Held | None
    """`None` when it is gone."""


def _deadline(one: _Mine) -> float | None:
    return None if one.held is None else one.held.deadline


class FiledHandles:
    """Index of the handles that this router has filed, and does not know to be gone. Deadlines are in its own time."""

    def __init__(self) -> None:
        self._filed: dict[Name, tuple[_Mine, ...]] = {}
        self._deadlines = CalendarQueue(_deadline)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Conversations."""
        return len(self._filed)

    def handles(self) -> tuple[Held, ...]:
        with self._lock:
            return tuple(one.held for mine in self._filed.values() for one in mine if one.held is not None)

    def clear(self) -> None:
        """Nothing of it is this router's to sweep any more."""
        with self._lock:
            self._filed.clear()
            self._deadlines = CalendarQueue(_deadline)

    def note(
        self, names: Iterable[Name], on_file: Mapping[_HandleName, Held], added: Mapping[_HandleName, Name]
    ) -> None:
        """What is on file of some conversations after a change, and what of it this router has added."""
        with self._lock:
            for name in names:
                mine = {one.held.name: one for one in self._filed.pop(name, ()) if one.held is not None}
                for handle, one in mine.items():
                    self._change(one, on_file.get(handle))
                for handle, of in added.items():
                    if of == name and handle not in mine:
                        mine[handle] = _Mine(name, None)
                        self._change(mine[handle], on_file[handle])
                if kept := tuple(one for one in mine.values() if one.held is not None):
                    self._filed[kept[0].name] = kept

    def _change(self, one: _Mine, held: Held | None) -> None:
        before, one.held = _deadline(one), held
        if (deadline := _deadline(one)) == before:
            return
        if before is not None:
            self._deadlines.void(before)
        if deadline is not None:
            self._deadlines.put(one, deadline)

    def due(self, now: float) -> dict[Name, frozenset[_HandleName]]:
        """Conversations with handles that have come to their deadline. They do not count as filed any more."""
        found: dict[Name, frozenset[_HandleName]] = {}
        with self._lock:
            while (due := self._deadlines.take(now)) is not None:
                if due.held is None:
                    continue
                found[due.name] = found.get(due.name, frozenset()) | {due.held.name}
                due.held = None
                if left := tuple(one for one in self._filed.pop(due.name, ()) if one.held is not None):
                    self._filed[due.name] = left
        return found


class HandleRefCounts:
    """Reference counts of shared handles that this router's turns have taken: one is not released before they are done."""

    def __init__(self) -> None:
        self._takers: Counter[_HandleName] = Counter()
        self._left: dict[_HandleName, Held] = {}
        """No longer on file, and still taken."""
        self._lock = threading.Lock()

    def took(self, held: Held | None) -> None:
        if held is not None and held.shared:
            with self._lock:
                self._takers[held.name] += 1

    def has_dropped(self, held: Held) -> bool:
        """Whether a handle that a turn has taken has been dropped since."""
        return held.name in self._left

    def free(self, dropped: Iterable[Held]) -> tuple[Held, ...]:
        """Of handles that are no longer on file those that can be released now; the others wait for their turns."""
        free = []
        with self._lock:
            for held in dropped:
                if held.name in self._takers:
                    self._left[held.name] = held
                else:
                    free.append(held)
        return tuple(free)

    def done(self, held: Held | None) -> tuple[Held, ...]:
        """A turn does not need what it took any more."""
        if held is None or not held.shared:
            return ()
        with self._lock:
            self._takers[held.name] -= 1
            if self._takers[held.name] > 0:
                return ()
            del self._takers[held.name]
            left = self._left.pop(held.name, None)
        return () if left is None else (left,)


class TurnNumbers:
    """LRU map of the last turn of each conversation here, so that turns of an outage are numbered too: reports are told apart
    by it."""

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._last: OrderedDict[Key, tuple[int, int]] = OrderedDict()
        self._lock = threading.Lock()

    def last(self, key: Key) -> tuple[int, int]:
        """Its generation and its number; zeros for none."""
        return self._last.get(key, (0, 0))

    def note(self, key: Key, generation: int, turn: int) -> None:
        with self._lock:
            self._last[key] = (generation, turn)
            self._last.move_to_end(key)
            if len(self._last) > self._most:
                self._last.popitem(last=False)

    def next_blind(self, key: Key) -> int:
        """The number of a turn that could not ask."""
        generation, turn = self.last(key)
        self.note(key, generation, turn + 1)
        return turn + 1


class RecordLocks:
    """Mutex per record: its changes that begin in one event loop happen one after the other."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, keys: Sequence[str], timeout_s: float | None) -> AsyncIterator[None]:
        """Raises `LedgerUnavailable` when earlier changes take longer than `timeout_s`."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(timeout_s):
                    for key in sorted(set(keys)):  # in one order, so that two changes never wait for each other
                        await stack.enter_async_context(self._one(key))
            except TimeoutError:
                raise LedgerUnavailable("earlier changes of the conversation take too long") from None
            yield

    @asynccontextmanager
    async def _one(self, key: str) -> AsyncIterator[None]:
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._waiting[key] += 1
        try:
            async with lock:
                yield
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key], self._locks[key]
