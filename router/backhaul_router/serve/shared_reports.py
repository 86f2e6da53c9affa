"""A repository of reports on Redis: each replica writes the reports of its turns, and any of them answers for all.

A conversation is a hash with its total, which the server adds up, and a list of its last reports. They are written behind the
answers, each once: a write whose outcome nobody knows is repeated under its number.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ..ledger.redis_link import RedisLink
from ..ledger.redis_outbox import Outbox
from ..ledger.redis_records import SHARED_FOR_S, Keys
from ..report import ReuseReport
from .report_log import MAX_CONVERSATIONS, MAX_REPORTS, Total

_PATIENCE_S = 1.0
_PAGE = 100
"""Conversations that are listed at a time."""

_DROP = """
local function drop(key)
  for _, index in ipairs(redis.call('HMGET', key, 'x', 'u')) do
    if index and index ~= '' then redis.call('ZREM', index, key) end
  end
  return redis.call('DEL', key, key .. ':l')
end
"""
_RECORD = (
    _DROP
    + """
local function add(total, turn)
  for name, value in pairs(turn) do
    if type(value) == 'table' then
      total[name] = total[name] or {}
      add(total[name], value)
    else
      total[name] = (total[name] or 0) + value
    end
  end
end
local function list(index, key, at, ttl, most)
  redis.call('ZADD', index, at, key)
  redis.call('PEXPIRE', index, ttl)
  while redis.call('ZCARD', index) > most do drop(redis.call('ZPOPMIN', index)[1]) end
end
local writer, ttl, conversations, reports = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
for i, key in ipairs(KEYS) do
  local number, at, name, index, unnamed, turn, report = unpack(ARGV, 7 * i - 2, 7 * i + 4)
  if tonumber(redis.call('HGET', key, writer) or '0') < tonumber(number) then
    local total = cjson.decode(redis.call('HGET', key, 't') or '{}')
    add(total, cjson.decode(turn))
    redis.call('HSET', key, 't', cjson.encode(total), 'n', name, 'a', at, 'x', index, 'u', unnamed, writer, number)
    redis.call('RPUSH', key .. ':l', report)
    redis.call('LTRIM', key .. ':l', -reports, -1)
    redis.call('PEXPIRE', key, ttl)
    redis.call('PEXPIRE', key .. ':l', ttl)
    if unnamed ~= '' then list(unnamed, key, at, ttl, math.max(1, math.floor(conversations / 2))) end
    list(index, key, at, ttl, conversations)
  end
end
"""
)
_SHOW = """
local found = redis.call('HMGET', KEYS[1], 'n', 'a', 't')
if not found[1] then return false end
for _, report in ipairs(redis.call('LRANGE', KEYS[1] .. ':l', 0, -1)) do
  if ARGV[1] == '' or string.sub(report, 1, #ARGV[1] + 1) == ARGV[1] .. ' ' then found[#found + 1] = report end
end
return found
"""
_LIST = """
local out = {}
for _, key in ipairs(redis.call('ZREVRANGE', KEYS[1], ARGV[1], ARGV[2])) do
  local found = redis.call('HMGET', key, 'n', 'a', 't')
  if found[1] then out[#out + 1] = found end
end
return {redis.call('ZCARD', KEYS[1]), out}
"""
_FORGET = (
    _DROP
    + """
local known = drop(KEYS[1]) > 0
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 't', ARGV[1], 'c', ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return known
"""
)


class _Written(NamedTuple):
    number: int
    at: float
    report: ReuseReport
    worker: int | None


class SharedReports:
    """Those of all replicas. `replica`: who writes here. Methods that read raise `LedgerUnavailable`."""

    def __init__(self, link: RedisLink, keys: Keys, replica: str, worker: int | None = None) -> None:
        self._link = link
        self._keys = keys
        self._writer = f"w:{replica}"
        self._worker = worker
        self._numbers = itertools.count(1)
        self._outbox = Outbox(self._write)

    @property
    def lost(self) -> int:
        """Reports that found no room while the server did not answer."""
        return self._outbox.lost

    def record(self, report: ReuseReport) -> None:
        """Has it written behind the answer."""
        if report.conversation is not None:
            self._outbox.put(_Written(next(self._numbers), time.time(), report, self._worker))

    async def listed(self, tenant: str) -> list[dict[str, Any]]:
        """A tenant's conversations without reports, the one that was active last first."""
        await self._outbox.written(_PATIENCE_S)
        found: list[dict[str, Any]] = []
        index = self._keys.reported(tenant, by_history=False)
        for start in itertools.count(0, _PAGE):
            number, page = await self._link.run(_LIST, [index], [start, start + _PAGE - 1], patience_s=_PATIENCE_S)
            found += (_summary(*one) for one in page)
            if start + _PAGE >= number:
                return found
        raise AssertionError

    async def shown(self, tenant: str, conversation: str, turn: int | None = None) -> dict[str, Any] | None:
        """One conversation with its last reports, or those of one turn."""
        await self._outbox.written(_PATIENCE_S)
        key = self._keys.reports(tenant, conversation)
        found = await self._link.run(_SHOW, [key], ["" if turn is None else turn], patience_s=_PATIENCE_S)
        if not found:
            return None
        read = [msgspec.json.decode(one.partition(b" ")[2]) for one in found[3:]]
        return {**_summary(*found[:3]), "reports": sorted(read, key=lambda one: one["turn"])}

    async def forget(self, tenant: str, conversation: str) -> bool:
        """Whether there was anything to forget. Replicas are told."""
        await self._outbox.written(_PATIENCE_S)
        keys = [self._keys.reports(tenant, conversation), self._keys.replicas("ends")]
        ttl = round(SHARED_FOR_S * 1000)
        return bool(await self._link.run(_FORGET, keys, [tenant, conversation, ttl], patience_s=_PATIENCE_S))

    async def aclose(self) -> None:
        await self._outbox.aclose()

    async def _write(self, batch: Sequence[_Written]) -> None:
        keys: list[str] = []
        given: list[Any] = [self._writer, round(SHARED_FOR_S * 1000), MAX_CONVERSATIONS, MAX_REPORTS]
        for number, at, report, worker in batch:
            tenant, conversation = report.tenant, report.conversation or ""
            of_turn = Total()
            of_turn.add(report)
            shown = report.to_dict() if worker is None else {**report.to_dict(), "worker": worker}
            unnamed = self._keys.reported(tenant, by_history=True) if report.identity_source == "history" else ""
            keys.append(self._keys.reports(tenant, conversation))
            given += (number, at, conversation, self._keys.reported(tenant, by_history=False), unnamed)
            given += (msgspec.json.encode(of_turn.sums()), f"{report.turn} ".encode() + msgspec.json.encode(shown))
        await self._link.run(_RECORD, keys, given, patience_s=_PATIENCE_S)


def _summary(name: bytes, at: bytes, total: bytes) -> dict[str, Any]:
    read = Total.of_sums(msgspec.json.decode(total))
    return {"id": name.decode(), "last_active": float(at), "total": read.to_dict()}
