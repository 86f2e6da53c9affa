"""Splitter of server-sent events, as bytes: where one event ends, and nothing more. What passes through is never re-encoded."""

from __future__ import annotations

import re

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
