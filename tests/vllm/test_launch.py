"""`backhaul up` and real engines: what is left when it ends, by whatever death, and what one is told."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from backhaul_connector.launch.cluster import Engine
from backhaul_connector.launch.supervise import descendants
from real_engines import PYTHON, EngineSet, EngineSets, assert_none_is_left


@contextmanager
def up(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a process of its own; its output goes to `out` and `err` in `tmp_path`."""
    command = [sys.executable, "-m", "backhaul_cli", "up", "--python", str(PYTHON), *arguments]
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        with subprocess.Popen(command, stdout=out, stderr=err) as launcher:
            try:
                yield launcher
            finally:
                launcher.terminate()


def wait_until(condition: Callable[[], object], launcher: subprocess.Popen[bytes], timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert launcher.poll() is None, f"the launcher ended with status {launcher.returncode}"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def servers(launcher: subprocess.Popen[bytes]) -> list[int]:
    """The API servers below a launcher, prefill engine first."""
    found = []
    for pid in descendants(launcher.pid):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):  # the probe of the interpreter, which ends soon
            continue
        if b"vllm.entrypoints.openai.api_server" in words and not any(b"supervise.py" in word for word in words):
            found.append(pid)
    return found


def test_a_launcher_that_is_killed_leaves_no_process(engine_sets: EngineSets, tmp_path: Path) -> None:
    engine_sets.make_room()
    with up(tmp_path) as launcher:
        wait_until(lambda: "AsyncOpenAI(" in (tmp_path / "out").read_text(), launcher)
        family = descendants(launcher.pid)
        launcher.kill()
        launcher.wait()
    names = [Path(f"/proc/{pid}/comm") for pid in family]
    assert len(family) >= 2 * len(("supervisor", "API server", "engine core", "worker")), names
    assert_none_is_left(family)

    told = (tmp_path / "out").read_text()
    urls = re.findall(r"starting on (http://127\.0\.0\.1:\d+)", told)
    assert f"client = AsyncOpenAI(prefill={json.dumps(urls[:1])}, decode={json.dumps(urls[1:])})" in told
    assert len(re.findall(r"^(?:prefill|decode)-0: healthy after \d+ s$", told, re.MULTILINE)) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_is_told_to_stop_ends_well_and_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    with up(tmp_path) as launcher:
        wait_until(lambda: len(servers(launcher)) == 2, launcher)
        family = descendants(launcher.pid)
        launcher.send_signal(number)
        assert launcher.wait(60) == 0
    assert_none_is_left(family, within_s=0)
    assert (tmp_path / "out").read_text().endswith("stopped\n")
    assert (tmp_path / "err").read_text() == ""


def test_when_one_engine_dies_the_other_is_ended_and_the_command_fails(tmp_path: Path) -> None:
    with up(tmp_path) as launcher:
        wait_until(lambda: len(servers(launcher)) == 2, launcher)
        family = descendants(launcher.pid)
        os.kill(servers(launcher)[1], signal.SIGKILL)
        assert launcher.wait(60) == 2
    assert_none_is_left(family, within_s=0)
    assert (tmp_path / "err").read_text().splitlines()[-1].startswith("backhaul up: decode-0 ended with status 137")


def test_when_a_supervisor_is_killed_its_engine_ends_too(tmp_path: Path) -> None:
    with up(tmp_path) as launcher:
        wait_until(lambda: len(servers(launcher)) == 2, launcher)
        family = descendants(launcher.pid)
        os.kill(family[0], signal.SIGKILL)
        assert launcher.wait(60) == 2
    assert_none_is_left(family)


def test_an_engine_that_cannot_start_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    with up(tmp_path, "--", "--no-such-flag") as launcher:
        assert launcher.wait(120) == 2
    *end_of_log, last = (tmp_path / "err").read_text().splitlines()
    told = re.fullmatch(r"backhaul up: (?:prefill|decode)-0 ended with status 2; its whole log is (\S+)", last)
    assert told is not None
    assert any("unrecognized arguments: --no-such-flag" in line for line in end_of_log)
    assert "--no-such-flag" in Path(told[1]).read_text()


def worker_of(engine: Engine) -> int:
    """The one process that vLLM pinned."""
    server, *others = engine.pids()
    (worker,) = [pid for pid in others if os.sched_getaffinity(pid) != os.sched_getaffinity(server)]
    return worker


def test_workers_run_on_different_cores(engines: EngineSet) -> None:
    used = []
    for worker in map(worker_of, engines.running.all):
        threads = [int(task.name) for task in Path(f"/proc/{worker}/task").iterdir()]
        (cores,) = {frozenset(os.sched_getaffinity(thread)) for thread in threads}
        used.append(cores)
    assert frozenset.union(*used) == os.sched_getaffinity(0)
    assert sum(map(len, used)) == len(os.sched_getaffinity(0))


def test_only_a_workers_main_thread_uses_its_core(engines: EngineSet) -> None:
    """Without `nixl_progress` each worker has one more, that of NIXL, which polls without pause."""

    def other_threads_s(worker: int) -> float:
        others = [task for task in Path(f"/proc/{worker}/task").iterdir() if task.name != str(worker)]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in others) / 1e9

    workers = [worker_of(engine) for engine in engines.running.all]
    before = [other_threads_s(worker) for worker in workers]
    time.sleep(2.0)
    assert max(other_threads_s(worker) - start for worker, start in zip(workers, before, strict=True)) < 0.3
