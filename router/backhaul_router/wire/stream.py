"""Answers as they come: the splitter of server-sent events, the token counts in them, and the stream filters. Events pass as they
are, but for the handle and the ids (taken out), `usage` (the report put in) and the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import msgspec
from backhaul_protocol import KEY
from backhaul_protocol.account import Account
from msgspec import Raw

from ..errors import error_event
from .exact_history import AnswerAccumulator, AnswerContent
from .handle import Handle, quotes_handle, read_params
from .json_members import (
    FORBIDDEN,
    HANDLE,
    NULL,
    MalformedBody,
    Members,
    decode_members,
    encode,
    join,
    put_last,
    split,
    without_handles,
)

_END = re.compile(rb"\n\n|\r\n\r\n|\r\r")
_OVERLAP = 3
"""A terminator of four bytes can straddle two pieces with at most three of them in the first."""


class EventSplitter:
    """Incremental splitter: cuts a byte stream, split anywhere, into whole events, each with its terminator."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes. Linear in the bytes fed, however small the pieces."""
        scan_from = max(0, len(self._pending) - _OVERLAP)
        self._pending += data
        events = []
        start = 0
        for end in _END.finditer(self._pending, scan_from):
            events.append(bytes(self._pending[start : end.end()]))
            start = end.end()
        if start:
            del self._pending[:start]
        return events

    def rest(self) -> bytes:
        """Takes out the bytes of an event that never ended."""
        rest = bytes(self._pending)
        self._pending.clear()
        return rest


def data_of(event: bytes) -> bytes | None:
    """The payload of an event's `data:` lines, or `None` for comments and other fields."""
    if event.startswith(b"data:") and event.count(b"\n", 0, -2) == 0 and b"\r" not in event:
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


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


UsageCallback = Callable[[Usage | None], None]
"""Told the usage when it comes."""
AccountCallback = Callable[[Account | None], None]
"""Told what an engine that runs our connector says it did, before `UsageCallback`."""

COMMENT: Final = b": backhaul "
"""Begins the comment that has the report, to clients that ask for it."""
_DONE: Final = b"data: [DONE]"
_NO_HANDLE: Final = b',"kv_transfer_params":null'
"""In every chunk of vLLM 0.33. It can be cut out unread: within a JSON string the quotes would be escaped."""
_QUOTES_HANDLE: Final = "the engine failed (its message is not shown: it quotes a handle)"
_FORBIDDEN: Final = re.compile("|".join(f'"{key}"' for key in sorted(FORBIDDEN)).encode())
_WATCHED: Final = re.compile("|".join(f'"{key}"' for key in ("usage", "error", *sorted(FORBIDDEN))).encode())
_NAME: Final = re.compile(rb"event: *([\w.]+)")


@dataclass(frozen=True, slots=True)
class Listeners:
    """Callbacks of one stream: who is told what, and what of it the client has asked for."""

    count: UsageCallback
    account: AccountCallback | None = None
    accumulator: AnswerAccumulator | None = None
    """Fed with the events, to put the answer together."""
    wants_usage: bool = True
    shows_ids: bool = False


class UsageEvent(msgspec.Struct, frozen=True):
    """An event with usage, in its members or in those of a whole answer that is its `response`."""

    head: bytes
    members: Members
    event: bytes = b""
    """As it came, where it may pass so."""
    answer: Members | None = None

    def shown(self, note: bytes | None) -> bytes:
        if note is None and self.event:
            return self.event
        if self.answer is None:
            members = noted(self.members, note)
        else:
            members = {**self.members, "response": Raw(join(noted(self.answer, note)))}
        return self.head + join(members) + b"\n\n"


