"""The order in which conversations were last active, of each tenant: which one makes room for another."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ledger import Key


class Ages:
    """Conversations of each tenant, the one that was silent for longest first; their owner has the lock."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, OrderedDict[Key, None]] = {}

    def count(self, tenant: str) -> int:
        return len(self._by_tenant.get(tenant, ()))

    def touch(self, key: Key) -> None:
        """A conversation is active now, or new."""
        keys = self._by_tenant.get(key.tenant)
        if keys is None:
            keys = self._by_tenant[key.tenant] = OrderedDict()
        keys[key] = None
        keys.move_to_end(key)

    def drop(self, key: Key) -> None:
        keys = self._by_tenant[key.tenant]
        del keys[key]
        if not keys:
            del self._by_tenant[key.tenant]

    def oldest(self, tenant: str) -> Key:
        """Raises `KeyError` where the tenant has none."""
        return next(iter(self._by_tenant[tenant]))

    def largest(self, growing: str, more: int) -> str:
        """The tenant with the most conversations once `growing` has so many more: in a full ledger it makes room. Raises
        `ValueError` where nobody has any."""
        if len(self._by_tenant) == 1:
            return next(iter(self._by_tenant))
        return max(
            self._by_tenant, key=lambda tenant: len(self._by_tenant[tenant]) + (more if tenant == growing else 0)
        )
