"""RPC server and client of the lease channel in this engine's event loop: how a reader asks D whether it may read.

The messages are the connector's. One question, one answer, in order; connections are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable

import msgspec
from backhaul_connector.lease_channel import BrokenChannel
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

from .config import Faults
from .listening import stop_listening


class LeaseChannel:
    """The listener. Port 0 takes a free one, which `port` then names."""

    def __init__(self, answer: Callable[[Message], Answer], faults: Faults, host: str, port: int) -> None:
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
        while len(self._buffer) >= LENGTH_BYTES:
            size = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if size > LONGEST_FRAME:
                self._transport.abort()
                return
            if len(self._buffer) < LENGTH_BYTES + size:
                return
            body = bytes(self._buffer[LENGTH_BYTES : LENGTH_BYTES + size])
            del self._buffer[: LENGTH_BYTES + size]
            try:
                answer = self._reply(body)
            except msgspec.DecodeError:
                self._transport.abort()
                return
            self._transport.write(frame(answer))

    def _reply(self, body: bytes) -> Answer:
        try:
            message = decode_message(body)
        except msgspec.ValidationError:
            return Answer(ok=False, why=Why.MALFORMED)
        return self._channel.answer(message)


class LeaseClient:
    """Asks other engines' lease channels."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._idle: dict[tuple[str, int], list[_Connection]] = defaultdict(list)
        self._closed = False

    async def ask(self, host: str, port: int, message: Message) -> Answer:
        """Raises `BrokenChannel`."""
        where = f"lease channel {host}:{port}"
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask((host, port), message)
        except TimeoutError as error:
            raise BrokenChannel(f"{where}: no answer within {self._timeout_s} s") from error
        except (asyncio.IncompleteReadError, OSError, ValueError, msgspec.MsgspecError) as error:
            raise BrokenChannel(f"{where}: {error}") from error

    async def _ask(self, address: tuple[str, int], message: Message) -> Answer:
        idle = self._idle[address]
        while idle:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                # What was kept may have lost its peer meanwhile, which says nothing of who listens there now.
                return await self._ask_on(idle.pop(), address, message)
        return await self._ask_on(_Connection(*await asyncio.open_connection(*address)), address, message)

    async def _ask_on(self, connection: _Connection, address: tuple[str, int], message: Message) -> Answer:
        answer: Answer | None = None
        try:
            answer = await connection.ask(message)
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

    async def ask(self, message: Message) -> Answer:
        self.writer.write(frame(message))
        await self.writer.drain()
        size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
        if size > LONGEST_FRAME:
            raise ConnectionAbortedError(f"frame of {size} bytes: at most {LONGEST_FRAME}")
        return decode_answer(await self._reader.readexactly(size))
