"""Subprocesses: modules of this project as processes of their own, what they use, and how long things took."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Program:
    url: str
    pid: int


@asynccontextmanager
async def program(module: str, *arguments: str) -> AsyncIterator[Program]:
    """A module as a process that prints its URL in its first line, until the block ends. Raises `OSError`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        if process.stdout is None:
            raise AssertionError("no pipe")
        found = re.search(r"http://\S+", (await process.stdout.readline()).decode())
        if found is None:
            raise OSError(f"{module} {arguments[0]} did not start; what it said is above")
        yield Program(found[0], process.pid)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


def cpu_s(pid: int) -> float | None:
    """CPU time that a process has used, over all its threads that live; `None` where Linux's /proc is not."""
    try:
        return (
            sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
            or None
        )
    except OSError:
        return None


def rss_mb(pid: int) -> float | None:
    """Resident memory of a process; `None` where Linux's /proc is not."""
    try:
        found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) / 1024 if found else None


def p99(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[98] if len(times) > 1 else times[0]
