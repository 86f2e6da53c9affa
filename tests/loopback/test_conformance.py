"""Loopback engines pass the checks that real engines pass."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from backhaul_connector.loopback import CostModel, LoopbackPair, loopback_pair
from conformance import CASES, Engines


@pytest.fixture(scope="module")
async def pair() -> AsyncIterator[LoopbackPair]:
    """As the real engines of the same checks: P without prefix caching, blocks of 32, decoding that takes time."""
    costs = CostModel(decode_s=0.0001)
    async with loopback_pair(block_size=32, max_model_len=8192, costs=costs, prefill={"prefix_caching": False}) as pair:
        yield pair


@pytest.mark.parametrize("name", CASES)
async def test_loopback_engine(name: str, pair: LoopbackPair) -> None:
    async with Engines(pair.prefill.url, pair.decode.url, pair.model) as engines:
        await CASES[name](engines)
        await engines.wait_for_usage(pair.decode.url)
