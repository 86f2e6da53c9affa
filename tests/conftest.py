"""What holds for every test: nothing is left running, and with BACKHAUL_NO_SKIPS=1 nothing is skipped."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

BEGAN = time.monotonic()
NO_SKIPS = os.environ.get("BACKHAUL_NO_SKIPS") == "1"
GRACE_S = 20.0
"""How long a test's tasks may take to end after the test."""

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
CHILDREN = pytest.StashKey[list[str]]()
LEFT = "left_running"


@pytest.fixture(autouse=True)
def nothing_left_running(request: pytest.FixtureRequest) -> None:
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("no_task_left_running")


@pytest.fixture
async def no_task_left_running() -> AsyncIterator[None]:
    """Fails a test that leaves tasks in the event loop. Those of wider fixtures are older than the test, and stay."""
    before = asyncio.all_tasks()
    yield
    loop = asyncio.get_running_loop()
    deadline = loop.time() + GRACE_S
    while left := asyncio.all_tasks() - before - {asyncio.current_task()}:
        if loop.time() > deadline:
            for task in left:
                task.cancel()
            coroutines = ", ".join(repr(task.get_coro()) for task in left)
            pytest.fail(f"still running after the test: {coroutines}", pytrace=False)
        await asyncio.sleep(0.005)


def pytest_sessionfinish(session: pytest.Session) -> None:
    left = session.config.stash.setdefault(CHILDREN, [])
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output[LEFT] = list(running_children())
    elif not session.config.getoption("numprocesses", None):  # else its children are workers, which tell of their own
        left += running_children()
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended."""
    node.config.stash.setdefault(CHILDREN, []).extend(getattr(node, "workeroutput", {}).get(LEFT, ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if last := os.environ.get("BACKHAUL_LAST_PHASE"):
        phases = Path(os.environ["BACKHAUL_PHASES"]).read_text().splitlines()
        phases.append(f"{time.monotonic() - BEGAN:5.0f} s  {last}")
        phases.append(f"{sum(int(phase.split()[0]) for phase in phases):5} s  in all")
        terminalreporter.section("phases")
        terminalreporter.write_line("\n".join(phases))
    for child in config.stash.get(CHILDREN, []):
        terminalreporter.write_line(f"FAILED: the tests left a process running: {child}", red=True)


def running_children() -> Iterator[str]:
    """Process id and command line of each child of this process that runs. Nothing where /proc does not tell."""
    for listing in Path("/proc/self/task").glob("*/children"):
        for pid in _read(listing).split():
            command = _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")
            if command and "multiprocessing.resource_tracker" not in command:
                yield f"{pid} {command}"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it has ended meanwhile


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return forbid_skip(report)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return forbid_skip(report)


def forbid_skip(report: Report) -> Report:
    """Turns a skip into a failure. An expected failure is reported as skipped too, and stays."""
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"{reason}: with BACKHAUL_NO_SKIPS=1, a skip is a failure"
    return report
