"""What a router on a shared ledger knows of its own part: what it has filed and has to sweep, which shared handles its turns are
reading, and in which order it changes a conversation."""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from .ledger import Held, Key
from .redis_link import LedgerUnavailable
from .redis_records import Name

_HandleName = tuple[str, str]


class Filed:
    """Handles that this router has filed, and does not know to be gone. Deadlines are in its own time."""

    def __init__(self) -> None:
        self._filed: dict[Name, dict[_HandleName, Held]] = {}
        self._deadlines: list[tuple[float, Name, _HandleName]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Conversations."""
        return len(self._filed)

    def handles(self) -> tuple[Held, ...]:
        with self._lock:
            return tuple(held for handles in self._filed.values() for held in handles.values())

    def clear(self) -> None:
        """Nothing of it is this router's to sweep any more."""
        with self._lock:
            self._filed.clear()
            self._deadlines.clear()

    def note(
        self, names: Iterable[Name], on_file: Mapping[_HandleName, Held], added: Mapping[_HandleName, Name]
    ) -> None:
        """What is on file of some conversations after a change, and what of it this router has added."""
        with self._lock:
            for name in names:
                mine = self._filed.pop(name, {})
                kept = {handle: on_file[handle] for handle in mine if handle in on_file}
                kept |= {handle: on_file[handle] for handle, of in added.items() if of == name}
                for handle, held in kept.items():
                    if handle not in mine or mine[handle].deadline < held.deadline:
                        heapq.heappush(self._deadlines, (held.deadline, name, handle))
                if kept:
                    self._filed[name] = kept

    def due(self, now: float) -> dict[Name, frozenset[_HandleName]]:
        """Conversations with handles that have come to their deadline. They do not count as filed any more."""
        if not self._deadlines or self._deadlines[0][0] > now:
            return {}
        found: dict[Name, frozenset[_HandleName]] = {}
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                _, name, handle = heapq.heappop(self._deadlines)
                held = self._filed.get(name, {}).get(handle)
                if held is None or held.deadline > now:
                    continue
                found[name] = found.get(name, frozenset()) | {handle}
                del self._filed[name][handle]
                if not self._filed[name]:
                    del self._filed[name]
        return found


class Readers:
    """How many of this router's turns have taken each shared handle: it is not released before they are done."""

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
    """The last turn of each conversation here, so that turns of an outage are numbered too: reports are told apart by it."""

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


class Queues:
    """Has the changes of a record that begin in one event loop happen one after the other."""

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
