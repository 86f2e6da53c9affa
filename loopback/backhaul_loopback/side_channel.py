"""Transfer server: how engines reach each other's blocks: a TCP listener per engine, in the place of NIXL and its handshake.

As with RDMA, a read names block numbers and gets what is in them; nothing checks whose they are by now. The one
fence is the engine id, which changes with every start. Messages are MessagePack behind a 4-byte length.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec

from .errors import KVLoadError
from .listening import stop_listening


class Hello(msgspec.Struct, tag="hello"):
    pass


class Read(msgspec.Struct, tag="read"):
    engine_id: str
    request_id: str
    block_ids: list[int]


class Notify(msgspec.Struct, tag="notify"):
    """The reader has what it needs: the blocks can go."""

    engine_id: str
    request_id: str


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """The reader still means to read: the lease should not end."""

    engine_id: str
    request_id: str


class Welcome(msgspec.Struct, tag="welcome"):
    engine_id: str
    block_size: int
    clock: float
    """The peer's time, by which its expiry stamps are corrected."""


class Blocks(msgspec.Struct, tag="blocks"):
    values: list[list[int]]


class Done(msgspec.Struct, tag="done"):
    pass


class Refused(msgspec.Struct, tag="refused"):
    why: str


Message = Hello | Read | Notify | Heartbeat | Welcome | Blocks | Done | Refused
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


class Owner(Protocol):
    """The engine behind a listener."""

    @property
    def engine_id(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    def clock_now(self) -> float: ...
    def read_blocks(self, request_id: str, block_ids: Sequence[int]) -> list[list[int]]: ...
    def notified(self, request_id: str) -> None: ...
    def heartbeat(self, request_id: str) -> None: ...


class SideChannel:
    """The listener. Port 0 takes a free one, which `port` then names."""

    def __init__(self, owner: Owner, host: str, port: int) -> None:
        self._owner = owner
        self.host = host
        self.port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is None:
            return
        await stop_listening(self._server)
        for writer in tuple(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                await _send(writer, self._answer(await _receive(reader)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the peer hung up, which is how every exchange ends
        finally:
            self._writers.discard(writer)
            writer.close()

    def _answer(self, message: Message) -> Message:
        owner = self._owner
        match message:
            case Hello():
                return Welcome(owner.engine_id, owner.block_size, owner.clock_now())
            case Read(engine_id=engine_id) | Notify(engine_id=engine_id) | Heartbeat(engine_id=engine_id) if (
                engine_id != owner.engine_id
            ):
                return Refused(f"engine ID mismatch: this is {owner.engine_id}, not {engine_id}")
            case Read():
                return Blocks(owner.read_blocks(message.request_id, message.block_ids))
            case Notify():
                owner.notified(message.request_id)
                return Done()
            case Heartbeat():
                owner.heartbeat(message.request_id)
                return Done()
            case _:
                return Refused(f"unexpected message {type(message).__name__}")


class Peer:
    """A connection to another engine's side channel, after the handshake. Every failure is a `KVLoadError`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, where: str) -> None:
        self._reader = reader
        self._writer = writer
        self._where = where
        self.welcome = Welcome("", 0, 0.0)

    async def shake_hands(self, engine_id: str) -> None:
        answer = await self._ask(Hello())
        if not isinstance(answer, Welcome) or answer.engine_id != engine_id:
            found = answer.engine_id if isinstance(answer, Welcome) else answer
            raise KVLoadError(f"{self._where}: engine ID mismatch, expected {engine_id}, found {found}")
        self.welcome = answer

    async def read(self, request_id: str, block_ids: Sequence[int]) -> list[list[int]]:
        answer = await self._ask(Read(self.welcome.engine_id, request_id, list(block_ids)))
        if not isinstance(answer, Blocks):
            raise KVLoadError(f"{self._where}: read of {request_id} failed: {answer}")
        return answer.values

    async def notify(self, request_id: str) -> None:
        await self._ask(Notify(self.welcome.engine_id, request_id))

    async def heartbeat(self, request_id: str) -> None:
        await self._ask(Heartbeat(self.welcome.engine_id, request_id))

    async def _ask(self, message: Message) -> Message:
        try:
            await _send(self._writer, message)
            return await _receive(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError) as error:
            raise KVLoadError(f"{self._where}: {error}") from error


@contextlib.asynccontextmanager
async def connect(host: str, port: int, engine_id: str) -> AsyncIterator[Peer]:
    where = f"side channel {host}:{port}"
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except (OSError, ValueError) as error:
        raise KVLoadError(f"{where}: {error}") from error
    try:
        peer = Peer(reader, writer, where)
        await peer.shake_hands(engine_id)
        yield peer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    data = _encoder.encode(message)
    writer.write(len(data).to_bytes(4, "big") + data)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Message:
    size = int.from_bytes(await reader.readexactly(4), "big")
    return _decoder.decode(await reader.readexactly(size))


Connect = Callable[[str, int, str], contextlib.AbstractAsyncContextManager[Peer]]
