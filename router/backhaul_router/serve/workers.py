"""`serve` with several workers: router processes that serve one address, and the process that looks after them.

The parent answers no requests. It starts the workers by forking, so that they have the configuration that it has checked, starts
those anew that end, tells them to stop, and passes on what they ask each other (`team`). It holds one end of a pair of sockets
with each; a worker that finds the other end closed knows that the parent is gone, however it went, and stops as if it were told.

It has neither threads nor an event loop, which makes forking safe. uvicorn has a supervisor too; its workers do not hear of each
other nor of its death, start anew without a pause, and are told to stop by a signal, which a terminal has sent them already.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

from ..drive import logs
from ..errors import ConfigError
from ..ledger.protocol import open_ledger
from . import server
from .reload import in_force
from .settings import Settings
from .team import Team
from .worker_connections import Connections
from .worker_link import Ask, Failed, How, Leave, Message, Ready, Said, Stop
from .worker_process import Place, Process
from .worker_questions import Questions

log = logging.getLogger("backhaul")

_CLEANUP_S = 15.0
"""For releases and the like, once requests have ended."""
_HAND_OUT_S = 1.0
"""For connections that have come by the end, where workers are slow to take them."""

Load = Callable[[], Settings]


def serve(listener: socket.socket, settings: Settings, load: Load | None, started: Callable[[str], None]) -> None:
    """Runs `settings.server.workers` workers until SIGINT or SIGTERM. For the main thread of a process without others.

    Raises `ConfigError`: what a worker said as it could not start. Raises `server.WorkersFailed`."""
    settings.check_files()
    open_ledger(settings.router, time.monotonic)  # whether it could be
    _Parent(listener, settings, load, started).run()


class _Parent:
    def __init__(
        self, listener: socket.socket, settings: Settings, load: Load | None, started: Callable[[str], None]
    ) -> None:
        self._listener = listener
        self._settings = settings
        self._load = load
        self._say_started: Callable[[str], None] | None = started
        self._places = [Place(number) for number in range(1, settings.server.workers + 1)]
        self._questions = Questions(self._places, self._read_again)
        self._connections = Connections(listener, self._places)
        self._stopping = False
        self._end_at: float | None = None
        self._was_woken = False
        """By a signal: a worker may have ended."""
        self._signalled: deque[int] = deque()
        """Signals that have come, and nothing was done about."""
        self._kill_at: float | None = None
        self._failure: Exception | None = None

    def run(self) -> None:
        with selectors.DefaultSelector() as self._selector, self._signals() as self._woken:
            self._selector.register(self._woken, selectors.EVENT_READ, self._wake)
            for place in self._places:
                self._start(place)
            while not self._stopping or any(place.process for place in self._places):
                ready = self._selector.select(self._idle_s())
                while self._signalled:
                    self._signalled.popleft()
                    self._stop(now=self._stopping)
                for key, events in ready:
                    key.data(events)
                if self._was_woken:
                    self._was_woken = False
                    self._reap()
                self._look_at_the_clock()
                self._watch_writes()
                if self._say_started is None:
                    self._connections.attend(self._selector)
        if self._failure is not None:
            raise self._failure

    # --- signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """SIGINT and SIGTERM stop; the socket wakes the loop up, at the end of a child too."""
        woken, wakes = socket.socketpair()
        woken.setblocking(False)
        wakes.setblocking(False)
        handlers = {signal.SIGINT: self._told, signal.SIGTERM: self._told, signal.SIGCHLD: lambda *_: None}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        before_fd = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        try:
            yield woken
        finally:
            signal.set_wakeup_fd(before_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            woken.close()
            wakes.close()

    def _told(self, number: int, _: object) -> None:
        self._signalled.append(number)

    def _wake(self, _: int) -> None:
        self._was_woken = True
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def _stop(self, *, now: bool, failure: Exception | None = None) -> None:
        self._failure = self._failure or failure
        self._stopping = True
        for place in self._places:
            place.start_at = None
        delay_s = self._settings.server.shutdown_delay_s
        if now or not delay_s:
            self._end(How.NOW if now else How.END)
        else:
            self._tell(How.SOON)
            self._end_at = time.monotonic() + delay_s

    def _end(self, how: How) -> None:
        self._end_at = None
        self._connections.close(self._selector, within_s=0.0 if how is How.NOW else _HAND_OUT_S)
        self._tell(how)
        patience_s = _CLEANUP_S if how is How.NOW else max(1, self._settings.server.grace_s) + _CLEANUP_S
        self._kill_at = time.monotonic() + patience_s

    def _tell(self, how: How) -> None:
        for place in self._places:
            if place.process is not None:
                place.process.send(Stop(how))

    # --- processes

    def _start(self, place: Place) -> None:
        place.start_at = None
        ours, theirs = socket.socketpair()
        gives, gets = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            for one in (ours, theirs, gives, gets):
                one.close()
            self._start_later(place, 0.0, f"worker {place.number} cannot be started: {error.strerror}")
            return
        if pid == 0:
            for one in (ours, gives):
                one.close()
            self._become(place.number, theirs, gets)
        theirs.close()
        gets.close()
        ours.setblocking(False)
        gives.setblocking(False)
        place.process = Process(pid, ours, gives)
        self._selector.register(ours, selectors.EVENT_READ, functools.partial(self._hear, place, place.process))
        log.info("worker %d is process %d", place.number, pid)
        self._questions.started(place)

    def _become(self, number: int, link: socket.socket, connections: socket.socket) -> None:
        """The rest of the life of a process that was just forked."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the parent too, which passes it on
            self._selector.close()
            self._woken.close()
            for place in self._places:
                if place.process is not None:
                    place.process.close()
            self._connections.close_copy()
            logs.name_worker(number)
            status = _work(
                self._listener, self._settings, self._load, Team(link, connections, number, self._questions.members)
            )
        except BaseException:
            log.exception("worker %d ended, and Backhaul is at fault", number)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        for place in self._places:
            process = place.process
            if process is None:
                continue
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            if not pid:
                continue
            for message in process.received():  # its last words
                self._take(place, process, message)
            place.process = None
            if process.link in self._selector.get_map():
                self._selector.unregister(process.link)
            process.close()
            self._questions.gone(place)
            self._ended(place, process, os.waitstatus_to_exitcode(status))

    def _ended(self, place: Place, process: Process, status: int) -> None:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if self._stopping:
            if status and self._failure is None:
                self._failure = server.WorkersFailed(
                    process.failure or f"worker {place.number} {how} when it was to stop"
                )
        elif process.leaving and not status:
            log.info("worker %d (process %d) has ended as it was told; another one follows", place.number, process.pid)
            place.start_at = time.monotonic()
        elif self._say_started is not None and process.failure:
            self._stop(now=True, failure=ConfigError(process.failure))
        else:
            served_s = 0.0 if process.serves_since is None else time.monotonic() - process.serves_since
            why = f": {process.failure}" if process.failure else ""
            self._start_later(place, served_s, f"worker {place.number} (process {process.pid}) {how}{why}")

    def _start_later(self, place: Place, served_s: float, why: str) -> None:
        """Where there is hope."""
        pause_s = place.restarts.pause_s(served_s)
        if self._say_started is not None:
            self._stop(now=True, failure=server.WorkersFailed(why))
        elif all(one.restarts.hopeless and not one.serves for one in self._places):
            self._stop(now=True, failure=server.WorkersFailed(f"no worker stays up: {why}"))
        else:
            log.error("%s; it is started again in %g s", why, pause_s)
            place.start_at = time.monotonic() + pause_s

    def _read_again(self) -> None:
        """Workers that are started from now on follow what the others do."""
        if self._load is not None:
            try:
                self._settings = in_force(self._settings, self._load())
            except ConfigError as error:
                log.error("workers that are started again do not get the new configuration: %s", error)  # noqa: TRY400

    # --- time

    def _idle_s(self) -> float | None:
        moments = (
            self._kill_at,
            self._end_at,
            self._connections.try_again_at,
            self._questions.next_until,
            *(place.start_at for place in self._places),
        )
        first = min((moment for moment in moments if moment is not None), default=None)
        return None if first is None else max(0.0, first - time.monotonic())

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        self._questions.look_at_the_clock(now)
        for place in self._places:
            if place.start_at is not None and place.start_at <= now:
                place.restarts.count += 1
                self._start(place)
        if self._end_at is not None and self._end_at <= now:
            self._end(How.END)
        if self._kill_at is not None and self._kill_at <= now:
            self._kill_at = None
            for place in self._places:
                if place.process is not None:
                    place.process.failure = f"worker {place.number} did not end in time, and was killed"
                    os.kill(place.process.pid, signal.SIGKILL)

    # --- what workers say

    def _hear(self, place: Place, process: Process, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            process.flush()
        if events & selectors.EVENT_READ:
            for message in process.received():
                self._take(place, process, message)
        if process.silent:
            self._selector.unregister(process.link)

    def _listen(self, url: str) -> None:
        """All workers serve."""
        assert self._say_started is not None
        try:
            server.start_listening(self._listener)
        except ConfigError as error:
            self._stop(now=True, failure=error)
            return
        self._say_started(url)
        self._say_started = None

    def _watch_writes(self) -> None:
        for place in self._places:
            if (process := place.process) is not None and not process.silent:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
                key = self._selector.get_key(process.link)
                if key.events != wanted:
                    self._selector.modify(process.link, wanted, key.data)

    def _take(self, place: Place, process: Process, message: Message) -> None:
        match message:
            case Ready(url):
                process.serves_since = time.monotonic()
                if self._say_started is not None and not self._stopping and all(one.serves for one in self._places):
                    self._listen(url)
            case Leave():
                if not self._stopping:  # else it is told when it is time
                    process.leaving = True
                    process.send(Stop(How.END))
            case Failed(text):
                process.failure = text
            case Said():
                self._questions.said(place, message)
            case Ask():
                self._questions.ask(place, process, message)
            case _:
                raise AssertionError(f"no worker says {message}")


def _work(listener: socket.socket, settings: Settings, load: Load | None, team: Team) -> int:
    """Serves as one of the team until it is told to stop. Returns the exit status."""
    try:
        server.serve_settings(listener, settings, load, started=team.serves, team=team)
    except ConfigError as error:
        team.failed(str(error))
        return 2
    except asyncio.CancelledError:  # before it served
        pass
    return 0
