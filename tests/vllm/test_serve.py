"""`backhaul up` as a newcomer runs it: real engines, a router in front of them, an agent on that router, and the end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import backhaul
from backhaul import Proof, Route
from backhaul_connector.launch.supervise import descendants
from by_hand import BLOCK
from real_engines import PYTHON, EngineSets, wait_for_baseline

START_S = 600.0
STORY = "The cache keeps the keys and values of every token that the engine has run, block by block. "


@contextmanager
def up(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Without prefix caching on P, so that what P finds cached it has read from D."""
    options = ["--python", str(PYTHON), "--dtype", "float32", "--no-prefix-caching-on-prefill"]
    command = [sys.executable, "-m", "backhaul_cli", "up", *options]
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        with subprocess.Popen(command, stdout=out, stderr=err) as launcher:
            try:
                yield launcher
            finally:
                launcher.terminate()


def told(launcher: subprocess.Popen[bytes], tmp_path: Path) -> str:
    """What the command prints once everything is up."""
    deadline = time.monotonic() + START_S
    while "Ctrl-C stops everything." not in (text := (tmp_path / "out").read_text()):
        assert launcher.poll() is None, (tmp_path / "err").read_text()
        assert time.monotonic() < deadline, text
        time.sleep(0.1)
    return text


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def test_up_serves_warm_turns_to_an_agent_and_leaves_nothing(engine_sets: EngineSets, tmp_path: Path) -> None:
    engine_sets.make_room()
    with up(tmp_path) as launcher:
        text = told(launcher, tmp_path)
        [line] = re.findall(r"^ +client = (AsyncOpenAI\(base_url=.*\))$", text, re.MULTILINE)
        [decode] = re.findall(r"^decode +(http://\S+)$", text, re.MULTILINE)
        family = [launcher.pid, *descendants(launcher.pid)]

        client = eval(line, {"AsyncOpenAI": backhaul.AsyncOpenAI})
        history: list[Any] = [{"role": "system", "content": STORY * 6}]
        async with client, backhaul.conversation() as chat:
            for turn in range(3):
                history.append({"role": "user", "content": f"Question {turn}: {STORY * 5}"})
                stream = await client.chat.completions.create(
                    model="tiny", messages=history, max_tokens=24, temperature=0, stream=True
                )
                answer = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                history.append({"role": "assistant", "content": answer})
                assert chat.reuse.last is not None
                assert chat.reuse.last.turn == turn + 1
        await wait_for_baseline(decode)

        assert [report.route for report in chat.reuse.turns] == [Route.COLD, Route.WARM, Route.WARM]
        for report in chat.reuse.turns[1:]:
            assert report.proof is Proof.CONNECTOR
            assert report.cached == report.verified > 0
            # The answer before, of fewer tokens than a block, may re-tokenise differently: the blocks it is in are lost.
            assert report.verified in range(report.offered - 2 * BLOCK, report.offered + 1, BLOCK)
            assert report.decode_engine == decode

        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 0
    assert alive(family) == []
    assert (tmp_path / "out").read_text().endswith("stopped\n")
    assert (tmp_path / "err").read_text() == ""
