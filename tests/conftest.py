"""What holds for every test: nothing is left running, and with BACKHAUL_NO_SKIPS=1 nothing is skipped."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

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


USES_OPENAI = re.compile(r"^(?:from|import) (?:openai|backhaul)(?: |$)", re.MULTILINE)
RUNS_PROGRAMS_THAT_DO = ("test_readme", "test_sdk_example", "test_bench")
OURS_ALONE = ("test_collapse", "test_conversation", "test_conversations", "test_keepalive")
"""About conversations, whichever client makes the calls in them."""


ALONE = frozenset(
    {
        "test_bench",
        "test_bench_exact_histories",
        "test_bench_overhead",
        "test_bench_peers",
        "test_bench_retention",
        "test_bench_scale",
        "test_connector_cost",
        "test_demo",
        "test_engine_client",
        "test_fast_client",
        "test_fleet_failures",
        "test_launch",
        "test_left_behind",
        "test_lease_channel",
        "test_redis_ledger",
        "test_repository",
        "test_scale",
        "test_sse",
        "test_transport",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests in which openai's client runs, since these are run with both of its majors; and those that are not run
    beside others."""
    for item in items:
        if item.path.stem in ALONE:
            item.add_marker(pytest.mark.alone)
    for path in {item.path for item in items}:
        uses = path.stem not in OURS_ALONE and USES_OPENAI.search(path.read_text())
        if uses or path.stem in RUNS_PROGRAMS_THAT_DO:
            for item in items:
                if item.path == path:
                    item.add_marker(pytest.mark.openai)


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
