"""A write-behind queue to Redis or Valkey: what nobody waits for is written behind the answer, in batches and in order, and again
after an outage. Bounded: what finds no room any more is lost, the oldest first, and counted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from .redis_link import LedgerUnavailable

_T = TypeVar("_T")
_TRY_AGAIN_S = 0.5
_AT_ONCE = 32


class Outbox(Generic[_T]):
    """Of one kind of things. `write` raises `LedgerUnavailable` where they may not have been written; it then gets them again."""

    def __init__(self, write: Callable[[Sequence[_T]], Awaitable[None]], most: int = 10_000) -> None:
        self.lost = 0
        """Things that found no room."""
        self._write = write
        self._most = most
        self._waiting: deque[_T] = deque()
        self._put = 0
        self._gone = 0
        """Of those that were put in, how many are written or lost."""
        self._readers: list[tuple[int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return self._put - self._gone

    def put(self, thing: _T) -> None:
        """Has it written soon, by the running event loop."""
        self._put += 1
        self._waiting.append(thing)
        self._bound()
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._drain())

    async def written(self, limit_s: float) -> None:
        """Returns when what has been put in by now is written, or cannot be, or after `limit_s`."""
        if self:
            reader = asyncio.get_running_loop().create_future()
            self._readers.append((self._put, reader))
            await asyncio.wait((reader,), timeout=limit_s)

    async def aclose(self, limit_s: float = 1.0) -> None:
        """Ends the writing, after up to `limit_s` for what still waits."""
        await self.written(limit_s)
        if self._task is not None and self._task.get_loop() is asyncio.get_running_loop():
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _drain(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
            try:
                await self._write(batch)
            except LedgerUnavailable:
                self._waiting.extendleft(reversed(batch))
                self._bound()
                self._tell_readers(self._put)
                await asyncio.sleep(_TRY_AGAIN_S)
            else:
                self._gone += len(batch)
                self._tell_readers(self._gone)

    def _bound(self) -> None:
        while len(self._waiting) > self._most:
            self._waiting.popleft()
            self.lost += 1
            self._gone += 1

    def _tell_readers(self, up_to: int) -> None:
        told = [reader for number, reader in self._readers if number <= up_to]
        self._readers = [one for one in self._readers if one[0] > up_to]
        for reader in told:
            if not reader.done():
                reader.set_result(None)
