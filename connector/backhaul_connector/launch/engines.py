"""Process group of running engines: started together, watched, and ended so that no process is left."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from . import cpu_workers, interpreter, models, supervise
from .command import HOST, Device, EngineCommand, EnginesConfig, Role, plan, served_name, split_cores
from .models import LaunchError

GRACE_S = 10.0
"""An engine that was asked to end has this long before it is killed."""
LOG_TAIL_LINES = 25
_LONGEST_SOCKET_FOLDER = 107 - len("/") - 36
"""vLLM names its sockets by UUIDs, and Linux allows 107 bytes for a socket's path."""


def tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The end of an engine's log."""
    with contextlib.suppress(FileNotFoundError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    return ""


class Engine:
    """One engine of a set, in its own process tree below a supervisor (see `supervise`)."""

    def __init__(self, command: EngineCommand, log: Path, scratch: Path, cores: list[int] | None) -> None:
        """`scratch` is a folder for what the engine leaves behind, removed once the launcher is gone."""
        self.command = command
        self.log = log
        self.scratch = scratch
        self.cores = cores
        """On which its workers are to run; `None` leaves that to vLLM."""
        self._supervisor: subprocess.Popen[bytes] | None = None
        self.asked_to_end = True
        """False while the engine is meant to run."""
        self.ready = False
        """Whether it has been healthy since it was started."""

    def __repr__(self) -> str:
        return f"<Engine {self.name} {self.url} {'running' if self.running else 'ended'}>"

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def role(self) -> Role:
        return self.command.role

    @property
    def url(self) -> str:
        return self.command.url

    @property
    def running(self) -> bool:
        """Whether the engine's processes are there; says nothing about its health."""
        return self._supervisor is not None and self._supervisor.poll() is None

    @property
    def healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.command.ports.http, timeout=2.0)
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                return False

    def pids(self) -> list[int]:
        """The engine's processes, API server first."""
        return supervise.descendants(self._supervisor.pid) if self._supervisor and self.running else []

    def start(self) -> None:
        """Starts the processes, for the first time or again on the same ports; `Engines.wait_healthy` says when they
        serve."""
        if self.running:
            raise LaunchError(f"{self.name} is running already")
        self.stop()
        self.asked_to_end = self.ready = False
        with self.log.open("a") as log:
            log.write(f"$ {self.command.shell()}\n")
        supervisor = [sys.executable, "-I", "-S", supervise.__file__, str(self.log), str(GRACE_S), str(self.scratch)]
        self._supervisor = subprocess.Popen(
            [*supervisor, *self.command.argv],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**self._sockets(), **os.environ, **self.command.env},
            start_new_session=True,
        )

    def _sockets(self) -> dict[str, str]:
        """vLLM leaves its sockets in the temporary directory, unless it is told another."""
        short = len(os.fsencode(self.scratch)) <= _LONGEST_SOCKET_FOLDER
        return {"VLLM_RPC_BASE_PATH": str(self.scratch)} if short else {}

    def check(self) -> None:
        """Raises `LaunchError` with the log's tail if the engine has ended of itself."""
        if self._supervisor is None or self.running or self.asked_to_end:
            return
        raise LaunchError(
            f"{self.name} ended with status {self._supervisor.returncode}; its whole log is {self.log}", tail(self.log)
        )

    def ask_to_end(self) -> None:
        """Begins to end the engine; `join` waits for it."""
        self._end(supervise.END)

    def join(self) -> None:
        """Returns when no process is left."""
        if self._supervisor is not None:
            self._supervisor.wait()
            if self._supervisor.stdin is not None:
                self._supervisor.stdin.close()

    def stop(self) -> None:
        """Ends the engine as an operator would."""
        self.ask_to_end()
        self.join()

    def kill(self) -> None:
        """Ends the engine as a crash would: SIGKILL for all of its processes."""
        self._end(supervise.KILL)
        self.join()

    def _end(self, word: bytes) -> None:
        self.asked_to_end = True
        pipe = self._supervisor.stdin if self._supervisor else None
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                pipe.write(word)


