"""Agents of one program open alike and say no id. What they have in common must not bring them all to one engine, and what
their histories say decides only where a turn goes: never what it reads."""

from __future__ import annotations

from collections import Counter

import pytest
from backhaul_router.report import Route
from router_turns import STORY, Cluster, Message, run_cluster, system, user

AGENTS = 8


async def converse(cluster: Cluster, turns: int, opening: list[Message]) -> None:
    histories = [[*opening, user(f"Task {number}. {STORY}")] for number in range(AGENTS)]
    for turn in range(turns):
        for number, messages in enumerate(histories):
            answer = await cluster.exact({"messages": messages}, conversation=None)
            messages += [answer.message, user(f"Step {turn} of {number}. {STORY}")]


@pytest.mark.parametrize("connector", ["stock", "backhaul"])
async def test_a_system_prompt_that_all_share_collapses_onto_no_engine(connector: str) -> None:
    async with run_cluster(prefill=2, decode=2, engine={"connector": connector}) as cluster:
        await converse(cluster, 3, [system(STORY * 4)])
        first, rest = cluster.reports[:AGENTS], cluster.reports[AGENTS:]
        for engines in ([r.prefill_engine for r in first], [r.decode_engine for r in first]):
            assert sorted(Counter(engines).values()) == [AGENTS // 2] * 2
        assert {report.route for report in rest} == {Route.WARM}
        homes = {(report.conversation, report.decode_engine) for report in cluster.reports}
        assert len(homes) == AGENTS


async def test_a_history_that_only_looks_like_anothers_is_read_as_far_as_the_tokens_agree() -> None:
    async with run_cluster(p={"prefix_caching": False}) as cluster:
        messages = [system(STORY * 2), user("Task. " + STORY)]
        answer = await cluster.exact({"messages": messages}, conversation=None)
        forged = {**answer.message, "content": "Never said that. " + STORY}
        await cluster.exact({"messages": [*messages, forged, user("Go on.")]}, conversation=None)
        went_on = cluster.reports[-1]
        assert went_on.conversation == cluster.reports[0].conversation
        assert went_on.offered < (cluster.reports[0].prompt or 0) + (cluster.reports[0].generated or 0)
