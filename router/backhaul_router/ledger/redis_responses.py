"""A write-through cache of response ids: those that turns were answered with are on Redis too, and looked for there on a miss."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..identity.ids import ResponseIds, fits
from .redis_link import LedgerUnavailable, RedisLink
from .redis_outbox import Outbox
from .redis_records import SHARED_FOR_S, Keys

_AGAIN_S = 0.02
"""A request may come to one router before another has written what its client got from it."""

_WRITE = """
for i = 1, #KEYS do redis.call('SET', KEYS[i], ARGV[i + 1], 'PX', ARGV[1]) end
"""
_READ = """
return redis.call('GET', KEYS[1])
"""


class SharedResponses(ResponseIds):
    """Those of all routers on one Redis. What is not known here and cannot be asked for is not known."""

    def __init__(self, link: RedisLink, keys: Keys) -> None:
        super().__init__()
        self._link = link
        self._keys = keys
        self._outbox = Outbox(self._write)

    def note(self, response: str, conversation: str, tenant: str = "") -> None:
        super().note(response, conversation, tenant)
        if fits(response):
            self._outbox.put((self._keys.response(tenant, response), conversation))

    async def learn(self, response: object, tenant: str = "") -> None:
        if not isinstance(response, str) or not fits(response) or self.conversation_of(response, tenant) is not None:
            return
        key = self._keys.response(tenant, response)
        try:
            found = await self._link.run(_READ, [key])
            if found is None:
                await asyncio.sleep(_AGAIN_S)
                found = await self._link.run(_READ, [key])
        except LedgerUnavailable:
            return
        if found is not None:
            super().note(response, found.decode(), tenant)

    async def aclose(self) -> None:
        await self._outbox.aclose()

    async def _write(self, noted: Sequence[tuple[str, str]]) -> None:
        keys, conversations = zip(*noted, strict=True)
        await self._link.run(_WRITE, keys, [round(SHARED_FOR_S * 1000), *conversations])
