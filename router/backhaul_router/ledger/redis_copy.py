"""Unit of work on records in Redis: a working copy on which a change is worked out, and what is then written.

The rules are those of `MemoryLedger`; whether the records are still as they were read is for `redis_scripts.COMMIT` to say.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ..report import Reason
from . import digests
from .conversations import Conversation
from .memory import MemoryLedger
from .records import Branch, Held, Key, Taken
from .redis_records import (
    BranchRecord,
    ConversationRecord,
    Head,
    HeldRecord,
    Keys,
    Name,
    Snapshot,
    body_of,
    conversations_in,
    encode,
    field_of,
    held_of,
)

_NO_BOUND = 2**31
_SAME = tuple(field for field in BranchRecord.__struct_fields__ if field not in ("held", "missing"))
"""Fields that a branch and its record have in common."""
_GRACE_S = 30.0
"""For how long what was asked once stays on file behind its deadline, for the router that filed it to release it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of a shared ledger."""

    max_conversations: int
    """Of requests without a tenant."""
    max_conversations_per_tenant: int
    max_branches: int
    max_idle_s: float


class WorkingCopy(MemoryLedger):
    """Working copy of the conversations of a few records, as the server has them: the rules of a ledger in memory hold in here
    too. Times are the server's. It counts no takers: other routers' cannot be known."""

    def __init__(self, names: Sequence[Name], loaded: Snapshot, limits: Limits, keys: Keys) -> None:
        super().__init__(max_conversations=_NO_BOUND, max_branches=limits.max_branches, max_idle_s=limits.max_idle_s)
        self._generations = iter(_drawn, 0)
        self.flushes = loaded.epoch
        self.names = names
        self.offset = loaded.offset
        """The server's time less this router's."""
        self._loaded = loaded
        self._limits = limits
        self._redis_keys = keys
        self._stamps: dict[tuple[str, str], tuple[int, str]] = {}
        self._numbers: list[frozenset[int]] = []
        self._ends: list[frozenset[str]] = []
        self._anonymous: list[bool] = []
        self.flushed: list[Held] = []
        """Handles that a flush has made void, still to be released."""
        for name, (_, head) in zip(names, loaded.records, strict=True):
            self._load(name, head)
        self._found = frozenset(held.name for held in self.handles())

    def _load(self, name: Name, head: bytes) -> None:
        numbers: set[int] = set()
        for record in conversations_in(name, head):
            key = Key(name.tenant, record.model, record.cache_salt, name.conversation)
            conversation, _ = self._open(key, record.seen)
            conversation.generation, conversation.turns = record.generation, record.turns
            for one in record.branches:
                numbers.add(one.number)
                conversation.branches = (*conversation.branches, branch := self._branch(one))
                if branch.held is not None:
                    self._watch(conversation, branch.held)
            self._file_history(conversation)
        self._numbers.append(frozenset(numbers))
        self._ends.append(self._ends_of(name))
        self._anonymous.append(self._is_anonymous(name))

    def _branch(self, record: BranchRecord) -> Branch:
        held, missing = record.held, record.missing
        if held is not None and held.epoch != self._loaded.epoch:
            self.flushed.append(held_of(held))
            held, missing = None, Reason.FLUSHED
        elif held is not None and held.life != self._loaded.life and not held_of(held).shared:
            held, missing = None, Reason.LEDGER_UNAVAILABLE  # somebody may have taken it in a state that is lost
        if held is not None:
            self._stamps[held_of(held).name] = (held.epoch, held.life)
        same = {field: getattr(record, field) for field in _SAME}
        return Branch(blocks=b"", held=held_of(held) if held is not None else None, missing=missing, **same)

    # --- what a shared ledger has beyond the rules

    def take_after(
        self,
        last: tuple[int, int],
        key: Key,
        chain: bytes,
        now: float,
        usable: Callable[[Held], Reason | None],
        parent: str | None,
    ) -> Taken:
        """`take`, where `last` is the last turn that the router knows of: it may have run some that could not ask."""
        generation, turn = last
        conversation = self._conversations.get(key)
        if conversation is not None and conversation.generation == generation:
            conversation.turns = max(conversation.turns, turn)
        return self.take(key, chain, now, usable, parent)

    def settle_late(self, key: Key, flushes: int, branch: Branch, now: float) -> tuple[Held, ...]:
        """Files what a turn left that could not take: as if it had taken, and given back, what it goes on from."""
        taken = self.take(key, branch.chain, now, lambda _: None)
        given = self.give_back(key, taken)
        taken = msgspec.structs.replace(taken, held=None, flushes=flushes)
        return taken.drop + given + self.settle(key, taken, branch, now)

    @property
    def filed(self) -> dict[tuple[str, str], Name]:
        """The handles that are on file now and were not before, by name."""
        return {
            branch.held.name: Name.of(conversation.key)
            for conversation in self._conversations.values()
            for branch in conversation.branches
            if branch.held is not None and branch.held.name not in self._found
        }

    def place_of(self, taken: Taken, key: Key) -> tuple[int, str]:
        """Which record the body of the branch taken is in, counted from 1, and its field; 0 for none."""
        if taken.branch is None:
            return 0, ""
        name = Name.of(taken.forked_from[0] if taken.forked_from else key)
        return list(self.names).index(name) + 1, field_of(taken.branch.number)

    # --- what is written

    def changes(self, wanted: tuple[int, str]) -> list[str | bytes | int] | None:
        """The arguments of `redis_scripts.COMMIT`; `None` when nothing has changed."""
        writes = [self._write(index) for index in range(len(self.names))]
        if not any(writes):
            return None
        arguments: list[str | bytes | int] = [self._loaded.life]
        arguments += [version for version, _ in self._loaded.records]
        arguments += wanted
        for write in writes:
            arguments += write or ["keep"]
        return arguments

    def _write(self, index: int) -> list[str | bytes | int] | None:
        name, (_, before) = self.names[index], self._loaded.records[index]
        conversations = self._records_of(name)
        ends = self._ends_of(name)
        old_ends = sorted(self._ends[index] - ends)
        by_history = self._anonymous[index] if before else self._is_anonymous(name)
        place = [self._redis_keys.index(name.tenant, by_history=by_history), name.conversation]
        if not conversations:
            return ["drop", *place, len(old_ends), *old_ends] if before else None
        head = encode(Head(name.tenant, name.conversation, conversations))
        if head == before:
            return None
        branches = {branch.number: branch for branch in self._branches_of(name)}
        added = [branch for number, branch in branches.items() if number not in self._numbers[index]]
        gone = [field_of(number) for number in self._numbers[index] if number not in branches]
        most = self._limits.max_conversations_per_tenant if name.tenant else self._limits.max_conversations
        if by_history:
            most = max(1, most // 2)
        written: list[str | bytes | int] = ["put", *place, most, self._ttl_ms(name), os.urandom(8), head]
        written.append(len(added))
        for branch in added:
            written += [field_of(branch.number), encode(body_of(branch))]
        new_ends = sorted(ends)
        return [*written, len(gone), *gone, len(new_ends), *new_ends, len(old_ends), *old_ends]

    def _ttl_ms(self, name: Name) -> int:
        left_s = self._limits.max_idle_s
        once = all(one.key in self._histories and one.turns <= 1 for one in self._named(name))
        deadlines = [branch.held.deadline for branch in self._branches_of(name) if branch.held is not None]
        if once and deadlines:
            left_s = min(left_s, max(0.0, max(deadlines) - self._loaded.now) + _GRACE_S)
        return max(1, round(left_s * 1000))

    def _records_of(self, name: Name) -> list[ConversationRecord]:
        return [
            ConversationRecord(
                one.key.model,
                one.key.cache_salt,
                one.generation,
                one.turns,
                one.seen,
                [self._record(branch) for branch in one.branches],
            )
            for one in sorted(self._named(name), key=lambda one: one.key)
        ]

    def _named(self, name: Name) -> tuple[Conversation, ...]:
        return self._conversations.named(name.conversation, name.tenant)

    def _record(self, branch: Branch) -> BranchRecord:
        held = None
        if branch.held is not None:
            epoch, life = self._stamps.get(branch.held.name, (self._loaded.epoch, self._loaded.life))
            one = branch.held
            held = HeldRecord(one.handle, one.decode, one.deadline, one.tokens, epoch, life)
        return BranchRecord(held=held, missing=branch.missing, **{field: getattr(branch, field) for field in _SAME})

    def _branches_of(self, name: Name) -> list[Branch]:
        return [branch for one in self._named(name) for branch in one.branches]

    def _is_anonymous(self, name: Name) -> bool:
        return any(one.key in self._histories for one in self._named(name))

    def _ends_of(self, name: Name) -> frozenset[str]:
        return frozenset(
            self._redis_keys.end(one.key, branch.chain[-digests.SIZE :])
            for one in self._named(name)
            for branch in one.branches
            if branch.by_history and branch.chain
        )


def _drawn() -> int:
    return int.from_bytes(os.urandom(8)) >> 1 or 1
