"""Engines that keep nothing, keep it in a way that nobody can read back, or do not read what they are given: the answers are
right all the same, and every turn says that nothing was reused, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from backhaul_router.report import Reason, Route
from router_turns import CHAT, STORY, Cluster, first_turn, opening, run_cluster, system, user

NO_CACHE = {"prefix_caching": False}
READS_NOTHING = {"kv_recompute_threshold": 10**6}
"""On P: what it is offered is too little to be read, whatever the router thinks."""

Params = dict[str, Any]


def without(key: str) -> Callable[[Params], Params]:
    return lambda params: {name: value for name, value in params.items() if name != key}


def with_(**fields: Any) -> Callable[[Params], Params]:
    return lambda params: {**params, **fields}


UNREADABLE = {
    "made for push transfer": with_(transfer_mode="push"),
    "without a request id": without("remote_request_id"),
    "without an engine id": without("remote_engine_id"),
    "without a port": without("remote_port"),
    "another connector's": lambda params: {
        "disagg_spec": {"req_id": "r", "receiver_host": "10.0.0.1"},
        "ret_first_tok": True,
    },
    "without blocks": with_(remote_block_ids=[[]]),
    "empty": lambda params: {},
}


async def second(cluster: Cluster, history: list[Any], **how: Any) -> Any:
    return (await cluster.exact({"messages": history}, **how)).reused


# --- nothing moves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [False, True], ids=["nothing cached", "its own cache"])
async def test_a_prefill_engine_that_reads_nothing_of_what_it_was_offered_is_no_warm_turn(cache: bool) -> None:
    async with run_cluster(p={"prefix_caching": cache, **READS_NOTHING}) as cluster:
        history = await first_turn(cluster)
        if cache:  # of all that it ran P keeps a part of the system prompt alone
            await cluster.until(cluster.p.core.pool.reset_cache)
            await cluster.ask({"messages": opening()[:1], "max_tokens": 1}, conversation=None)
        read = cluster.p.core.metrics.external_kv_transfer
        report = await second(cluster, history)
        assert cluster.p.core.metrics.external_kv_transfer == read
        assert (report.route, report.reason, report.offered > 0) == (Route.COLD, Reason.READ_FAILED, True)
        assert cluster.router.fleet.counters.reasons[Reason.READ_FAILED] == 1


async def test_a_prefill_engine_that_has_all_but_a_few_tokens_itself_is_one() -> None:
    async with run_cluster() as cluster:
        report = await second(cluster, await first_turn(cluster))
        assert report.cached < report.offered
        assert (report.route, report.reason) == (Route.WARM, None)


async def test_a_decode_engine_of_ours_that_reads_nothing_is_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    async with run_cluster(engine={"connector": "backhaul"}, p=NO_CACHE) as cluster:
        await cluster.router.connect()
        cluster.d.faults.fail_kv_loads = 10**6
        cluster.pinned_until_ttl = True
        for number in range(2):
            messages = [system(f"Agent {number}. {STORY}"), user(STORY)]
            await cluster.exact({"messages": messages, "stream": number == 1}, conversation=str(number))
        assert cluster.router.fleet.counters.prompts_computed_twice == 2
        assert caplog.text.count("computed a prompt again instead of reading it") == 1


async def test_one_that_reads_or_runs_alone_is_not() -> None:
    async with run_cluster(engine={"connector": "backhaul"}, p=NO_CACHE) as cluster:
        history = await first_turn(cluster)
        await second(cluster, history, route=Route.LOCAL)
        await second(cluster, history, route=Route.COLD)
        assert cluster.router.fleet.counters.prompts_computed_twice == 0


async def test_a_stock_decode_engine_that_cannot_read_is_told_as_what_failed() -> None:
    async with run_cluster() as cluster:
        await cluster.router.connect()
        cluster.d.faults.fail_kv_loads = 10**6
        cluster.pinned_until_ttl = True
        answer = await cluster.ask({"messages": opening()})
        assert (answer.status, answer.json["error"]["code"]) == (502, "decode_failed")


# --- what an engine says of its blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", UNREADABLE)
async def test_what_a_decode_engine_keeps_in_another_way_is_not_read_and_the_turn_says_so(
    kind: str, stream: bool
) -> None:
    async with run_cluster(p=NO_CACHE) as cluster:
        cluster.pinned_until_ttl = True  # nobody can say what to release
        cluster.d.faults.lie = UNREADABLE[kind]
        messages = opening()
        await cluster.exact({"messages": messages, "stream": stream})
        following = [*messages, {"role": "assistant", "content": "x"}, user("Second: " + STORY)]
        report = await second(cluster, following)
        assert (report.route, report.reason, report.offered) == (Route.COLD, Reason.NO_HANDLE, 0)
        assert "remote_request_id" not in cluster.p.requests_to(CHAT)[-1].body["kv_transfer_params"]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("made for push transfer", "for another transfer mode than pull"),
        ("another connector's", "of another connector than NIXL's"),
        ("without a request id", "of another connector than NIXL's"),
        ("without blocks", "that hold no blocks"),
    ],
)
async def test_a_prefill_engine_whose_blocks_no_decode_engine_can_read_is_named_with_what_it_sent(
    kind: str, what: str
) -> None:
    async with run_cluster() as cluster:
        await cluster.router.connect()
        cluster.pinned_until_ttl = True
        cluster.p.faults.lie = UNREADABLE[kind]
        answer = await cluster.ask({"messages": opening()})
        assert (answer.status, answer.json["error"]["code"]) == (502, "prefill_failed")
        assert f"{cluster.p.url} returned kv_transfer_params {what}" in answer.json["error"]["message"]
        assert not cluster.d.requests_to(CHAT)


async def test_fields_that_nobody_here_knows_go_with_the_blocks_as_they_came() -> None:
    """What a later vLLM, or a connector made from its NIXL one, puts beside the blocks is for the engine that reads them."""
    more = {"remote_registration_generation": 3, "lmcache": {"pins": [1, 2.50, None], "é": True}, "remote_pp": "1"}
    async with run_cluster(p=NO_CACHE) as cluster:
        for engine in cluster.engines:
            engine.faults.lie = with_(**more)
        await second(cluster, await first_turn(cluster))
        for reader in (cluster.d.requests_to(CHAT)[0], cluster.p.requests_to(CHAT)[1]):
            given = reader.body["kv_transfer_params"]
            assert {name: given[name] for name in more} == more


@pytest.mark.parametrize("name", ["cmpl-a-0-1f2e3d4c", "chatcmpl-___prefill_addr_10.0.0.1:1", "x" * 300, "é 1"])
async def test_an_engines_own_name_of_a_request_is_repeated_to_the_letter(name: str) -> None:
    async with run_cluster(p=NO_CACHE) as cluster:
        cluster.pinned_until_ttl = cluster.released_twice = True  # the loopback engine does not know it by that name
        cluster.d.faults.lie = with_(remote_request_id=name)
        history = await first_turn(cluster)
        await cluster.ask({"messages": history})
        assert cluster.p.requests_to(CHAT)[1].body["kv_transfer_params"]["remote_request_id"] == name


async def test_a_turn_that_reuses_nothing_always_says_why() -> None:
    async with run_cluster(p=NO_CACHE) as cluster:
        history = await first_turn(cluster)
        await second(cluster, history, route=Route.COLD)
        await second(cluster, opening("Another history."))
        await second(cluster, history, conversation=None)
        await cluster.exact({"messages": history, "n": 2})
        await cluster.router.flush()
        await second(cluster, history)
        assert len(cluster.reports) == 6
        assert all(report.route is not Route.WARM and report.reason is not None for report in cluster.reports)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_and_says_it_to_the_client_too(stream: bool) -> None:
    async with run_cluster(d={"bidirectional_kv_xfer": False}) as cluster:
        history = await first_turn(cluster)
        body: dict[str, Any] = {"messages": history, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        answer = await cluster.exact(body)
        said = (answer.events[-1] if stream else answer.json)["usage"]["backhaul"]
        assert (said["route"], said["reason"], said["cached"]) == ("cold", "no_handle", answer.reused.cached)
        assert answer.headers["x-backhaul-route"] == "cold"
