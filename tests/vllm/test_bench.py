"""`backhaul bench ttft` and `backhaul demo` on real engines. Nothing here is about how fast this machine is."""

from __future__ import annotations

import io
import warnings

import pytest
from backhaul_bench import ttft
from backhaul_bench.clusters import Cluster
from backhaul_demo import demo
from backhaul_demo.agent import SCRIPT
from backhaul_demo.screen import Screen
from backhaul_router.report import Route
from real_engines import EngineSet
from rich.console import Console


@pytest.fixture
def cluster(engines: EngineSet) -> Cluster:
    return Cluster(
        prefill=engines.prefill[0], decode=engines.decode[0], model=engines.model, title="vLLM on this machine"
    )


async def test_every_route_is_measured_and_answers_alike(cluster: Cluster) -> None:
    lengths = (512, 2048)
    result = await ttft.measure(cluster, ttft.Plan(prompt_tokens=lengths, new_tokens=128, repeats=2))
    assert result.answers_equal
    assert [(row.prompt_tokens, row.route) for row in result.rows] == [
        (length, route) for length in lengths for route in ttft.ROUTES
    ]
    for row in result.rows:
        assert row.as_meant, row
        assert row.computed is not None
        assert row.computed == row.prompt_tokens if row.route == "off" else row.computed < row.prompt_tokens / 2 + 64
        assert 0 < row.ttft_min_ms <= row.ttft_ms <= row.ttft_max_ms
        if row.compute_ms is not None:
            assert 0 < row.compute_ms <= row.ttft_max_ms
        if row.route == "warm" and row.read_ms is not None:
            assert row.read_ms > 0
    off, warm, local = (result.row(2048, route).ttft_ms for route in ttft.ROUTES)
    if not (warm < off and local < off):
        warnings.warn(
            f"reuse did not pay at 2,048 tokens: off {off:.0f}, warm {warm:.0f}, local {local:.0f} ms", stacklevel=1
        )


async def test_the_demo_runs_on_real_engines(cluster: Cluster) -> None:
    result = await demo.play(cluster, Screen(Console(file=io.StringIO())))
    assert result.identical
    assert len(result.on) == len(SCRIPT)
    assert {turn.report.route for turn in result.off} == {Route.COLD}
    assert result.on[-1].report.route is Route.WARM
    assert result.total.reused > 0
