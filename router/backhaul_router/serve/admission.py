"""How many requests each tenant may have here, how many turns run at a time, and who waits: a bounded queue for each tenant,
served in turns.

A turn that finds no room waits; a queue that is full refuses. Of two tenants with turns waiting each gets every second place that
becomes free, however many the other has queued, and a full queue makes room for one that has fewer by refusing the newest of
the one that has most: nobody's burst shuts others out.

A tenant's own limit is another thing: it counts what waits too, with all replicas that share a Redis, and refuses before a
request's body is read.

Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ..errors import ConfigError
from .shared_limits import SharedLimits

_TRY_AGAIN_S = 1
_LONGEST_TRY_AGAIN_S = 30


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one router process."""

    max_concurrent_turns: int = 0
    """Turns that run at a time; 0 is no limit."""
    max_queued_turns: int = 100
    """Turns of all tenants that wait for one to end; more are answered 429."""
    queue_timeout_s: float = 30.0
    """Longest wait; a turn that still has no place then is answered 503."""

    def __post_init__(self) -> None:
        for name in ("max_concurrent_turns", "max_queued_turns"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}: a number of turns, 0 or more")
        if not 0 < self.queue_timeout_s < math.inf:
            raise ConfigError(f"queue_timeout_s={self.queue_timeout_s}: a number of seconds above 0")


class Refused(Exception):
    """A turn gets no place. It was not begun, so that it can be sent again."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("retry-after", str(self.retry_after_s)), ("x-should-retry", "true"))


class Admission:
    """Places for turns. `limits` may be replaced at any time; turns that run or wait stay."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.shared: SharedLimits | None = None
        """What tenants have with other replicas."""
        self._limits = limits or Limits()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._queued = 0
        self._here: Counter[str] = Counter()
        self.running = 0

    def __repr__(self) -> str:
        return f"<Admission {self.running} running, {self._queued} queued>"

    @property
    def queued(self) -> int:
        return self._queued

    @property
    def limits(self) -> Limits:
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits
        self._admit()

    @contextlib.asynccontextmanager
    async def request(self, tenant: str, most: int | None) -> AsyncIterator[None]:
        """One of at most `most` requests that a tenant may have, until the block is left. Raises `Refused`."""
        if most is None:
            yield
            return
        self._here[tenant] += 1
        try:
            if self._here[tenant] > most or not await self._shared_place(tenant, most):
                raise Refused(
                    429,
                    "too_many_turns",
                    f"{tenant} has {most} requests running, its limit (max_concurrent_turns)",
                    _TRY_AGAIN_S,
                )
            yield
        finally:
            self._here[tenant] -= 1
            if self.shared is not None:
                self.shared.left(tenant, self._here[tenant])
            if not self._here[tenant]:
                del self._here[tenant]

    async def _shared_place(self, tenant: str, most: int) -> bool:
        return self.shared is None or await self.shared.enter(tenant, self._here[tenant], most)

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str = "") -> AsyncIterator[None]:
        """Waits for a place, and has it until the block is left. Raises `Refused`."""
        await self._enter(tenant)
        try:
            yield
        finally:
            self._leave()

    @property
    def _has_room(self) -> bool:
        return not self._limits.max_concurrent_turns or self.running < self._limits.max_concurrent_turns

    async def _enter(self, tenant: str) -> None:
        if self._has_room:  # then nobody waits
            self.running += 1
            return None
        self._make_place(tenant)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        self._queued += 1
        timeout_s = self._limits.queue_timeout_s
        try:
            await asyncio.wait((place,), timeout=timeout_s)
        except asyncio.CancelledError:
            if not place.done():
                self._remove(tenant, place)
            elif place.exception() is None:
                self._leave()
            raise
        if place.done():
            return place.result()
        self._remove(tenant, place)
        raise Refused(
            503,
            "queue_timeout",
            f"no other turn ended within {timeout_s:g} s in favour of this one (queue_timeout_s); "
            f"{self.running} turns are running and {self._queued} others wait",
            min(max(_TRY_AGAIN_S, math.ceil(timeout_s)), _LONGEST_TRY_AGAIN_S),
        )

    def _leave(self) -> None:
        self.running -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._has_room:
            tenant, places = next(iter(self._waiting.items()))
            place = places.popleft()
            self._queued -= 1
            if places:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            self.running += 1
            place.set_result(None)

    def _make_place(self, tenant: str) -> None:
        if self._queued < self._limits.max_queued_turns:
            return
        own = len(self._waiting.get(tenant, ()))
        longest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=tenant)
        if longest == tenant or len(self._waiting[longest]) <= own + 1:
            raise self._full()
        newest = self._waiting[longest][-1]
        self._remove(longest, newest)
        newest.set_exception(self._full())

    def _remove(self, tenant: str, place: asyncio.Future[None]) -> None:
        places = self._waiting[tenant]
        places.remove(place)
        self._queued -= 1
        if not places:
            del self._waiting[tenant]

    def _full(self) -> Refused:
        return Refused(
            429,
            "too_many_turns",
            f"{self.running} turns are running (max_concurrent_turns) and {self._queued} wait (max_queued_turns): "
            "send it again later",
            _TRY_AGAIN_S,
        )
