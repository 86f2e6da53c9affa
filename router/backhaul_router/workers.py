"""`serve` with several workers: router processes that take connections from one socket, and the process that looks after them.

The parent answers no requests. It starts the workers by forking, so that they have the configuration that it has checked, starts
those anew that end, tells them to stop, and passes on what they ask each other (`team`). It holds one end of a pair of sockets
with each; a worker that finds the other end closed knows that the parent is gone, however it went, and stops as if it were told.

It has neither threads nor an event loop, which makes forking safe, and its decisions are few: uvicorn's supervisor has no
channel between workers, cuts requests at a second signal's race, and does not end them when it is killed.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from . import logs, server
from .errors import ConfigError
from .ledger_protocol import open_ledger
from .reload import in_force
from .settings import Settings
from .team import Team
from .worker_link import (
    RELOAD,
    Answers,
    Ask,
    Do,
    Failed,
    Member,
    Message,
    Ready,
    Said,
    Stop,
    Unpacker,
    Whom,
    Worker,
    packed,
)

log = logging.getLogger("backhaul")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0
_STEADY_S = 60.0
"""A worker that has served for so long has not failed at its start."""
_MOST_FAILURES = 8
"""Of each worker in a row, while none serves: then the parent gives up."""
_CLEANUP_S = 15.0
"""For releases and the like, once requests have ended."""
_READ_BYTES = 256 * 1024

Load = Callable[[], Settings]


class WorkersFailed(Exception):
    """The workers do not stay up, or did not end as they should have."""


def serve(listener: socket.socket, settings: Settings, load: Load | None, started: Callable[[str], None]) -> None:
    """Runs `settings.server.workers` workers until SIGINT or SIGTERM. For the main thread of a process without others.

    Raises `ConfigError`: what a worker said as it could not start. Raises `WorkersFailed`."""
    if not hasattr(os, "fork"):
        raise ConfigError(f"workers={settings.server.workers}: this system cannot fork; run several routers instead")
    settings.check_files()
    open_ledger(settings.router, time.monotonic)  # whether it could be
    _Parent(listener, settings, load, started).run()


@dataclass(eq=False)
class _Process:
    """A worker that runs."""

    pid: int
    link: socket.socket
    asking: dict[int, _Question] = field(default_factory=dict)
    """Questions to it that it has not answered."""
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
class _Place:
    """Of one worker, which may be started many times."""

    number: int
    process: _Process | None = None
    restarts: int = 0
    failures: int = 0
    """In a row."""
    start_at: float | None = None

    @property
    def shown(self) -> Worker:
        process = self.process
        serves = process is not None and process.serves_since is not None
        return Worker(self.number, process.pid if process else None, serves, self.restarts)


@dataclass(eq=False)
class _Question:
    """One that is being answered."""

    number: int
    asker: _Place
    by: _Process
    ask: Ask
    until: float
    answers: dict[int, Any] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    spread: bool = False
    """Of a change: the one that asks has made it, and the others are told."""

    @property
    def is_change(self) -> bool:
        return self.ask.whom in (Whom.CHANGE, Whom.CHANGE_AT_ONCE)


class _Parent:
    def __init__(
        self, listener: socket.socket, settings: Settings, load: Load | None, started: Callable[[str], None]
    ) -> None:
        self._listener = listener
        self._settings = settings
        self._load = load
        self._say_started: Callable[[str], None] | None = started
        self._members: list[Member] = []
        """Empty: as the configuration names them."""
        self._places = [_Place(number) for number in range(1, settings.server.workers + 1)]
        self._questions: dict[int, _Question] = {}
        self._changes: list[tuple[_Place, _Process, Ask]] = []
        """That wait for the one before."""
        self._asked = 0
        self._stopping = False
        self._signals_left = 0
        """That have come, and nothing was done about."""
        self._kill_at: float | None = None
        self._failure: Exception | None = None

    def run(self) -> None:
        with selectors.DefaultSelector() as self._selector, self._signals() as self._woken:
            self._selector.register(self._woken, selectors.EVENT_READ, self._wake)
            for place in self._places:
                self._start(place)
            while not self._stopping or any(place.process for place in self._places):
                for key, events in self._selector.select(self._idle_s()):
                    key.data(events)
                for _ in range(self._signals_left):
                    self._signals_left -= 1
                    self._stop(now=self._stopping)
                self._reap()
                self._look_at_the_clock()
                self._watch_writes()
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

    def _told(self, *_: object) -> None:
        self._signals_left += 1

    def _wake(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def _stop(self, *, now: bool, failure: Exception | None = None) -> None:
        self._failure = self._failure or failure
        self._stopping = True
        self._listener.close()  # the workers still have it, until they take no more connections
        of_server = self._settings.server
        patience_s = _CLEANUP_S if now else of_server.shutdown_delay_s + max(1, of_server.grace_s) + _CLEANUP_S
        self._kill_at = time.monotonic() + patience_s
        for place in self._places:
            place.start_at = None
            if place.process is not None:
                place.process.send(Stop(now))

    # --- processes

    def _start(self, place: _Place) -> None:
        place.start_at = None
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._become(place.number, ours, theirs)
        theirs.close()
        ours.setblocking(False)
        place.process = _Process(pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, functools.partial(self._hear, place, place.process))
        log.info("worker %d is process %d", place.number, pid)

    def _become(self, number: int, ours: socket.socket, theirs: socket.socket) -> None:
        """The rest of the life of a process that was just forked."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the parent too, which passes it on
            self._selector.close()
            for one in (ours, self._woken, *(place.process.link for place in self._places if place.process)):
                one.close()
            logs.name_worker(number)
            status = _work(self._listener, self._settings, self._load, Team(theirs, number, self._members))
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
            process.link.close()
            for question in list(process.asking.values()):
                self._no_answer(place, question)
            self._ended(place, process, os.waitstatus_to_exitcode(status))

    def _ended(self, place: _Place, process: _Process, status: int) -> None:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        why = process.failure or f"worker {place.number} {how}"
        if self._stopping:
            if status and self._failure is None:
                self._failure = WorkersFailed(process.failure or f"{why} when it was to stop")
            return
        if self._say_started is not None:
            self._stop(now=True, failure=ConfigError(process.failure) if process.failure else WorkersFailed(why))
            return
        served_s = 0.0 if process.serves_since is None else time.monotonic() - process.serves_since
        if served_s > _STEADY_S:
            place.failures = 0
        pause_s = min(_FIRST_PAUSE_S * 2**place.failures, _LONGEST_PAUSE_S)
        place.failures += 1
        if all(one.failures >= _MOST_FAILURES and not one.shown.serves for one in self._places):
            self._stop(now=True, failure=WorkersFailed(f"no worker stays up: {why}"))
            return
        log.error(
            "worker %d (process %d) %s; it is started again in %g s%s",
            place.number,
            process.pid,
            how,
            pause_s,
            f": {process.failure}" if process.failure else "",
        )
        place.start_at = time.monotonic() + pause_s

    # --- time

    def _idle_s(self) -> float | None:
        moments = [question.until for question in self._questions.values()]
        moments += [place.start_at for place in self._places if place.start_at is not None]
        moments += [] if self._kill_at is None else [self._kill_at]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for question in list(self._questions.values()):
            if question.until <= now:
                self._close(question)
        for place in self._places:
            if place.start_at is not None and place.start_at <= now:
                place.restarts += 1
                self._start(place)
        if self._kill_at is not None and self._kill_at <= now:
            self._kill_at = None
            for place in self._places:
                if place.process is not None:
                    place.process.failure = f"worker {place.number} did not end in time, and was killed"
                    os.kill(place.process.pid, signal.SIGKILL)

    # --- what workers say

    def _hear(self, place: _Place, process: _Process, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            process.flush()
        if events & selectors.EVENT_READ:
            for message in process.received():
                self._take(place, process, message)
        if process.silent:
            self._selector.unregister(process.link)

    def _watch_writes(self) -> None:
        for place in self._places:
            if (process := place.process) is not None and not process.silent:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
                key = self._selector.get_key(process.link)
                if key.events != wanted:
                    self._selector.modify(process.link, wanted, key.data)

    def _take(self, place: _Place, process: _Process, message: Message) -> None:
        match message:
            case Ready(url):
                process.serves_since = time.monotonic()
                if self._say_started is not None and all(one.shown.serves for one in self._places):
                    self._say_started(url)
                    self._say_started = None
            case Failed(text):
                process.failure = text
            case Said():
                self._said(place, process, message)
            case Ask(whom=Whom.CHANGE) if any(one.ask.whom is Whom.CHANGE for one in self._questions.values()):
                self._changes.append((place, process, message))
            case Ask():
                self._ask(place, process, message)
            case _:
                raise AssertionError(f"no worker says {message}")

    def _ask(self, place: _Place, process: _Process, ask: Ask) -> None:
        self._asked += 1
        until = time.monotonic() + ask.limit_s
        question = self._questions[self._asked] = _Question(self._asked, place, process, ask, until)
        if question.is_change:
            self._pass_on(question, [place])
        elif ask.whom is not Whom.NONE:
            self._pass_on(question, [one for one in self._places if one.shown.serves])
        self._close_if_done(question)

    def _pass_on(self, question: _Question, places: list[_Place]) -> None:
        do = Do(question.number, question.ask.kind, question.ask.what)
        for place in places:
            if place.process is not None:
                question.waiting.add(place.number)
                place.process.asking[question.number] = question
                place.process.send(do)

    def _said(self, place: _Place, process: _Process, said: Said) -> None:
        question = process.asking.pop(said.question, None)
        if question is None:
            return
        question.waiting.discard(place.number)
        question.answers[place.number] = said.value
        if question.ask.whom is Whom.UNTIL_ONE and said.good:
            question.waiting.clear()
        if question.is_change and not question.spread and said.good:  # too late to tell or not
            question.spread = True
            self._changed(said.members, configuration=question.ask.kind == RELOAD)
            self._pass_on(question, [one for one in self._places if one is not place])
        self._close_if_done(question)

    def _changed(self, members: list[Member] | None, *, configuration: bool) -> None:
        """Workers that are started from now on begin with what the others have."""
        if members is not None:
            self._members = members
        if configuration and self._load is not None:
            try:
                self._settings = in_force(self._settings, self._load())
            except ConfigError as error:
                log.error("workers that are started again do not get the new configuration: %s", error)  # noqa: TRY400

    def _no_answer(self, place: _Place, question: _Question) -> None:
        """The worker is gone. Where it was to change something, the one that takes its place begins with the change."""
        question.waiting.discard(place.number)
        self._close_if_done(question)

    def _close_if_done(self, question: _Question) -> None:
        if question.number in self._questions and not question.waiting:
            self._close(question)

    def _close(self, question: _Question) -> None:
        del self._questions[question.number]
        missing, workers = sorted(question.waiting), [place.shown for place in self._places]
        if question.asker.process is question.by:
            question.by.send(Answers(question.ask.number, question.answers, missing, workers))
        if question.ask.whom is not Whom.CHANGE:
            return
        while self._changes:
            place, process, ask = self._changes.pop(0)
            if place.process is process:
                self._ask(place, process, ask)
                return


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
