"""Token counts of an answer as a value, and the router's note among them."""

from __future__ import annotations

from typing import Final

import msgspec
from backhaul_protocol import KEY
from msgspec import Raw

from .json_members import Members, decode_members, encode, put_last


class Details(msgspec.Struct):
    """Of the prompt's tokens, those that were found in a cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts as an engine reports them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: Details | None = None

    @property
    def cached(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


_decode_usage = msgspec.json.Decoder(Usage | None).decode
_NAMES_US: Final = f'"{KEY}"'.encode()


def read_usage(raw: Raw | bytes | None) -> Usage | None:
    """`usage` of chat and completions. Raises `msgspec.DecodeError`."""
    return None if raw is None else _decode_usage(raw)


def noted(members: Members, note: bytes | None) -> Members:
    """An answer, or an event, with our note (JSON) in its `usage`, where it has one."""
    if note is None or "usage" not in members:
        return members
    return {**members, "usage": Raw(_with_note(members["usage"], note))}


def _with_note(usage: Raw | bytes, note: bytes) -> bytes:
    """`usage` with our account of the turn under `backhaul`; anything else in it stays as it is."""
    if bytes(usage) == b"null":
        return bytes(usage)
    if b'"' not in bytes(usage) or _NAMES_US in bytes(usage):
        return encode({**decode_members(usage), KEY: Raw(note)})
    return put_last(bytes(usage), KEY, note)
