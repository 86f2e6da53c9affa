"""Real engines pass the checks that loopback engines pass, so that what is tested on those means something."""

from __future__ import annotations

import pytest
from conformance import CASES
from conformance import Engines as Checked
from real_engines import EngineSet

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("name", CASES)
async def test_real_engine(name: str, engines: EngineSet) -> None:
    async with Checked(engines.prefill[0], engines.decode[0], engines.model) as checked:
        await CASES[name](checked)
