"""Repository in memory: the map from conversation to handles.

Invariants, whatever the interleaving of turns:
- a stock engine's handle leaves the ledger by `take` and is in nobody else's hands until it is given back: it is used at
  most once. A shared one stays and can be taken by several turns, each of which says when it is done;
- every handle that the ledger drops (superseded, expired, evicted, ended, flushed) is returned, to be released, once: at once,
  or a shared one when the last turn that has taken it is done;
- a flush covers the turns that run: no handle that was taken, or is left, by a turn that began before it is filed after it;
- a conversation keeps at most `max_branches` histories, the ledger at most `max_conversations` conversations and a tenant at
  most `max_conversations_per_tenant`, none of them silent for longer than `max_idle_s`; a tenant that is full makes room for
  itself, and in a ledger that is full the tenant that has most does;
- a history is superseded by a turn that extends it, or edits it behind its first message: agents that share an id and a
  system prompt stand beside each other.

Methods neither block nor await, and hold a lock, so that several event loops may share one ledger.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from ..report import Reason
from ..wire import process_of
from . import digests
from .conversations import Conversation, Conversations
from .deadlines import CalendarQueue
from .histories import HistoryIndex
from .records import INSTRUCTIONS, UNOPENED, Branch, Held, Key, Taken

_OPENING = 2
"""Messages of a history's first turn: a system prompt and a question."""


