"""uvicorn's HTTP protocol, with a limit of its own and deaf to `Upgrade`.

A head that does not end is not kept in memory until it does: an application sees a request when its head is complete, and
httptools takes one of any length. What an application can see is limited there (`access`). Trailers, which uvicorn adds to the
headers of a request that already runs, are left out.

A request that offers to go on in another protocol (`Upgrade: h2c`, as Java's client and `curl --http2` do) is one like any other
for a server that does not speak it (RFC 9110, section 7.8). httptools takes it for one without a body, and what follows is for
somebody else; uvicorn would take that for the next request.
"""

from __future__ import annotations

from array import array
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 256 * 1024
"""Of request line and headers. Far above what `access` lets through, which says in JSON what was wrong."""

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: 30\r\n\r\nthe request's head is too long"
)
_FRAMING = (b"content-length", b"transfer-encoding")


class _Parser(httptools.HttpRequestParser):
    """Leaves no connection to another protocol."""

    def __init__(self, protocol: LimitedHttp) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        # as uvicorn does, so that it answers before it closes
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._protocol.goes_on(bytes(data[upgrade.args[0] :]))


class LimitedHttp(HttpToolsProtocol):
    """Closes a connection whose request's head is longer than `MAX_HEAD_BYTES`, and reads the body of every request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._in_head = False
        self._head_bytes = 0
        self._framing: list[bytes] = []
        """The header fields that say where the request's body ends."""
        self._repeats = False
        """The parser is told the framing of a request whose head was read before."""
        self._unread: bytes | None = None

    def goes_on(self, rest: bytes) -> None:
        """The parser has stopped after a request's head, before what is left unread."""
        self.parser = _Parser(self)
        self._repeats, self._unread = True, rest or None
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(self._framing))

    def data_received(self, data: bytes) -> None:
        unread: bytes | None = data
        while unread is not None:
            self._unread = None
            super().data_received(unread)
            unread = self._unread
        self._bound_head(len(data))

    def _bound_head(self, received: int) -> None:
        if not self._in_head:
            return
        self._head_bytes += received
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        if self._repeats:
            return
        self._in_head, self._head_bytes, self._framing = True, 0, []
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._repeats:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return
        if name.lower() in _FRAMING:
            self._framing.append(b"%b: %b\r\n" % (name, value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._repeats:
            return
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._repeats and self.parser.should_upgrade():
            return  # it has a body, or ends when the next parser says so
        self._repeats = False
        super().on_message_complete()
