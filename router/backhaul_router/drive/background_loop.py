"""Event loop in a background thread (a blocking portal), for code without one: synchronous clients, finalizers, the exit.

One loop serves the whole process. It starts when it is first needed, and a forked child starts its own: threads do not
survive a fork, and what the parent's routers hold is the parent's to release.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")
_log = logging.getLogger("backhaul")

CLOSE_LIMIT_S = 5.0
"""How long closing may take where nobody can be told that it failed: at exit, in a finalizer, after an early close."""


class Closeable(Protocol):
    async def aclose(self) -> None: ...


class _Loop(asyncio.SelectorEventLoop):
    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> Any:
        """Resolves in place during the interpreter's exit, when executors take no more work."""
        if _exiting:
            return socket.getaddrinfo(*args, **kwargs)
        return await super().getaddrinfo(*args, **kwargs)


class BackgroundLoop:
    """Blocking portal: a running event loop that other threads hand coroutines to."""

    def __init__(self) -> None:
        self._loop = _Loop()
        self._thread = threading.Thread(target=self._run, name="backhaul-background-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Starts `work` in a copy of the caller's context. Cancelling the future cancels it; never blocks."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Has the loop call something after a delay."""
        self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, call)

    def run(self, work: Coroutine[Any, Any, _T], limit_s: float | None = None) -> _T:
        """Waits for `work`, which is cancelled when the wait ends early. Raises `TimeoutError` after `limit_s`."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(
                "a synchronous client cannot be used from Backhaul's own event loop: it would wait for itself"
            )
        future = self.submit(work)
        try:
            return future.result(limit_s)
        finally:
            future.cancel()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_LIMIT_S)
        if not self._thread.is_alive():
            self._loop.close()


_lock = threading.RLock()
_shared: BackgroundLoop | None = None
_open: set[Closeable] = set()
_lost: list[object] = []
"""What a forked child has of its parent's: kept, so that no finalizer touches the selectors and sockets that both share."""
_exiting = False


def shared() -> BackgroundLoop:
    """The process's background loop, started if need be. Safe in a finalizer, even one that interrupts this very function."""
    global _shared
    if _shared is None:
        with _lock:
            fresh = BackgroundLoop()
            if _shared is None:
                _shared = fresh
                fresh.start()
    return _shared


def running() -> bool:
    """Whether the calling thread is inside an event loop, which must not be blocked."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def exiting() -> bool:
    """Whether the interpreter's exit has begun, which closes everything by itself."""
    return _exiting


def close_at_exit(thing: Closeable) -> None:
    """Closes `thing` when the interpreter exits, unless `closed` says before that it is not needed."""
    _open.add(thing)


def closed(thing: Closeable) -> None:
    _open.discard(thing)


def abandon(thing: object) -> None:
    """Forgets something of the parent process without finalizing it."""
    _lost.append(thing)


def close_soon(thing: Closeable, owner_pid: int) -> None:
    """Closes `thing` in the background: finalizers run in any thread and must not block. Nothing after a fork."""
    if _exiting or os.getpid() != owner_pid:
        return
    closed(thing)
    shared().submit(close_all([thing]))


async def close_all(things: Iterable[Closeable]) -> None:
    await all_within_limit((f"closing {thing!r}", thing.aclose()) for thing in things)


async def all_within_limit(work: Iterable[tuple[str, Coroutine[Any, Any, None]]]) -> None:
    """Runs everything side by side within `CLOSE_LIMIT_S`. Failures are logged: there is nobody to raise them to."""
    tasks = {asyncio.ensure_future(coroutine): name for name, coroutine in work}
    if not tasks:
        return
    done, late = await asyncio.wait(tasks, timeout=CLOSE_LIMIT_S)
    for task in late:
        task.cancel()
        _log.warning(
            "%s took more than %g s: what is left on the engines ends with its TTL", tasks[task], CLOSE_LIMIT_S
        )
    for task in done:
        if not task.cancelled() and (error := task.exception()):
            _log.warning("%s failed: what is left on the engines ends with its TTL", tasks[task], exc_info=error)


async def _abort_and_close(things: Iterable[Closeable]) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLOSE_LIMIT_S)
    await close_all(things)


@atexit.register
def _close_at_exit() -> None:
    global _exiting
    _exiting = True
    things, loop = list(_open), _shared
    _open.clear()
    if loop is not None:
        try:
            loop.run(_abort_and_close(things), 2 * CLOSE_LIMIT_S + 1)
        except TimeoutError:
            _log.warning("Backhaul's event loop did not answer at exit: leases on the engines end with their TTL")
        loop.stop()
    elif things:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(close_all(things))


def _start_anew_in_child() -> None:
    global _shared, _lock
    if _shared is not None:
        abandon(_shared)
    _shared = None
    _lock = threading.RLock()
    _open.clear()


os.register_at_fork(after_in_child=_start_anew_in_child)
