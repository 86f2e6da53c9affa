"""`backhaul demo` on loopback engines, as a newcomer runs it; and when the engines lie to it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from backhaul_bench.clusters import Cluster
from backhaul_demo import demo
from backhaul_demo.agent import SCRIPT
from backhaul_demo.screen import Screen
from backhaul_loopback import CostModel, LoopbackPair, loopback_pair
from backhaul_router.report import ReuseReport
from rich.console import Console


async def start(*arguments: str, in_background: bool = False, **env: str) -> asyncio.subprocess.Process:
    """`in_background`: as a shell script starts what it does not wait for, with SIGINT ignored."""
    prefix = ("sh", "-c", 'trap "" INT; exec "$@"', "sh") if in_background else ()
    return await asyncio.create_subprocess_exec(
        *(*prefix, sys.executable, "-m", "backhaul_cli", "demo", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **env},
    )


@asynccontextmanager
async def quick_cluster() -> AsyncIterator[tuple[LoopbackPair, Cluster]]:
    """Engines for which everything is free."""
    async with loopback_pair(prefill={"prefix_caching": False}) as pair:
        yield (
            pair,
            Cluster(
                prefill=pair.prefill.url, decode=pair.decode.url, model=pair.model, title="test", costs=CostModel()
            ),
        )


def screen() -> tuple[Screen, io.StringIO]:
    shown = io.StringIO()
    return Screen(Console(file=shown, highlight=False)), shown


@pytest.mark.alone
async def test_the_demo_shows_every_route_and_identical_answers_within_half_a_minute(tmp_path: Path) -> None:
    began = time.monotonic()
    process = await start("--json", str(tmp_path / "demo.json"))
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert time.monotonic() - began < 30
    text = out.decode()
    assert "cost model" in text.splitlines()[0]
    assert text.splitlines()[-1].endswith("all 8 answers identical")
    assert re.findall(r"\b(cold|warm|local)\b", text) == ["cold", *["warm", "local", "warm"] * 2, "warm"]
    written = json.loads((tmp_path / "demo.json").read_text())
    assert written["identical"] is True
    assert [turn["reuse"] for turn in written["turns"]] == ["off"] * len(SCRIPT) + ["on"] * len(SCRIPT)
    for turn in written["turns"]:
        assert turn.keys() >= set(ReuseReport.__struct_fields__)
        assert turn["ttft_ms"] > 0
    assert {turn["reason"] for turn in written["turns"][: len(SCRIPT)]} == {"reuse_off"}
    assert written["turns"][-1]["prompt"] > 5000


@pytest.mark.openai
async def test_without_a_terminal_it_prints_a_plain_table() -> None:
    async with quick_cluster() as (_, cluster):
        to, shown = screen()
        result = await demo.play(cluster, to)
        assert demo.conclude(result, to) == 0
    assert "\x1b" not in shown.getvalue()
    assert len(shown.getvalue().splitlines()) == 1 + 1 + 2 * len(SCRIPT) + 2


async def test_on_a_terminal_the_table_is_live() -> None:
    async with quick_cluster() as (_, cluster):
        shown = io.StringIO()
        live = Screen(Console(file=shown, force_terminal=True, width=120, height=40, highlight=False))
        await demo.play(cluster, live)
    assert "\x1b[" in shown.getvalue()
    assert "running the conversation with reuse off" in shown.getvalue()


async def test_a_lying_engine_is_found_out() -> None:
    """D's handle names its blocks in another order, so what P reads is not the KV of the prompt."""

    def lie(handle: dict[str, Any]) -> dict[str, Any]:
        return {**handle, "remote_block_ids": [group[::-1] for group in handle["remote_block_ids"]]}

    async with quick_cluster() as (pair, cluster):
        pair.decode.faults.lie = lie
        to, shown = screen()
        result = await demo.play(cluster, to)
        assert not result.identical
        assert result.to_dict()["identical"] is False
        assert demo.conclude(result, to) == 1
    assert "answers DIFFER in turn" in shown.getvalue()


@pytest.mark.parametrize("in_background", [False, True], ids=["", "in the background"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
async def test_an_ended_demo_leaves_nothing(number: signal.Signals, in_background: bool, tmp_path: Path) -> None:
    process = await start(in_background=in_background, TMPDIR=str(tmp_path))
    assert process.stdout is not None
    ports = re.findall(rb"http://127.0.0.1:(\d+)", await process.stdout.readline())
    assert len(ports) == 2
    process.send_signal(number)
    out, err = await process.communicate()
    assert (process.returncode, out, err) == (130, b"stopped\n", b"")
    assert os.listdir(tmp_path) == []
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(port))) != 0


async def test_engines_that_cannot_start_are_an_error_in_one_line() -> None:
    process = await start("--engines", "vllm", "--python", "no-such-python")
    out, err = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert err == b"backhaul demo: --python no-such-python: there is no such program\n"
