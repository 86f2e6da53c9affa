"""A prefill engine that takes a request's blocks away after it has read them from decode: the prompt is computed, the answer
is right, and no block stays in use.

vLLM admits a prompt only if all of it fits, so what takes them are requests that run already, and grow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from by_hand import BLOCK, COMPLETIONS, ask_d, ask_p, body, expected, fresh, lease_ops, release
from real_engines import EngineSet, EngineSets, metrics, post, wait_for_baseline

BLOCKS, STEP = 71, 32
TRIES = 12
GROWING = 16
"""Requests that run already. Each ends with four blocks; with three each, and the prompt's thirty, there are too few."""
TIGHT = (
    *("--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", str(64 * BLOCK)),
    *("--max-num-batched-tokens", str(STEP), "--max-num-seqs", "24"),
)


@pytest.fixture
def tight_connector_engines(engine_sets: EngineSets) -> EngineSet:
    """Few blocks, and short steps."""
    return engine_sets.special(replace(EngineSets.CONNECTOR, vllm_args=TIGHT))


@pytest.fixture
async def engines(tight_connector_engines: EngineSet) -> AsyncIterator[EngineSet]:
    """When a test is over, nothing is kept."""
    yield tight_connector_engines
    for url in (*tight_connector_engines.decode, *tight_connector_engines.prefill):
        await lease_ops(url, tight_connector_engines.model, flush=True)
        await wait_for_baseline(url, timeout_s=20.0)


async def preemptions(engines: EngineSet) -> float:
    return (await metrics(engines.prefill[0])).total("vllm:num_preemptions_total")


async def used(engines: EngineSet) -> float:
    return (await metrics(engines.prefill[0])).total("vllm:kv_cache_usage_perc") * (BLOCKS - 1)


async def test_a_prompt_whose_blocks_are_taken_after_its_read_is_computed(engines: EngineSet) -> None:
    history = fresh(10 * BLOCK)
    ids, handle = await ask_d(engines, history, None, 8, {"shared": True})
    offered = {**handle, "backhaul": {k: v for k, v in handle["backhaul"].items() if k != "account"}}
    prompt = [*history, *ids, *(100 + i * 7 % 900 for i in range(20 * BLOCK - 10))]
    right = await expected(engines, prompt, 8)
    for attempt in range(TRIES):
        before = await preemptions(engines)
        grow = [
            asyncio.create_task(post(engines.prefill[0], COMPLETIONS, body(engines, fresh(BLOCK // 2), 3 * BLOCK)))
            for _ in range(GROWING)
        ]
        enough = (2 - attempt % 2) * GROWING
        while not all(one.done() for one in grow) and await used(engines) < enough:  # the machine says how soon
            await asyncio.sleep(0.01)
        account, params = await ask_p(engines, prompt, offered)
        await asyncio.gather(*grow)
        preempted = await preemptions(engines) > before
        generated, returned = await ask_d(engines, prompt, params, 8, {"retain": False})
        assert generated == right
        from_p = returned["backhaul"]["account"]
        assert (from_p["why"], from_p["received"] + from_p["local"]) == (None, len(prompt))
        told = (account["verified"], account["pulled"], account["why"])
        if told == (10 * BLOCK, 0, "read_failed"):
            assert preempted
            assert account["computed"] == len(prompt)
            break
        # Another request may have been the one whose blocks were taken.
        assert told == (10 * BLOCK, 10 * BLOCK, None)
    else:
        pytest.fail("the prompt was never preempted")
    await release(engines, handle["remote_request_id"])
