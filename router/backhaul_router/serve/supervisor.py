"""A pre-fork supervisor: starts the workers that serve one address, starts those anew that end, and passes signals on.

It answers no requests and knows nothing of them. Each worker listens on a socket of its own (`SO_REUSEPORT`), and is a router
like any other on its Redis. A worker that finds the pipe from the supervisor closed knows that it is gone, however it went,
and stops as if it were told. There are neither threads nor an event loop here, which makes forking safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess

from ..drive import logs
from ..errors import ConfigError
from .listening import let_share, share
from .reload import in_force
from .settings import Settings
from .siblings import Seat

log = logging.getLogger("backhaul")

STEADY_S = 60.0
"""A worker that has served for so long has not failed at its start."""
MOST_FAILURES = 8
"""In a row, of each worker while none serves: then the supervisor gives up."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0
_MOST_DOUBLINGS = 10
"""After which it is longer than the longest."""
_LOOK_S = 0.05
_CLEANUP_S = 15.0
"""For releases and the like, once requests have ended."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class WorkersFailed(Exception):
    """The workers do not stay up, or did not end as they should have."""


@dataclass(eq=False)
class Worker:
    """One worker, which may be started many times."""

    number: int
    process: ForkProcess | None = None
    says: connection.Connection | None = None
    """Where it says its URL once it serves, and before that what is wrong."""
    serves_since: float | None = None
    failure: str = ""
    restarts: int = 0
    failures: int = 0
    """In a row."""
    start_at: float = 0.0

    def pause_s(self, served_s: float) -> float:
        """How long to wait before it is started again, after it has served for so long."""
        if served_s > STEADY_S:
            self.failures = 0
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(self.failures, _MOST_DOUBLINGS), _LONGEST_PAUSE_S)
        self.failures += 1
        return pause_s


class Supervisor:
    """Of the workers on one address, which `holder` holds. `serve` serves as `server.serve_settings` does, in a worker."""

    def __init__(
        self,
        holder: socket.socket,
        settings: Settings,
        load: Callable[[], Settings] | None,
        serve: Callable[..., None],
        started: Callable[[str], None],
    ) -> None:
        self._holder = holder
        self._settings = settings
        self._load = load
        self._serve = serve
        self._say_started: Callable[[str], None] | None = started
        self._workers = [Worker(number) for number in range(1, settings.server.workers + 1)]
        self._signalled = 0
        self._stopping = False
        self._kill_at = float("inf")
        self._failure: Exception | None = None

    def run(self) -> None:
        """Until SIGINT or SIGTERM. For the main thread of a process without others. Calls `started` with the URL once all serve.

        Raises `ConfigError`: what a worker said as it could not start. Raises `WorkersFailed`."""
        let_share(self._holder)
        self._alive, self._life = os.pipe()  # nothing is written there: that it closes is what workers hear
        before = {number: signal.signal(number, self._told) for number in _SIGNALS}
        try:
            with tempfile.TemporaryDirectory(prefix="backhaul-", ignore_cleanup_errors=True) as self._folder:
                while not self._stopping or any(worker.process for worker in self._workers):
                    while self._signalled:
                        self._signalled -= 1
                        self._stop()
                    for worker in self._workers:
                        self._look_at(worker)
                    time.sleep(_LOOK_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for fd in (self._alive, self._life):
                os.close(fd)
        if self._failure is not None:
            raise self._failure

    def _told(self, *_: object) -> None:
        self._signalled += 1

    def _stop(self, failure: Exception | None = None) -> None:
        """Tells the workers to end; a second time, without waiting for requests."""
        of_server = self._settings.server
        finish_s = 0.0 if self._stopping else of_server.shutdown_delay_s + max(1, of_server.grace_s)
        self._kill_at = time.monotonic() + finish_s + _CLEANUP_S
        self._failure = self._failure or failure
        self._stopping = True
        for worker in self._workers:
            if worker.process is not None:
                worker.process.terminate()

    def _look_at(self, worker: Worker) -> None:
        now = time.monotonic()
        if worker.says is not None and worker.says.poll():
            with contextlib.suppress(EOFError):
                self._hear(worker, *worker.says.recv())
            worker.says.close()
            worker.says = None
        if worker.process is not None and worker.process.exitcode is not None:
            process, worker.process = worker.process, None
            self._ended(worker, process, process.exitcode or 0)
        elif worker.process is not None and self._kill_at <= now:
            worker.failure = f"worker {worker.number} did not end in time, and was killed"
            worker.process.kill()
        elif worker.process is None and not self._stopping and worker.start_at <= now:
            self._start(worker)

    def _hear(self, worker: Worker, url: str, failure: str) -> None:
        worker.failure, worker.serves_since = failure, None if failure else time.monotonic()
        if self._say_started is not None and all(one.serves_since is not None for one in self._workers):
            self._say_started(url)
            self._say_started = None

    def _start(self, worker: Worker) -> None:
        worker.restarts += worker.start_at > 0
        worker.failure = ""
        worker.says, says = connection.Pipe(duplex=False)
        process = get_context("fork").Process(target=self._become, args=(worker, says))
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until it is known whose they are
        try:
            process.start()
            worker.process = process
            log.info("worker %d is process %d", worker.number, process.pid)
        except OSError as error:
            self._start_later(worker, 0.0, f"worker {worker.number} cannot be started: {error.strerror}")
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            says.close()

    def _ended(self, worker: Worker, process: ForkProcess, status: int) -> None:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        served_s = 0.0 if worker.serves_since is None else time.monotonic() - worker.serves_since
        worker.serves_since = None
        if self._stopping:
            if status not in (0, -signal.SIGTERM) and self._failure is None:
                self._failure = WorkersFailed(worker.failure or f"worker {worker.number} {how} when it was to stop")
        elif served_s and not status:
            log.info("worker %d (process %d) has ended as it was told; another one follows", worker.number, process.pid)
            worker.start_at = time.monotonic()
        elif self._say_started is not None and worker.failure:
            self._stop(ConfigError(worker.failure))
        else:
            why = f": {worker.failure}" if worker.failure else ""
            self._start_later(worker, served_s, f"worker {worker.number} (process {process.pid}) {how}{why}")

    def _start_later(self, worker: Worker, served_s: float, why: str) -> None:
        """Where there is hope."""
        pause_s = worker.pause_s(served_s)
        if self._say_started is not None:
            self._stop(WorkersFailed(why))
        elif all(one.failures >= MOST_FAILURES and one.serves_since is None for one in self._workers):
            self._stop(WorkersFailed(f"no worker stays up: {why}"))
        else:
            log.error("%s; it is started again in %g s", why, pause_s)
            worker.start_at = time.monotonic() + pause_s

    def _become(self, worker: Worker, says: connection.Connection) -> None:
        """The life of a worker's process."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the supervisor too, which passes it on
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.close(self._life)
        threading.Thread(target=_end_with, args=(self._alive,), daemon=True).start()
        logs.name_worker(worker.number)
        seat = Seat(worker.number, len(self._workers), worker.restarts, self._folder)
        try:
            with share(self._holder) as listener:
                settings = self._settings_now(worker)
                self._serve(listener, settings, self._load, started=lambda url: says.send((url, "")), seat=seat)
        except ConfigError as error:
            says.send(("", str(error)))
            sys.exit(2)
        except asyncio.CancelledError:  # before it served
            pass

    def _settings_now(self, worker: Worker) -> Settings:
        """One that is started again follows what a reload has changed meanwhile."""
        if worker.restarts and self._load is not None:
            try:
                return in_force(self._settings, self._load())
            except ConfigError as error:
                log.error("the configuration cannot be read, and stays as it was at the start: %s", error)  # noqa: TRY400
        return self._settings


def _end_with(alive: int) -> None:
    """Ends this process as SIGTERM does when nobody is at the other end of a pipe any more."""
    os.read(alive, 1)
    log.warning("the process that looks after the workers is gone: this one stops")
    os.kill(os.getpid(), signal.SIGTERM)
