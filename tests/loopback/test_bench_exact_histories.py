"""`backhaul bench exact-histories`, on engines without a model."""

from __future__ import annotations

import json

from backhaul_bench import clusters, exact_histories
from backhaul_bench.setups import QWEN3_32B


async def test_the_models_own_tokens_are_reused_where_a_tool_call_was_written_anew() -> None:
    async with clusters.loopback(QWEN3_32B, virtual=True) as cluster:
        off, on = await exact_histories.measure(cluster, 2)
    assert off.turns == on.turns == 16
    assert off.continued == 0
    assert on.continued >= 6
    assert on.reused > off.reused
    _, head, first, second = exact_histories.lines(cluster.title, 2, [off, on])
    assert head.split()[2:] == ["turns", "prompt", "reused", "computed", "continued"]
    assert (first.split()[0], second.split()[0]) == ("off", "on")
    row = json.loads(json.dumps(on.row()))
    assert {name: row[name] for name in ("exact", "turns", "continued")} == {
        "exact": True,
        "turns": 16,
        "continued": on.continued,
    }
    assert row["computed"] == row["prompt"] - row["reused"]
    assert sum(row["routes"].values()) == 16
