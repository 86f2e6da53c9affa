"""Agents rebuild the engine's answer before they send it back, and no framework does so to the letter. Whatever became of it, the
next answer is that of an engine that was never told of the last one, with either proof."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from backhaul_router.report import Route
from router_turns import BLOCK, STORY, Message, opening, run_cluster, user

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


def drop(*fields: str) -> Callable[[list[Message]], None]:
    def change(history: list[Message]) -> None:
        for field in fields:
            history[2].pop(field, None)

    return change


def legacy(history: list[Message]) -> None:
    """The call as it was written before tools."""
    (call,) = history[2].pop("tool_calls")
    history[2]["function_call"] = call["function"]
    history[3] = {"role": "function", "name": "look", "content": history[3]["content"]}


def put(index: int, **fields: Any) -> Callable[[list[Message]], None]:
    return lambda history: history[index].update(fields)


REBUILT: dict[str, Callable[[list[Message]], Any]] = {
    "to the letter": lambda history: None,
    "without its tool calls": drop("tool_calls"),
    "with the old kind of call": legacy,
    "with arguments written anew": lambda h: h[2]["tool_calls"][0]["function"].update(arguments='{"place":"ember"}'),
    "with other arguments": lambda h: h[2]["tool_calls"][0]["function"].update(arguments='{"place": "elsewhere"}'),
    "with a content that was null": put(2, content=None),
    "with a text beside its call": put(2, content="I shall look."),
    "with reasoning that it never had": put(2, reasoning="Well. " + STORY),
    "with a call's id of the framework's": lambda h: (
        h[2]["tool_calls"][0].update(id="call_1"),
        h[3].update(tool_call_id="call_1"),
    ),
    "with another result": put(3, content="Nothing there."),
    "without the result": lambda history: history.pop(3),
    "as a text": put(2, content='{"name": "look", "arguments": {"place": "ember"}}', tool_calls=[]),
}


@pytest.mark.parametrize("connector", ["stock", "backhaul"])
@pytest.mark.parametrize("how", REBUILT)
async def test_an_answer_that_comes_back_rebuilt_changes_no_answer(how: str, connector: str) -> None:
    tools = {"tools": [TOOL]}
    async with run_cluster(p={"prefix_caching": False}, engine={"connector": connector}) as cluster:
        messages = opening()
        first = await cluster.exact({"messages": messages, **tools, "tool_choice": "required"})
        answer = first.message
        assert answer["tool_calls"]
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "It is there."}
        history = copy.deepcopy([*messages, answer, result, user("Go on. " + STORY)])
        REBUILT[how](history)
        report = (await cluster.exact({"messages": history, **tools})).reused
        assert report.route is Route.WARM
        ran = (first.reused.prompt or 0) + (first.reused.generated or 0)
        read = report.pulled if connector == "backhaul" else report.offered
        assert read is not None
        assert read <= ran // BLOCK * BLOCK
        await cluster.exact({"messages": history, **tools}, conversation=None)  # what P has by now is right as well
