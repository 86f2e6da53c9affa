"""What a worker and the process that started it tell each other: messages in MessagePack, each behind its length, over a pair of
sockets that nobody else has. `workers` has the parent's end, `team` that of a worker. Connections go over another pair."""

from __future__ import annotations

import enum
import struct
from typing import Any

import msgspec

RELOAD = "reload"
"""The kind of question after whose good answer the parent reads the configuration too."""
_LENGTH = struct.Struct("!I")


class Whom(enum.StrEnum):
    """Which workers a question goes to."""

    ALL = "all"
    """Those that serve; the answer is complete when all of them have said something."""
    UNTIL_ONE = "until_one"
    """Those that serve, until one of them knows."""
    CHANGE = "change"
    """First the one that asks, and where that went well all the others, those that are about to serve too. Changes are made one
    after the other."""
    CHANGE_AT_ONCE = "change_at_once"
    """All of them at the same time, beside other changes."""
    NONE = "none"
    """The parent alone, which says how the workers are."""


class Worker(msgspec.Struct, frozen=True):
    """What the parent knows of a worker."""

    worker: int
    """Counts from 1. One that is started anew in place of another keeps its number."""
    pid: int | None
    serves: bool
    restarts: int


class Member(msgspec.Struct, frozen=True):
    """An engine that workers know, whatever the configuration says."""

    role: str
    url: str
    draining: bool = False


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A worker asks workers something. `limit_s`: answers that are not there by then are missing."""

    number: int
    kind: str
    whom: Whom
    limit_s: float
    what: Any = None


class Do(msgspec.Struct, frozen=True, tag="do"):
    """The parent passes it on."""

    question: int
    kind: str
    what: Any = None


class Said(msgspec.Struct, frozen=True, tag="said"):
    """A worker's answer. `good`: it was done, or something is known. `members`: of a change, the engines afterwards."""

    question: int
    good: bool
    value: Any = None
    members: list[Member] | None = None
    failed: bool = False
    """The worker has no answer: something went wrong there, which its log has."""


class Answers(msgspec.Struct, frozen=True, tag="answers"):
    """The answers to a worker's question, by workers' numbers."""

    number: int
    answers: dict[int, Any]
    missing: list[int]
    """They were asked, and did not answer in time, or failed."""
    workers: list[Worker]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker answers requests from now on."""

    url: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker cannot start, and ends."""

    message: str


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Somebody has told the worker itself to end. It wants no more connections, and to be told when there are none on the way."""


class How(enum.StrEnum):
    """How far a worker is to stop."""

    SOON = "soon"
    """It goes on, and says that it is not ready."""
    END = "end"
    """No more connections come; it ends when its requests have."""
    NOW = "now"
    """It ends without waiting for them."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The worker is to end."""

    how: How


Message = Ask | Do | Said | Answers | Ready | Failed | Leave | Stop
_decode = msgspec.msgpack.Decoder(Message).decode
_encode = msgspec.msgpack.Encoder().encode


def packed(message: Message) -> bytes:
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Takes what arrives, and gives out the messages that are complete."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._data += data
        messages: list[Message] = []
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            messages.append(_decode(self._data[_LENGTH.size : end]))
            del self._data[:end]
        return messages
