"""`backhaul bench peers`, with a stand-in for `vllm-router` that takes its options."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from backhaul.bench import peers

STAND_IN = """\
#!{python}
import os, sys
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert sys.argv[1] == "--vllm-pd-disaggregation"
options = [word for name in ("--prefill", "--decode", "--port") for word in (name, given[name])]
os.execv(sys.executable, [sys.executable, "-m", "backhaul_router.cli", "serve", *options])
"""


async def run(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backhaul_router.cli", "bench", "peers", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_both_routers_and_the_calls_by_hand_are_measured_in_every_case(tmp_path: Path) -> None:
    stand_in, file = tmp_path / "vllm-router", tmp_path / "rows.json"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o755)
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


async def test_a_program_that_cannot_be_started_is_named_in_one_line(tmp_path: Path) -> None:
    status, out, err = await run("--vllm-router", str(tmp_path / "none"), "--turns", "1")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].endswith("none cannot be started: No such file or directory")
