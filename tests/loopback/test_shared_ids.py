"""Agents that share an id, as sub-agents do: each reads its own history, none another's, and what is kept is bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from backhaul_router.report import Reason, ReuseReport, Route
from router_turns import STORY, Cluster, Message, run_cluster, system, user

KINDS = pytest.mark.parametrize(
    "engine", [{}, {"connector": "backhaul", "kv_recompute_threshold": 0}], ids=["stock", "ours"]
)
NO_CACHE = {"prefix_caching": False}


def agent(number: int, prompt: str = "You are an agent. ") -> list[Message]:
    return [system(prompt + STORY * 2), user(f"{number}, begin. {STORY}")]


async def take_turns(cluster: Cluster, agents: list[list[Message]], turns: int) -> list[list[ReuseReport]]:
    """Each agent's reports, when they go on in turn under one id."""
    reports: list[list[ReuseReport]] = [[] for _ in agents]
    for turn in range(turns):
        for number, messages in enumerate(agents):
            answer = await cluster.exact({"messages": messages})
            messages += [answer.message, user(f"{number}, go on, {turn}. {STORY}")]
            reports[number].append(answer.reused)
    return reports


async def tokens_of(cluster: Cluster, messages: list[Message]) -> int:
    return len(await cluster.ids({"messages": messages, "add_generation_prompt": False}))


@KINDS
async def test_sub_agents_with_one_system_prompt_each_read_their_own_history(engine: dict[str, Any]) -> None:
    async with run_cluster(engine=engine, p=NO_CACHE) as cluster:
        agents = [agent(number) for number in range(3)]
        reports = await take_turns(cluster, agents, 4)
        for messages, told in zip(agents, reports, strict=True):
            history = await tokens_of(cluster, messages[:-4])
            assert [r.route for r in told[2:]] == [Route.WARM, Route.WARM]
            assert (told[-1].verified or told[-1].offered) > history - 32


@KINDS
async def test_a_sub_agent_that_starts_later_leaves_the_long_history_alone(engine: dict[str, Any]) -> None:
    async with run_cluster(engine=engine, p=NO_CACHE) as cluster:
        main = agent(0)
        await take_turns(cluster, [main], 2)
        (started,) = await take_turns(cluster, [agent(1)], 1)
        assert started[0].diverged_at == 1
        ((went_on,),) = await take_turns(cluster, [main], 1)
        assert (went_on.route, went_on.diverged_at) == (Route.WARM, None)


@KINDS
async def test_a_sub_agent_with_another_system_prompt_is_another_history(engine: dict[str, Any]) -> None:
    async with run_cluster(engine=engine, p=NO_CACHE) as cluster:
        agents = [agent(0), agent(1, "Review what others do. " + STORY)]
        reports = await take_turns(cluster, agents, 3)
        assert [r.route for r in reports[0]] == [Route.COLD, Route.WARM, Route.WARM]
        assert (reports[1][0].route, reports[1][0].reason) == (Route.COLD, Reason.DIVERGED)
        assert [r.route for r in reports[1][1:]] == [Route.WARM, Route.WARM]


async def test_an_id_of_the_callers_counts_from_the_first_request_on_and_for_parallel_agents() -> None:
    async with run_cluster(p=NO_CACHE) as cluster:
        agents = {f"agent-{number}": agent(number) for number in range(3)}
        replies = [await cluster.open({"messages": messages}, conversation=name) for name, messages in agents.items()]
        for messages, reply in zip(agents.values(), replies, strict=True):
            answer = json.loads(b"".join([chunk async for chunk in reply]))
            messages += [answer["choices"][0]["message"], user("Go on. " + STORY)]
        assert sorted(str(report.conversation) for report in cluster.reports) == sorted(agents)
        for name, messages in agents.items():
            assert (await cluster.exact({"messages": messages}, conversation=name)).reused.route is Route.WARM


async def test_so_many_histories_of_an_id_are_kept_and_no_more() -> None:
    async with run_cluster(max_branches=2) as cluster:
        await take_turns(cluster, [agent(number, f"You are {number}. ") for number in range(5)], 2)
        await cluster.until(lambda: len(cluster.d.core.pins) == 2)
        assert len(cluster.router.ledger.handles()) == 2
