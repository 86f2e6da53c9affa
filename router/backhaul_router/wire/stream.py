"""What is watched for while a stream's events pass: the handle and the ids (taken out), `usage` (the truth put in), the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

import msgspec
from msgspec import Raw

from .. import wire
from ..errors import error_event
from .connector_object import Account
from .endpoint import usage_of
from .exact_history import Listening, Said
from .json_members import NULL, Members
from .sse import EventSplitter, data_of

Note = Callable[[wire.Usage | None], Mapping[str, object] | None]
"""Asked, when the usage comes, for what to put into it (`None`: nothing); it is told the usage."""
Told = Callable[[Account | None], None]
"""Told what an engine that runs our connector says it did, before `Note`."""

_DONE: Final = b"data: [DONE]"
_NO_HANDLE: Final = b',"kv_transfer_params":null'
"""In every chunk of vLLM 0.33. It can be cut out unread: within a JSON string the quotes would be escaped."""
_QUOTES_HANDLE: Final = "the engine failed (its message is not shown: it quotes a handle)"
_FORBIDDEN: Final = re.compile("|".join(f'"{key}"' for key in sorted(wire.FORBIDDEN)).encode())
_WATCHED: Final = re.compile("|".join(f'"{key}"' for key in ("usage", "error", *sorted(wire.FORBIDDEN))).encode())
_NAME: Final = re.compile(rb"event: *([\w.]+)")


class StreamFilter:
    """Passes events on as they are, but for the last few."""

    def __init__(
        self, *, wants_usage: bool, note: Note, account: Told | None = None, listening: Listening | None = None
    ) -> None:
        self._listening = listening
        self._wants_usage = wants_usage
        self._note = note
        self._account = account
        self._splitter = EventSplitter()
        self.handle: wire.Handle | None = None
        self.generated: tuple[int, ...] | None = None
        self.ran: Raw = NULL
        """The prompt's ids as JSON, where the stream says them."""
        self.answer_id: str | None = None
        """By which later requests can name the answer, where the API has such requests."""
        self.error: bytes | None = None
        """The engine's error event, where it sent one."""
        self.finished = False
        self.last = b"data: [DONE]\n\n"
        """The event that ends the stream. It is held back, so that whoever sees it can count on the turn being settled."""
        self.events = 0

    def feed(self, data: bytes) -> bytes:
        """The events that `data` completes, as the client gets them. Raises `msgspec.DecodeError` or `MalformedBody` where an
        event cannot be read and could show a handle."""
        out = []
        for event in self._splitter.feed(data):
            self.events += 1
            if event.startswith(_DONE):
                self.finished = True
                continue
            if self._listening is not None and (heard := data_of(event)) is not None:
                self._listening.hear(heard)
            event = event.replace(_NO_HANDLE, b"")
            if _WATCHED.search(event):
                out.append(self._look(event))
            else:
                out.append(event)
        return b"".join(out)

    def _look(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            return event
        try:
            members = wire.split(data)
        except wire.MalformedBody:
            if wire.quotes_handle(event):
                raise
            return event
        if "error" in members and "choices" not in members:
            self.error = data
            if wire.quotes_handle(event):
                return error_event(_QUOTES_HANDLE, type_="server_error", code="decode_failed")
        touched = False
        if wire.FORBIDDEN & members.keys():
            members = self._take_handle(members)
            touched = True
        if bytes(members.get("usage", b"null")) != b"null":
            note = self._note(wire.read_usage(members["usage"]))
            if bytes(members.get("choices", b"")) == b"[]":
                if not self._wants_usage:
                    return b""
                if note is not None:
                    members["usage"] = msgspec.Raw(wire.with_note(members["usage"], note))
                    touched = True
        return b"data: " + wire.join(members) + b"\n\n" if touched else event

    @property
    def said(self) -> Said | None:
        """What the answer says, where it was listened to."""
        return self._listening.said if self._listening is not None else None

    def _take_handle(self, members: Members) -> Members:
        params = wire.read_params(members.get(wire.HANDLE))
        self.handle, self.generated = params.handle or self.handle, params.token_ids or self.generated
        if self._account is not None:
            self._account(params.account)
        return {key: value for key, value in members.items() if key not in wire.FORBIDDEN}


class NamedEvents(StreamFilter):
    """Events that have names, of which one ends the stream."""

    early: ClassVar[frozenset[bytes]] = frozenset()
    """Sent before the engine has done anything. They are held back until it has, so that the turn can still be tried again."""
    ends: ClassVar[frozenset[bytes]]
    errors: ClassVar[frozenset[bytes]]

    def __init__(self, facts: wire.Facts, note: Note, account: Told | None = None) -> None:
        super().__init__(wants_usage=True, note=note, account=account)
        self._facts = facts
        self._held: list[bytes] = []
        self.last = b""

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
            if name in self.errors:
                self.error = data_of(event) or b""
            passed = self._passed(event, name)
            if name in self.errors and wire.quotes_handle(passed):
                passed = self._facts.api.error_event(
                    _QUOTES_HANDLE, type_="server_error", code="decode_failed", events=self.events
                )
            if name in self.ends or name in self.errors:
                self.last, self.finished = passed, True
            else:
                out.append(passed)
        return b"".join(out)

    def _passed(self, event: bytes, name: bytes) -> bytes:
        return cleaned(event)

    @staticmethod
    def _members(event: bytes) -> Members:
        return wire.split(data_of(event) or b"")


class MessagesFilter(NamedEvents):
    """Anthropic's events: `message_delta` has the usage and, by our plugin, the handle."""

    ends = frozenset({b"message_stop"})
    errors = frozenset({b"error"})

    def _passed(self, event: bytes, name: bytes) -> bytes:
        if name != b"message_delta":
            return cleaned(event)
        members = self._members(event)
        touched = bool(wire.FORBIDDEN & members.keys())
        if touched:
            members = self._take_handle(members)
        if "usage" in members:
            note = self._note(usage_of(self._facts.api, members["usage"]))
            if note is not None:
                members["usage"] = Raw(wire.with_note(members["usage"], note))
                touched = True
        return _event(name, wire.join(members)) if touched else event


class ResponsesFilter(NamedEvents):
    """OpenAI's events: the last one has the whole response, the handle with it."""

    early = frozenset({b"response.created", b"response.queued", b"response.in_progress"})
    ends = frozenset({b"response.completed", b"response.incomplete", b"response.cancelled"})
    errors = frozenset({b"response.failed", b"error"})

    def _passed(self, event: bytes, name: bytes) -> bytes:
        if name not in self.ends:
            return cleaned(event)
        members = self._members(event)
        answer = wire.read_answer(self._facts.endpoint, wire.split(members.get("response", NULL)))
        self.handle, self.generated, self.ran = answer.params.handle, answer.generated, answer.ran
        self.answer_id = answer.id
        if self._account is not None:
            self._account(answer.params.account)
        note = self._note(answer.usage)
        members["response"] = Raw(wire.client_answer(self._facts, answer.members, note))
        return _event(name, wire.join(members))


def stream_filter(
    facts: wire.Facts, note: Note, account: Told | None = None, listening: Listening | None = None
) -> StreamFilter:
    """What watches the stream that answers a request."""
    match facts.endpoint:
        case wire.Endpoint.MESSAGES:
            return MessagesFilter(facts, note, account)
        case wire.Endpoint.RESPONSES:
            return ResponsesFilter(facts, note, account)
        case wire.Endpoint.CHAT | wire.Endpoint.COMPLETIONS:
            return StreamFilter(wants_usage=facts.wants_usage, note=note, account=account, listening=listening)


def cleaned(event: bytes) -> bytes:
    """An event of any endpoint without transfer parameters; its other fields stay."""
    if _FORBIDDEN.search(event) is None:
        return event
    data = data_of(event)
    if data is None or (kept := wire.without_handles(data)) == data:
        return event
    fields = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    return b"\n".join([*fields, b"data: " + kept]) + b"\n\n"


def _event(name: bytes, data: bytes) -> bytes:
    return b"event: " + name + b"\ndata: " + data + b"\n\n"
