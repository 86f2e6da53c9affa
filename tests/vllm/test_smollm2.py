"""A real chat model in float32: agents' turns, whose answers sometimes tokenise differently when they come back."""

from __future__ import annotations

from typing import Any

import pytest
from backhaul_router.report import Reason, Route
from real_engines import EngineSet, post
from vllm_agents import CHAT, Agent, router_on

BLOCK = 32
QUESTIONS = [
    "List three fruits. Give each its own paragraph, with an empty line between.",
    "Write a short poem about the sea, in two verses.",
    "Now explain in two paragraphs what a cache is.",
    "Thank you. Which of the fruits is the sweetest?",
    "Give me a numbered list of three steps to make tea.",
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_chat_reuses_exactly_what_is_the_same(smollm2_engines: EngineSet, stream: bool) -> None:
    engines = smollm2_engines
    async with router_on(engines) as (router, reports):
        agent = Agent(router, engines, reports)
        history: list[dict[str, Any]] = [{"role": "system", "content": "You are a helpful assistant. " * 8}]
        ran: list[int] = []
        for turn, question in enumerate(QUESTIONS):
            history.append({"role": "user", "content": question})
            rendered = await post(engines.decode[0], f"{CHAT}/render", {"model": engines.model, "messages": history})
            prompt: list[int] = rendered["token_ids"]
            body = {"messages": history, "max_tokens": 70, "stream": stream, "return_token_ids": True}
            answer = await agent.ask(body)
            if turn:
                same = next((i for i, (a, b) in enumerate(zip(ran, prompt, strict=False)) if a != b), len(ran))
                assert answer.report.route is Route.WARM
                assert answer.report.offered == min(same, len(prompt) - 1) // BLOCK * BLOCK
                assert answer.report.cached == answer.report.offered
            else:
                assert answer.report.reason is Reason.FIRST_TURN
            ran = [*prompt, *answer.token_ids][:-1]
            history.append({"role": "assistant", "content": answer.text})
