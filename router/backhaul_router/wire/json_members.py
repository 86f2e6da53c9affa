"""Shallow JSON codec: objects as their top-level members, whose own bytes are not re-encoded, and what of them never travels.

Splitting decodes the keys, so every spelling of a forbidden key (escapes, duplicates) is the same key and gone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Final, TypeVar

import msgspec
from msgspec import Raw

from ..errors import BackhaulError

HANDLE = "kv_transfer_params"
FORBIDDEN: Final = frozenset({HANDLE, "ec_transfer_params"})
"""Name hosts, ports and blocks of engines: neither taken from a client nor shown to one."""

Members = dict[str, Raw]

NULL: Final = Raw(b"null")
FALSE: Final = Raw(b"false")
TRUE: Final = Raw(b"true")
ONE: Final = Raw(b"1")

decode_members = msgspec.json.Decoder(Members).decode
decode_list = msgspec.json.Decoder(list[Raw]).decode
decode_any = msgspec.json.Decoder().decode
encode = msgspec.json.encode

_NESTING: Final = ("response", "message")
"""Where the events of the Responses and the Messages API hold a whole answer."""


_T = TypeVar("_T", bound=Hashable)


@lru_cache(maxsize=1024)
def interned(value: _T) -> _T:
    """The same value as ever: what all conversations have in common is kept once."""
    return value


class MalformedBody(BackhaulError):
    """A body is not a JSON object; the message is meant for the client."""


def split(body: bytes) -> Members:
    """The top-level members of a JSON object. Of repeated keys the last counts, as in Python's own decoder.

    Raises `MalformedBody`.
    """
    try:
        return decode_members(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBody(f"the body is not a JSON object: {error}") from None


def join(members: Mapping[str, Raw]) -> bytes:
    """The members as one JSON object again."""
    return encode(members)


def without(data: bytes, key: str, value: Raw) -> bytes:
    """An object without a member that it has. The others are not read where the key stands in it once, as engines write it."""
    name = b'"%b":' % key.encode()
    if data.count(name) == 1:  # inside a text the quotes would be escaped
        before, found, after = data.partition(name + bytes(value))
        if found and after.startswith(b","):
            return before + after[1:]
        if found and before.endswith(b","):
            return before[:-1] + after
    members = decode_members(data)
    members.pop(key, None)
    return bytes(memoryview(join(members)))  # msgspec's own is kept with up to half as much room behind it


def put_last(data: bytes, key: str, value: bytes) -> bytes:
    """An object, compact and not empty, with another member behind its own."""
    return b'%b,"%b":%b}' % (data[:-1], key.encode(), value)


def read_members(body: bytes) -> Members:
    """The members of a client's body that may travel: no transfer parameters, neither at the top nor inside `vllm_xargs`.

    Raises `MalformedBody`, also for text that is not UTF-8: Python's decoder, which reads the body after us, takes some of it.
    """
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise MalformedBody(f"the body is not a JSON object: it is not UTF-8 at byte {error.start}") from None
    kept = split(body)
    for key in FORBIDDEN:
        kept.pop(key, None)
    if "vllm_xargs" in kept:
        try:
            inner = decode_members(kept["vllm_xargs"])
        except msgspec.DecodeError:
            return kept
        if FORBIDDEN & inner.keys():
            kept["vllm_xargs"] = Raw(join({k: v for k, v in inner.items() if k not in FORBIDDEN}))
    return kept


def passed_body(body: bytes) -> bytes:
    """A client's body for an endpoint that the router does not read otherwise. Raises `MalformedBody`."""
    return join(read_members(body))


def value_of(raw: Raw) -> object:
    """A member's value. A number out of range is infinite, as for Python's decoder."""
    data = bytes(raw)
    return _plain_value(data) if len(data) <= _SHORT and data[:1] not in b"{[" else _value(data)


def _value(data: bytes) -> object:
    try:
        return decode_any(data)
    except msgspec.ValidationError:
        return math.inf


_SHORT: Final = 64
_plain_value = lru_cache(maxsize=512)(_value)
"""Requests say the same again and again: models, limits, flags."""


def is_set(raw: Raw | None) -> bool:
    """Whether a member is there and asks for something."""
    return raw is not None and bytes(raw) not in (b"null", b"false")


def without_handles(data: bytes) -> bytes:
    """A JSON body of any endpoint without transfer parameters, at the top or inside the answer that an event holds. What is no
    JSON object stays as it is."""
    if not any(key.encode() in data for key in FORBIDDEN):
        return data
    try:
        members = split(data)
    except MalformedBody:
        return data
    kept = {key: value for key, value in members.items() if key not in FORBIDDEN}
    changed = len(kept) < len(members)
    for key in _NESTING:
        inner = bytes(kept.get(key, b""))
        if inner.startswith(b"{") and (cleaned := without_handles(inner)) != inner:
            kept[key] = Raw(cleaned)
            changed = True
    return join(kept) if changed else data
