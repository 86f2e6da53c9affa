"""How conversations are written in Redis, and a copy of a few of them on which a change is worked out.

A record holds everything of one tenant's conversation name, under every model and salt, so that a change is one record's, or
two's where a child forks its parent. Its name in Redis is a hash. Deadlines are in the server's own time, which routers share.
"""

from __future__ import annotations

import logging
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from ..report import Reason
from ..wire import Handle
from ..wire.exact_history import AnswerContent, TokenHistory
from . import digests
from .conversations import Conversation
from .memory import MemoryLedger
from .records import Branch, Held, Key, Taken

log = logging.getLogger("backhaul")

FORMAT = "2"
"""Of records, and part of every key: routers that write others do not see each other's."""
_NO_BOUND = 2**31
_GRACE_S = 30.0
"""For how long what was asked once stays on file behind its deadline, for the router that filed it to release it."""


class _HeldRecord(msgspec.Struct, frozen=True, array_like=True):
    handle: Handle
    decode: str
    deadline: float
    tokens: int
    epoch: int
    life: str


class _BranchRecord(msgspec.Struct, frozen=True, array_like=True):
    number: int
    chain: bytes
    held: _HeldRecord | None
    missing: Reason | None
    by_history: bool
    block_size: int
    tokens: int
    prompt_tokens: int
    message_bytes: int
    decode: str
    prefill: str | None


class _ConversationRecord(msgspec.Struct, frozen=True, array_like=True):
    model: str
    cache_salt: str
    generation: int
    turns: int
    seen: float
    branches: list[_BranchRecord]


class _Head(msgspec.Struct, frozen=True, array_like=True):
    tenant: str
    conversation: str
    conversations: list[_ConversationRecord]


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """What only the turn needs that goes on from the branch."""

    blocks: bytes
    ran: bytes | None
    said: AnswerContent | None
    rendering: bytes | None


_encode = msgspec.msgpack.encode
_read_head = msgspec.msgpack.Decoder(_Head).decode
_read_body = msgspec.msgpack.Decoder(_Body).decode


class Name(NamedTuple):
    """What one record is about."""

    tenant: str
    conversation: str

    @classmethod
    def of(cls, key: Key) -> Name:
        return cls(key.tenant, key.conversation)


@dataclass(frozen=True)
class Keys:
    """Names in Redis. `prefix` keeps fleets apart that share one server."""

    prefix: str

    @property
    def epoch(self) -> str:
        return f"{self.prefix}:{FORMAT}:epoch"

    @property
    def every_record(self) -> str:
        """A pattern."""
        escaped = "".join(f"\\{c}" if c in r"\*?[]^-" else c for c in self.prefix)
        return f"{escaped}:{FORMAT}:c:*"

    def record(self, name: Name) -> str:
        return f"{self.prefix}:{FORMAT}:c:{_hash(*name)}"

    def index(self, tenant: str, *, by_history: bool) -> str:
        """Where a tenant's records are listed by when they end: those that have a name, or those that have none."""
        return f"{self.prefix}:{FORMAT}:{'a' if by_history else 't'}:{_hash(tenant)}"

    def end(self, key: Key, digest: bytes) -> str:
        """Where the conversations are found whose history ends so, of those that share all of `key` but the conversation."""
        return f"{self.prefix}:{FORMAT}:e:{_hash(key.tenant, key.model, key.cache_salt, digest)}"


