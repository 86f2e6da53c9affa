"""`backhaul bench ttft` on loopback engines in virtual time, where its figures are the cost model's own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from backhaul_bench import clusters, plots, table, ttft, ttft_command
from backhaul_bench.options import OptionsError
from backhaul_bench.setups import SETUPS, Setup
from backhaul_loopback import CostModel, loopback_pair

SMALL = Setup(
    name="small",
    title="cost model of a test",
    costs=CostModel(fixed_s=0.01, prefill_s=0.001, transfer_s=0.0001),
    prompt_tokens=(512, 1024),
    new_tokens=128,
)


async def measure(setup: Setup = SMALL, **plan: Any) -> ttft.Result:
    settings = {"prompt_tokens": setup.prompt_tokens, "new_tokens": setup.new_tokens, "repeats": 1, **plan}
    async with clusters.loopback(setup, virtual=True) as cluster:
        return await ttft.measure(cluster, ttft.Plan(**settings))


async def run(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backhaul_cli", "bench", "ttft", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.openai
async def test_the_times_are_those_of_the_cost_model() -> None:
    result = await measure()
    off, warm, local = (result.row(1024, route) for route in ttft.ROUTES)
    assert (off.offered, off.computed) == (0, 1024)
    assert (warm.offered, warm.computed) == (896 - 16, 144)
    assert local.computed == 144
    assert off.ttft_ms == pytest.approx(2 * 10 + 1024 + 1 + 0.1 * 144, abs=2)
    assert warm.ttft_ms == pytest.approx(2 * 10 + 144 + 1 + 0.1 * 1024, abs=2)
    assert local.ttft_ms == pytest.approx(10 + 144, abs=2)
    assert warm.read_ms == pytest.approx(0.1 * warm.offered, abs=0.1)
    assert warm.compute_ms == pytest.approx(144)
    assert (off.read_ms, local.read_ms, local.prefill_ms) == (0, 0, None)
    assert result.answers_equal
    assert all(row.as_meant for row in result.rows)


@pytest.mark.openai
async def test_repeats_have_a_median_and_a_spread() -> None:
    result = await measure(repeats=3, prompt_tokens=(256,))
    assert [(row.route, row.repeats) for row in result.rows] == [(route, 3) for route in ttft.ROUTES]
    assert all(row.ttft_min_ms <= row.ttft_ms <= row.ttft_max_ms for row in result.rows)
    assert len(result.samples) == 9


@pytest.mark.openai
async def test_wrong_kv_is_found_out() -> None:
    """D's handle names its blocks in another order, so what P reads is not the KV of the prompt."""

    def lie(handle: dict[str, Any]) -> dict[str, Any]:
        return {**handle, "remote_block_ids": [group[::-1] for group in handle["remote_block_ids"]]}

    async with loopback_pair(prefill={"prefix_caching": False}) as pair:
        pair.decode.faults.lie = lie
        cluster = clusters.Cluster(
            prefill=pair.prefill.url, decode=pair.decode.url, model=pair.model, title="test", costs=CostModel()
        )
        result = await ttft.measure(cluster, ttft.Plan(prompt_tokens=(512,), new_tokens=128, repeats=1))
    assert not result.answers_equal
    assert "Some ANSWERS DIFFERED between the routes." in table.notes(result)
    assert table.to_dict(result)["answers_equal"] is False


@pytest.mark.openai
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
async def test_a_published_setup_meets_its_first_published_figure(setup: Setup) -> None:
    shortest = setup.published[0]
    result = await measure(setup, prompt_tokens=(shortest.prompt_tokens,))
    assert result.row(shortest.prompt_tokens, "off").ttft_ms == pytest.approx(shortest.ttft_ms, rel=0.01)


@pytest.mark.openai
async def test_the_command_writes_a_table_rows_and_plots(tmp_path: Path) -> None:
    file, out = tmp_path / "rows.json", tmp_path / "plots"
    lengths = ["--prompt-tokens", "512,1024", "--new-tokens", "128"]
    status, shown, _ = await run(*lengths, "--json", str(file), "--out", str(out))
    assert status == 0
    assert "cost model of Qwen3-32B" in shown
    assert "The answers of all turns were equal on all routes." in shown
    written = json.loads(file.read_text())
    assert written["engines"]["kind"] == "loopback"
    assert "cost model" in written["engines"]["title"]
    assert [(row["prompt_tokens"], row["route"]) for row in written["rows"]] == [
        (length, route) for length in (512, 1024) for route in ttft.ROUTES
    ]
    off, warm, local = written["rows"][3:]
    assert local["ttft_ms"] < warm["ttft_ms"] < off["ttft_ms"]
    for name in ("ttft", "split"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "cost model" in (out / f"{name}.svg").read_text()


@pytest.mark.openai
async def test_equal_results_are_equal_files(tmp_path: Path) -> None:
    result = await measure(prompt_tokens=(512,))
    first = [path.read_bytes() for path in plots.save(result, tmp_path)]
    assert [path.read_bytes() for path in plots.save(result, tmp_path)] == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"setup": "nobody"}, "--setup nobody: use one of qwen3-32b, glm-5-fp8"),
        ({"prompt_tokens": (12,)}, "--prompt-tokens 12: 256 or more, so that there is history to reuse"),
        ({"prompt_tokens": (512, 520)}, "--prompt-tokens 512,520: more than 16 apart"),
        ({"repeats": -1}, "--repeats and --new-tokens: 1 or more"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=f"^{message}$"):
        ttft_command.Options(**options).plan()


async def test_an_error_of_the_command_is_one_line() -> None:
    status, out, err = await run("--setup", "nobody")
    assert (status, out, err) == (2, "", "backhaul bench: --setup nobody: use one of qwen3-32b, glm-5-fp8\n")


async def test_a_file_that_cannot_be_written_is_refused_at_once() -> None:
    status, out, err = await run("--json", "/nowhere/rows.json")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].endswith("/nowhere/rows.json: no file can be written there")
