"""Requests that name no conversation are known by the messages that they continue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from backhaul_loopback import CostModel
from backhaul_router.report import Reason, Route
from router_turns import COMPLETIONS, STORY, Cluster, Message, opening, run_cluster, system, user

NO_CACHE = {"prefix_caching": False}
OURS = {"connector": "backhaul", "kv_recompute_threshold": 0}
STOCK: dict[str, Any] = {}
ONE_SHOT_S = 60.0
KINDS = pytest.mark.parametrize("engine", [STOCK, OURS], ids=["stock", "connector"])


async def ask(cluster: Cluster, messages: list[Message], **body: Any) -> tuple[Any, list[Message]]:
    """A turn that names no conversation: its report, and the history that it leaves."""
    answer = await cluster.exact({"messages": messages, **body}, conversation=None)
    return answer.reused, [*messages, answer.message]


@KINDS
async def test_a_history_that_goes_on_is_one_conversation(engine: dict[str, Any]) -> None:
    async with run_cluster(engine=engine, p=NO_CACHE) as cluster:
        messages = opening()
        reports = []
        for turn in range(3):
            report, messages = await ask(cluster, messages)
            messages.append(user(f"Go on, {turn}. {STORY}"))
            reports.append(report)
        assert [r.route for r in reports] == [Route.COLD, Route.WARM, Route.WARM]
        assert [r.turn for r in reports] == [1, 2, 3]
        assert {r.identity_source for r in reports} == {"history"}
        assert len({r.conversation for r in reports}) == 1
        assert (reports[0].reason, reports[0].conversation[:5]) == (Reason.FIRST_TURN, "anon-")


@KINDS
async def test_agents_with_one_opening_stay_apart_once_they_differ(engine: dict[str, Any]) -> None:
    async with run_cluster(engine=engine, p=NO_CACHE) as cluster:
        agents = [opening(), opening()]
        seen: list[set[str]] = [set(), set()]
        for turn in range(3):
            for number, messages in enumerate(agents):
                report, agents[number] = await ask(cluster, messages)
                agents[number].append(user(f"Agent {number} goes on, {turn}. {STORY}"))
                seen[number].add(report.conversation)
        assert [report.route for report in cluster.reports] == [Route.COLD] * 2 + [Route.WARM] * 4
        assert len(seen[0] | seen[1]) == 2


async def test_a_named_conversation_is_not_found_by_its_history() -> None:
    async with run_cluster(p=NO_CACHE) as cluster:
        messages = opening()
        named = await cluster.exact({"messages": messages}, conversation="c")
        report, _ = await ask(cluster, [*messages, named.message, user("Go on. " + STORY)])
        assert (report.reason, report.identity_source) == (Reason.FIRST_TURN, "history")
        assert report.conversation != "c"


async def test_another_model_or_salt_is_another_conversation() -> None:
    async with run_cluster(p=NO_CACHE) as cluster:
        first, messages = await ask(cluster, opening(), cache_salt="a")
        second, _ = await ask(cluster, [*messages, user("Go on.")], cache_salt="b")
        assert second.reason is Reason.FIRST_TURN
        assert second.conversation != first.conversation


async def test_the_answer_of_a_request_that_names_nothing_is_the_engines_own() -> None:
    async with run_cluster() as cluster:
        answer = await cluster.exact({"messages": opening()}, conversation=None)
        assert "backhaul" not in answer.json["usage"]


async def test_a_one_shot_call_is_kept_for_a_short_time_by_engines_that_can() -> None:
    async with run_cluster(engine=OURS) as cluster:
        report, messages = await ask(cluster, opening())
        (sent,) = [r.body["kv_transfer_params"]["backhaul"] for r in cluster.d.received if "chat" in r.path]
        assert (sent["retain"], sent["retain_s"]) == (True, ONE_SHOT_S)
        assert report.handle_remaining_s <= ONE_SHOT_S
        report, _ = await ask(cluster, [*messages, user("Go on.")])
        assert report.handle_remaining_s > ONE_SHOT_S


async def test_a_one_shot_call_of_a_stock_engine_is_released_after_that_time() -> None:
    seconds = 0.0
    async with run_cluster() as cluster:
        cluster.router.services.clock = lambda: seconds
        report, _ = await ask(cluster, opening())
        assert report.handle_remaining_s == ONE_SHOT_S
        seconds = ONE_SHOT_S
        await ask(cluster, [system("Another. " + STORY), user("Hello")])
        await cluster.until(lambda: len(cluster.d.core.pins) == 1)
        assert len(cluster.router.ledger) == 1


async def test_it_is_released_when_no_other_request_comes() -> None:
    async with run_cluster(one_shot_s=0.02) as cluster:
        await ask(cluster, opening())
        await cluster.until(lambda: not cluster.d.usage)
        assert len(cluster.router.ledger) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": STORY}),
        ("/v1/chat/completions", {"messages": opening(), "n": 2}),
        ("/v1/chat/completions", {"messages": opening(), "echo": True}),
    ],
    ids=["a text to complete", "several choices", "left to decode"],
)
async def test_what_cannot_be_continued_leaves_nothing(path: str, body: dict[str, Any]) -> None:
    async with run_cluster() as cluster:
        report = (await cluster.ask(body, path, conversation=None)).reused
        assert (report.conversation, report.identity_source) == (None, None)
        await cluster.until(lambda: not cluster.d.usage)
        assert len(cluster.router.ledger) == 0


async def test_a_turn_that_is_left_leaves_no_conversation() -> None:
    async with run_cluster(d={"costs": CostModel(decode_s=0.01)}) as cluster:
        reply = await cluster.open({"messages": opening(), "stream": True, "max_tokens": 400}, conversation=None)
        await reply.aclose()
        assert len(cluster.router.ledger) == 0


async def test_many_agents_at_once_each_find_their_own() -> None:
    async with run_cluster(engine=OURS, p=NO_CACHE) as cluster:

        async def agent(number: int) -> list[str]:
            messages = [system(STORY), user(f"I am {number}. {STORY}")]
            found = []
            for turn in range(3):
                answer = await cluster.ask({"messages": messages}, conversation=None)
                messages += [answer.message, user(f"{number}: {turn}")]
                found.append(answer.headers["x-backhaul-turn"])
            return found

        assert await asyncio.gather(*map(agent, range(6))) == [["1", "2", "3"]] * 6
        assert len({r.conversation for r in cluster.reports}) == 6


@KINDS
async def test_requests_without_a_name_push_out_no_conversation_with_one(engine: dict[str, Any]) -> None:
    async with run_cluster(engine=engine, p=NO_CACHE, max_conversations=2) as cluster:
        named = {}
        for name in ("a", "b"):
            messages = opening(f"I am {name}. {STORY}")
            answer = await cluster.exact({"messages": messages}, conversation=name)
            named[name] = [*messages, answer.message, user(f"Go on. {STORY}")]
        for number in range(3):
            await ask(cluster, opening(f"Nobody, {number}. {STORY}"))
        reports = [(await cluster.exact({"messages": m}, conversation=name)).reused for name, m in named.items()]
    assert [report.route for report in reports] == [Route.WARM, Route.WARM]
