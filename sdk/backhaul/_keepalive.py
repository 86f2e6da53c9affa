"""Lease renewal for conversations that are open, before the leases end: while an agent thinks, a tool runs, a human decides.

One timer serves the whole process, in the background event loop, and only while there is something to renew. A conversation is
due when half of the time is gone for which its last turn's handle can be used; a turn in between puts that off. Conversations
are held weakly: one that is dropped is no longer renewed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from backhaul_router.drive import background_loop
from backhaul_router.errors import BackhaulError

_log = logging.getLogger("backhaul")

_RENEW_LIMIT_S = 10.0
_TOO_LATE_S = 1.0
"""With less time left than this, another try would come too late."""


class Renewable(Protocol):
    """An open conversation."""

    async def renew(self) -> float | None:
        """Seconds until the first of its leases ends; `None` when there is none, or none that can be renewed."""

    def renewal_failed(self) -> bool:
        """Returns whether to try again."""


@dataclass(frozen=True, slots=True)
class _Watch:
    due: float
    deadline: float


def _in_background(delay_s: float, call: Callable[[], None]) -> None:
    background_loop.shared().later(delay_s, call)


class KeepAlive:
    """`later` calls a function after a delay, inside an event loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] = _in_background,
    ) -> None:
        self._clock = clock
        self._later = later
        self.reset()

    def reset(self) -> None:
        """Forgets everything, as a forked child does: what the parent process holds is the parent's to renew."""
        self._lock = threading.RLock()  # a finalizer may interrupt whoever holds it
        self._watched: weakref.WeakKeyDictionary[Renewable, _Watch] = weakref.WeakKeyDictionary()
        self._renewing: set[asyncio.Task[None]] = set()
        self._wake: float | None = None
        self._timers = 0

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, conversation: Renewable, remaining_s: float) -> None:
        """Notes that a conversation's handle can be used for `remaining_s` more seconds."""
        now = self._clock()
        self._watch(conversation, _Watch(now + remaining_s / 2, now + remaining_s))

    def forget(self, conversation: Renewable) -> None:
        with self._lock:
            self._watched.pop(conversation, None)

    def _watch(self, conversation: Renewable, watch: _Watch) -> None:
        if background_loop.exiting():
            return
        with self._lock:
            self._watched[conversation] = watch
            self._wake_by(watch.due)

    def _wake_by(self, due: float) -> None:
        if self._wake is not None and self._wake <= due:
            return
        self._wake = due
        self._timers += 1
        number = self._timers
        self._later(max(0.0, due - self._clock()), lambda: self._woken(number))

    def _woken(self, number: int) -> None:
        with self._lock:
            if number != self._timers:
                return  # an earlier one has taken this timer's place
            self._wake = None
            now = self._clock()
            due = [(one, watch) for one, watch in self._watched.items() if watch.due <= now]
            for conversation, _ in due:
                del self._watched[conversation]
            if later := [watch.due for watch in self._watched.values()]:
                self._wake_by(min(later))
        for conversation, watch in due:
            task = asyncio.get_running_loop().create_task(self._renew(conversation, watch))
            self._renewing.add(task)
            task.add_done_callback(self._renewing.discard)

    async def _renew(self, conversation: Renewable, watch: _Watch) -> None:
        try:
            async with asyncio.timeout(_RENEW_LIMIT_S):
                remaining_s = await conversation.renew()
        except (BackhaulError, TimeoutError, RuntimeError) as error:  # RuntimeError: the router is closed
            wanted = conversation.renewal_failed()
            left_s = watch.deadline - self._clock()
            again = wanted and left_s > _TOO_LATE_S
            _log.warning(
                "the leases of %r could not be renewed, %s: %s",
                conversation,
                f"and end in {left_s:.0f} s if that fails again" if again else "and end now",
                error or type(error).__name__,
                exc_info=_log.isEnabledFor(logging.DEBUG),
            )
            if again:
                self._watch(conversation, _Watch(self._clock() + left_s / 2, watch.deadline))
            return
        if remaining_s:
            self.watch(conversation, remaining_s)


keeper = KeepAlive()
"""This process's."""

os.register_at_fork(after_in_child=keeper.reset)