class StreamFilter:
    """Stream filter of chat and completions: passes events on as they are, but for the last few. The event that ends the stream
    is held back, and the last usage with it (`ended`), so that whoever sees them can count on the turn being settled."""

    def __init__(self, listeners: Listeners) -> None:
        self._listeners = listeners
        self._splitter = EventSplitter()
        self.handle: Handle | None = None
        self.generated: tuple[int, ...] | None = None
        self.ran: Raw = NULL
        """The prompt's ids as JSON, where the stream says them."""
        self.answer_id: str | None = None
        """By which later requests can name the answer, where the API has such requests."""
        self.error: bytes | None = None
        """The engine's error event, where it sent one."""
        self.finished = False
        self.events = 0
        self._last = b"data: [DONE]\n\n"
        self._usage: UsageEvent | None = None

    def feed(self, data: bytes) -> bytes:
        """The events that `data` completes, as the client gets them. Raises `msgspec.DecodeError` or `MalformedBody` where an
        event cannot be read and could show a handle."""
        out = []
        for event in self._splitter.feed(data):
            self.events += 1
            if event.startswith(_DONE):
                self.finished = True
                continue
            out.append(self._passed_usage())
            if self._listeners.accumulator is not None and (heard := data_of(event)) is not None:
                self._listeners.accumulator.feed(heard)
            event = event.replace(_NO_HANDLE, b"")
            if _WATCHED.search(event):
                out.append(self._look(event))
            else:
                out.append(event)
        return b"".join(out)

    def ended(self, note: bytes | None = None, *, comment: bool = False) -> bytes:
        """The events that were held back, with `note` in the usage where the client gets it. Before them it is told as a
        `comment`, where that is asked for."""
        told = COMMENT + note + b"\n\n" if comment and note is not None else b""
        return told + self._passed_usage(note) + self._last

    def _passed_usage(self, note: bytes | None = None) -> bytes:
        """What is held back of it; without a note also when other events follow."""
        held, self._usage = self._usage, None
        return b"" if held is None else held.shown(note)

    def _look(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            return event
        try:
            members = split(data)
        except MalformedBody:
            if quotes_handle(event):
                raise
            return event
        if "error" in members and "choices" not in members:
            self.error = data
            if quotes_handle(event):
                return error_event(_QUOTES_HANDLE, type_="server_error", code="decode_failed")
        if FORBIDDEN & members.keys():
            members = self._take_handle(members)
            event = b"data: " + join(members) + b"\n\n"
        if bytes(members.get("usage", b"null")) != b"null":
            self._listeners.count(read_usage(members["usage"]))
            if bytes(members.get("choices", b"")) == b"[]":
                if self._listeners.wants_usage:
                    self._usage = UsageEvent(b"data: ", members, event)
                return b""
        return event

    @property
    def said(self) -> AnswerContent | None:
        """What the answer says, where it was listened to."""
        return self._listeners.accumulator.said if self._listeners.accumulator is not None else None

    def _take_handle(self, members: Members) -> Members:
        params = read_params(members.get(HANDLE))
        self.handle, self.generated = params.handle or self.handle, params.token_ids or self.generated
        if self._listeners.account is not None:
            self._listeners.account(params.account)
        return {key: value for key, value in members.items() if key not in FORBIDDEN}


class NamedEvents(StreamFilter):
    """Stream filter of events that have names, of which one ends the stream."""

    early: ClassVar[frozenset[bytes]] = frozenset()
    """Sent before the engine has done anything. They are held back until it has, so that the turn can still be tried again."""
    ends: ClassVar[frozenset[bytes]]
    errors: ClassVar[frozenset[bytes]]

    def __init__(self, listeners: Listeners, error_event: Callable[..., bytes]) -> None:
        """`error_event`: the API's own."""
        super().__init__(listeners)
        self._error_event = error_event
        self._held: list[bytes] = []
        self._last = b""

    def feed(self, data: bytes) -> bytes:
        out = []
        for event in self._splitter.feed(data):
            found = _NAME.match(event)
            name = found[1] if found is not None else b""
            if name in self.early and not self.events:
                self._held.append(cleaned(event))
                continue
            if not self.events:
                out += self._held
                self.events = len(self._held)
            self.events += 1
            if name not in self.ends:
                out.append(self._passed_usage())
            if name in self.errors:
                self.error = data_of(event) or b""
            passed = self._passed(event, name)
            if name in self.errors and quotes_handle(passed):
                passed = self._error_event(
                    _QUOTES_HANDLE, type_="server_error", code="decode_failed", events=self.events
                )
            if name in self.ends or name in self.errors:
                self._last, self.finished = passed, True
            else:
                out.append(passed)
        return b"".join(out)

    def _passed(self, event: bytes, name: bytes) -> bytes:
        return cleaned(event)

    @staticmethod
    def _members(event: bytes) -> Members:
        return split(data_of(event) or b"")


def cleaned(event: bytes) -> bytes:
    """An event of any endpoint without transfer parameters; its other fields stay."""
    if _FORBIDDEN.search(event) is None:
        return event
    data = data_of(event)
    if data is None or (kept := without_handles(data)) == data:
        return event
    fields = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    return b"\n".join([*fields, b"data: " + kept]) + b"\n\n"


def head_of(name: bytes) -> bytes:
    """What an event begins with, up to its data."""
    return b"event: " + name + b"\ndata: "
