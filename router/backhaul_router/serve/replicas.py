"""Anti-entropy between replicas: served routers that share a Redis, on one machine or several, and follow the same orders.

What the engines are to be is a register for each of them, of which the last writer wins. Every replica keeps all registers, tells
the server those that it lacks and takes those that are newer, twice a second. So an order reaches a replica that was started
later, and one that was given while the server was away is told when it is back, also where that has lost its data. Registers
end when no replica has been there for a minute; the configuration alone counts then.

Each replica says besides how its engines are and which orders it has followed, so that any of them can answer for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ..drive.router import Router
from ..errors import ConfigError, LeaseError
from ..fleet.engine import Role
from ..ledger.redis_link import LedgerUnavailable, RedisLink
from ..ledger.redis_records import Keys
from .shared_limits import LEASE_S

log = logging.getLogger("backhaul")

_PERIOD_S = 0.5
_PATIENCE_S = 1.0
_LOOK_S = 0.05
_ORDERS_KEPT_S = 60.0

_SYNC = """
local me, info, lease, kept, known, drawn, after = unpack(ARGV, 1, 7)
local seen, infos, fleet, version, ends = unpack(KEYS)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', seen, '-inf', now - lease)) do
  redis.call('ZREM', seen, gone)
  redis.call('HDEL', infos, gone)
end
redis.call('ZADD', seen, now, me)
redis.call('HSET', infos, me, info)
for i = 8, #ARGV, 3 do
  local there = redis.call('HGET', fleet, ARGV[i])
  if not there or tonumber(string.match(there, '%d+')) < tonumber(ARGV[i + 1]) then
    redis.call('HSET', fleet, ARGV[i], ARGV[i + 1] .. ' ' .. ARGV[i + 2])
    redis.call('SET', version, drawn)
  end
end
for _, key in ipairs({seen, infos, fleet, version}) do redis.call('PEXPIRE', key, kept) end
local there = redis.call('GET', version) or ''
local orders = false
if there ~= known then orders = redis.call('HGETALL', fleet) end
local news = {}
if after == '' then
  local last = redis.call('XREVRANGE', ends, '+', '-', 'COUNT', 1)[1]
  after = last and last[1] or '0-0'
else
  news = redis.call('XRANGE', ends, '(' .. after, '+', 'COUNT', 1000)
  if #news > 0 then after = news[#news][1] end
