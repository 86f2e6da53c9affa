"""What engines keep for the router is released in batches, by name where the engine knows names, and failures are counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from backhaul_protocol.account import Account
from backhaul_router.engines.audit import compare
from backhaul_router.engines.client import EngineAnswer, EngineCall, EngineFailure
from backhaul_router.engines.leases import Leases, Renewal
from backhaul_router.errors import FailureKind, LeaseError
from backhaul_router.fleet.engine import Holder
from backhaul_router.fleet.fleet import Fleet
from backhaul_router.turn.effects import EndLease
from core_values import D1, D2, P1, P2, encoded, engine, held, leased

Respond = Callable[[EngineCall], EngineAnswer]


def did(call: EngineCall) -> EngineAnswer:
    """An engine of ours that does what it is told; a stock one's rejection."""
    params = json.loads(call.body or b"{}")["kv_transfer_params"]
    if "backhaul" not in params:
        return EngineAnswer(404, {}, b"{}")
    asked = params["backhaul"]["leases"]
    renewed = {id: asked["ttl_s"] for id in asked.get("renew", ()) if id != "gone"}
    leases = {"released": asked.get("release", []), "renewed": renewed, "count": 1, "blocks": 2}
    return EngineAnswer(200, {}, encoded({"kv_transfer_params": {"backhaul": {"leases": leases}}}))


class Client:
    def __init__(self, respond: Respond = did) -> None:
        self.respond = respond
        self.calls: list[EngineCall] = []
        self.most_at_once = 0
        self._at_once = 0

    async def call(self, request: EngineCall) -> EngineAnswer:
        self.calls.append(request)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(0)
        self._at_once -= 1
        return self.respond(request)

    async def open(self, request: EngineCall) -> Any:
        raise AssertionError("nothing is streamed")

    async def aclose(self) -> None:
        pass

    @property
    def asked(self) -> list[tuple[str, dict[str, str], dict[str, Any]]]:
        """Of each lease operation: the engine, the headers, what it was told."""
        return [
            (call.url.removesuffix("/v1/completions"), dict(call.headers), params["backhaul"]["leases"])
            for call in self.calls
            if "backhaul" in (params := json.loads(call.body or b"{}")["kv_transfer_params"])
        ]


class Kept:
    """Leases of two decode engines of ours, and what they were asked."""

    def __init__(self, respond: Respond = did) -> None:
        self.fleet = Fleet([engine(P1), engine(P2), engine(D1, connector=1), engine(D2, connector=1)])
        self.client = Client(respond)
        self.tasks: list[asyncio.Task[None]] = []
        self.leases = Leases(self.client, self.fleet, self.spawn)

    def spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.append(task)
        return task

    async def done(self) -> None:
        await asyncio.gather(*self.tasks)

    @property
    def counted(self) -> tuple[int, int]:
        return self.fleet.counters.releases, self.fleet.counters.failed_releases


async def test_each_engine_is_told_once_of_all_that_it_can_free() -> None:
    kept = Kept()
    await kept.leases.end_now([leased("a"), leased("b"), leased("c", decode=D2)])
    assert sorted(kept.client.asked) == [(D1, {}, {"release": ["a", "b"]}), (D2, {}, {"release": ["c"]})]
    assert kept.counted == (3, 0)


async def test_a_stock_handle_goes_by_way_of_prefill() -> None:
    kept = Kept()
    await kept.leases.end_now([held("a")])
    assert (kept.client.asked, len(kept.client.calls), kept.client.calls[0].url) == ([], 1, f"{P1}/v1/completions")
    assert kept.counted == (1, 0)


async def test_a_data_parallel_rank_is_told_of_its_own() -> None:
    kept = Kept()
    ranks = [leased(str(rank), decode=D1) for rank in range(2)]
    handles = [held(h.handle.request_id, engine_id=f"e_dp{n}", backhaul=SAYS) for n, h in enumerate(ranks)]
    await kept.leases.end_now(handles)
    assert sorted(kept.client.asked, key=str) == [
        (D1, {"x-data-parallel-rank": "0"}, {"release": ["0"]}),
        (D1, {"x-data-parallel-rank": "1"}, {"release": ["1"]}),
    ]


SAYS = {"version": 1, "lease": {"port": 4000, "ttl_s": 480.0, "shared": True}}


async def test_what_a_turn_has_no_use_for_is_released_at_once_and_together() -> None:
    kept = Kept()
    for lease in ("a", "b"):
        kept.leases.end_one(EndLease(Holder(D1), lease))
    await kept.done()
    assert kept.client.asked == [(D1, {}, {"release": ["a", "b"]})]


