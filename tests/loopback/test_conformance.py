"""Loopback engines pass the checks that real engines pass, in the dialect of each release."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from backhaul_loopback import CostModel, LoopbackPair, loopback_pair
from conformance import CASES, CONNECTOR_CASES, Engines

VERSIONS = ("0.32.0", "0.33.0")


@pytest.fixture(scope="module", params=VERSIONS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[LoopbackPair]:
    async with _pair(vllm_version=request.param) as pair:
        yield pair


@pytest.fixture(scope="module", params=VERSIONS)
async def connector_pair(request: pytest.FixtureRequest) -> AsyncIterator[LoopbackPair]:
    async with _pair(vllm_version=request.param, connector="backhaul") as pair:
        yield pair


def _pair(**settings: Any) -> AbstractAsyncContextManager[LoopbackPair]:
    """As the real engines of the same checks: P without prefix caching, blocks of 32, decoding that takes time."""
    costs = CostModel(decode_s=0.0001)
    return loopback_pair(block_size=32, max_model_len=8192, costs=costs, prefill={"prefix_caching": False}, **settings)


@pytest.mark.parametrize("name", CASES)
async def test_loopback_engine(name: str, pair: LoopbackPair) -> None:
    async with Engines(pair.prefill.url, pair.decode.url, pair.model) as engines:
        await CASES[name](engines)
        await engines.wait_for_usage(pair.decode.url)


@pytest.mark.parametrize("name", CONNECTOR_CASES)
async def test_loopback_engine_with_the_connector(name: str, connector_pair: LoopbackPair) -> None:
    pair = connector_pair
    async with Engines(pair.prefill.url, pair.decode.url, pair.model) as engines:
        await CONNECTOR_CASES[name](engines)
        await engines.wait_for_usage(pair.decode.url)
        await engines.wait_for_usage(pair.prefill.url)