end
return {there, orders, after, news}
"""
_OTHERS = """
local time = redis.call('TIME')
local found = {}
for _, one in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], time[1] * 1000 + time[2] / 1000 - ARGV[2], '+inf')) do
  if one ~= ARGV[1] then found[#found + 1] = redis.call('HGET', KEYS[2], one) or '' end
end
return found
"""
_LEAVE = """
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
"""


class Wanted(enum.StrEnum):
    """What an engine is to be."""

    IN = "in"
    DRAINING = "draining"
    OUT = "out"


class Order(msgspec.Struct, frozen=True):
    """The last word on one engine."""

    stamp: int
    """Milliseconds since 1970, and more than that of every order that was known where it was given."""
    role: Role
    wanted: Wanted
    within_s: float
    """How long turns have to end where it is `OUT`."""


class Info(msgspec.Struct, frozen=True):
    """What a replica says of itself."""

    name: str
    followed: dict[str, int]
    """By engine, the stamp of the order that it has followed, or could not."""
    failed: dict[str, str]
    engines: list[dict[str, Any]]
    """As `GET /backhaul/admin/engines` lists them."""


_read_info = msgspec.json.Decoder(Info).decode
_read_order = msgspec.json.Decoder(Order).decode


class Replicas:
    """One replica's view of all. `engines` says how its own are; `ended` is called for conversations that were ended."""

    def __init__(
        self,
        router: Router,
        link: RedisLink,
        keys: Keys,
        *,
        replica: str,
        name: str,
        engines: Callable[[], list[dict[str, Any]]],
        ended: Callable[[str, str], None],
        refresh: Callable[[], None],
    ) -> None:
        """`refresh` is called whenever the server has answered."""
        self.name = name
        self._router = router
        self._link = link
        self._keys = [keys.replicas(what) for what in ("seen", "info", "fleet", "version", "ends")]
        self._replica = replica
        self._engines = engines
        self._ended = ended
        self._refresh = refresh
        self._orders: dict[str, Order] = {}
        self._untold: set[str] = set()
        self._followed: dict[str, int] = {}
        self._failed: dict[str, str] = {}
        self._version = self._after = ""
        self._following: dict[str, asyncio.Task[None]] = {}
        self._hurry = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Replicas at {self._link.address}, this one is {self.name}>"

    # --- its life

    async def begin(self) -> None:
        """Before the router connects: has it begin with the engines that the others have."""
        with contextlib.suppress(LedgerUnavailable):
            await self._sync()
        config, of = self._router.config, {}
        for role, configured in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
            of[role] = dict.fromkeys(url for url in configured if self._wanted(url) is not Wanted.OUT)
            of[role] |= {
                url: None for url, one in self._orders.items() if one.role is role and one.wanted is not Wanted.OUT
            }
        if all(of.values()):
            config = dataclasses.replace(config, prefill=tuple(of[Role.PREFILL]), decode=tuple(of[Role.DECODE]))
            self._router.reconfigure(config)

    def start(self) -> None:
        """After it has connected: follows orders from now on."""
        for url in self._orders:
            self._follow(url)
        self._loop = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """Leaves the others."""
        tasks = [*self._following.values(), *([self._loop] if self._loop is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        with contextlib.suppress(LedgerUnavailable):
            await self._link.run(_LEAVE, self._keys[:2], [self._replica], patience_s=_PATIENCE_S)

    async def _run(self) -> None:
        while True:
            try:
                await self._sync()
            except LedgerUnavailable:
                pass  # which the link logs
            except Exception:
                log.exception("the other replicas cannot be followed, and Backhaul is at fault")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_S):
                    await self._hurry.wait()
            self._hurry.clear()

    # --- orders

    def tell(self, role: Role, url: str, wanted: Wanted, within_s: float = 30.0) -> None:
        """This replica has followed an order, and the others are to."""
        stamp = max(round(time.time() * 1000), self._orders[url].stamp + 1 if url in self._orders else 0)
        self._orders[url] = Order(stamp, role, wanted, within_s)
        self._followed[url] = stamp
        self._failed.pop(url, None)
        self._untold.add(url)
        self._hurry.set()

    def correct(self, role: Role, url: str, wanted: Wanted) -> None:
        """The configuration says so, which is told to the others only where an order stands against it."""
        if url in self._orders and self._orders[url].wanted is not wanted:
            self.tell(role, url, wanted)

    async def missing(self, url: str, limit_s: float) -> list[str]:
        """Who has not followed the last order on an engine within `limit_s`, and why. Raises `LedgerUnavailable`: nobody can be
        told for now."""
        await self._sync()
        until, stamp = time.monotonic() + limit_s, self._orders[url].stamp
        while True:
            others = await self.others()
            waiting = [one for one in others if one.followed.get(url, 0) < stamp]
            if not waiting or time.monotonic() > until:
                break
            await asyncio.sleep(_LOOK_S)
        return [f"{one.name} has not answered yet" for one in waiting] + [
            f"{one.name}: {one.failed[url]}" for one in others if one not in waiting and url in one.failed
        ]

    async def others(self) -> list[Info]:
        """What the other replicas have said last. Raises `LedgerUnavailable`."""
        given: list[Any] = [self._replica, round(LEASE_S * 1000)]
        found = await self._link.run(_OTHERS, self._keys[:2], given, patience_s=_PATIENCE_S)
        return sorted((_read_info(one) for one in found if one), key=lambda info: info.name)

    async def reachable(self) -> None:
        """Raises `LedgerUnavailable` where the others cannot be told anything."""
        await self._sync()

    def _wanted(self, url: str) -> Wanted | None:
        return self._orders[url].wanted if url in self._orders else None

    async def _sync(self) -> None:
        async with self._one_at_a_time:
            info = Info(self.name, self._followed, self._failed, self._engines())
            told: list[Any] = []
            for url in self._untold:
                told += (url, self._orders[url].stamp, msgspec.json.encode(self._orders[url]))
            drawn = f"{self._replica}:{time.time_ns()}"
            lasts = [round(LEASE_S * 1000), round(_ORDERS_KEPT_S * 1000)]
            given: list[Any] = [
                self._replica,
                msgspec.json.encode(info),
                *lasts,
                self._version,
                drawn,
                self._after,
                *told,
            ]
            version, orders, after, news = await self._link.run(_SYNC, self._keys, given, patience_s=_PATIENCE_S)
            self._version, self._after = version.decode(), after.decode()
            if orders is not None:
                self._take({url.decode(): _read_order(one.partition(b" ")[2]) for url, one in _pairs(orders)})
            for _, fields in news:
                ended = {name: value.decode() for name, value in _pairs(fields)}
                self._ended(ended[b"c"], ended[b"t"])
            self._refresh()

    def _take(self, there: Mapping[str, Order]) -> None:
        for url, order in there.items():
            mine = self._orders.get(url)
            if mine is None or (order.stamp >= mine.stamp and order != mine):
                self._orders[url] = order
                if self._loop is not None:
                    self._follow(url)
        self._untold = {url for url, mine in self._orders.items() if url not in there or there[url].stamp < mine.stamp}

    def _follow(self, url: str) -> None:
        if url not in self._following:
            task = asyncio.get_running_loop().create_task(self._follow_last(url))
            self._following[url] = task
            task.add_done_callback(lambda _: self._following.pop(url, None))

    async def _follow_last(self, url: str) -> None:
        while (order := self._orders[url]).stamp > self._followed.get(url, 0):
            self._failed.pop(url, None)
            try:
                await self._perform(url, order)
            except (ConfigError, LeaseError) as error:
                log.warning("%s is to be %s, as another replica was told: %s", url, order.wanted, error)
                self._failed[url] = str(error)
                if order.wanted is Wanted.IN:
                    self._router.membership.absent[url] = order.role
            self._followed[url] = max(order.stamp, self._followed.get(url, 0))
            self._hurry.set()

    async def _perform(self, url: str, order: Order) -> None:
        """Raises `ConfigError`."""
        router = self._router
        engine = router.fleet.get(url)
        if order.wanted is Wanted.OUT:
            if not router.membership.absent.pop(url, None) and engine is not None:
                await router.remove_engine(url, within_s=order.within_s)
            return
        if (
            engine is None
            or not router.fleet.takes_part(engine)
            or (order.wanted is Wanted.IN and url in router.fleet.draining)
        ):
            await router.add_engine(order.role, url)
        if order.wanted is Wanted.DRAINING:
            await router.drain_engine(url)


def _pairs(flat: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
