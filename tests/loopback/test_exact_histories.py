"""`exact_histories`: an answer that comes back as other tokens is replaced by the tokens that the engine made."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from backhaul_router.report import Route
from router_turns import BLOCK, STORY, Cluster, Message, run_cluster

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": STORY * 2,
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string"}, "how": {"type": "string"}},
            "required": ["where", "how"],
        },
    },
}
FIRST: list[Message] = [{"role": "system", "content": STORY * 4}, {"role": "user", "content": f"Look. {STORY * 4}"}]
RESULT: list[Message] = [{"role": "tool", "tool_call_id": "c", "content": f"Nothing there. {STORY * 2}"}]


def engines(connector: str, *, exact: bool = True) -> AbstractAsyncContextManager[Cluster]:
    return run_cluster(
        engine={"connector": connector}, p={"prefix_caching": False}, exact_histories=exact, route=Route.WARM
    )


def rewritten(answer: Message) -> Message:
    """Its tool calls' arguments written by another JSON library."""
    calls = json.loads(json.dumps(answer["tool_calls"]))
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), separators=(",", ":"))
    assert calls != answer["tool_calls"]
    return {**answer, "tool_calls": calls}


async def first_turn(engines: Cluster, *, stream: bool) -> Message:
    body = {"messages": FIRST, "tools": [TOOL], "tool_choice": "required", "stream": stream}
    answer = await engines.ask(body)
    if not stream:
        return answer.message
    arguments, names = "", ""
    for event in answer.events:
        for choice in event["choices"]:
            for call in choice["delta"].get("tool_calls") or ():
                names += call["function"].get("name") or ""
                arguments += call["function"].get("arguments") or ""
    function = {"name": names, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


@pytest.fixture(params=["stock", "backhaul"])
def connector(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_tool_call_that_was_written_anew_costs_nothing(connector: str, stream: bool) -> None:
    async with engines(connector) as made:
        answer = await first_turn(made, stream=stream)
        as_it_was = await made.direct({"messages": [*FIRST, answer, *RESULT], "tools": [TOOL]})
        turn = await made.ask({"messages": [*FIRST, rewritten(answer), *RESULT], "tools": [TOOL]})
        ran = len(await made.ids({"messages": [*FIRST, answer], "tools": [TOOL], "add_generation_prompt": False}))
    report = turn.reused
    assert report.exact_history is True
    assert report.diverged_at is None
    assert (report.route, report.reason) == (Route.WARM, None)
    assert report.cached is not None
    assert report.cached >= (ran - 3) // BLOCK * BLOCK - BLOCK
    assert turn.message["content"] == json.loads(as_it_was[1])["choices"][0]["message"]["content"]


async def test_without_the_setting_reuse_ends_where_the_answer_begins(connector: str) -> None:
    async with engines(connector, exact=False) as made:
        answer = await first_turn(made, stream=False)
        turn = await made.exact({"messages": [*FIRST, rewritten(answer), *RESULT], "tools": [TOOL]})
    assert turn.reused.exact_history is None


async def test_an_answer_that_comes_back_as_it_was_needs_nothing(connector: str) -> None:
    async with engines(connector) as made:
        answer = await first_turn(made, stream=False)
        turn = await made.exact({"messages": [*FIRST, answer, *RESULT], "tools": [TOOL]})
    assert turn.reused.exact_history is None
    assert turn.reused.route is Route.WARM


OTHER_TOOL = {"type": "function", "function": {"name": "go", "description": STORY, "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [TOOL, OTHER_TOOL]},
        {"tools": [OTHER_TOOL]},
        {"documents": [{"text": "Confidential."}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
    ],
    ids=["a tool more", "another tool", "documents", "template options", "no generation prompt"],
)
async def test_what_else_a_template_sees_is_what_the_request_says(connector: str, change: dict[str, Any]) -> None:
    async with engines(connector) as made:
        answer = await first_turn(made, stream=False)
        turn = await made.exact({"messages": [*FIRST, rewritten(answer), *RESULT], "tools": [TOOL], **change})
    assert turn.reused.exact_history is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("limit", [{"max_tokens": 13}, {"stop": ["e"]}, {"stop_token_ids": [ord("a")]}])
async def test_an_answer_that_was_cut_off_is_the_text_that_came_back(
    connector: str, stream: bool, limit: dict[str, Any]
) -> None:
    async with engines(connector) as made:
        first = await made.ask({"messages": FIRST, "stream": stream, **limit})
        if stream:
            text = "".join(c["delta"].get("content") or "" for event in first.events for c in event["choices"])
        else:
            text = first.message["content"]
        history = [*FIRST, {"role": "assistant", "content": f"{text.strip()} "}, *RESULT]
        turn = await made.exact({"messages": history, **limit})
    assert turn.reused.exact_history is None


def other_arguments(answer: Message) -> Message:
    calls = json.loads(json.dumps(answer["tool_calls"]))
    calls[0]["function"]["arguments"] = '{"where": "elsewhere", "how": "now"}'
    return {**answer, "tool_calls": calls}


def more_text(answer: Message) -> Message:
    return {**answer, "content": "I will look."}


@pytest.mark.parametrize("edit", [other_arguments, more_text])
async def test_an_answer_that_was_edited_is_what_the_client_made_of_it(
    connector: str, edit: Callable[[Message], Message]
) -> None:
    async with engines(connector) as made:
        answer = await first_turn(made, stream=False)
        turn = await made.exact({"messages": [*FIRST, edit(answer), *RESULT], "tools": [TOOL]})
    assert turn.reused.exact_history is None


async def test_a_history_whose_beginning_was_edited_is_what_the_client_made_of_it(connector: str) -> None:
    async with engines(connector) as made:
        answer = await first_turn(made, stream=False)
        edited = [FIRST[0], {"role": "user", "content": f"Look again. {STORY * 4}"}]
        turn = await made.exact({"messages": [*edited, rewritten(answer), *RESULT], "tools": [TOOL]})
    assert turn.reused.exact_history is None
    assert turn.reused.diverged_at == 1


async def test_every_earlier_answer_keeps_its_tokens(connector: str) -> None:
    """The third turn sends the first and the second answer, both written anew."""
    async with engines(connector) as made:
        first = await first_turn(made, stream=False)
        history = [*FIRST, rewritten(first), *RESULT]
        second = await made.ask({"messages": history, "tools": [TOOL], "tool_choice": "required"})
        history += [rewritten(second.message), *RESULT]
        third = await made.ask({"messages": history, "tools": [TOOL]})
        as_it_was = [*FIRST, first, *RESULT, second.message, *RESULT]
        _, raw = await made.direct({"messages": as_it_was, "tools": [TOOL]})
    assert third.reused.exact_history is True
    assert third.message["content"] == json.loads(raw)["choices"][0]["message"]["content"]
    assert third.reused.cached is not None
    assert second.reused.prompt is not None
    assert third.reused.cached > second.reused.prompt
