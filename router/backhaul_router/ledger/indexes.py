"""Indexes of the ledger: the conversations on file in the order of their use (LRU), the ends of histories, and deadlines in a
calendar queue. There may be a million conversations: what is kept for each is counted in bytes.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from . import digests
from .records import Branch, Key

# --- conversations -----------------------------------------------------------------------------------------------------
#
# An LRU map by key and by name, ordered within each tenant. The order is a list through the conversations themselves: an
# ordered dictionary beside them takes 100 bytes for each.


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


# --- ends of histories -------------------------------------------------------------------------------------------------
#
# An LRU index by which a request that goes on from a conversation without a name is known by its messages. It continues a
# history when it begins with all of its messages and has more: both are chains of digests, so it is enough to look for the
# digest of a history's last message among the request's. Equal openings are no continuation: two agents that say the same at
# first are two conversations.


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


_T = TypeVar("_T", bound=Hashable)
_SPAN_S = 2.0
_VOID = 4
"""A list is cleaned when more than one thing in so many is void."""


# --- deadlines ---------------------------------------------------------------------------------------------------------
#
# Each in a bucket for its span of time; only the bucket that is near is a heap. A heap of pairs takes 100 bytes a thing, and
# what is not awaited any more stays in it. A list of which too much is void is cleaned by itself, so that nothing ever takes as
# long as all the things there are.


class CalendarQueue(Generic[_T]):
    """Calendar queue whose entries are voided lazily. Their owner has the lock, and knows of each thing the time under which it
    was put here last: `when` says it, or `None` of what is not awaited any more. Every other time under which the thing was put
    here is void."""

    def __init__(self, when: Callable[[_T], float | None], span_s: float = _SPAN_S) -> None:
        self._when = when
        self._span_s = span_s
        self._far: dict[int, list[_T]] = {}
        """By number of the span."""
        self._void: dict[int, int] = {}
        self._next: int | None = None
        """The first span in `_far`."""
        self._near: list[tuple[float, int, _T]] = []
        """A heap: all that is due up to the end of `_reached`. While it is empty there is no such span."""
        self._near_void = 0
        self._reached = 0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Places taken, void ones too."""
        return len(self._near) + sum(map(len, self._far.values()))

    def put(self, thing: _T, at: float) -> None:
        """Where it was put before under another time, `void` has to be told."""
        span = int(at // self._span_s)
        if self._near and span <= self._reached:
            heapq.heappush(self._near, (at, next(self._numbers), thing))
        elif (things := self._far.get(span)) is not None:
            things.append(thing)
        else:
            self._far[span] = [thing]
            if self._next is None or span < self._next:
                self._next = span

    def void(self, at: float) -> None:
        """What was put here under this time is not awaited then any more: `when` says so by now."""
        span = int(at // self._span_s)
        things = self._far.get(span)
        if things is None:
            self._void_near()
            return
        void = self._void.get(span, 0) + 1
        if void <= len(things) // _VOID:
            self._void[span] = void
        elif left := self._awaited(span, things):
            self._far[span] = left
            self._void.pop(span, None)
        else:
            self._remove(span)

    def take(self, until: float) -> _T | None:
        """The first thing that is due by `until`; of those that are due at the same time, the one that was put here first."""
        while True:
            while self._near and self._near[0][0] <= until:
                at, _, thing = heapq.heappop(self._near)
                if self._when(thing) == at:
                    return thing
                self._near_void -= 1
            if self._near or self._next is None or self._next * self._span_s > until:
                return None
            self._reached, self._near_void = self._next, 0
            for thing in self._awaited(self._reached, self._far[self._reached]):
                if (at_ := self._when(thing)) is not None:
                    self._near.append((at_, next(self._numbers), thing))
            heapq.heapify(self._near)
            self._remove(self._reached)

    def _void_near(self) -> None:
        self._near_void += 1
        if self._near_void > len(self._near) // _VOID:
            self._near = [one for one in self._near if self._when(one[2]) == one[0]]
            heapq.heapify(self._near)
            self._near_void = 0

    def _awaited(self, span: int, things: list[_T]) -> list[_T]:
        """Those of a span's things that are not void, each once."""
        when, span_s = self._when, self._span_s
        return list(
            dict.fromkeys(thing for thing in things if (at := when(thing)) is not None and at // span_s == span)
        )

    def _remove(self, span: int) -> None:
        del self._far[span]
        self._void.pop(span, None)
        if span == self._next:
            self._next = min(self._far, default=None)
