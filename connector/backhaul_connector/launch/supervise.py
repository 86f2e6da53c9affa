"""Process supervisor: keeps one engine, and leaves no process behind whatever happens to the launcher.

    python -I -S supervise.py LOG GRACE_S SCRATCH COMMAND...

vLLM forks an engine core and workers, so a signal to one process does not end an engine. This process sits between
launcher and engine: a session of its own (Ctrl-C in the launcher's terminal does not reach it), and a subreaper (every
process that the engine starts stays its descendant, even when the one between dies). It ends the engine when

- its standard input says so (`END`, and `KILL`, which is heard while an engine is ending as well),
- its standard input closes, which is what happens when the launcher is gone, be it by SIGKILL,
- it gets SIGTERM,
- the engine's first process exits, for then the rest is of no use.

It exits as the engine did, and only when no descendant is left. If the launcher is gone by then, it removes the folder
SCRATCH, which the launcher would have removed. Standard library only, and quick to import.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

END = b"e"
"""Sent to standard input: end the engine, politely at first."""
KILL = b"k"
"""Sent to standard input: end the engine at once with SIGKILL, as a crash would."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, parents before children. Zombies are left out."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level
    return found


class Supervisor:
    """One engine and everything below it."""

    def __init__(self, command: list[str], log: str, grace_s: float) -> None:
        self.grace_s = grace_s
        self.status: int | None = None
        """Wait status of the engine's first process, once it has ended."""
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        self.wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        with open(log, "ab", buffering=0) as output:
            # Kept, though only `reap` waits: a Popen that is dropped collects a child that has ended, status and all.
            self.first = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
            )
        self.pid = self.first.pid

    def run(self) -> int:
        """Returns the exit status when the engine has ended, for whatever reason, and nothing of it is left."""
        while self.status is None:
            ready, _, _ = select.select([0, self.wake], [], [])
            if 0 in ready:
                self.end(at_once=os.read(0, 1) == KILL)
            elif signal.SIGTERM in os.read(self.wake, 512):
                self.end()
            self.reap()
        self.end()
        code = os.waitstatus_to_exitcode(self.status)
        return code if code >= 0 else 128 - code

    def end(self, *, at_once: bool = False) -> None:
        """Ends the engine, politely at first, and returns when no descendant is left."""
        deadline = time.monotonic() + (0.0 if at_once else self.grace_s)
        if not at_once and self.status is None:
            os.kill(self.pid, signal.SIGTERM)
        while self.reap():
            if told() == KILL:
                deadline = time.monotonic()
            if time.monotonic() >= deadline:
                for pid in descendants(os.getpid()):
                    if time.monotonic() < deadline + TRACKER_GRACE_S and _is_resource_tracker(pid):
                        continue
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def reap(self) -> bool:
        """Collects whoever has ended; says whether any child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.pid:
                self.status = status


TRACKER_GRACE_S = 10.0


def _is_resource_tracker(pid: int) -> bool:
    """Python's resource trackers end by themselves once all others have, and unlink the shared memory of the dead."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def told() -> bytes | None:
    """The next word on standard input; `None` when there is none yet, and nothing (`b""`) once the launcher is gone."""
    return os.read(0, 1) if select.select([0], [], [], 0)[0] else None


def launcher_is_gone() -> bool:
    """A launcher keeps its end of the pipe open until this process has ended; what it wrote last may be unread."""
    while word := told():
        pass
    return word is not None


def main(log: str, grace_s: str, scratch: str, *command: str) -> int:
    try:
        return Supervisor(list(command), log, float(grace_s)).run()
    finally:
        if launcher_is_gone():
            shutil.rmtree(scratch, ignore_errors=True)  # the other engines' supervisors do the same at the same time


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
