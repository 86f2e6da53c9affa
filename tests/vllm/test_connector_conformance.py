"""Real engines with the connector pass the checks that loopback engines pass."""

from __future__ import annotations

import pytest
from conformance import CONNECTOR_CASES
from conformance import Engines as Checked
from real_engines import EngineSet

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("name", CONNECTOR_CASES)
async def test_real_engine_with_the_connector(name: str, connector_engines: EngineSet) -> None:
    engines = connector_engines
    async with Checked(engines.prefill[0], engines.decode[0], engines.model) as checked:
        await CONNECTOR_CASES[name](checked)
        await checked.wait_for_usage(checked.decode_url)
