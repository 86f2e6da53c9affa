"""RPC messages of the lease channel: how a reader claims a lease from the engine that holds it.

TCP between scheduler processes; each message is a msgpack map behind its length, four bytes, big-endian. Requests on one
connection are answered in order. A frame that is too long or no message ends the connection.

    {"v": 1, "op": "claim", "lease", "engine", "epoch", "blocks", "hash", "hold_s", "claim"[, "tail"]}
        -> {"ok": true, "block_ids": [[...], ...], "tokens", "peer": {...}} | {"ok": false, "why"}
    {"v": 1, "op": "done", "lease", "claim", "read": true | false}    -> {"ok": true}
    {"v": 1, "op": "decline", "lease"}                                -> {"ok": true}

`peer` repeats how the holder's workers are reached and sharded, so that a reader need not trust the handle for it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from . import VERSION
from .why import Why

LONGEST_FRAME: Final = 1 << 20
LENGTH_BYTES: Final = 4
LONGEST_HOLD_S: Final = 600.0


class Claim(msgspec.Struct, frozen=True, tag_field="op", tag="claim"):
    """May these blocks be read, and held meanwhile?"""

    v: Literal[1]
    lease: str
    engine: str
    epoch: str
    blocks: int
    hash: bytes
    """In full, of the last of the blocks."""
    hold_s: float
    claim: Annotated[str, Meta(max_length=64)]
    tail: bytes | None = None
    """For a lease that is read as a whole: the hash of all of its tokens, those behind the last whole block included."""


class Done(msgspec.Struct, frozen=True, tag_field="op", tag="done"):
    """The reader is finished with what it claimed."""

    lease: str
    claim: str
    read: bool
    v: int = VERSION


class Decline(msgspec.Struct, frozen=True, tag_field="op", tag="decline"):
    """The one reader of a lease that is not shared will not read it."""

    lease: str
    v: int = VERSION


Message = Claim | Done | Decline


class Answer(msgspec.Struct, frozen=True):
    ok: bool
    why: Why | None = None
    block_ids: list[list[int]] = []
    tokens: int = 0
    peer: dict[str, int] = {}


_encode = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(Message).decode
"""Raises `msgspec.ValidationError` for what is no message, and `msgspec.DecodeError` for what is no msgpack."""
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def frame(message: Message | Answer) -> bytes:
    """Raises `UnicodeEncodeError`."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
