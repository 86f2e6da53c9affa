"""RPC server and client of the lease channel: how a reader claims a lease from the engine that holds it.

TCP between scheduler processes, a thread per connection; the messages are `backhaul_protocol`'s.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from backhaul_protocol.lease_channel import (
    LENGTH_BYTES,
    LONGEST_FRAME,
    Answer,
    Message,
    decode_answer,
    decode_message,
    frame,
)
from backhaul_protocol.why import Why

from .lease_table import LeaseTable

MOST_CONNECTIONS: Final = 512
IDLE_S: Final = 600.0
"""A connection that says nothing for so long is closed; a reader that comes back opens another."""
COMPLAIN_EVERY_S: Final = 60.0
MOST_IDLE: Final = 64
"""Holders that connections are kept to: one that restarts comes back under another port."""

logger = logging.getLogger("vllm.backhaul_connector.leases")


class BrokenChannel(Exception):
    """The other side is gone, too slow, or sends what is no message."""


class WrongAnswer(BrokenChannel):
    """A message that this release does not know: the other side runs another one."""


# --- frames -----------------------------------------------------------------------------------------------------------


def _receive(connection: socket.socket) -> bytes | None:
    """The next frame; `None` where the other side has hung up between two."""
    head = _exactly(connection, LENGTH_BYTES)
    if head is None:
        return None
    length = int.from_bytes(head, "big")
    if length > LONGEST_FRAME:
        raise BrokenChannel(f"a frame of {length} bytes")
    body = _exactly(connection, length)
    if body is None:
        raise BrokenChannel("half a frame")
    return body


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    left = count
    while left:
        part = connection.recv(left)
        if not part:
            if parts:
                raise BrokenChannel("half a frame")
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


# --- the holder's side ------------------------------------------------------------------------------------------------


class LeaseServer(socketserver.ThreadingTCPServer):
    """Answers for a lease table, each connection in a thread of its own, until `stop`."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, table: LeaseTable, peer: Callable[[], Mapping[str, int]]) -> None:
        """`peer` goes into every grant. Port 0 takes a free one; raises `OSError` where the address cannot be bound."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        self._table = table
        self.peer = peer
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        self._refused = 0
        self._complained = float("-inf")
        super().__init__(address[:2], _Connection)  # type: ignore[arg-type]
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, args=(0.2,), name="backhaul-leases", daemon=True)
        self._thread.start()

    def verify_request(self, request: Any, client_address: object) -> bool:
        with self._open_lock:
            if len(self._open) < MOST_CONNECTIONS:
                self._open.add(request)
                return True
            self._refused += 1
            if time.monotonic() - self._complained >= COMPLAIN_EVERY_S:
                self._complained = time.monotonic()
                logger.warning(
                    "Backhaul: %d lease channels are open, the most there may be: the one from %s is refused, the %d. so far,"
                    " and what comes over it is computed. A prefill engine keeps a few: does anything else connect to port %d?",
                    MOST_CONNECTIONS,
                    client_address,
                    self._refused,
                    self.port,
                )
            return False

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: object) -> None:
        logger.exception("Backhaul: the lease channel to %s failed", client_address)

    def serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(IDLE_S)  # a reader whose machine is gone hangs up never
        try:
            while (body := _receive(connection)) is not None:
                try:
                    message = decode_message(body)
                except msgspec.ValidationError:
                    connection.sendall(frame(Answer(ok=False, why=Why.MALFORMED)))
                    continue
                connection.sendall(frame(self.reply(message)))
        except (msgspec.DecodeError, BrokenChannel) as error:
            logger.warning("Backhaul: a lease channel is closed, which sent no message: %s", error)
        except OSError:
            return  # the reader is gone, or silent; its holds end by themselves

    def reply(self, message: Message) -> Answer:
        return self._table.answer(message, self.peer)

    def stop(self) -> None:
        """Closes the port and every connection."""
        self.shutdown()
        self.server_close()
        self._thread.join()
        with self._open_lock:
            connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Connection(socketserver.BaseRequestHandler):
    server: LeaseServer

    def handle(self) -> None:
        self.server.serve(self.request)


# --- the reader's side ------------------------------------------------------------------------------------------------


class LeaseClient:
    """Asks holders; connections are kept and used again. Any number of threads may ask at the same time."""

    def __init__(self, timeout_s: float) -> None:
        """How long one answer may take, connecting included."""
        self.timeout_s = timeout_s
        self._idle: OrderedDict[tuple[str, int], list[socket.socket]] = OrderedDict()
        self._busy: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, host: str, port: int, message: Message) -> Answer:
        """Raises `BrokenChannel` where no answer comes in time. A kept connection that turns out to be dead, as after a
        restart of the holder, is replaced by a new one."""
        deadline = time.monotonic() + self.timeout_s
        address = host, port
        connection = self._kept(address)
        if connection is not None:
            with contextlib.suppress(BrokenChannel):
                return self._ask(connection, address, message, deadline)
        if time.monotonic() >= deadline:
            raise BrokenChannel(f"{host}:{port} gave no answer in {self.timeout_s:g} s")
        try:
            connection = socket.create_connection(address, timeout=max(0.001, deadline - time.monotonic()))
        except (OSError, UnicodeError) as error:
            raise BrokenChannel(f"{host}:{port} cannot be reached: {error}") from None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._ask(connection, address, message, deadline)

    def _kept(self, address: tuple[str, int]) -> socket.socket | None:
        with self._lock:
            idle = self._idle.get(address)
            return idle.pop() if idle else None

    def _ask(self, connection: socket.socket, address: tuple[str, int], message: Message, deadline: float) -> Answer:
        with self._lock:
            if self._closed:
                connection.close()
                raise BrokenChannel("this engine is shutting down")
            self._busy.add(connection)
        try:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.sendall(frame(message))
            body = _receive(connection)
            if body is None:
                raise BrokenChannel("hung up")
            got = decode_answer(body)
        except msgspec.ValidationError as error:
            self._drop(connection)
            raise WrongAnswer(f"{address[0]}:{address[1]}: {error}") from None
        except (OSError, UnicodeEncodeError, msgspec.DecodeError, BrokenChannel) as error:
            self._drop(connection)
            raise BrokenChannel(f"{address[0]}:{address[1]}: {error}") from None
        with self._lock:
            self._busy.discard(connection)
            stale = [connection] if self._closed else self._keep(connection, address)
        for one in stale:
            one.close()
        return got

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def _keep(self, connection: socket.socket, address: tuple[str, int]) -> list[socket.socket]:
        """Keeps a connection; those that are kept no longer."""
        self._idle.setdefault(address, []).append(connection)
        self._idle.move_to_end(address)
        return self._idle.popitem(last=False)[1] if len(self._idle) > MOST_IDLE else []

    def close(self) -> None:
        """Ends every connection; whoever waits for an answer gets `BrokenChannel` at once."""
        with self._lock:
            self._closed = True
            idle = [connection for kept in self._idle.values() for connection in kept]
            self._idle.clear()
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
