"""Where the histories of conversations without a name end, so that a request that goes on from one is known by its messages.

A request continues a history when it begins with all of its messages and has more: both are chains of digests, so it is
enough to look for the digest of a history's last message among the request's. Equal openings are no continuation: two
agents that say the same at first are two conversations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from . import digests

if TYPE_CHECKING:
    from .ledger import Key

_End = tuple[str, str, str, bytes]
"""Tenant, model, cache salt, and the digest: nothing is found across any of them."""


class Histories:
    """The ends of the histories of at most `max_conversations` conversations of each tenant, or of all where there are no
    tenants; its owner has the lock."""

    def __init__(self, max_conversations: int, max_per_tenant: int | None = None) -> None:
        self._max_conversations = max_conversations
        self._max_per_tenant = max_conversations if max_per_tenant is None else max_per_tenant
        self._by_tenant: dict[str, OrderedDict[Key, frozenset[bytes]]] = {}
        self._found: dict[_End, dict[Key, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def __contains__(self, key: Key) -> bool:
        return key in self._by_tenant.get(key.tenant, ())

    def oldest(self, tenant: str) -> Key | None:
        """The tenant's conversation that was filed longest ago."""
        return next(iter(self._by_tenant.get(tenant, ())), None)

    def put(self, key: Key, chains: Iterable[bytes]) -> Key | None:
        """Files a conversation with its histories as they are now; without any it is forgotten. Returns the conversation
        that makes room, if one has to: the one of the same tenant that was filed longest ago."""
        ends = frozenset(chain[-digests.SIZE :] for chain in chains if chain)
        filed = self._by_tenant.setdefault(key.tenant, OrderedDict())
        before = filed.pop(key, frozenset())
        for end in before - ends:
            self._remove(key, end)
        for end in ends:
            holders = self._found.setdefault(_end(key, end), {})
            holders.pop(key, None)
            holders[key] = None
        if ends:
            filed[key] = ends
        return next(iter(filed)) if len(filed) > self._most(key.tenant) else None

    def drop(self, key: Key) -> None:
        """Forgets a conversation, known or not."""
        if key in self:
            for end in self._by_tenant[key.tenant].pop(key):
                self._remove(key, end)

    def find(self, key: Key, chain: bytes) -> str | None:
        """The conversation that `chain` continues furthest, of those that were filed last; `key` says what it must share."""
        if not self._by_tenant.get(key.tenant):
            return None
        for stop in range(len(chain) - digests.SIZE, 0, -digests.SIZE):
            if holders := self._found.get(_end(key, chain[stop - digests.SIZE : stop])):
                return next(reversed(holders)).conversation
        return None

    def _most(self, tenant: str) -> int:
        return self._max_per_tenant if tenant else self._max_conversations

    def _remove(self, key: Key, end: bytes) -> None:
        holders = self._found[_end(key, end)]
        del holders[key]
        if not holders:
            del self._found[_end(key, end)]


def _end(key: Key, digest: bytes) -> _End:
    return key.tenant, key.model, key.cache_salt, digest
