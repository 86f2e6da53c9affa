"""`backhaul bench peers`, with a stand-in for `vllm-router` that takes its options."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from backhaul_bench import peers, peers_conversation
from backhaul_bench.setups import QWEN3_32B

STAND_IN = """\
#!{python}
import os, sys
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert sys.argv[1] == "--vllm-pd-disaggregation"
options = [word for name in ("--prefill", "--decode", "--port") for word in (name, given[name])]
os.execv(sys.executable, [sys.executable, "-m", "backhaul_cli", "serve", *options])
"""


def made(path: Path) -> Path:
    path.write_text(STAND_IN.format(python=sys.executable))
    path.chmod(0o755)
    return path


async def run(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backhaul_cli", "bench", "peers", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.alone
async def test_both_routers_and_the_calls_by_hand_are_measured_in_every_case(tmp_path: Path) -> None:
    stand_in, file = made(tmp_path / "vllm-router"), tmp_path / "rows.json"
    cases = ("--body-bytes", "3000", "--concurrency", "1,2", "--turns", "8", "--json", str(file))
    status, shown, said = await run("--vllm-router", str(stand_in), *cases)
    assert status == 0, said
    assert "Two routers over the same engines" in shown
    rows = json.loads(file.read_text())["rows"]
    assert [(row["concurrency"], row["stream"], row["variant"]) for row in rows] == [
        (concurrency, stream, variant)
        for concurrency in (1, 2)
        for stream in (False, True)
        for variant in peers.VARIANTS
    ]
    assert {row["requests"] for row in rows} == {8}
    assert all((row["cpu_ms"] is None) == (row["variant"] == "direct") for row in rows)


async def test_a_conversation_is_timed_through_both_with_prefix_caching_off_and_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    options = peers_conversation.Options(
        vllm_router=made(tmp_path / "vllm-router"), setup=QWEN3_32B, turns=2, repeats=1, json=file
    )
    assert await asyncio.to_thread(peers_conversation.main, options) == 0
    assert "cost model of Qwen3-32B" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [(row["prefix_caching"], row["turn"], row["router"]) for row in rows] == [
        (prefix_caching, turn, router)
        for prefix_caching in (False, True)
        for turn in (1, 2)
        for router in peers_conversation.ROUTERS
    ]
    first, second = ({row["prompt_tokens"] for row in rows if row["turn"] == turn} for turn in (1, 2))
    assert (len(first), len(second)) == (1, 1)
    # what a turn adds, and the few tokens that the template puts around its messages
    assert 4_096 < second.pop() - first.pop() < 4_196


async def test_a_conversation_has_a_cost_model_and_no_cases_of_bodies() -> None:
    status, _, err = await run("--vllm-router", "none", "--conversation", "gpt")
    assert (status, err.splitlines()[-1]) == (2, "backhaul bench: --conversation gpt: use one of qwen3-32b, glm-5-fp8")
    status, _, err = await run("--vllm-router", "none", "--conversation", "--concurrency", "2")
    assert (status, "without --body-bytes and --concurrency" in err) == (2, True)


async def test_a_program_that_cannot_be_started_is_named_in_one_line(tmp_path: Path) -> None:
    status, out, err = await run("--vllm-router", str(tmp_path / "none"), "--turns", "1")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].endswith("none cannot be started: No such file or directory")
