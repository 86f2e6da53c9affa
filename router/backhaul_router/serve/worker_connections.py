"""The parent accepts connections and hands them to the workers in turn.

If the workers took them from the socket themselves, the first one to wake up would take all that have come: of 32 clients, which
keep their connections, one worker of four may get all. It also means that connections wait with the system while no worker
serves, and that nobody listens any more once the parent is gone.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Sequence

from .worker_process import Place

log = logging.getLogger("backhaul")

_AT_ONCE = 32
"""Connections, before anything else is looked at."""
_RETRY_S = 0.05
_LOOK_S = 0.005


class Connections:
    """Those of one socket, which does not block."""

    def __init__(self, listener: socket.socket, places: Sequence[Place]) -> None:
        self.try_again_at: float | None = None
        """When to `attend` again, though nothing has happened."""
        self._listener = listener
        self._places = places
        self._accepts = False
        self._closed = False
        self._unplaced: socket.socket | None = None
        """A connection that no worker had room for."""
        self._turn = 0

    def attend(self, selector: selectors.BaseSelector) -> None:
        """Accepts connections from now on where somebody can take them, and else leaves them where they are."""
        if self._unplaced is not None and self._hand_out(self._unplaced):
            self._unplaced = None
        can = not self._closed and self._unplaced is None and any(place.takes for place in self._places)
        if can and not self._accepts:
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif not can and self._accepts:
            selector.unregister(self._listener)
        self._accepts = can
        self.try_again_at = None if self._unplaced is None else time.monotonic() + _RETRY_S

    def close(self, selector: selectors.BaseSelector, *, within_s: float) -> None:
        """Hands out all that has come, as far as it can be done within `within_s` seconds, and listens no more. May be called
        again."""
        if self._closed:
            return
        if self._accepts:
            selector.unregister(self._listener)
            self._accepts = False
        if self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            self._hand_out_all(time.monotonic() + within_s)
        if self._unplaced is not None and within_s:
            log.error("connections that have come are cut: no worker takes them")
        self.close_copy()
        self._listener.close()
        self._closed = True

    def close_copy(self) -> None:
        """Closes this process's descriptor of what no worker had room for, as one has to that was forked."""
        if self._unplaced is not None:
            self._unplaced.close()
            self._unplaced = None

    def _hand_out_all(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                if self._unplaced is None:
                    self._unplaced = self._next()
            except BlockingIOError:
                return
            except OSError as error:
                _report(error)
                continue
            if self._hand_out(self._unplaced):
                self._unplaced = None
            elif any(place.takes for place in self._places):
                time.sleep(_LOOK_S)
            else:
                return

    def _accept(self, _: int) -> None:
        for _ in range(_AT_ONCE if self._accepts else 0):  # a signal may just have ended it
            try:
                connection = self._next()
            except BlockingIOError:
                return
            except OSError as error:
                _report(error)
                return
            if not self._hand_out(connection):
                self._unplaced = connection
                return

    def _next(self) -> socket.socket:
        """The next connection that has come and is still there. Raises `BlockingIOError` where there is none, and another
        `OSError` where it cannot be accepted now."""
        while True:
            with contextlib.suppress(ConnectionAbortedError):
                return self._listener.accept()[0]

    def _hand_out(self, connection: socket.socket) -> bool:
        """To the next worker, unless it has left much of what it was given before to be taken, and others have not."""
        takers = [place.process for place in self._places if place.takes and place.process is not None]
        if not takers:
            return False
        self._turn += 1
        in_turn = [takers[(self._turn + one) % len(takers)] for one in range(len(takers))]
        for process in sorted(in_turn, key=lambda one: one.backlog):
            if process.hand(connection):
                connection.close()
                return True
        return False


def _report(error: OSError) -> None:
    log.error("a connection cannot be accepted: %s", error.strerror)
    time.sleep(_RETRY_S)  # where there are no descriptors left, it would be tried all the time