def _hash(*parts: str | bytes) -> str:
    return blake2b(_encode(parts), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Loaded:
    """What `redis_scripts.LOAD` returned."""

    now: float
    """The server's time, seconds."""
    life: str
    epoch: int
    records: tuple[tuple[bytes, bytes], ...]
    """Version and head."""
    offset: float
    """The server's time less this router's, or a little less: by what the answer took."""

    @classmethod
    def of(cls, answer: Sequence[bytes], here: float) -> Loaded:
        """`here` is this router's time, read after the answer."""
        seconds, micros, life, epoch, *rest = answer
        records = tuple(zip(rest[::2], rest[1::2], strict=True))
        now = int(seconds) + int(micros) / 1e6
        return cls(now, life.decode(), int(epoch), records, now - here)


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_conversations: int
    """Of requests without a tenant."""
    max_conversations_per_tenant: int
    max_branches: int
    max_idle_s: float


class Copy(MemoryLedger):
    """The conversations of a few records, as the server has them: the rules of a ledger in memory hold in here too. Times are
    the server's. It counts no takers: other routers' cannot be known."""

    def __init__(self, names: Sequence[Name], loaded: Loaded, limits: Limits, keys: Keys) -> None:
        super().__init__(max_conversations=_NO_BOUND, max_branches=limits.max_branches, max_idle_s=limits.max_idle_s)
        self._generations = iter(_drawn, 0)
        self.flushes = loaded.epoch
        self._names = names
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
        for record in _conversations(name, head):
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

    def _branch(self, record: _BranchRecord) -> Branch:
        held, missing = record.held, record.missing
        if held is not None and held.epoch != self._loaded.epoch:
            self.flushed.append(_held(held))
            held, missing = None, Reason.FLUSHED
        elif held is not None and held.life != self._loaded.life and not _held(held).shared:
            held, missing = None, Reason.LEDGER_UNAVAILABLE  # somebody may have taken it in a state that is lost
        if held is not None:
            self._stamps[_held(held).name] = (held.epoch, held.life)
        return Branch(
            chain=record.chain,
            blocks=b"",
            block_size=record.block_size,
            tokens=record.tokens,
            message_bytes=record.message_bytes,
            decode=record.decode,
            prefill=record.prefill,
            held=_held(held) if held is not None else None,
            missing=missing,
            prompt_tokens=record.prompt_tokens,
            by_history=record.by_history,
            number=record.number,
        )

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
        return (
            taken.drop
            + given
            + self.settle(key, msgspec.structs.replace(taken, held=None, flushes=flushes), branch, now)
        )

    @property
    def names(self) -> Sequence[Name]:
        return self._names

    @property
    def offset(self) -> float:
        """The server's time less this router's."""
        return self._loaded.offset

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
        return list(self._names).index(name) + 1, _field(taken.branch.number)

    # --- what is written

    def changes(self, wanted: tuple[int, str]) -> list[str | bytes | int] | None:
        """The arguments of `redis_scripts.COMMIT`; `None` when nothing has changed."""
        writes = [self._write(index) for index in range(len(self._names))]
        if not any(writes):
            return None
        arguments: list[str | bytes | int] = [self._loaded.life]
        arguments += [version for version, _ in self._loaded.records]
        arguments += wanted
        for write in writes:
            arguments += write or ["keep"]
        return arguments

    def _write(self, index: int) -> list[str | bytes | int] | None:
        name, (_, before) = self._names[index], self._loaded.records[index]
        conversations = self._records_of(name)
        ends = self._ends_of(name)
        old_ends = sorted(self._ends[index] - ends)
        by_history = self._anonymous[index] if before else self._is_anonymous(name)
        place = [self._redis_keys.index(name.tenant, by_history=by_history), name.conversation]
        if not conversations:
            return ["drop", *place, len(old_ends), *old_ends] if before else None
        head = _encode(_Head(name.tenant, name.conversation, conversations))
        if head == before:
            return None
        branches = {branch.number: branch for branch in self._branches_of(name)}
        added = [branch for number, branch in branches.items() if number not in self._numbers[index]]
        gone = [_field(number) for number in self._numbers[index] if number not in branches]
        most = self._limits.max_conversations_per_tenant if name.tenant else self._limits.max_conversations
        if by_history:
            most = max(1, most // 2)
        written: list[str | bytes | int] = ["put", *place, most, self._ttl_ms(name), os.urandom(8), head]
        written.append(len(added))
        for branch in added:
            written += [_field(branch.number), _encode(_body(branch))]
        new_ends = sorted(ends)
        return [*written, len(gone), *gone, len(new_ends), *new_ends, len(old_ends), *old_ends]

    def _ttl_ms(self, name: Name) -> int:
        left_s = self._limits.max_idle_s
        once = all(one.key in self._histories and one.turns <= 1 for one in self._named(name))
        deadlines = [branch.held.deadline for branch in self._branches_of(name) if branch.held is not None]
        if once and deadlines:
            left_s = min(left_s, max(0.0, max(deadlines) - self._loaded.now) + _GRACE_S)
        return max(1, round(left_s * 1000))

    def _records_of(self, name: Name) -> list[_ConversationRecord]:
        return [
            _ConversationRecord(
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

    def _record(self, branch: Branch) -> _BranchRecord:
        held = None
        if branch.held is not None:
            epoch, life = self._stamps.get(branch.held.name, (self._loaded.epoch, self._loaded.life))
            one = branch.held
            held = _HeldRecord(one.handle, one.decode, one.deadline, one.tokens, epoch, life)
        return _BranchRecord(
            branch.number,
            branch.chain,
            held,
            branch.missing,
            branch.by_history,
            branch.block_size,
            branch.tokens,
            branch.prompt_tokens,
            branch.message_bytes,
            branch.decode,
            branch.prefill,
        )

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


def moved(held: Held, by_s: float) -> Held:
    """The same handle in a time that is `by_s` ahead."""
    return msgspec.structs.replace(held, deadline=held.deadline + by_s)


def with_body(branch: Branch, body: bytes) -> Branch:
    """The same branch with what `COMMIT` returned of it. One that cannot be read proves nothing."""
    if not body:
        return branch
    try:
        read = _read_body(body)
    except msgspec.DecodeError as error:
        log.warning("a branch in Redis cannot be read, and is not reused: %s", error)
        return branch
    exact = None
    if read.ran is not None and read.said is not None and read.rendering is not None:
        exact = TokenHistory(_unpacked(read.ran), read.said, read.rendering)
    return msgspec.structs.replace(branch, blocks=read.blocks, exact=exact)


def handles_in(head: bytes, loaded: Loaded) -> tuple[Held, ...]:
    """Of a record that has been removed."""
    return tuple(
        _held(branch.held)
        for record in _conversations(None, head)
        for branch in record.branches
        if branch.held is not None and (branch.held.life == loaded.life or _held(branch.held).shared)
    )


def name_in(head: bytes) -> Name | None:
    """Whose record it is; `None` where it cannot be read."""
    try:
        read = _read_head(head)
    except msgspec.DecodeError:
        return None
    return Name(read.tenant, read.conversation)


def _conversations(name: Name | None, head: bytes) -> Iterable[_ConversationRecord]:
    if not head:
        return ()
    try:
        read = _read_head(head)
    except msgspec.DecodeError as error:
        log.warning("a conversation in Redis cannot be read, and counts as new: %s", error)
        return ()
    if name is not None and name != (read.tenant, read.conversation):
        raise AssertionError("a record in Redis is under another conversation's key")
    return read.conversations


def _held(record: _HeldRecord) -> Held:
    return Held(record.handle, record.decode, record.deadline, record.tokens)


def _body(branch: Branch) -> _Body:
    if branch.exact is None:
        return _Body(branch.blocks, None, None, None)
    return _Body(branch.blocks, _packed(branch.exact.ran), branch.exact.said, branch.exact.rendering)


def _packed(ids: array[int]) -> bytes:
    words = array("I", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _unpacked(data: bytes) -> array[int]:
    words = array("I", data)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _field(number: int) -> str:
    return f"b{number}"


def _drawn() -> int:
    return int.from_bytes(os.urandom(8)) >> 1 or 1
