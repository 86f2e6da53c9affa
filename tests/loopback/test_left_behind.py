"""Commands that are ended, by whatever signal, leave no process, no port and no temporary file."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import stand_in
from backhaul_connector.launch.supervise import descendants
from backhaul_loopback import LoopbackPair, loopback_pair

LIMIT_S = 60.0
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
RUNNING = {
    "up": "Ctrl-C stops everything.",
    "serve": "router ",
    "demo": "no prefix caching on prefill",
    "demo vllm": "no prefix caching on prefill",
}
"""What a command prints once all of it runs."""
STATUS = {"up": 0, "serve": 0, "demo": 130, "demo vllm": 130}
"""Exit status of a command that is asked to end."""


@dataclass
class Command:
    process: asyncio.subprocess.Process
    temporary: Path
    """Its directory for temporary files; empty at first."""
    told: str = ""

    async def until(self, text: str) -> None:
        """Returns when it has printed `text`."""
        assert self.process.stdout is not None
        while text not in self.told:
            line = await asyncio.wait_for(self.process.stdout.readline(), LIMIT_S)
            assert line, self.told
            self.told += line.decode()

    async def end(self, number: signal.Signals) -> int:
        """Sends a signal. Returns the exit status, once every process of the command is gone."""
        family = [self.process.pid, *descendants(self.process.pid)]
        self.process.send_signal(number)
        await asyncio.wait_for(self.process.communicate(), LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            while any(map(exists, family)):
                await asyncio.sleep(0.01)
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def ports(self) -> set[int]:
        return {int(port) for port in re.findall(r"http://127\.0\.0\.1:(\d+)", self.told)}


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short path, as the system's is: sockets lie below."""
    with tempfile.TemporaryDirectory(prefix="t") as name:
        yield Path(name)


@asynccontextmanager
async def started(
    name: str, pair: LoopbackPair, tmp_path: Path, temporary: Path, *, building: Path | None = None
) -> AsyncIterator[Command]:
    """With `building`, a model takes forever to build, and that file shows that it has begun."""
    python = str(stand_in.make(tmp_path, building))
    arguments = {
        "up": ["up", "--python", python, "--port", "0"],
        "serve": ["serve", "--port", "0", "--prefill", pair.prefill.url, "--decode", pair.decode.url],
        "demo": ["demo"],
        "demo vllm": ["demo", "--engines", "vllm", "--python", python],
    }[name]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backhaul_cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(temporary),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        },
    )
    try:
        yield Command(process, temporary)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def emptied(folder: Path) -> None:
    """A process that was being started when its parent was killed cleans up a moment after those that were known."""
    deadline = time.monotonic() + 10.0
    while left := os.listdir(folder):
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.05)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("name", RUNNING)
async def test_an_ended_command_leaves_nothing(
    name: str, number: signal.Signals, tmp_path: Path, temporary: Path
) -> None:
    async with loopback_pair() as pair, started(name, pair, tmp_path, temporary) as command:
        await command.until(RUNNING[name])
        own = command.ports - {pair.prefill.config.port, pair.decode.config.port}
        assert len(own) == {"up": 3, "serve": 1}.get(name, 2)
        assert all(listens(port) for port in own)
        status = await command.end(number)
    assert status == (-number if number is signal.SIGKILL else STATUS[name])
    await emptied(temporary)
    assert not [port for port in own if listens(port)]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
async def test_a_launcher_that_is_ended_while_engines_start_leaves_nothing(
    number: signal.Signals, tmp_path: Path, temporary: Path
) -> None:
    async with loopback_pair() as pair, started("up", pair, tmp_path, temporary) as command:
        await command.until("decode-0: starting")
        await command.end(number)
    await emptied(temporary)
    assert not [port for port in command.ports if listens(port)]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
async def test_a_launcher_that_is_ended_while_a_model_is_built_leaves_nothing(
    number: signal.Signals, tmp_path: Path, temporary: Path
) -> None:
    building = tmp_path / "building"
    async with loopback_pair() as pair, started("up", pair, tmp_path, temporary, building=building) as command:
        await command.until("building the model tiny")
        async with asyncio.timeout(LIMIT_S):
            while building.name not in os.listdir(tmp_path):
                await asyncio.sleep(0.01)
        await command.end(number)
    await emptied(temporary)
    assert os.listdir(tmp_path / "cache" / "backhaul" / "models") == []


async def test_the_logs_are_kept_when_an_engine_has_ended_of_itself(tmp_path: Path, temporary: Path) -> None:
    async with loopback_pair() as pair, started("up", pair, tmp_path, temporary) as command:
        await command.until(RUNNING["up"])
        for pid in engine_processes(command, "kv_producer"):
            os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(command.process.communicate(), LIMIT_S)
    assert command.process.returncode == 2
    [folder] = os.listdir(temporary)
    assert sorted(os.listdir(temporary / folder)) == ["decode-0.log", "prefill-0.log"]


def engine_processes(command: Command, kv_role: str) -> list[int]:
    """Those of one engine, without its supervisor."""
    for pid in descendants(command.process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_text()
        if kv_role in words and "supervise" not in words:
            return [*descendants(pid), pid]
    raise AssertionError(f"no {kv_role} runs")