class Engines:
    """A set of prefill and decode engines of one model, for as long as the `with` block lasts.

    Entering builds the model if need be, starts the engines and returns when all of them are healthy. Leaving ends
    them, and so does the death of this process, by whatever signal. Raises `LaunchError`, then with nothing running.
    """

    def __init__(
        self, config: EnginesConfig, *, logs: Path | None = None, report: Callable[[str], None] = lambda _: None
    ) -> None:
        """`logs` is a directory for the engines' logs. By default they are temporary, and kept only when the block ends with
        `LaunchError`. `report` gets lines of progress."""
        self.config = config
        self._logs = logs
        self._scratch: Path | None = None
        self._report = report
        self.prefill: tuple[Engine, ...] = ()
        self.decode: tuple[Engine, ...] = ()

    @property
    def all(self) -> tuple[Engine, ...]:
        return self.prefill + self.decode

    @property
    def model(self) -> str:
        """The name that requests use."""
        return served_name(self.config)

    def __enter__(self) -> Self:
        python = interpreter.find(self.config.python)
        if not python.plugin:
            self._report(
                f"note: {python.path} has no Backhaul; without it, vLLM {python.vllm} hides handles in streams"
            )
        models.ensure(self.config.model, python.path, self._report)
        device = self.config.device or python.device
        all_cores = sorted(os.sched_getaffinity(0))
        commands = plan(
            self.config, python=python.path, device=device, cores=len(all_cores), gpus=interpreter.visible_gpus()
        )
        cores = split_cores(all_cores, len(commands)) if device is Device.CPU else None
        self._scratch = scratch = Path(tempfile.mkdtemp(prefix="backhaul-"))
        logs = self._logs or scratch
        engines = [
            Engine(command, logs / f"{command.name}.log", scratch, cores[place] if cores else None)
            for place, command in enumerate(commands)
        ]
        self.prefill = tuple(engine for engine in engines if engine.role is Role.PREFILL)
        self.decode = tuple(engine for engine in engines if engine.role is Role.DECODE)
        try:
            removed = "" if self._logs else " (removed at the end, unless an engine fails)"
            self._report(f"vLLM {python.vllm} with NIXL {python.nixl} on {device}, logs in {logs}{removed}")
            for engine in engines:
                self._report(f"{engine.name}: starting on {engine.url}")
                engine.start()
            self.wait_healthy()
        except BaseException as error:
            self._stop(keep_logs=isinstance(error, LaunchError))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop(keep_logs=isinstance(error, LaunchError))

    def wait_healthy(self) -> None:
        """Returns when every engine that was started has become healthy. Raises `LaunchError` if one ends before, or
        takes too long."""
        begin = time.monotonic()
        waiting = [engine for engine in self.all if not engine.asked_to_end and not engine.ready]
        last_word = begin
        while waiting:
            self.check()
            for engine in list(waiting):
                if engine.healthy:
                    waiting.remove(engine)
                    engine.ready = True
                    if engine.cores:
                        cpu_workers.move(engine.pids(), engine.cores)
                    self._report(f"{engine.name}: healthy after {time.monotonic() - begin:.0f} s")
            now = time.monotonic()
            if waiting and now - begin > self.config.start_timeout_s:
                engine = waiting[0]
                raise LaunchError(
                    f"{engine.name} was not healthy after {now - begin:.0f} s; its whole log is {engine.log}",
                    tail(engine.log),
                )
            if waiting and now - last_word > 15:
                last_word = now
                self._report(f"waiting for {', '.join(engine.name for engine in waiting)} ({now - begin:.0f} s)")
            time.sleep(0.25)

    def check(self) -> None:
        """Raises `LaunchError` when an engine has ended of itself."""
        for engine in self.all:
            engine.check()

    def watch(self) -> NoReturn:
        """Waits until an engine ends of itself, and raises `LaunchError` then."""
        while True:
            self.check()
            time.sleep(0.25)

    def stop(self) -> None:
        """Ends all engines and returns when no process is left, nor a temporary file."""
        self._stop(keep_logs=False)

    def _stop(self, *, keep_logs: bool) -> None:
        try:
            for engine in self.all:
                engine.ask_to_end()
            for engine in self.all:
                engine.join()
        except BaseException:  # a second Ctrl-C
            for engine in self.all:
                engine.kill()
            raise
        finally:
            self._clear(keep_logs=keep_logs)

    def _clear(self, *, keep_logs: bool) -> None:
        scratch, self._scratch = self._scratch, None
        if scratch is None:
            return
        # An engine whose supervisor was killed may be removing its sockets at this moment.
        if not keep_logs or self._logs is not None:
            shutil.rmtree(scratch, ignore_errors=True)
            return
        for left in scratch.iterdir():
            if left.suffix != ".log":
                left.unlink(missing_ok=True)
