"""LRU index of the ends of histories: a request that goes on from a conversation without a name is known by its messages.

A request continues a history when it begins with all of its messages and has more: both are chains of digests, so it is
enough to look for the digest of a history's last message among the request's. Equal openings are no continuation: two
agents that say the same at first are two conversations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from . import digests
from .records import Key

_Scope = tuple[str, str, str]
"""Tenant, model and cache salt: nothing is found across any of them."""
_Ends = bytes | frozenset[bytes]
"""Most conversations have one history; a set takes four times as much."""


class HistoryIndex:
    """LRU index: the ends of the histories of at most `max_conversations` conversations of each tenant, or of all where there
    are no tenants; its owner has the lock."""

    def __init__(self, max_conversations: int, max_per_tenant: int | None = None) -> None:
        self._max_conversations = max_conversations
        self._max_per_tenant = max_conversations if max_per_tenant is None else max_per_tenant
        self._by_tenant: dict[str, OrderedDict[Key, _Ends]] = {}
        self._found: dict[_Scope, dict[bytes, Key | dict[Key, None]]] = {}
        """By digest; most ends are one conversation's, else the last is the one that was filed last."""

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
        before = _each(filed.get(key, frozenset()))
        for end in before - ends:
            self._remove(key, end)
        for end in ends:
            self._add(key, end)
        if not ends:
            filed.pop(key, None)
        else:
            if ends != before:
                filed[key] = next(iter(ends)) if len(ends) == 1 else ends
            filed.move_to_end(key)  # a dictionary that keys leave and enter grows to twice its size
        return next(iter(filed)) if len(filed) > self._most(key.tenant) else None

    def drop(self, key: Key) -> None:
        """Forgets a conversation, known or not."""
        if key in self:
            for end in _each(self._by_tenant[key.tenant].pop(key)):
                self._remove(key, end)

    def find(self, key: Key, chain: bytes) -> str | None:
        """The conversation that `chain` continues furthest, of those that were filed last; `key` says what it must share."""
        found = self._found.get(_scope(key))
        if found is None:
            return None
        for stop in range(len(chain) - digests.SIZE, 0, -digests.SIZE):
            if (holders := found.get(chain[stop - digests.SIZE : stop])) is not None:
                return (next(reversed(holders)) if isinstance(holders, dict) else holders).conversation
        return None

    def _most(self, tenant: str) -> int:
        return self._max_per_tenant if tenant else self._max_conversations

    def _add(self, key: Key, end: bytes) -> None:
        """As the last one of those that end so."""
        found = self._found.setdefault(_scope(key), {})
        holders = found.get(end)
        if holders is None or holders == key:
            found[end] = key
        elif isinstance(holders, dict):
            holders.pop(key, None)
            holders[key] = None
        else:
            found[end] = {holders: None, key: None}

    def _remove(self, key: Key, end: bytes) -> None:
        found = self._found[_scope(key)]
        holders = found[end]
        if isinstance(holders, dict):
            del holders[key]
            if len(holders) == 1:
                (found[end],) = holders
            return
        del found[end]
        if not found:
            del self._found[_scope(key)]


def _scope(key: Key) -> _Scope:
    return key.tenant, key.model, key.cache_salt


def _each(ends: _Ends) -> frozenset[bytes]:
    return frozenset((ends,)) if isinstance(ends, bytes) else ends
