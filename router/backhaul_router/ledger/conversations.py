"""LRU map of the conversations on file, by key and by name, ordered within each tenant.

The order is a list through the conversations themselves: an ordered dictionary beside them takes 100 bytes for each.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from .records import Branch, Key


class Conversation:
    """Entry of the map. There may be a million: what is added here is added to each of them."""

    __slots__ = ("after", "before", "branches", "generation", "key", "seen", "turns", "watched")

    def __init__(self, key: Key, generation: int) -> None:
        self.key = key
        self.branches: tuple[Branch, ...] = ()
        self.generation = generation
        self.seen = 0.0
        self.turns = 0
        self.watched: float | None = None
        """The deadline under which the sweep looks at it next."""
        self.before: Conversation | None = None
        """The next one of its tenant's that was active earlier, and later."""
        self.after: Conversation | None = None

    def put(self, index: int, branch: Branch) -> None:
        """Replaces one of its branches."""
        self.branches = (*self.branches[:index], branch, *self.branches[index + 1 :])

    def pop(self, index: int) -> Branch:
        """Takes one of its branches out."""
        branch = self.branches[index]
        self.branches = self.branches[:index] + self.branches[index + 1 :]
        return branch


class _Tenant:
    def __init__(self) -> None:
        self.count = 0
        self.by_name: dict[str, Conversation | dict[Key, Conversation]] = {}
        """Most names have one; a dictionary of those that have several, under other models or salts."""
        self.first: Conversation | None = None
        """The one that was silent for longest."""
        self.last: Conversation | None = None

    def append(self, conversation: Conversation) -> None:
        conversation.before = self.last
        if self.last is None:
            self.first = conversation
        else:
            self.last.after = conversation
        self.last = conversation

    def unlink(self, conversation: Conversation) -> None:
        before, after = conversation.before, conversation.after
        if before is None:
            self.first = after
        else:
            before.after = after
        if after is None:
            self.last = before
        else:
            after.before = before
        conversation.before = conversation.after = None


class Conversations:
    """LRU map of conversations, per tenant. Its owner has the lock."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        """Those that have none any more stay until `silent` comes upon them."""
        self._silence: list[tuple[float, int, str]] = []
        """A heap: of each tenant when its first one was seen, or earlier."""
        self._numbers = itertools.count()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Key]:
        return (conversation.key for conversation in self.values())

    def values(self) -> Iterator[Conversation]:
        for tenant in self._tenants.values():
            conversation = tenant.first
            while conversation is not None:
                yield conversation
                conversation = conversation.after

    def get(self, key: Key) -> Conversation | None:
        tenant = self._tenants.get(key.tenant)
        found = None if tenant is None else tenant.by_name.get(key.conversation)
        if isinstance(found, dict):
            return found.get(key)
        return found if found is not None and found.key == key else None

    def named(self, name: str, tenant: str) -> tuple[Conversation, ...]:
        """Under every model and salt."""
        of = self._tenants.get(tenant)
        found = None if of is None else of.by_name.get(name)
        if found is None:
            return ()
        return tuple(found.values()) if isinstance(found, dict) else (found,)

    def add(self, conversation: Conversation) -> None:
        """One whose key is new. It is the last to have been active."""
        key = conversation.key
        tenant = self._tenants.get(key.tenant)
        if tenant is None:
            tenant = self._tenants[key.tenant] = _Tenant()
            heapq.heappush(self._silence, (conversation.seen, next(self._numbers), key.tenant))
        found = tenant.by_name.get(key.conversation)
        if found is None:
            tenant.by_name[key.conversation] = conversation
        elif isinstance(found, dict):
            found[key] = conversation
        else:
            tenant.by_name[key.conversation] = {found.key: found, key: conversation}
        tenant.append(conversation)
        tenant.count += 1
        self._count += 1

    def touch(self, conversation: Conversation) -> None:
        """It is active now."""
        tenant = self._tenants[conversation.key.tenant]
        if tenant.last is not conversation:
            tenant.unlink(conversation)
            tenant.append(conversation)

    def remove(self, conversation: Conversation) -> None:
        key = conversation.key
        tenant = self._tenants[key.tenant]
        found = tenant.by_name[key.conversation]
        if not isinstance(found, dict):
            del tenant.by_name[key.conversation]
        else:
            del found[key]
            if len(found) == 1:
                (tenant.by_name[key.conversation],) = found.values()
        tenant.unlink(conversation)
        tenant.count -= 1
        self._count -= 1

    # --- which one goes first

    def count(self, tenant: str) -> int:
        found = self._tenants.get(tenant)
        return found.count if found is not None else 0

    def oldest(self, tenant: str) -> Conversation:
        """The tenant's one that was silent for longest. Raises `KeyError` where it has none."""
        found = self._tenants[tenant].first
        if found is None:
            raise KeyError(tenant)
        return found

    def largest(self, growing: str, more: int) -> str:
        """The tenant with the most conversations once `growing` has so many more: in a full ledger it makes room. Raises
        `ValueError` where nobody has any."""
        if len(self._tenants) == 1:
            return next(iter(self._tenants))

        def size(tenant: str) -> tuple[int, bool]:
            # of equal ones not the one that grows: its only one may be the new one
            grows = tenant == growing
            return self._tenants[tenant].count + more * grows, not grows

        return max(self._tenants, key=size)

    def silent(self, now: float, for_s: float) -> Conversation | None:
        """One that was silent for longer than that, of any tenant."""
        while self._silence and now - self._silence[0][0] > for_s:
            _, number, name = heapq.heappop(self._silence)
            first = self._tenants[name].first
            if first is None:
                del self._tenants[name]
                continue
            heapq.heappush(self._silence, (first.seen, number, name))
            if now - first.seen > for_s:
                return first
        return None
