"""An engine of another deployment behind an address that this router uses: no request is answered by it, nobody's turn fails of
it while there is another, and it is back in use when it is what it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from backhaul_loopback import LoopbackEngine
from backhaul_router.config import RouterConfig
from backhaul_router.errors import ConfigError
from backhaul_router.report import Route
from router_turns import CHAT, STORY, Cluster, first_turn, opening, run_cluster, system, user


@asynccontextmanager
async def replaced(cluster: Cluster, engine: LoopbackEngine, **other: Any) -> AsyncIterator[LoopbackEngine]:
    """Another engine at the same address, until the block ends."""
    await cluster.kill(engine)
    async with LoopbackEngine(engine.config.role, port=engine.config.port, **other) as stranger:
        yield stranger
    await engine.restart()


def used(cluster: Cluster, role: str) -> LoopbackEngine:
    report = cluster.reports[-1]
    url = report.prefill_engine if role == "prefill" else report.decode_engine
    return next(engine for engine in cluster.engines if engine.url == url)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_one_of_another_model_is_passed_over_and_shut_out(role: str, stream: bool) -> None:
    async with run_cluster(
        prefill=2, decode=2, p={"prefix_caching": False}, engine={"enable_scale_out": False}
    ) as cluster:
        cluster.pinned_until_ttl = cluster.released_twice = True
        history = await first_turn(cluster)
        async with replaced(cluster, used(cluster, role), model="another") as stranger:
            answer = await cluster.exact({"messages": history, "stream": stream})
            assert stranger.url not in (answer.reused.prefill_engine, answer.reused.decode_engine)
            for number in range(3):
                messages = [system(f"Agent {number}. {STORY}"), user(STORY)]
                report = (await cluster.exact({"messages": messages}, conversation=str(number))).reused
                assert report.retries == 0
            assert len(stranger.requests_to(CHAT)) == 1
            assert cluster.router.fleet.is_down(stranger.url)
        async with asyncio.timeout(20):
            while cluster.router.fleet.is_down(stranger.url):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_where_there_is_no_other_the_error_names_it(role: str, caplog: pytest.LogCaptureFixture) -> None:
    async with run_cluster(engine={"enable_scale_out": False}) as cluster:
        cluster.pinned_until_ttl = cluster.released_twice = True
        await cluster.router.connect()
        engine = cluster.p if role == "prefill" else cluster.d
        async with replaced(cluster, engine, model="another"):
            answer = await cluster.ask({"messages": opening()})
            assert (answer.status, answer.json["error"]["code"]) == (502, f"{role}_failed")
            assert engine.url in answer.json["error"]["message"]
        assert "does not serve loopback any more" in caplog.text


async def test_a_model_that_no_engine_ever_served_is_the_engines_word_and_shuts_nobody_out() -> None:
    async with run_cluster() as cluster:
        answer = await cluster.exact({"messages": opening(), "model": "never heard of"})
        assert answer.status == 404
        assert not cluster.router.fleet.breakers.any_open


async def test_prefill_and_decode_the_wrong_way_round_give_right_answers_all_the_same() -> None:
    async with run_cluster(p={"prefix_caching": False}) as cluster:
        cluster.prefill, cluster.decode = cluster.decode, cluster.prefill
        urls = {"prefill": (cluster.p.url,), "decode": (cluster.d.url,)}
        cluster.router.reconfigure(RouterConfig(**urls, local_max_tokens=0, check_pairs=False))
        history = await first_turn(cluster)
        assert (await cluster.exact({"messages": history})).reused.route is Route.WARM


@pytest.mark.parametrize("swapped", [False, True])
def test_one_engine_cannot_have_both_roles(swapped: bool) -> None:
    roles = ["prefill", "decode"]
    with pytest.raises(ConfigError, match="one role"):
        RouterConfig(**dict.fromkeys(roles[::-1] if swapped else roles, ("http://one:1",)))
