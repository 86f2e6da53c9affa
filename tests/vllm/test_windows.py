"""A model of which every other layer has a sliding window, on real engines with our connector: a turn that goes on where the
last one stopped reads all of it, any other reads nothing, and every answer is that of a plain engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from backhaul_connector.launch import models
from by_hand import BLOCK, Turn, ask_d, ask_p, expected, fresh, lease_ops, release, turn
from real_engines import PYTHON, EngineSet, EngineSets, wait_for_baseline

WINDOW = 3 * BLOCK
SHARED = {"shared": True}


@pytest.fixture(scope="session")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other attention: its weights are random all the same."""
    models.ensure("tiny", str(PYTHON), print)
    made = tmp_path_factory.mktemp("windowed")
    for file in Path(models.location("tiny")).iterdir():
        (made / file.name).symlink_to(file)
    config = json.loads((made / "config.json").read_text())
    config |= {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
    (made / "config.json").unlink()
    (made / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture
def windowed_engines(engine_sets: EngineSets, windowed_model: Path) -> EngineSet:
    config = replace(EngineSets.CONNECTOR, model=str(windowed_model), prefill_prefix_caching=True, max_model_len=8192)
    return engine_sets.special(config)


@pytest.fixture
async def engines(windowed_engines: EngineSet) -> AsyncIterator[EngineSet]:
    """When a test is over, nothing is kept."""
    yield windowed_engines
    for url in (*windowed_engines.decode, *windowed_engines.prefill):
        await lease_ops(url, windowed_engines.model, flush=True)
        await wait_for_baseline(url, timeout_s=20.0)


async def told_by_d_alone(engines: EngineSet, prompt: list[int], generated: int) -> Turn:
    """A turn of which P has seen nothing."""
    ids, handle = await ask_d(engines, prompt, None, generated, SHARED)
    return Turn(prompt, ids, {}, {}, handle)


@pytest.mark.parametrize("tokens", [300, 10 * BLOCK - 40, 10 * BLOCK - 39, 10 * BLOCK - 38])
async def test_a_turn_that_goes_on_reads_to_the_very_last_token(engines: EngineSet, tokens: int) -> None:
    first = await told_by_d_alone(engines, fresh(tokens), 40)
    ran = tokens + 40 - 1
    assert (first.handle["backhaul"]["whole"], first.handle["backhaul"]["tokens"]) == (True, ran)
    second = await turn(engines, [*first.sequence, *range(50, 120)], first.for_p, wishes={"retain": False})
    told = second.p
    assert (told["offered"], told["verified"], told["local"], told["pulled"], told["why"]) == (ran, ran, 0, ran, None)
    await release(engines, first.lease)


async def test_what_p_has_itself_is_not_read_again(engines: EngineSet) -> None:
    first = await turn(engines, fresh(300), wishes=SHARED)
    second = await turn(engines, first.sequence, None, 150, wishes=SHARED)
    prompt = [*second.sequence, *range(50, 120)]
    third = await turn(engines, prompt, second.for_p, wishes=SHARED)
    ran = len(second.sequence) - 1
    assert third.p["local"] >= 300 // BLOCK * BLOCK
    assert third.p["pulled"] == ran - third.p["local"] > 64
    await release(engines, first.lease, second.lease, third.lease)


async def test_a_lease_bears_many_readers(engines: EngineSet) -> None:
    first = await told_by_d_alone(engines, fresh(300), 40)
    prompts = [[*first.sequence, *range(seed, seed + 60)] for seed in (50, 90, 130)]
    turns = await asyncio.gather(*(turn(engines, each, first.for_p, wishes={"retain": False}) for each in prompts))
    assert max(each.p["pulled"] for each in turns) == 339
    await release(engines, first.lease)


async def test_a_prompt_that_goes_another_way_is_computed(engines: EngineSet) -> None:
    first = await told_by_d_alone(engines, fresh(300), 40)
    more = list(range(50, 120))
    edited = [*first.sequence[:150], first.sequence[150] + 1, *first.sequence[151:], *more]
    end = len(first.sequence) - 2
    last = [*first.sequence[:end], (first.sequence[end] + 1) % 4000, first.sequence[end + 1], *more]
    for prompt, why in (
        (edited, "diverged"),
        (last, "differs"),
        (first.sequence[:200], "diverged"),
        (first.sequence[:-1], "diverged"),
    ):
        account, to_d = await ask_p(engines, prompt, first.for_p)
        generated, _ = await ask_d(engines, prompt, to_d, 40, {"retain": False})
        assert generated == await expected(engines, prompt, 40)
        assert (account["pulled"], account["why"]) == (0, why), prompt[-3:]
    await release(engines, first.lease)
