"""Client of Redis or Valkey with a circuit breaker: calls take a bounded time, and fail at once in an outage. Needs the extra
`redis`.

After a call that failed the server counts as gone: calls fail at once, but for one every `_TRY_AGAIN_S`, which finds out whether
it is back. So an outage costs one turn in a while its wait, and the others nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .. import urls
from ..errors import ConfigError, LeaseError

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("backhaul")

_TRY_AGAIN_S = 0.5
_MAX_CONNECTIONS = 64
_SCANNED_AT_A_TIME = 500


class LedgerUnavailable(LeaseError):
    """The shared ledger did not do what it was asked, or nobody knows whether it did."""

    def __init__(self, message: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown
        """It may have been done all the same, or be done later."""


class RedisLink:
    """Client of one server with a circuit breaker; a connection pool per event loop. Raises `ConfigError` where the extra
    `redis` is not installed, or the URL is none of Redis."""

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            import redis.asyncio
            import redis.exceptions
        except ImportError:
            raise ConfigError("redis_url= needs the package redis: pip install 'backhaul[redis]'") from None
        self._redis = redis
        self._url = url
        self._timeout_s = timeout_s
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Redis] = WeakKeyDictionary()
        self._down_since: float | None = None
        self._try_again = 0.0
        self._missed = 0
        self.failures = 0
        """Calls that failed, or were not tried, since the start."""
        self._client()

    def __repr__(self) -> str:
        state = "" if self._down_since is None else ", does not answer"
        return f"<RedisLink {self.address}{state}>"

    @property
    def address(self) -> str:
        """Without credentials."""
        return urls.shown(self._url)

    @property
    def down(self) -> bool:
        return self._down_since is not None

    async def run(self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes | int | float] = ()) -> Any:
        """Runs a script. Raises `LedgerUnavailable`, `unknown` where the server may have run it."""
        self._admit()
        client = self._client()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await client.register_script(script)(keys, arguments)
        except self._failures as error:
            if isinstance(error, self._redis.exceptions.ReadOnlyError):  # another server has become the one to write to
                await client.connection_pool.disconnect(inuse_connections=False)
            raise self._failed(error) from None
        self._answered()
        return answer

    async def scan(self, pattern: str) -> AsyncIterator[list[str]]:
        """Keys that match, in batches. One that is there all along is among them, perhaps twice. Raises `LedgerUnavailable`."""
        cursor: int = -1
        while cursor:
            self._admit()
            try:
                async with asyncio.timeout(self._timeout_s):
                    cursor, keys = await self._client().scan(max(cursor, 0), pattern, _SCANNED_AT_A_TIME)
            except self._failures as error:
                raise self._failed(error) from None
            self._answered()
            yield [key.decode() if isinstance(key, bytes) else key for key in keys]

    async def read(self, keys: Sequence[str], field: str) -> list[bytes]:
        """A field of several hashes, empty where there is none. Raises `LedgerUnavailable`."""
        self._admit()
        try:
            async with asyncio.timeout(self._timeout_s), self._client().pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.hget(key, field)
                found = await pipeline.execute()
        except self._failures as error:
            raise self._failed(error) from None
        self._answered()
        return [one or b"" for one in found]

    async def aclose(self) -> None:
        """Closes the connections of this event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        return (self._redis.exceptions.RedisError, OSError, TimeoutError)

    def _client(self) -> Redis:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._connected_to()  # checks the URL
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = self._connected_to()
        return client

    def _connected_to(self) -> Redis:
        try:
            pool = self._redis.asyncio.BlockingConnectionPool.from_url(
                self._url,
                max_connections=_MAX_CONNECTIONS,
                timeout=self._timeout_s,
                socket_timeout=None,  # every call has its limit here
                socket_connect_timeout=self._timeout_s,
                retry=self._redis.asyncio.retry.Retry(self._redis.backoff.NoBackoff(), 0),
            )
            pool.connection_class(**pool.connection_kwargs)  # connects to nothing, and knows the options in the URL
            return self._redis.asyncio.Redis.from_pool(pool)
        except (ValueError, TypeError, self._redis.exceptions.RedisError) as error:
            raise ConfigError(f"redis_url={self.address!r}: {error}") from None

    # --- outages

    def _admit(self) -> None:
        if self._down_since is None:
            return
        if (now := time.monotonic()) < self._try_again:
            self.failures += 1
            self._missed += 1
            raise LedgerUnavailable(f"{self.address} does not answer")
        self._try_again = now + max(_TRY_AGAIN_S, self._timeout_s)

    def _failed(self, error: Exception) -> LedgerUnavailable:
        now = time.monotonic()
        why = str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
        if self._down_since is None:
            self._down_since = now
            log.warning(
                "the ledger at %s does not answer (%s): turns run without what earlier ones left until it does",
                self.address,
                why,
            )
        self._try_again = now + _TRY_AGAIN_S
        self.failures += 1
        self._missed += 1
        return LedgerUnavailable(f"{self.address}: {why}", unknown=True)

    def _answered(self) -> None:
        if self._down_since is None:
            return
        log.warning(
            "the ledger at %s answers again, after %.1f s and %d calls that failed",
            self.address,
            time.monotonic() - self._down_since,
            self._missed,
        )
        self._down_since, self._missed = None, 0