async def test_what_waits_for_a_ride_is_left_to_whoever_takes_it() -> None:
    kept = Kept()
    kept.leases.end([leased("a")], ride=True)
    assert kept.tasks == []
    assert kept.fleet.releases.take(Holder(D1)) == ("a",)
    kept.leases.end_waiting()
    await kept.done()
    assert kept.client.calls == []


async def test_what_waits_for_a_ride_can_be_hurried() -> None:
    kept = Kept()
    kept.leases.end([leased("a")], ride=True)
    kept.leases.end_waiting()
    await kept.done()
    assert kept.client.asked == [(D1, {}, {"release": ["a"]})]


def refuses(call: EngineCall) -> EngineAnswer:
    raise EngineFailure(FailureKind.REFUSED, f"{call.url}: refused")


@pytest.mark.parametrize(
    "respond",
    [
        refuses,
        lambda _: EngineAnswer(500, {}, b"{}"),
        lambda _: EngineAnswer(200, {}, b"{}"),
        lambda _: EngineAnswer(200, {}, b"odd"),
    ],
    ids=["refused", "a status", "not understood", "not read"],
)
async def test_a_release_that_fails_is_counted_by_lease_and_told(
    respond: Respond, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(respond)
    await kept.leases.end_now([leased("a"), leased("b")])
    assert kept.counted == (2, 2)
    assert "2 leases could not be released" in caplog.text


async def test_a_flush_goes_to_every_engine_and_rank_and_covers_what_was_due() -> None:
    kept = Kept()
    kept.fleet.restarts.saw_engine_id(D2, "e_dp1")
    kept.fleet.releases.add(Holder(D1), ["a"])
    await kept.leases.flush()
    assert sorted(kept.client.asked, key=str) == [
        (D1, {}, {"flush": True}),
        (D2, {"x-data-parallel-rank": "1"}, {"flush": True}),
    ]
    assert kept.fleet.releases.holders == ()


async def test_a_flush_that_fails_anywhere_is_an_error() -> None:
    kept = Kept(lambda call: EngineAnswer(500, {}, b"{}") if call.url.startswith(D2) else did(call))
    with pytest.raises(LeaseError, match=f"{D2} answered 500"):
        await kept.leases.flush()
    assert len(kept.client.calls) == 2


async def test_what_was_renewed_is_told_by_name() -> None:
    kept = Kept()
    left = [leased("a"), leased("gone"), leased("b", decode=D2)]
    assert await kept.leases.renew(left, 60.0) == Renewal({(D1, "a"): 60.0, (D1, "gone"): 0.0, (D2, "b"): 60.0}, None)


async def test_an_engine_that_does_not_renew_costs_the_others_nothing() -> None:
    kept = Kept(lambda call: refuses(call) if call.url.startswith(D1) else did(call))
    renewal = await kept.leases.renew([leased("a"), leased("b", decode=D2)], 60.0)
    assert renewal.remaining == {(D2, "b"): 60.0}
    assert isinstance(renewal.failure, LeaseError)


async def test_stock_handles_are_released_a_few_at_a_time() -> None:
    kept = Kept()
    await kept.leases.end_now([held(str(number)) for number in range(300)])
    assert len(kept.client.calls) == 300
    assert 1 < kept.client.most_at_once <= 64


async def test_an_engine_that_does_not_list_its_leases_is_told_apart() -> None:
    kept = Kept(lambda call: refuses(call) if call.url.startswith(D2) else did(call))
    first, second = await kept.leases.listing()
    assert (first.decode, first.count, first.blocks, first.error) == (D1, 1, 2, None)
    assert second.error is not None
    assert "refused" in second.error


async def test_a_closed_router_tells_engines_nothing() -> None:
    kept = Kept()
    kept.leases.closed = True
    await kept.leases.end_now([leased("a"), held("b")])
    assert kept.client.calls == []
    assert kept.counted == (2, 2)


# --- the audit -----------------------------------------------------------------------------------------------------------


def counting(offered: int, verified: int, pulled: int, *, since: float | None = None) -> Respond:
    page = "" if since is None else f"process_start_time_seconds {since}\n"
    page += "".join(
        f'backhaul_{name}_tokens_total{{engine="0",model_name="m"}} {value}.0\n'
        for name, value in (("offered", offered), ("verified", verified), ("pulled", pulled))
    )
    return lambda _: EngineAnswer(200, {}, page.encode())


def audited(started_at: float | None = None) -> Fleet:
    start = {"offered": 1000, "verified": 1000, "pulled": 1000}
    p = engine(P1, connector=1, at_start=start, started_at=started_at)
    fleet = Fleet([p, engine(P2), engine(D1, connector=1)])
    fleet.accounts.add(P1, Account(offered=500, verified=400, pulled=300))
    return fleet


@pytest.mark.parametrize(
    ("counted", "alarms"),
    [
        ((1500, 1400, 1300), []),
        ((1504, 1400, 1300), []),
        ((1600, 1400, 1300), ["offered"]),
        ((1500, 1400, 1200), ["pulled"]),
    ],
    ids=["equal", "within tolerance", "somebody else", "reuse that did not happen"],
)
async def test_accounts_are_held_against_the_engines_counters(counted: tuple[int, int, int], alarms: list[str]) -> None:
    lines = await compare(Client(counting(*counted)), audited(), 0.01)
    assert [line.counter for line in lines if line.alarm] == alarms
    assert {line.engine for line in lines} == {P1}


async def test_an_alarm_says_what_may_be_the_cause() -> None:
    fleet = audited()
    more, *_ = await compare(Client(counting(1600, 1400, 1300)), fleet, 0.01)
    fewer, *_ = await compare(Client(counting(1400, 1400, 1300)), audited(), 0.01)
    restarted, *_ = await compare(Client(counting(0, 0, 0)), audited(), 0.01)
    assert "another client uses the engine" in str(more)
    assert "reuse was reported that the engine did not count" in str(fewer)
    assert "was restarted" in str(restarted)
    fleet.accounts.note_missing(P1)
    lines = await compare(Client(counting(1600, 1400, 1300)), fleet, 0.01)
    assert "1 prefills ended without an account" in str(lines[0])


@pytest.mark.parametrize("since", [None, 1.75e9], ids=["by its counters", "by its start time"])
async def test_an_engine_that_was_restarted_is_compared_anew(since: float | None) -> None:
    fleet = audited(started_at=None if since is None else since - 60)
    anew = (0, 0, 0) if since is None else (2000, 2000, 2000)
    lines = await compare(Client(counting(*anew, since=since)), fleet, 0.01)
    assert [(line.restarted, line.alarm, line.difference) for line in lines] == [(True, False, 0)] * 3
    fleet.accounts.add(P1, Account(offered=50, verified=40, pulled=30))
    more = (anew[0] + 50, anew[1] + 40, anew[2] + 30)
    lines = await compare(Client(counting(*more, since=since)), fleet, 0.01)
    assert [(line.restarted, line.alarm, line.router) for line in lines] == [
        (False, False, 50),
        (False, False, 40),
        (False, False, 30),
    ]
    lines = await compare(Client(counting(more[0], more[1], more[2] + 30, since=since)), fleet, 0.01)
    assert [line.counter for line in lines if line.alarm] == ["pulled"]


async def test_a_restart_among_running_turns_is_taken_up_when_they_are_over() -> None:
    fleet = audited()
    fleet.load.begin(P1)
    lines = await compare(Client(counting(0, 0, 0)), fleet, 0.01)
    assert [(line.restarted, line.alarm) for line in lines] == [(True, False)] * 3
    fleet.load.end(P1)
    fleet.accounts.add(P1, Account(offered=50, verified=40, pulled=30))
    lines = await compare(Client(counting(50, 40, 30)), fleet, 0.01)
    assert [(line.restarted, line.alarm, line.difference) for line in lines] == [(True, False, 0)] * 3


@pytest.mark.parametrize("ends", [True, False])
async def test_a_turn_that_begins_or_ends_while_the_counters_are_read_is_no_alarm(ends: bool) -> None:
    """Whether they count it nobody knows."""
    fleet = audited()
    page = counting(1500, 1400, 1300)
    if ends:
        fleet.load.begin(P1)

    def respond(call: EngineCall) -> EngineAnswer:
        fleet.accounts.add(P1, Account(offered=500, verified=400, pulled=300))
        if ends:
            fleet.load.end(P1)
        return page(call)

    lines = await compare(Client(respond), fleet, 0.01)
    assert [(line.in_flight, line.alarm) for line in lines] == [(True, False)] * 3


async def test_turns_that_run_are_no_alarm() -> None:
    fleet = audited()
    fleet.load.begin(P1)
    lines = await compare(Client(counting(1600, 1400, 1300)), fleet, 0.01)
    assert [(line.in_flight, line.alarm) for line in lines] == [(True, False)] * 3


@pytest.mark.parametrize("respond", [refuses, lambda _: EngineAnswer(404, {}, b"")])
async def test_an_engine_that_does_not_show_its_metrics_is_not_compared(respond: Respond) -> None:
    assert await compare(Client(respond), audited(), 0.01) == ()