class MemoryLedger:
    """Ledger in this process."""

    shared = False
    available = True

    def __init__(
        self,
        *,
        max_conversations: int = 10_000,
        max_branches: int = 8,
        max_idle_s: float = 3600.0,
        max_conversations_per_tenant: int = 10_000,
    ) -> None:
        self._max_conversations = max_conversations
        self._max_per_tenant = max_conversations_per_tenant
        self._max_branches = max_branches
        self._max_idle_s = max_idle_s
        self._conversations = Conversations()
        most = min(max_conversations, max_conversations_per_tenant)
        self._histories = HistoryIndex(max(1, max_conversations // 2), max(1, most // 2))
        self._deadlines: CalendarQueue[Conversation] = CalendarQueue(lambda conversation: conversation.watched)
        """Each conversation with handles, under no later time than the first deadline of theirs."""
        self._generations: Iterator[int] = itertools.count(1)
        self._takers: Counter[tuple[str, str]] = Counter()
        self._left: dict[tuple[str, str], Held] = {}
        """Shared handles that are no longer on file, and that running turns have taken."""
        self.flushes = 0
        """How often it was flushed."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._conversations)

    def __repr__(self) -> str:
        return f"<MemoryLedger {len(self)} conversations, {len(self.handles())} handles>"

    def handles(self) -> tuple[Held, ...]:
        """Every handle on file."""
        with self._lock:
            return tuple(held for c in self._conversations.values() for held in _handles(c.branches))

    def take(
        self,
        key: Key,
        chain: bytes,
        now: float,
        usable: Callable[[Held], Reason | None],
        parent: str | None = None,
    ) -> Taken:
        """The branch of `key` with the longest common history, and its handle, then in the caller's hands alone unless it is
        shared. A handle that reading uses up is left to its branch by a turn that has little in common with it. Where `key`
        has no branch yet, its `parent` may have one that the turn forks.

        `usable` says why a handle cannot be used (its engine restarted), or `None`. The caller ends with exactly one of
        `settle`, `give_back` and `lost`; after `give_back` it may settle a record with `held=None` in its `taken`.
        """
        with self._lock:
            conversation, evicted = self._open(key, now)
            conversation.turns += 1
            generation, turn = conversation.generation, conversation.turns
            source, forked_from = conversation, None
            if not conversation.branches and parent is not None and parent != key.conversation:
                found_parent = self._conversations.get(key._replace(conversation=parent))
                if found_parent is not None:
                    source, forked_from = found_parent, (found_parent.key, found_parent.generation)
            first = Taken(
                generation, turn, reason=Reason.FIRST_TURN, drop=evicted, flushes=self.flushes, key=conversation.key
            )
            if not source.branches:
                return first
            branches = source.branches
            shared = [digests.common(chain, branch.chain) for branch in branches]
            best = max(range(len(shared)), key=lambda i: (shared[i], branches[i].held is not None, i))
            branch = branches[best]
            if forked_from is not None:
                if not _is_fork(branch, shared[best]):
                    return first
                source.seen = now
                self._conversations.touch(source)
            common = shared[best]
            if common >= digests.count(branch.chain):  # the others are the less recently used ones
                source.branches = (*branches[:best], *branches[best + 1 :], branch)
                best = len(branches) - 1
            found = Taken(
                generation, turn, branch, None, None, common, evicted, forked_from, self.flushes, conversation.key
            )
            if branch.held is None:
                return msgspec.structs.replace(found, reason=branch.missing or Reason.NO_HANDLE)
            unusable = Reason.EXPIRED if now >= branch.held.deadline else usable(branch.held)
            if unusable is None and not branch.held.shared and _is_anothers(common, branch):
                return msgspec.structs.replace(found, reason=Reason.DIVERGED)
            if unusable is not None or not branch.held.shared:
                source.put(best, msgspec.structs.replace(branch, held=None, missing=unusable or Reason.IN_USE))
            if unusable is not None:
                return msgspec.structs.replace(found, reason=unusable, drop=evicted + self._free([branch.held]))
            if branch.held.shared:
                self._takers[branch.held.name] += 1
            return msgspec.structs.replace(found, held=branch.held)

    def give_back(self, key: Key, taken: Taken) -> tuple[Held, ...]:
        """The turn is done with the handle and did not use it up. Returns it, to be released, when its branch is gone by now
        and nobody else has it."""
        if taken.held is None:
            return ()
        with self._lock:
            if taken.held.shared:
                return self._done(taken.held)
            if taken.flushes != self.flushes:
                self._replace(key, taken, held=None, missing=Reason.FLUSHED)
                return (taken.held,)
            if self._replace(key, taken, held=taken.held, missing=None):
                self._watch_key(_filed(key, taken)[0], taken.held)  # its deadline may have passed meanwhile
                return ()
            return (taken.held,)

    def lost(self, key: Key, taken: Taken, reason: Reason) -> tuple[Held, ...]:
        """Notes that the handle taken was used up or is void, by a turn that left no other. Returns what to release."""
        with self._lock:
            if taken.held is None or not taken.held.shared:
                self._replace(key, taken, held=None, missing=reason)
                return ()
            name = taken.held.name
            conversation = self._conversations.get(_filed(key, taken)[0])
            return self._drop(conversation, lambda held: held.name == name, reason) + self._done(taken.held)

    def settle(self, key: Key, taken: Taken, branch: Branch, now: float) -> tuple[Held, ...]:
        """Files what a turn left. Returns the handles to release: those that this one supersedes or pushes out, and its
        own when the conversation has ended meanwhile.

        A history that extends, repeats or edits a branch replaces it; one that shares no more than the first message stands
        beside it, and the least recently used one makes room."""
        with self._lock:
            done = taken.held if taken.held is not None and taken.held.shared else None
            conversation = self._conversations.get(key)
            evicted: tuple[Held, ...] = ()
            if conversation is None and branch.by_history and taken.generation == UNOPENED:
                if (full := self._makes_room(key.tenant, more=1)) is not None:
                    oldest = self._histories.oldest(full) or self._histories.oldest(key.tenant)
                    if oldest is None:  # named ones do not make room for it
                        return self._free(_handles([branch])) + self._done(done)
                    evicted = self._close_key(oldest)
                conversation, _ = self._open(key, now)
                conversation.turns = taken.turn
            elif conversation is None or conversation.generation != taken.generation:
                return self._free(_handles([branch])) + self._done(done)
            conversation.seen = now
            self._conversations.touch(conversation)
            if branch.held is not None and branch.held.name in self._left:  # dropped while the turn ran
                branch = msgspec.structs.replace(branch, held=None, missing=Reason.NO_HANDLE)
            flushed: tuple[Held, ...] = ()
            if branch.held is not None and taken.flushes != self.flushes:
                flushed = self._free([branch.held])
                branch = msgspec.structs.replace(branch, held=None, missing=Reason.FLUSHED)
            replaced: list[Branch] = []
            index = self._index(conversation, taken.branch)
            if index is not None and taken.supersedes:
                replaced.append(conversation.pop(index))
            conversation.branches = (*conversation.branches, branch)
            if branch.held is not None:
                self._watch(conversation, branch.held)
            if len(conversation.branches) > self._max_branches:
                replaced.append(conversation.pop(0))
            kept = {held.name for held in _handles(conversation.branches)}
            drop = self._free(held for held in _handles(replaced) if held.name not in kept)
            return evicted + flushed + drop + self._done(done) + self._file_history(conversation)

    def find(self, key: Key, chain: bytes) -> str | None:
        """The conversation without a name whose history `chain` continues, of those that share all of `key` but the
        conversation. Named ones are never found."""
        with self._lock:
            return self._histories.find(key, chain)

    def forget(self, conversation: str, tenant: str = "") -> tuple[Held, ...]:
        """Ends a conversation, under every model and salt. Returns the handles to release; a turn that is still running
        finds its conversation gone when it settles, and releases what it leaves."""
        with self._lock:
            found = self._conversations.named(conversation, tenant)
            return tuple(held for one in found for held in self._close(one))

    def held_for(self, conversation: str, tenant: str = "") -> tuple[Held, ...]:
        """A conversation's handles, under every model and salt."""
        with self._lock:
            found = self._conversations.named(conversation, tenant)
            return tuple(held for one in found for held in _handles(one.branches))

    def drop_for(
        self, conversation: str, condition: Callable[[Held], bool], reason: Reason, tenant: str = ""
    ) -> tuple[Held, ...]:
        """Drops handles of a conversation, whose histories stay. Returns the handles to release."""
        with self._lock:
            found = self._conversations.named(conversation, tenant)
            return tuple(held for one in found for held in self._drop(one, condition, reason))

    def renewed(
        self,
        conversation: str,
        deadlines: Mapping[tuple[str, str], float],
        now: float | None = None,
        tenant: str = "",
    ) -> None:
        """Notes new deadlines, by `Held.name`. With `now` the conversation does not count as silent: it is still wanted."""
        with self._lock:
            for one in self._conversations.named(conversation, tenant):
                if now is not None:
                    one.seen = now
                    self._conversations.touch(one)
                for index, branch in enumerate(one.branches):
                    if branch.held is not None and (deadline := deadlines.get(branch.held.name)) is not None:
                        held = msgspec.structs.replace(branch.held, deadline=deadline)
                        one.put(index, msgspec.structs.replace(branch, held=held))
                        self._watch(one, held)

    def sweep(self, now: float) -> tuple[Held, ...]:
        """Forgets silent conversations and drops handles past their deadline. Returns the handles to release."""
        drop: tuple[Held, ...] = ()
        with self._lock:
            while (silent := self._conversations.silent(now, self._max_idle_s)) is not None:
                drop += self._close(silent)
            while (conversation := self._deadlines.take(now)) is not None:
                conversation.watched = None
                drop += self._drop(conversation, lambda held: held.deadline <= now, Reason.EXPIRED)
                drop += self._close_if_one_shot(conversation)
                for held in _handles(conversation.branches):
                    self._watch(conversation, held)
        return drop

    def drop_engine(self, decode: str, engine_id: str) -> tuple[Held, ...]:
        """Drops the handles that an earlier process of a decode engine made (`engine_id` as `process_of` has it); there is
        nothing to release."""

        def is_its(held: Held) -> bool:
            return held.decode == decode and process_of(held.handle.engine_id) == engine_id

        with self._lock:
            return self._drop_all(is_its, Reason.ENGINE_CHANGED)

    def flush(self) -> tuple[Held, ...]:
        """Drops every handle, as for a weight update; the histories stay. What turns that are running have taken or leave is not
        filed either. Returns the handles to release."""
        with self._lock:
            self.flushes += 1
            return self._drop_all(lambda held: True, Reason.FLUSHED)

    async def aclose(self) -> None:
        """Nothing is under way."""

    def _drop_all(self, condition: Callable[[Held], bool], reason: Reason) -> tuple[Held, ...]:
        return tuple(
            held
            for conversation in self._conversations.values()
            for held in self._drop(conversation, condition, reason)
        )

    def _drop(
        self, conversation: Conversation | None, condition: Callable[[Held], bool], reason: Reason
    ) -> tuple[Held, ...]:
        dropped: list[Held] = []
        for index, branch in enumerate(conversation.branches if conversation else ()):
            if conversation is not None and branch.held is not None and condition(branch.held):
                conversation.put(index, msgspec.structs.replace(branch, held=None, missing=reason))
                dropped.append(branch.held)
        return self._free(dropped)

    def _free(self, dropped: Iterable[Held]) -> tuple[Held, ...]:
        """Of handles that are no longer on file those that can be released now; the others wait for the turns that have
        taken them."""
        free = []
        for held in dropped:
            if self._takers.get(held.name):
                self._left[held.name] = held
            else:
                free.append(held)
        return tuple(free)

    def _done(self, held: Held | None) -> tuple[Held, ...]:
        """A turn does not need a shared handle any more."""
        if held is None:
            return ()
        self._takers[held.name] -= 1
        if self._takers[held.name] > 0:
            return ()
        del self._takers[held.name]
        left = self._left.pop(held.name, None)
        return () if left is None else (left,)

    def _watch_key(self, key: Key, held: Held) -> None:
        if (conversation := self._conversations.get(key)) is not None:
            self._watch(conversation, held)

    def _watch(self, conversation: Conversation, held: Held) -> None:
        before = conversation.watched
        if before is None or held.deadline < before:
            conversation.watched = held.deadline
            if before is not None:
                self._deadlines.void(before)
            self._deadlines.put(conversation, held.deadline)

    def _open(self, key: Key, now: float) -> tuple[Conversation, tuple[Held, ...]]:
        conversation = self._conversations.get(key)
        evicted: tuple[Held, ...] = ()
        if conversation is not None:
            conversation.seen = now
            self._conversations.touch(conversation)
            return conversation, ()
        conversation = Conversation(key, next(self._generations))
        conversation.seen = now
        self._conversations.add(conversation)
        if (full := self._makes_room(key.tenant)) is not None:
            evicted = self._close(self._conversations.oldest(full))
        return conversation, evicted

    def _makes_room(self, tenant: str, more: int = 0) -> str | None:
        """The tenant that has too many conversations once there are so many more of `tenant`'s."""
        if tenant and self._conversations.count(tenant) + more > self._max_per_tenant:
            return tenant
        if len(self._conversations) + more <= self._max_conversations:
            return None
        return self._conversations.largest(tenant, more)

    def _close_key(self, key: Key) -> tuple[Held, ...]:
        conversation = self._conversations.get(key)
        return () if conversation is None else self._close(conversation)

    def _close(self, conversation: Conversation) -> tuple[Held, ...]:
        self._histories.drop(conversation.key)
        self._conversations.remove(conversation)
        if (watched := conversation.watched) is not None:
            conversation.watched = None
            self._deadlines.void(watched)
        branches, conversation.branches = conversation.branches, ()  # its place among the deadlines keeps nothing
        return self._free(_handles(branches))

    def _file_history(self, conversation: Conversation) -> tuple[Held, ...]:
        """Has the conversation found by its history, where it has no name. Returns what the one that makes room held."""
        key = conversation.key
        chains = [branch.chain for branch in conversation.branches if branch.by_history]
        if not chains and key not in self._histories:
            return ()
        crowded_out = self._histories.put(key, chains)
        return () if crowded_out is None else self._close_key(crowded_out)

    def _close_if_one_shot(self, conversation: Conversation) -> tuple[Held, ...]:
        """Forgets a conversation without a name that nobody went on with while its handle could be used."""
        if conversation.turns > 1 or conversation.key not in self._histories:
            return ()
        return () if _handles(conversation.branches) else self._close(conversation)

    def _replace(self, key: Key, taken: Taken, *, held: Held | None, missing: Reason | None) -> bool:
        key, generation = _filed(key, taken)
        conversation = self._conversations.get(key)
        if conversation is None or conversation.generation != generation:
            return False
        index = self._index(conversation, taken.branch)
        if index is None:
            return False
        conversation.put(index, msgspec.structs.replace(conversation.branches[index], held=held, missing=missing))
        return True

    @staticmethod
    def _index(conversation: Conversation, branch: Branch | None) -> int | None:
        """A branch is the same one as long as its number is."""
        if branch is not None:
            for index, candidate in enumerate(conversation.branches):
                if candidate.number == branch.number:
                    return index
        return None


def _is_anothers(common: int, branch: Branch) -> bool:
    """Whether a turn is rather another agent's than an edit of the branch: all that it shares with a history beyond its opening
    is its first message."""
    return digests.count(branch.chain) > _OPENING and common <= INSTRUCTIONS


def _is_fork(branch: Branch, common: int) -> bool:
    """Whether a request that begins with `common` messages of a parent's record forks it, rather than having the same
    instructions: it extends the record, or branches off behind its opening where that costs the parent nothing."""
    if not common:
        return False
    shared = branch.held is not None and branch.held.shared
    return common == digests.count(branch.chain) or (shared and common >= _OPENING)


def _filed(key: Key, taken: Taken) -> tuple[Key, int]:
    """Where the branch that was taken is on file."""
    return taken.forked_from or (key, taken.generation)


def _handles(branches: Iterable[Branch]) -> tuple[Held, ...]:
    return tuple(branch.held for branch in branches if branch.held is not None)
