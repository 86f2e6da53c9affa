"""A distributed semaphore on Redis: how many requests of a tenant all replicas have, counted where each of them can be refused.

Each replica writes how many it has, so that a count that was lost heals by itself, and that of a replica which is gone (it is not
`seen` any more) is nobody's. While the server does not answer each replica counts for itself.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from ..ledger.redis_link import LedgerUnavailable, RedisLink
from ..ledger.redis_outbox import Outbox
from ..ledger.redis_records import Keys

LEASE_S = 5.0
"""A replica that has not been heard of for so long is gone."""
_AGAIN_S = 0.02
"""What another replica has just ended may not be written yet."""
_KEPT_MS = 60_000

_COUNT = """
local me, number, mine, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local gone = time[1] * 1000 + time[2] / 1000 - ARGV[5]
local others, before = 0, 0
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local written, count = string.match(all[i + 1], '(%d+) (%d+)')
  if all[i] == me then
    before = tonumber(written)
  elseif tonumber(redis.call('ZSCORE', KEYS[2], all[i]) or '-1') > gone then
    others = others + tonumber(count)
  else
    redis.call('HDEL', KEYS[1], all[i])
  end
end
if most > 0 and others + mine > most then return 0 end
if number > before then redis.call('HSET', KEYS[1], me, number .. ' ' .. mine) end
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return 1
"""


class SharedLimits:
    """One replica's view of them."""

    def __init__(self, link: RedisLink, keys: Keys, replica: str) -> None:
        self._link = link
        self._keys = keys
        self._replica = replica
        self._numbers = itertools.count(1)
        self._here: dict[str, int] = {}
        """Requests of each tenant, where there are any."""
        self._outbox = Outbox(self._write)

    async def enter(self, tenant: str, here: int, most: int) -> bool:
        """Whether a tenant may have `here` requests with this replica, one more than before, where it may have `most` in all."""
        self._here[tenant] = here
        try:
            if await self._count(tenant, here, most):
                return True
            await asyncio.sleep(_AGAIN_S)
            return await self._count(tenant, here, most)
        except LedgerUnavailable:
            return True

    def left(self, tenant: str, here: int) -> None:
        """A tenant has so many requests here from now on."""
        self._here[tenant] = here
        if not here:
            del self._here[tenant]
        self._outbox.put(tenant)

    def refresh(self) -> None:
        """Writes again what there is, which the server may have lost."""
        if not self._outbox:
            for tenant in self._here:
                self._outbox.put(tenant)

    async def aclose(self) -> None:
        await self._outbox.aclose()

    async def _write(self, tenants: Sequence[str]) -> None:
        for tenant in dict.fromkeys(tenants):
            await self._count(tenant, self._here.get(tenant, 0), 0)

    async def _count(self, tenant: str, here: int, most: int) -> bool:
        keys = [self._keys.running(tenant), self._keys.replicas("seen")]
        given: list[Any] = [self._replica, next(self._numbers), here, most, round(LEASE_S * 1000), _KEPT_MS]
        return bool(await self._link.run(_COUNT, keys, given))
