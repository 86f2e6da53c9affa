"""Requests of every shape: reuse never changes an answer. (Histories that are not what D ran: `test_exactness`.)

`Agent.ask` compares each answer with the client's own body sent straight to an engine.
"""

from __future__ import annotations

from typing import Any

import pytest
from backhaul_router.report import Reason, Route
from real_engines import EngineSet
from vllm_agents import COMPLETIONS, Agent, router_on

STORY = "The cache keeps the keys and values of every token that the engine has run, block by block. "

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks at a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "enum": ["door", "window"]}},
                "required": ["place"],
            },
        },
    }
]


def opening() -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": STORY * 5},
        {"role": "user", "content": f"First: {STORY * 3}"},
    ]


SHAPES: dict[str, dict[str, Any]] = {
    "tools": {"tools": TOOLS},
    "tool_choice required": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60},
    "tool_choice named": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "max_tokens": 60,
    },
    "tool_choice none": {"tools": TOOLS, "tool_choice": "none"},
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "place",
                "schema": TOOLS[0]["function"]["parameters"],  # type: ignore[index]
            },
        },
    },
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False, "date_string": "1 May 2026"}},
    "reasoning_effort": {"reasoning_effort": "low"},
    "documents": {"documents": [{"title": "Doors", "text": "Doors open."}]},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "stop string": {"stop": ["e"]},
    "max_completion_tokens": {"max_completion_tokens": 9},
    "return_token_ids": {"return_token_ids": True},
    "seed and sampling": {"seed": 7, "temperature": 0.0, "top_p": 0.9, "min_tokens": 3},
}
TRUNCATED: dict[str, Any] = {"truncate_prompt_tokens": 100}


async def _two_turns(engines: EngineSet, route: Route | None, shape: dict[str, Any], stream: bool) -> Any:
    async with router_on(engines) as (router, reports):
        agent = Agent(router, engines, reports)
        history = opening()
        first = await agent.ask(
            {"messages": history, "max_tokens": 30, **{k: shape[k] for k in _RENDERED & shape.keys()}}
        )
        history = [
            *history,
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": f"Next: {STORY}"},
        ]
        return await agent.ask({"messages": history, "max_tokens": 30, "stream": stream, **shape}, route=route)


_RENDERED = {"tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "documents"}


@pytest.mark.parametrize("route", [Route.WARM, Route.LOCAL, Route.COLD])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_every_shape_of_request_equals_the_direct_run(engines: EngineSet, shape: str, route: Route) -> None:
    answer = await _two_turns(engines, route, SHAPES[shape], stream=route is Route.WARM)
    assert answer.report.route is route
    if route is Route.WARM:
        assert answer.report.offered > 0


async def test_a_truncated_prompt_goes_to_d_alone_and_says_so(engines: EngineSet) -> None:
    answer = await _two_turns(engines, None, TRUNCATED, stream=False)
    assert (answer.report.route, answer.report.reason) == (Route.LOCAL, Reason.NO_PROOF)


async def test_continue_final_message(engines: EngineSet) -> None:
    async with router_on(engines) as (router, reports):
        agent = Agent(router, engines, reports)
        history = opening()
        await agent.ask({"messages": history, "max_tokens": 30})
        history = [*history, {"role": "assistant", "content": "It begins like this and"}]
        fields = {"continue_final_message": True, "add_generation_prompt": False}
        answer = await agent.ask({"messages": history, "max_tokens": 30, **fields})
        assert answer.report.route is Route.WARM


async def test_completions_of_every_shape(engines: EngineSet) -> None:
    shapes: list[dict[str, Any]] = [
        {"prompt": STORY * 8},
        {"prompt": STORY * 8, "stream": True},
        {"prompt": [STORY, STORY * 2]},
        {"prompt": [[5, 6, 7], [8, 9]]},
        {"prompt": STORY * 8, "echo": True},
        {"prompt": STORY * 8, "logprobs": 2},
        {"prompt": STORY * 8, "n": 2, "temperature": 0.8, "seed": 5},
        {"prompt": STORY * 8, "prompt_logprobs": 1},
    ]
    async with router_on(engines) as (router, reports):
        agent = Agent(router, engines, reports)
        for shape in shapes:
            await agent.ask({"max_tokens": 20, **shape}, COMPLETIONS)


async def test_a_model_that_does_not_exist_is_the_engines_own_404(engines: EngineSet) -> None:
    async with router_on(engines) as (router, reports):
        agent = Agent(router, engines, reports)
        answer = await agent.ask({"model": "none", "messages": opening()}, status=404)
        assert b"does not exist" in answer.raw


@pytest.mark.parametrize(
    "fields",
    [{"temperature": "hot"}, {"messages": "hello"}, {"max_tokens": -1}, {"stream": "perhaps"}, {"max_tokens": 10**6}],
    ids=lambda fields: next(iter(fields)),
)
async def test_bad_input_is_the_engines_own_400_and_leaks_nothing(engines: EngineSet, fields: dict[str, Any]) -> None:
    async with router_on(engines) as (router, reports):
        agent = Agent(router, engines, reports)
        await agent.ask({"messages": opening(), **fields}, status=400)
