"""Histories that are not what the decode engine ran, and requests of every shape: reuse never changes an answer.

`Agent.ask` compares each answer with the client's own body sent straight to an engine; after a reuse, the same request
without a conversation shows that no prefix cache was poisoned.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from agents import CHAT, COMPLETIONS, Agent, router_on
from backhaul_router.report import Reason, Route
from real_engines import EngineSet, post

STORY = "The cache keeps the keys and values of every token that the engine has run, block by block. "
BLOCK = 32

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


async def ids_of(engines: EngineSet, messages: list[dict[str, Any]], **fields: Any) -> list[int]:
    """The prompt's ids, as the engine renders them."""
    body = {"model": engines.model, "messages": messages, **fields}
    rendered = await post(engines.decode[0], f"{CHAT}/render", body)
    ids: list[int] = rendered["token_ids"]
    return ids


def common_blocks(a: list[int], b: list[int]) -> int:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same // BLOCK


def opening() -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": STORY * 5},
        {"role": "user", "content": f"First: {STORY * 3}"},
    ]


EDITS: dict[str, Any] = {
    "a message edited in the middle": lambda h: h[1].update(content=f"Edited: {STORY * 3}"),
    "a message removed": lambda h: h.pop(1),
    "a message inserted": lambda h: h.insert(1, {"role": "user", "content": "Before that."}),
    "reasoning stripped": lambda h: h[2].pop("reasoning", None),
    "an answer rewritten": lambda h: h[2].update(content="Something else entirely."),
    "the last turn regenerated": lambda h: (h.pop(), h.pop()),
    "the last turn shortened": lambda h: (h.pop(), h.pop(), h[-1].update(content=f"First: {STORY}")),
}


@pytest.mark.parametrize("edit", EDITS, ids=str)
async def test_only_the_proven_leading_blocks_are_read(engines: EngineSet, edit: str) -> None:
    async with router_on(engines) as (router, reports):
        agent = Agent(router, engines, reports)
        history = opening()
        first = await agent.ask({"messages": history, "max_tokens": 60, "return_token_ids": True})
        ran = [*await ids_of(engines, history), *first.choice["token_ids"]][:-1]
        history = [
            *history,
            {**first.message, "reasoning": "thought of this"},
            {"role": "user", "content": f"Second: {STORY}"},
        ]
        history = copy.deepcopy(history)
        EDITS[edit](history)
        prompt = await ids_of(engines, history)
        expected = min(common_blocks(ran, prompt), (len(prompt) - 1) // BLOCK) * BLOCK
        answer = await agent.ask({"messages": history, "max_tokens": 30})
        report = answer.report
        assert report.route is Route.WARM
        assert report.offered == expected
        assert report.cached == expected
        agent.conversation = None
        again = await agent.ask({"messages": history, "max_tokens": 30})
        assert again.report.offered == 0


async def test_another_history_under_the_same_id_reads_nothing_and_keeps_the_first(engines: EngineSet) -> None:
    async with router_on(engines) as (router, reports):
        agent = Agent(router, engines, reports)
        history = opening()
        first = await agent.ask({"messages": history, "max_tokens": 30})
        other = [{"role": "system", "content": "Another agent. " * 40}, {"role": "user", "content": "Hello."}]
        answer = await agent.ask({"messages": other, "max_tokens": 30})
        assert (answer.report.route, answer.report.reason) == (Route.COLD, Reason.DIVERGED)
        assert answer.report.diverged_at == 0
        history = [*history, first.message, {"role": "user", "content": f"Second: {STORY}"}]
        assert (await agent.ask({"messages": history, "max_tokens": 30})).report.route is Route.WARM


@pytest.mark.parametrize("short", [BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("extra", [0, 1], ids=["retried", "extended"])
async def test_prompts_around_a_block_boundary(engines: EngineSet, short: int, extra: int) -> None:
    async with router_on(engines) as (router, reports):
        agent = Agent(router, engines, reports)
        prompt = list(range(200, 200 + 6 * BLOCK))
        first = await agent.ask({"prompt": prompt, "max_tokens": 40, "return_token_ids": True}, COMPLETIONS)
        ran = [*prompt, *first.choice["token_ids"]]
        shorter = [*ran[: len(ran) - short], *range(3, 3 + extra)]
        answer = await agent.ask({"prompt": shorter, "max_tokens": 20}, COMPLETIONS)
        assert answer.report.offered == (len(shorter) - 1) // BLOCK * BLOCK
        agent.conversation = None
        await agent.ask({"prompt": shorter, "max_tokens": 20}, COMPLETIONS)


@pytest.mark.parametrize("tokens", [63, 64, 65, 95, 96, 97])
async def test_the_recompute_threshold(engines: EngineSet, tokens: int) -> None:
    """Whole blocks of 32: 64 proven tokens are read, 32 are computed."""
    async with router_on(engines) as (router, reports):
        agent = Agent(router, engines, reports)
        prompt = list(range(200, 200 + tokens))
        await agent.ask({"prompt": prompt, "max_tokens": 1}, COMPLETIONS)
        report = (await agent.ask({"prompt": [*prompt, *range(900, 930)], "max_tokens": 20}, COMPLETIONS)).report
        whole = tokens // BLOCK * BLOCK
        if whole >= 64:
            assert (report.route, report.offered, report.cached) == (Route.WARM, whole, whole)
        else:
            assert (report.route, report.reason) == (Route.COLD, Reason.BELOW_THRESHOLD)


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
ALONE: dict[str, dict[str, Any]] = {
    "n=2": {"n": 2, "temperature": 0.8, "seed": 5},
    "echo": {"echo": True, "add_generation_prompt": False},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 100},
    "prompt_logprobs": {"prompt_logprobs": 1},
}


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


@pytest.mark.parametrize("shape", ALONE, ids=str)
async def test_what_cannot_be_proven_goes_to_d_alone_and_says_so(engines: EngineSet, shape: str) -> None:
    answer = await _two_turns(engines, None, ALONE[shape], stream=False)
    assert answer.report.route is Route.LOCAL
    assert answer.report.reason is (Reason.MULTIPLE_CHOICES if shape == "n=2" else Reason.NO_PROOF)


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
