"""What engines are asked before the first turn, and which of them can be used."""

from __future__ import annotations

import json
from typing import Any

import pytest
from backhaul_router.engines.client import EngineAnswer, EngineCall, EngineFailure
from backhaul_router.engines.describe import Unreachable, describe
from backhaul_router.errors import ConfigError, FailureKind
from backhaul_router.fleet.engine import Engine, Holder, Role, check_fit
from backhaul_router.fleet.fleet import Fleet
from core_values import D1, D2, P1, P2, engine

METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0
"""
PLUGIN = 'backhaul_plugin_info{version="1"} 1.0\n'


class FakeEngine:
    """Answers each path with a body, a status and a body, or a failure."""

    def __init__(self, **answers: Any) -> None:
        card = {"id": "m", "parent": None, "max_model_len": 4096}
        self.answers: dict[str, Any] = {
            "version": {"version": "0.32.0"},
            "models": {"data": [card, {"id": "tuned", "parent": "m"}]},
            "metrics": METRICS + PLUGIN,
            "render": [{"token_ids": [1]}],
        } | answers
        self.calls: list[EngineCall] = []

    async def call(self, request: EngineCall) -> EngineAnswer:
        self.calls.append(request)
        answer = self.answers[request.url.rpartition("/")[2]]
        if isinstance(answer, EngineFailure):
            raise answer
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        return EngineAnswer(status, {}, body.encode() if isinstance(body, str) else json.dumps(body).encode())

    async def open(self, request: EngineCall) -> Any:
        raise AssertionError("nothing is streamed")

    async def aclose(self) -> None:
        pass


async def probe(**answers: Any) -> Engine:
    return await describe(FakeEngine(**answers), D1, Role.DECODE)


async def test_an_engine_says_what_it_is() -> None:
    assert await probe() == Engine(
        url=D1,
        role=Role.DECODE,
        version="0.32.0",
        models=("m",),
        adapters=frozenset({"tuned"}),
        block_size=32,
        max_model_len=4096,
        renders=True,
        streams_handles=True,
        kv_tokens=99 * 32,
    )


async def test_every_question_has_a_time_limit() -> None:
    asked = FakeEngine()
    await describe(asked, D1, Role.DECODE)
    assert {call.url.removeprefix(D1) for call in asked.calls} == {
        "/version",
        "/v1/models",
        "/metrics",
        "/v1/completions/render",
    }
    assert all(call.timeout_s <= 30 for call in asked.calls)


@pytest.mark.parametrize("metrics", ["", (404, "Not Found"), (500, "x"), METRICS.replace("block_size", "other_size")])
async def test_an_engine_without_metrics_cannot_be_proven_against(metrics: Any) -> None:
    found = await probe(metrics=metrics)
    assert (found.block_size, found.streams_handles) == (None, False)


@pytest.mark.parametrize("line", ["", 'backhaul_plugin_info{version="2"} 1.0\n', "# HELP backhaul_plugin_info x\n"])
async def test_streams_show_handles_only_with_the_plugin_that_is_known(line: str) -> None:
    assert not (await probe(metrics=METRICS + line)).streams_handles


CONNECTOR = """\
backhaul_connector_info{version="1"} 1.0
backhaul_offered_tokens_total{engine="0",model_name="m"} 128.0
backhaul_offered_tokens_total{engine="1",model_name="m"} 1.024e+06
backhaul_verified_tokens_total{engine="0",model_name="m"} 96.0
"""


async def test_an_engine_of_ours_says_so_and_how_far_it_has_counted() -> None:
    found = await probe(metrics=METRICS + PLUGIN + CONNECTOR)
    assert found.connector == 1
    assert found.at_start == {"offered": 1_024_128, "verified": 96, "pulled": 0}


@pytest.mark.parametrize(
    "line", ["", 'backhaul_connector_info{version="2"} 1.0\n', "# HELP backhaul_connector_info x\n"]
)
async def test_a_connector_that_is_not_known_is_stock(line: str) -> None:
    found = await probe(metrics=METRICS + line)
    assert (found.connector, found.at_start) == (None, {})


@pytest.mark.parametrize(
    ("streams", "connector", "hides"), [(True, None, False), (False, None, True), (False, 1, False)]
)
def test_only_a_stock_stream_pins_where_no_one_can_reach(streams: bool, connector: int | None, hides: bool) -> None:
    assert engine(D1, streams_handles=streams, connector=connector).hides_handles is hides


@pytest.mark.parametrize("status", [403, 404, 500])
async def test_an_engine_may_not_render_for_others(status: int) -> None:
    assert not (await probe(render=(status, {}))).renders


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1rc2+cpu", "0.33.0", "0.33.1.dev5+gabc"])
async def test_known_versions_are_accepted(version: str) -> None:
    assert (await probe(version={"version": version})).version == version


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.3.2", "1.0.0", "dev", ""])
async def test_a_version_whose_protocol_is_unknown_is_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError, match=r"d1.*0\.32 and 0\.33"):
        await probe(version={"version": version})


@pytest.mark.parametrize("what", ["version", "models", "metrics", "render"])
async def test_an_engine_that_does_not_answer_is_unreachable(what: str) -> None:
    with pytest.raises(Unreachable, match="cannot connect"):
        await probe(**{what: EngineFailure(FailureKind.REFUSED, f"{D1}: cannot connect")})


@pytest.mark.parametrize("what", ["version", "models"])
async def test_an_engine_that_is_not_ready_is_unreachable(what: str) -> None:
    with pytest.raises(Unreachable, match="503"):
        await probe(**{what: (503, {})})


@pytest.mark.parametrize("what", ["version", "models"])
@pytest.mark.parametrize(("status", "hint"), [(401, "engine_api_key="), (403, "engine_api_key="), (404, "base URL")])
async def test_a_refusal_says_what_to_change(what: str, status: int, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"{status}.*{hint}"):
        await probe(**{what: (status, {})})


@pytest.mark.parametrize(
    "odd",
    [
        {"version": "<html>"},
        {"version": {"v": 1}},
        {"version": {"version": 1}},
        {"version": []},
        {"models": "x"},
        {"models": {"data": 1}},
        {"models": {}},
    ],
)
async def test_what_is_no_vllm_engine_is_told(odd: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not answer like a vLLM engine"):
        await probe(**odd)


async def test_an_engine_that_serves_nothing_is_told() -> None:
    with pytest.raises(ConfigError, match="serves no model"):
        await probe(models={"data": []})


# --- engines together ----------------------------------------------------------------------------------------------------


def test_engines_that_fit_are_accepted() -> None:
    check_fit([engine(P1), engine(D1), engine(D2, models=("alias", "m")), engine(P2, block_size=None)])


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"models": ("n",)}, "serve the same model"),
        ({"version": "0.33.0"}, "equal builds"),
        ({"block_size": 32}, "--block-size"),
    ],
)
def test_engines_that_cannot_exchange_kv_are_refused_by_name(other: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=f"prefill engine {P1}.*decode engine {D1}.*{what}"):
        check_fit([engine(P1), engine(D1, **other)])


def test_engines_are_compared_whatever_stands_between_them() -> None:
    with pytest.raises(ConfigError, match="--block-size"):
        check_fit([engine(P1, block_size=None), engine(D1), engine(D2, block_size=32)])


def test_an_engine_that_comes_later_has_to_fit_too() -> None:
    fleet = Fleet([engine(P1), engine(D1)])
    with pytest.raises(ConfigError):
        fleet.add(engine(D2, block_size=32))
    assert len(fleet.engines) == 2
    fleet.add(engine(D2))
    assert [e.url for e in fleet.decode] == [D1, D2]


# --- what the fleet learns -----------------------------------------------------------------------------------------------


def test_a_restart_shows_in_the_engine_id() -> None:
    fleet, decode = Fleet([engine(P1), engine(D1)]), engine(D1)
    assert fleet.restarts.saw_engine_id(decode.url, "a") is None
    assert fleet.restarts.saw_engine_id(decode.url, "a") is None
    assert fleet.restarts.saw_engine_id(decode.url, "b") == "a"


def test_data_parallel_ranks_are_one_process() -> None:
    fleet, decode = Fleet([engine(P1), engine(D1)]), engine(D1)
    fleet.restarts.saw_engine_id(decode.url, "a_dp0")
    assert fleet.restarts.saw_engine_id(decode.url, "a_dp11") is None
    assert fleet.restarts.made_by_current(D1, "a_dp3")
    assert fleet.restarts.saw_engine_id(decode.url, "b_dp0") == "a"
    assert not fleet.restarts.made_by_current(D1, "a_dp0")


def test_a_handle_of_an_engine_that_is_gone_is_not_current() -> None:
    fleet = Fleet([engine(P1), engine(D1)])
    assert fleet.restarts.made_by_current(D1, "never seen")
    assert not fleet.restarts.made_by_current(D2, "never seen")


def test_the_cost_of_a_cold_prefill_is_learned_and_small_ones_teach_nothing() -> None:
    fleet, prefill = Fleet([engine(P1), engine(P2), engine(D1)]), engine(P1)
    assert fleet.costs.prefill_rate(prefill.url) is None
    fleet.costs.learn_compute(prefill.url, 1000.0, 1)
    assert fleet.costs.prefill_rate(prefill.url) is None
    fleet.costs.learn_compute(prefill.url, 200.0, 100)
    assert fleet.costs.prefill_rate(prefill.url) == (2.0, 1)
    assert fleet.costs.prefill_rate(P2) == (2.0, 1)
    assert fleet.costs.prefill_rate(None) == (2.0, 1)


def test_the_fleet_tells_what_it_does() -> None:
    fleet, decode = Fleet([engine(P1), engine(D1)]), engine(D1)
    fleet.load.begin(decode.url)
    assert repr(fleet) == f"<Fleet 1 prefill, 1 decode; in flight {{{D1}: 1}}>"
    fleet.load.end(decode.url)
    assert repr(fleet) == "<Fleet 1 prefill, 1 decode; in flight {}>"


# --- engines of ours -----------------------------------------------------------------------------------------------------


def test_one_that_checks_handles_goes_before_others_after_the_preferred_one() -> None:
    fleet = Fleet([engine(P1), engine(P2, connector=1), engine(D1)])
    fleet.load.begin(P2)
    assert (picked := fleet.pick(Role.PREFILL)) is not None
    assert picked.url == P1
    assert (picked := fleet.pick(Role.PREFILL, verifying=True)) is not None
    assert picked.url == P2
    assert (picked := fleet.pick(Role.PREFILL, P1, verifying=True)) is not None
    assert picked.url == P1


def test_leases_that_are_due_are_handed_out_once_and_by_rank() -> None:
    fleet, holder = Fleet([engine(P1), engine(D1, connector=1)]), Holder.of(D1, "id_dp3")
    assert holder == Holder(D1, "3")
    fleet.releases.add(Holder(D1), ["a"])
    fleet.releases.add(Holder(D1), ["b"])
    fleet.releases.add(holder, ["c"])
    assert set(fleet.releases.holders) == {Holder(D1), holder}
    assert fleet.releases.take(Holder(D1)) == ("a", "b")
    assert fleet.releases.take(Holder(D1)) == ()
    assert fleet.releases.take(holder) == ("c",)


def test_data_parallel_ranks_are_addressed_as_they_are_seen() -> None:
    fleet, decode = Fleet([engine(P1), engine(D1, connector=1)]), engine(D1, connector=1)
    assert fleet.restarts.holders(decode) == (Holder(D1),)
    for engine_id in ("a_dp1", "a_dp0", "a_dp1"):
        fleet.restarts.saw_engine_id(decode.url, engine_id)
    assert fleet.restarts.holders(decode) == (Holder(D1, "0"), Holder(D1, "1"))


async def test_data_parallel_ranks_are_known_before_any_turn() -> None:
    """A flush that left one out would leave leases of the weights before."""
    ranks = "".join(f'vllm:cache_config_info{{block_size="32",engine="{n}"}} 1.0\n' for n in range(2))
    decode = await probe(metrics=ranks)
    fleet = Fleet([engine(P1), decode])
    assert fleet.restarts.holders(decode) == (Holder(D1, "0"), Holder(D1, "1"))
    assert (await probe()).ranks == frozenset(), "one process needs no address"


def test_what_is_known_of_a_pair_can_change() -> None:
    fleet = Fleet([engine(P1), engine(P2, connector=1), engine(D1)])
    assert not fleet.pairs.is_checked(P1, D1)
    assert fleet.pairs.is_checked(P2, D1)
    fleet.pairs.note(P1, D1, "hangs")
    assert (fleet.pairs.is_checked(P1, D1), fleet.pairs.unsafe_for(D1), fleet.pairs.unsafe_for(D2)) == (
        True,
        {P1},
        frozenset(),
    )
    fleet.pairs.note(P1, D1, None)
    assert (fleet.pairs.is_checked(P1, D1), fleet.pairs.unsafe_for(D1), fleet.pairs.unsafe) == (True, frozenset(), {})
