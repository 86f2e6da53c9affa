"""A worker's end: it asks the other workers through the parent, answers what they ask, and stops when it is told to.

Clients reach one worker, whichever takes their connection. What is said of all of them (`team_admin`, `team_reports`,
`team_metrics`) is asked for here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from .worker_arrivals import Arrivals
from .worker_link import (
    Answers,
    Ask,
    Do,
    Failed,
    How,
    Leave,
    Member,
    Message,
    Ready,
    Said,
    Stop,
    Unpacker,
    Whom,
    packed,
)

log = logging.getLogger("backhaul")

LIMIT_S = 2.0
"""For an answer that a worker has at hand."""
_PARENT_S = 5.0
"""The parent's own share."""
_ACCEPT_S = 1.0
"""For connections that have come when a worker is to end, where it has no descriptors for them, and for TLS handshakes."""
_READ_S = 0.05
"""For requests on connections that have just come: where none has been read, a connection is closed at the end."""
_READ_BYTES = 256 * 1024
_GONE = "the process that looks after the workers is gone, and this one is about to end"


class TeamError(Exception):
    """The other workers cannot be asked."""


class Server(Protocol):
    """What serves requests."""

    async def accept(self, connection: socket.socket) -> None:
        """Serves a connection from now on."""

    def end_soon(self) -> None:
        """Goes on, and says that it is not ready."""

    def end(self) -> None:
        """Ends when requests have. May be called again, as the others may."""

    def end_now(self) -> None:
        """Ends without waiting for them."""


Work = Callable[[Any], Awaitable[Said]]
"""Answers a question of a kind. The answer's number is put in afterwards."""


def said(value: Any, *, good: bool = True, members: list[Member] | None = None) -> Said:
    return Said(0, good, value, members)


class Team:
    """One worker's view of it. Made before the event loop; `join` begins to listen."""

    def __init__(
        self, link: socket.socket, connections: socket.socket, number: int, members: Sequence[Member] = ()
    ) -> None:
        """`members`: engines to begin with in place of the configured ones, where there are any."""
        self.number = number
        self.members = list(members)
        self._link = link
        self._arrivals = Arrivals(connections, number, self._serve)
        self._accepting: set[asyncio.Task[None]] = set()
        self._work: dict[str, Work] = {}
        self._if_it_fails: dict[str, Any] = {}
        self._asked: dict[int, asyncio.Future[Answers]] = {}
        self._count = 0
        self._server: Server | None = None
        self._starting: asyncio.Task[Any] | None = None
        self._connected = asyncio.Event()
        self._gone = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None

    def __repr__(self) -> str:
        return f"<Team, worker {self.number}>"

    def does(self, kind: str, work: Work, *, if_it_fails: Any = None) -> None:
        """This is how the worker answers questions of that kind. `if_it_fails`: the answer when `work` raises something; else
        there is none, and the worker counts as missing."""
        self._work[kind] = work
        self._if_it_fails[kind] = if_it_fails

    # --- its life

    async def join(self) -> None:
        """Begins to listen to the parent. Until `serve_with` a request to stop cancels the task that calls this."""
        self._starting = asyncio.current_task()
        reader, self._writer = await asyncio.open_unix_connection(sock=self._link.dup())
        self._spawn(self._listen(reader))

    def connected(self) -> None:
        """From now on questions are answered."""
        self._connected.set()

    def serve_with(self, server: Server) -> None:
        self._starting, self._server = None, server

    def serves(self, url: str) -> None:
        """Connections are served."""
        self._arrivals.begin()
        self._send(Ready(url))

    def leave(self) -> None:
        """Ends as if the parent had said so, without what is on the way to this worker being lost."""
        if not self._gone:
            self._send(Leave())

    def _serve(self, connection: socket.socket) -> None:
        assert self._server is not None
        task = self._spawn(self._server.accept(connection))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _end(self) -> None:
        """When what is on the way here has arrived."""
        assert self._server is not None
        self._server.end_soon()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ACCEPT_S):
                await self._arrivals.taken()
        self._arrivals.end()
        if self._accepting:
            await asyncio.wait(self._accepting, timeout=_ACCEPT_S)
        await asyncio.sleep(_READ_S)
        self._server.end()

    def failed(self, message: str) -> None:
        """The worker cannot start, and ends; its event loop is closed."""
        self._link.setblocking(True)  # the two are one to the system
        self._link.sendall(packed(Failed(message)))

    async def aclose(self) -> None:
        """Asks and answers nothing any more."""
        self._arrivals.end()
        for task in (tasks := list(self._tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        unpacker = Unpacker()
        with contextlib.suppress(ConnectionError):  # it has not read all that it was told
            while data := await reader.read(_READ_BYTES):
                for message in unpacker.feed(data):
                    self._take(message)
        log.warning("the process that looks after the workers is gone: worker %d stops", self.number)
        self._gone = True
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(TeamError(_GONE))
        self._stop(How.END)

    def _take(self, message: Message) -> None:
        match message:
            case Do():
                self._spawn(self._answer(message))
            case Answers():
                if (future := self._asked.get(message.number)) is not None and not future.done():
                    future.set_result(message)
            case Stop(how):
                self._stop(how)
            case _:
                raise AssertionError(f"the parent does not say {message}")

    def _stop(self, how: How) -> None:
        if self._server is None:
            if self._starting is not None:
                self._starting.cancel()
        elif how is How.SOON:
            self._server.end_soon()
        elif how is How.END:
            self._spawn(self._end())
        else:
            self._server.end_now()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("worker %d, and Backhaul is at fault", self.number, exc_info=failure)

    def _send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(packed(message))

    # --- questions

    async def ask(self, kind: str, whom: Whom, what: Any = None, limit_s: float = LIMIT_S) -> Answers:
        """Every worker's answer, this one's too. Raises `TeamError`."""
        if self._gone:
            raise TeamError(_GONE)
        self._count += 1
        number = self._count
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(Ask(number, kind, whom, limit_s, what))
        try:
            async with asyncio.timeout(limit_s + _PARENT_S):
                answers: Answers = await future
        except TimeoutError:
            raise TeamError("the process that looks after the workers does not answer") from None
        finally:
            del self._asked[number]
        if answers.missing:
            log.warning("workers that have failed, or not answered within %g s: %s", limit_s, answers.missing)
        return answers

    async def _answer(self, do: Do) -> None:
        await self._connected.wait()
        try:
            answer = await self._work[do.kind](do.what)
            self._send(Said(do.question, answer.good, answer.value, answer.members))
        except Exception:  # whoever asks would wait for nothing, and changes for each other
            log.exception("worker %d cannot answer (%s), and Backhaul is at fault", self.number, do.kind)
            instead = self._if_it_fails.get(do.kind)
            self._send(Said(do.question, good=False, value=instead, failed=instead is None))
