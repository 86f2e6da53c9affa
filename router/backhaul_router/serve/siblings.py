"""The sidecar sockets of workers: processes that `--workers` started ask each other what each must say for itself.

A client reaches one of them: `/metrics` is to have all, and a reload is for all. Each listens on a Unix socket in a folder that
only their user can open: a connection asks one thing by its name, in a line, and gets the answer in MessagePack.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("backhaul")

_LIMIT_S = 2.0
"""For an answer that a worker has at hand."""


class Worker(msgspec.Struct, frozen=True):
    """What is known of a worker."""

    worker: int
    """Counts from 1. One that is started anew in place of another keeps its number."""
    pid: int | None = None
    serves: bool = False
    restarts: int | None = None


class Seat(msgspec.Struct, frozen=True):
    """Which worker of how many a process is, and where they are."""

    number: int
    workers: int
    restarts: int
    folder: str


class Siblings:
    """One worker's view of them. `does` before `start`."""

    def __init__(self, seat: Seat) -> None:
        self.number = seat.number
        self.others = [number for number in range(1, seat.workers + 1) if number != seat.number]
        self._seat = seat
        Path(seat.folder).mkdir(mode=0o700, exist_ok=True)  # all others may just have left
        self._path(seat.number).unlink(missing_ok=True)  # of one that was killed
        self._server: asyncio.Server | None = None
        self._work: dict[str, Callable[[], Awaitable[Any]]] = {"who": self._who}

    def __repr__(self) -> str:
        return f"<Siblings, worker {self.number} of {self._seat.workers}>"

    def does(self, kind: str, work: Callable[[], Awaitable[Any]]) -> None:
        """This is how the worker answers that question."""
        self._work[kind] = work

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._answer, self._path(self.number))

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(OSError):  # others are there, or the parent was faster
                self._path(self.number).unlink(missing_ok=True)
                os.rmdir(self._seat.folder)

    async def ask(self, kind: str, limit_s: float = _LIMIT_S) -> dict[int, Any]:
        """What the other workers answer, by their numbers. Those that do not answer are left out."""
        answers = await asyncio.gather(*(self._ask(number, kind, limit_s) for number in self.others))
        return {number: answer for number, answer in zip(self.others, answers, strict=True) if answer is not self}

    async def workers(self) -> list[Worker]:
        """All of them, this one too."""
        known = {self.number: await self._who(), **await self.ask("who")}
        numbers = range(1, self._seat.workers + 1)
        return [msgspec.convert(known[one], Worker) if one in known else Worker(one) for one in numbers]

    async def _who(self) -> dict[str, Any]:
        worker = Worker(self.number, os.getpid(), serves=True, restarts=self._seat.restarts)
        return msgspec.to_builtins(worker)  # type: ignore[no-any-return]

    def _path(self, number: int) -> Path:
        return Path(self._seat.folder) / str(number)

    async def _ask(self, number: int, kind: str, limit_s: float) -> Any:
        """`self` where there is no answer."""
        try:
            async with asyncio.timeout(limit_s):
                reader, writer = await asyncio.open_unix_connection(self._path(number))
                with contextlib.closing(writer):
                    writer.write(f"{kind}\n".encode())
                    return msgspec.msgpack.decode(await reader.read(-1))
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            log.warning("worker %d does not answer (%s): %s", number, kind, error or "not in time")
            return self

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            kind = (await reader.readline()).decode().strip()
            writer.write(msgspec.msgpack.encode(await self._work[kind]()))
            await writer.drain()
