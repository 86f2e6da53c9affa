"""The connector's lease channel: how a reader asks D, at the moment of reading, whether it may.

Frames are a 4-byte big-endian length and a MessagePack map. One question, one answer, in order; connections are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from .asks import Id
from .config import Faults
from .listening import stop_listening

MAX_FRAME = 2**20
MAX_HOLD_S = 600.0

_HEAD = 4


class Claim(msgspec.Struct, tag_field="op", tag="claim", kw_only=True, omit_defaults=True):
    """May these blocks be read, and held meanwhile?"""

    v: Annotated[int, Meta(ge=1)]
    lease: Id
    engine: Id
    epoch: Id
    blocks: Annotated[int, Meta(ge=1)]
    hash: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """In full, of the last of the blocks."""
    tail: bytes | None = None
    """Only of leases that are read as a whole; this engine has none."""
    hold_s: Annotated[float, Meta(gt=0, le=MAX_HOLD_S)]
    claim: Id


class Done(msgspec.Struct, tag_field="op", tag="done", kw_only=True):
    """The reader is finished with what it claimed."""

    lease: Id
    claim: Id
    read: bool


class Decline(msgspec.Struct, tag_field="op", tag="decline", kw_only=True):
    """The one reader of a lease that is not shared will not read it."""

    lease: Id


Question = Claim | Done | Decline


class Answer(msgspec.Struct, omit_defaults=True):
    ok: bool
    why: str | None = None
    block_ids: list[list[int]] | None = None
    tokens: int | None = None
    peer: dict[str, int] | None = None
    """How the holder's blocks are reached, so that nobody has to trust the handle for it."""


class UnreachableError(Exception):
    """No answer from a lease channel in time, or none that can be understood."""


_encode = msgspec.msgpack.Encoder().encode
_decode_question = msgspec.msgpack.Decoder(Question).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


class LeaseChannel:
    """The listener. Port 0 takes a free one, which `port` then names."""

    def __init__(self, answer: Callable[[Question], Answer], faults: Faults, host: str, port: int) -> None:
        self.answer = answer
        self.faults = faults
        self.host = host
        self.port = port
        self.connections: set[asyncio.Transport] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Listener(self), self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is None:
            return
        await stop_listening(self._server)
        for transport in tuple(self.connections):
            transport.abort()
        await self._server.wait_closed()
        self._server = None


class _Listener(asyncio.Protocol):
    """One connection of a reader. What is no question ends it."""

    _transport: asyncio.Transport

    def __init__(self, channel: LeaseChannel) -> None:
        self._channel = channel
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._channel.connections.add(transport)
        if self._channel.faults.lease_channel == "refuse":
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._channel.connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        fault = self._channel.faults.lease_channel
        if fault is not None:
            if fault == "refuse":
                self._transport.abort()
            return
        self._buffer += data
        while len(self._buffer) >= _HEAD:
            size = int.from_bytes(self._buffer[:_HEAD], "big")
            if size > MAX_FRAME:
                self._transport.abort()
                return
            if len(self._buffer) < _HEAD + size:
                return
            frame = bytes(self._buffer[_HEAD : _HEAD + size])
            del self._buffer[: _HEAD + size]
            try:
                answer = self._reply(frame)
            except msgspec.DecodeError:
                self._transport.abort()
                return
            self._transport.write(_frame(answer))

    def _reply(self, frame: bytes) -> Answer:
        try:
            question = _decode_question(frame)
        except msgspec.ValidationError:
            return Answer(False, "malformed")
        return self._channel.answer(question)


class LeaseClient:
    """Asks other engines' lease channels."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._idle: dict[tuple[str, int], list[_Connection]] = defaultdict(list)
        self._closed = False

    async def ask(self, host: str, port: int, question: Question) -> Answer:
        """Raises `UnreachableError`."""
        where = f"lease channel {host}:{port}"
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask((host, port), question)
        except TimeoutError as error:
            raise UnreachableError(f"{where}: no answer within {self._timeout_s} s") from error
        except (asyncio.IncompleteReadError, OSError, ValueError, msgspec.MsgspecError) as error:
            raise UnreachableError(f"{where}: {error}") from error

    async def _ask(self, address: tuple[str, int], question: Question) -> Answer:
        idle = self._idle[address]
        while idle:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                # What was kept may have lost its peer meanwhile, which says nothing of who listens there now.
                return await self._ask_on(idle.pop(), address, question)
        return await self._ask_on(_Connection(*await asyncio.open_connection(*address)), address, question)

    async def _ask_on(self, connection: _Connection, address: tuple[str, int], question: Question) -> Answer:
        answer: Answer | None = None
        try:
            answer = await connection.ask(question)
            return answer
        finally:
            if answer is None or self._closed:
                connection.writer.close()
            else:
                self._idle[address].append(connection)

    async def aclose(self) -> None:
        self._closed = True
        for connections in self._idle.values():
            for connection in connections:
                connection.writer.close()
                with contextlib.suppress(ConnectionError):
                    await connection.writer.wait_closed()
        self._idle.clear()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def ask(self, question: Question) -> Answer:
        self.writer.write(_frame(question))
        await self.writer.drain()
        size = int.from_bytes(await self._reader.readexactly(_HEAD), "big")
        if size > MAX_FRAME:
            raise ConnectionAbortedError(f"frame of {size} bytes: at most {MAX_FRAME}")
        return _decode_answer(await self._reader.readexactly(size))


def _frame(message: Question | Answer) -> bytes:
    data = _encode(message)
    return len(data).to_bytes(_HEAD, "big") + data
