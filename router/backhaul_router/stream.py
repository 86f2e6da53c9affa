"""What is watched for while a stream's events pass: the handle and the ids (taken out), `usage` (the truth put in), the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from . import wire
from .extension import Account
from .sse import EventSplitter, data_of

_DONE = b"data: [DONE]"
_WATCHED = re.compile("|".join(f'"{key}"' for key in ("usage", "error", *sorted(wire.FORBIDDEN))).encode())


class StreamFilter:
    """Passes events on as they are, but for the last few.

    `note` is asked, when the usage event comes, for what to put into it (`None`: nothing); it is told the usage first.
    `account` is told what an engine that runs our connector says it did, which comes before.
    """

    def __init__(
        self,
        *,
        wants_usage: bool,
        note: Callable[[wire.Usage | None], Mapping[str, object] | None],
        account: Callable[[Account | None], None] | None = None,
    ) -> None:
        self._wants_usage = wants_usage
        self._note = note
        self._account = account
        self._splitter = EventSplitter()
        self.handle: wire.Handle | None = None
        self.generated: tuple[int, ...] | None = None
        self.error: bytes | None = None
        """The engine's error event, where it sent one."""
        self.finished = False
        """`[DONE]` has come; it is held back, so that whoever sees it can count on the turn being settled."""
        self.events = 0

    def feed(self, data: bytes) -> bytes:
        """The events that `data` completes, as the client gets them. Raises `msgspec.DecodeError` or `MalformedBody` where an
        event cannot be read and could show a handle."""
        out = []
        for event in self._splitter.feed(data):
            self.events += 1
            if event.startswith(_DONE):
                self.finished = True
            elif _WATCHED.search(event):
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
        touched = False
        if wire.FORBIDDEN & members.keys():
            params = wire.read_params(members.get(wire.HANDLE))
            self.handle, self.generated = params.handle or self.handle, params.token_ids or self.generated
            if self._account is not None:
                self._account(params.account)
            members = {key: value for key, value in members.items() if key not in wire.FORBIDDEN}
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
