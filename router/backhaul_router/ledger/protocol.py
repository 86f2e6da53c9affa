"""Repository interface: what a router asks of a ledger, whether it is in its own memory or shared with others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

from ..config import RouterConfig
from ..report import Reason
from .memory import MemoryLedger
from .records import Branch, Held, Key, Taken

_T = TypeVar("_T")
Later: TypeAlias = _T | Coroutine[Any, Any, _T]
"""A ledger in memory answers at once; one that has to ask somebody returns a coroutine, to be awaited or made a task. The
changes of one conversation happen in the order in which their coroutines start."""
Dropped: TypeAlias = Later[tuple[Held, ...]]
"""Handles that nobody has any more, to be released."""


async def arrived(later: Later[_T]) -> _T:
    """The value, waited for where it has to be."""
    return await later if asyncio.iscoroutine(later) else later


class Ledger(Protocol):
    """Interface of a ledger. The methods do what those of `MemoryLedger` say."""

    @property
    def shared(self) -> bool:
        """Other routers use it as well: it outlives this one."""

    @property
    def available(self) -> bool:
        """Whether it answers, as far as is known here."""

    @property
    def flushes(self) -> int:
        """How often it was flushed, as far as is known here."""

    def __len__(self) -> int: ...
    def handles(self) -> tuple[Held, ...]: ...
    def take(
        self, key: Key, chain: bytes, now: float, usable: Callable[[Held], Reason | None], parent: str | None = None
    ) -> Later[Taken]: ...
    def give_back(self, key: Key, taken: Taken) -> Dropped: ...
    def lost(self, key: Key, taken: Taken, reason: Reason) -> Dropped: ...
    def settle(self, key: Key, taken: Taken, branch: Branch, now: float) -> Dropped: ...
    def find(self, key: Key, chain: bytes) -> Later[str | None]: ...
    def forget(self, conversation: str, tenant: str = "") -> Dropped: ...
    def held_for(self, conversation: str, tenant: str = "") -> Dropped: ...
    def drop_for(
        self, conversation: str, condition: Callable[[Held], bool], reason: Reason, tenant: str = ""
    ) -> Dropped: ...
    def renewed(
        self,
        conversation: str,
        deadlines: Mapping[tuple[str, str], float],
        now: float | None = None,
        tenant: str = "",
    ) -> Later[None]: ...
    def sweep(self, now: float) -> Dropped: ...
    def drop_engine(self, decode: str, engine_id: str) -> Dropped: ...
    def flush(self) -> Dropped: ...
    async def aclose(self) -> None:
        """Ends what the ledger has under way in this event loop."""


def open_ledger(config: RouterConfig, clock: Callable[[], float]) -> Ledger:
    """The ledger that the configuration asks for. Raises `ConfigError`."""
    if config.redis_url is None:
        return MemoryLedger(
            max_conversations=config.max_conversations,
            max_branches=config.max_branches,
            max_idle_s=config.max_idle_s,
            max_conversations_per_tenant=config.max_conversations_per_tenant,
        )
    from .redis_ledger import RedisLedger

    return RedisLedger(
        config.redis_url,
        timeout_s=config.redis_timeout_s,
        prefix=config.redis_prefix,
        max_conversations=config.max_conversations,
        max_branches=config.max_branches,
        max_idle_s=config.max_idle_s,
        max_conversations_per_tenant=config.max_conversations_per_tenant,
        clock=clock,
    )
