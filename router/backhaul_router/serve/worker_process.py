"""A router's workers as their parent sees them: places that processes fill, one after the other."""

from __future__ import annotations

import array
import fcntl
import socket
import termios
from dataclasses import dataclass, field

from .worker_link import Message, Unpacker, Worker, packed

STEADY_S = 60.0
"""A worker that has served for so long has not failed at its start."""
MOST_FAILURES = 8
"""In a row, of each worker while none serves: then the parent gives up."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0
_MOST_DOUBLINGS = 10
"""After which it is longer than the longest."""
_TEN_CONNECTIONS = 8192
"""Bytes that they take up in a socket's buffer, roughly."""
_READ_BYTES = 256 * 1024


@dataclass(eq=False)
class Process:
    """A worker that runs."""

    pid: int
    link: socket.socket
    connections: socket.socket
    """Where it gets those that it is to serve."""
    leaving: bool = False
    """It wants no more of them."""
    serves_since: float | None = None
    failure: str = ""
    silent: bool = False
    """It has closed its end, and says nothing any more."""
    _unpacker: Unpacker = field(default_factory=Unpacker)
    _unsent: bytearray = field(default_factory=bytearray)

    def send(self, message: Message) -> None:
        self._unsent += packed(message)
        self.flush()

    def flush(self) -> None:
        """Sends what can be sent at once."""
        try:
            while self._unsent:
                del self._unsent[: self.link.send(self._unsent)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):  # it ends, which shows by itself
            self._unsent.clear()

    def hand(self, connection: socket.socket) -> bool:
        """Gives it a connection. Returns whether that could be done; what its client has sent by then is the worker's to read."""
        try:
            socket.send_fds(self.connections, [b"c"], [connection.fileno()])
        except OSError:  # there is no room, or it ends
            return False
        return True

    @property
    def backlog(self) -> int:
        """Of what it was given, what it has not taken: about one for every ten connections. 0 where the system does not say."""
        found = array.array("i", [0])
        try:
            fcntl.ioctl(self.connections, termios.TIOCOUTQ, found)
        except OSError:
            return 0
        return found[0] // _TEN_CONNECTIONS

    def close(self) -> None:
        self.link.close()
        self.connections.close()

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    def received(self) -> list[Message]:
        try:
            data = self.link.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        self.silent = not data
        return self._unpacker.feed(data)


@dataclass(eq=False)
class Restarts:
    """How often a worker was started in place of one that ended, and when the next one is."""

    count: int = 0
    failures: int = 0
    """In a row."""

    @property
    def hopeless(self) -> bool:
        return self.failures >= MOST_FAILURES

    def pause_s(self, served_s: float) -> float:
        """How long to wait, after one that had served for so long."""
        if served_s > STEADY_S:
            self.failures = 0
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(self.failures, _MOST_DOUBLINGS), _LONGEST_PAUSE_S)
        self.failures += 1
        return pause_s


@dataclass(eq=False)
class Place:
    """Of one worker, which may be started many times."""

    number: int
    process: Process | None = None
    restarts: Restarts = field(default_factory=Restarts)
    start_at: float | None = None

    @property
    def serves(self) -> bool:
        return self.process is not None and self.process.serves_since is not None

    @property
    def takes(self) -> bool:
        """Whether it can be given connections."""
        return self.process is not None and self.process.serves_since is not None and not self.process.leaving

    @property
    def shown(self) -> Worker:
        return Worker(self.number, self.process.pid if self.process else None, self.serves, self.restarts.count)
