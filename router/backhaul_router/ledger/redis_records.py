"""Serialisation of conversations in Redis: records as msgpack, and the names of their keys.

A record holds everything of one tenant's conversation name, under every model and salt, so that a change is one record's, or
two's where a child forks its parent. Its name in Redis is a hash. Deadlines are in the server's own time, which routers share.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from ..report import Reason
from ..wire import Handle
from ..wire.exact_history import AnswerContent, TokenHistory
from .records import Branch, Held, Key

log = logging.getLogger("backhaul")

FORMAT = "2"
"""Of records, and part of every key: routers that write others do not see each other's."""


class HeldRecord(msgspec.Struct, frozen=True, array_like=True):
    handle: Handle
    decode: str
    deadline: float
    tokens: int
    epoch: int
    life: str


class BranchRecord(msgspec.Struct, frozen=True, array_like=True):
    number: int
    chain: bytes
    held: HeldRecord | None
    missing: Reason | None
    by_history: bool
    block_size: int
    tokens: int
    prompt_tokens: int
    message_bytes: int
    decode: str
    prefill: str | None


class ConversationRecord(msgspec.Struct, frozen=True, array_like=True):
    model: str
    cache_salt: str
    generation: int
    turns: int
    seen: float
    branches: list[BranchRecord]


class Head(msgspec.Struct, frozen=True, array_like=True):
    tenant: str
    conversation: str
    conversations: list[ConversationRecord]


class Body(msgspec.Struct, frozen=True, array_like=True):
    """What only the turn needs that goes on from the branch."""

    blocks: bytes
    ran: bytes | None
    said: AnswerContent | None
    rendering: bytes | None


encode = msgspec.msgpack.encode
_read_head = msgspec.msgpack.Decoder(Head).decode
_read_body = msgspec.msgpack.Decoder(Body).decode


class Name(NamedTuple):
    """Name of one record: a conversation's, under every model and salt."""

    tenant: str
    conversation: str

    @classmethod
    def of(cls, key: Key) -> Name:
        return cls(key.tenant, key.conversation)


@dataclass(frozen=True)
class Keys:
    """Key schema in Redis. `prefix` keeps fleets apart that share one server."""

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
    return blake2b(encode(parts), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Snapshot:
    """Snapshot of some records: what `redis_scripts.LOAD` returned."""

    now: float
    """The server's time, seconds."""
    life: str
    epoch: int
    records: tuple[tuple[bytes, bytes], ...]
    """Version and head."""
    offset: float
    """The server's time less this router's, or a little less: by what the answer took."""

    @classmethod
    def of(cls, answer: Sequence[bytes], here: float) -> Snapshot:
        """`here` is this router's time, read after the answer."""
        seconds, micros, life, epoch, *rest = answer
        records = tuple(zip(rest[::2], rest[1::2], strict=True))
        now = int(seconds) + int(micros) / 1e6
        return cls(now, life.decode(), int(epoch), records, now - here)


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
        exact = TokenHistory(_little_endian(array("I", read.ran)), read.said, read.rendering)
    return msgspec.structs.replace(branch, blocks=read.blocks, exact=exact)


def handles_in(head: bytes, loaded: Snapshot) -> tuple[Held, ...]:
    """Of a record that has been removed."""
    return tuple(
        held_of(branch.held)
        for record in conversations_in(None, head)
        for branch in record.branches
        if branch.held is not None and (branch.held.life == loaded.life or held_of(branch.held).shared)
    )


def name_in(head: bytes) -> Name | None:
    """Whose record it is; `None` where it cannot be read."""
    try:
        read = _read_head(head)
    except msgspec.DecodeError:
        return None
    return Name(read.tenant, read.conversation)


def conversations_in(name: Name | None, head: bytes) -> Iterable[ConversationRecord]:
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


def held_of(record: HeldRecord) -> Held:
    return Held(record.handle, record.decode, record.deadline, record.tokens)


def body_of(branch: Branch) -> Body:
    if (exact := branch.exact) is None:
        return Body(branch.blocks, None, None, None)
    return Body(branch.blocks, _little_endian(array("I", exact.ran)).tobytes(), exact.said, exact.rendering)


def _little_endian(words: array[int]) -> array[int]:
    """From this machine's byte order, or back to it."""
    if sys.byteorder == "big":
        words.byteswap()
    return words


def field_of(number: int) -> str:
    return f"b{number}"
