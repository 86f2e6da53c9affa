"""Connections as they come to a worker.

A descriptor that is passed to a process which has none left is dropped by the system, and its connection with it; nothing but a
flag says so. So one is held in reserve and given up for the next connection. Where it cannot be had again, what comes is left
where it is, and the parent gives to other workers what does not fit there any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable

log = logging.getLogger("backhaul")

_RETRY_S = 0.05
_SAY_AGAIN_S = 10.0


class Arrivals:
    """Of one worker. Made before the event loop; `begin` begins to read."""

    def __init__(self, pair: socket.socket, number: int, serve: Callable[[socket.socket], None]) -> None:
        self._pair = pair
        self._number = number
        self._serve = serve
        self._begun = False
        self._ended = False
        self._reserve: int | None = None
        self._again: asyncio.TimerHandle | None = None
        """Nothing is read before."""
        self._said_at: float | None = None

    def begin(self) -> None:
        """Serves from now on what comes."""
        if not self._ended:
            self._begun = True
            self._pair.setblocking(False)
            self._go_on()

    def take(self) -> None:
        """Serves what has come, as far as there are descriptors."""
        if not self._begun or self._ended or self._again is not None:
            return
        with contextlib.suppress(BlockingIOError):
            while self._has_reserve():
                self._give_up_reserve()
                data, descriptors, flags, _ = socket.recv_fds(self._pair, 1, 1)
                for descriptor in descriptors:
                    self._serve(socket.socket(fileno=descriptor))
                if flags & socket.MSG_CTRUNC:  # a thread was faster
                    log.error("worker %d has lost a connection: it has no descriptors left (ulimit -n)", self._number)
                if not data:  # nobody is at the other end any more
                    asyncio.get_running_loop().remove_reader(self._pair)
                    return
        if not self._has_reserve():
            self._pause()

    async def taken(self) -> None:
        """Returns when what has come is served."""
        self.take()
        while self._again is not None:
            await asyncio.sleep(_RETRY_S)

    def end(self) -> None:
        """Reads no more. May be called again."""
        if self._begun and not self._ended:
            asyncio.get_running_loop().remove_reader(self._pair)
            self._give_up_reserve()
            if self._again is not None:
                self._again.cancel()
                self._again = None
                log.error("worker %d ends without what has come last: it has no descriptors left", self._number)
        self._ended = True

    def _go_on(self) -> None:
        self._again = None
        if self._has_reserve():
            asyncio.get_running_loop().add_reader(self._pair, self.take)
            self.take()
        else:
            self._pause()

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pair)
        self._again = loop.call_later(_RETRY_S, self._go_on)
        if self._said_at is None or loop.time() - self._said_at > _SAY_AGAIN_S:
            self._said_at = loop.time()
            log.error("worker %d has no descriptors left (ulimit -n): connections wait until it has", self._number)

    def _has_reserve(self) -> bool:
        if self._reserve is None:
            with contextlib.suppress(OSError):  # none is left
                self._reserve = os.open(os.devnull, os.O_RDONLY)
        return self._reserve is not None

    def _give_up_reserve(self) -> None:
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None
