"""`backhaul bench overhead`: the same engine calls by hand, by the embedded router, and by a served one."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from backhaul_bench import overhead, overhead_command
from backhaul_bench.options import OptionsError


async def run(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backhaul_cli", "bench", "overhead", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.alone
async def test_every_variant_is_measured_in_every_case(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ("--body-bytes", "3000", "--concurrency", "1,2", "--turns", "3", "--json", str(file))
    status, shown, _ = await run(*options)
    assert status == 0
    assert "What the router adds to a warm turn" in shown
    assert "Embedded, 3 kB, one at a time" in shown
    written = json.loads(file.read_text())
    assert [(row["concurrency"], row["stream"], row["variant"]) for row in written["rows"]] == [
        (concurrency, stream, variant)
        for concurrency in (1, 2)
        for stream in (False, True)
        for variant in overhead.VARIANTS
    ]
    assert {row["turns"] for row in written["rows"]} == {3, 4}
    for direct, *routed in overhead_command.by_case([overhead.Row(**row) for row in written["rows"]]):
        assert direct.added_p50_ms == 0
        assert 2_700 < direct.body_bytes < 3_300
        assert all(row.p50_ms == pytest.approx(direct.p50_ms + row.added_p50_ms) for row in routed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turns": 0}, "--turns and --concurrency: 1 or more"),
        ({"concurrency": (1, 0)}, "--turns and --concurrency: 1 or more"),
        ({"body_bytes": (100,)}, "--body-bytes 100: from 2000 to 800000"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=f"^{message}$"):
        overhead_command.Options(**options).cases()


async def test_a_refused_option_is_one_line() -> None:
    status, out, err = await run("--turns", "0")
    assert (status, out, err) == (2, "", "backhaul bench: --turns and --concurrency: 1 or more\n")
