"""An agent's turns over real engines: what P reads back from D, and that the answers are those of a plain engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from backhaul_router.drive.router import Request
from backhaul_router.report import Proof, Reason, Route
from real_engines import EngineSet
from vllm_agents import COMPLETIONS, Agent, pulled_bytes, pulled_tokens, router_on

STORY = "The cache keeps the keys and values of every token that the engine has run, block by block. "
KV_BYTES_PER_TOKEN = 4 * 2 * 64 * 2 * 4
"""The tiny model: 4 layers, 2 KV heads of 64 values, keys and values, in float32."""
BLOCK = 32


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_five_turns_are_warm_from_the_second_and_exact(engines: EngineSet, stream: bool) -> None:
    async with router_on(engines) as (router, reports):
        agent = Agent(router, engines, reports)
        messages: list[dict[str, Any]] = [{"role": "system", "content": STORY * 6}]
        for turn in range(5):
            messages.append({"role": "user", "content": f"Question {turn}: {STORY}"})
            before = await pulled_bytes(engines.prefill[0])
            answer = await agent.ask({"messages": messages, "max_tokens": 40, "stream": stream})
            report = answer.report
            assert report.turn == turn + 1
            if turn == 0:
                assert (report.route, report.reason) == (Route.COLD, Reason.FIRST_TURN)
            else:
                assert (report.route, report.reason, report.proof) == (Route.WARM, None, Proof.TOKENS)
                assert report.offered > 0
                assert report.cached == report.offered
                pulled = await pulled_tokens(engines.prefill[0], before, KV_BYTES_PER_TOKEN, report.offered)
                assert abs(pulled - report.offered) <= BLOCK
            messages.append(answer.message)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_on_a_prefix_caching_p_the_answer_is_read_back_too(
    engines_prefix_caching: EngineSet, stream: bool
) -> None:
    engines = engines_prefix_caching
    async with router_on(engines) as (router, reports):
        agent = Agent(router, engines, reports)
        prompt = list(range(100 + stream, 500 + stream))
        last = 0
        for turn in range(5):
            body = {"prompt": prompt, "max_tokens": 130, "ignore_eos": True, "return_token_ids": True, "stream": stream}
            before = await pulled_bytes(engines.prefill[0])
            answer = await agent.ask(body, COMPLETIONS)
            report = answer.report
            if turn:
                assert report.route is Route.WARM
                assert report.diverged_at is None
                history = last + 130 - 1
                assert report.offered == history // BLOCK * BLOCK
                assert report.cached == report.offered
                missing = report.offered - last // BLOCK * BLOCK
                pulled = await pulled_tokens(engines.prefill[0], before, KV_BYTES_PER_TOKEN, missing - BLOCK)
                assert abs(pulled - missing) <= BLOCK
            last = len(prompt)
            ids = answer.token_ids
            assert len(ids) == 130
            prompt = [*prompt, *ids, *range(700 + turn, 740 + turn)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_local_turns_are_exact_and_keep_the_handle_for_later(engines: EngineSet, stream: bool) -> None:
    async with router_on(engines) as (router, reports):
        agent = Agent(router, engines, reports)
        messages: list[dict[str, Any]] = [{"role": "system", "content": STORY * 6}]
        routes = (None, Route.LOCAL, Route.LOCAL, Route.LOCAL, None)
        for turn, route in enumerate(routes):
            messages.append({"role": "user", "content": f"Question {turn}: {STORY}"})
            answer = await agent.ask({"messages": messages, "max_tokens": 40, "stream": stream}, route=route)
            report = answer.report
            if route is Route.LOCAL:
                assert (report.route, report.proof) == (Route.LOCAL, Proof.ENGINE)
                assert report.cached
                assert report.prefill_engine is None
            elif turn:
                assert (report.route, report.reason) == (Route.WARM, None)
                assert report.offered > 0
            messages.append(answer.message)


async def test_a_short_suffix_runs_local_by_the_default_threshold(engines: EngineSet) -> None:
    async with router_on(engines, local_max_tokens=64) as (router, reports):
        agent = Agent(router, engines, reports)
        prompt = list(range(100, 500))
        answer = await agent.ask({"prompt": prompt, "max_tokens": 40, "return_token_ids": True}, COMPLETIONS)
        prompt += [*answer.choice["token_ids"], 7, 8, 9]
        answer = await agent.ask({"prompt": prompt, "max_tokens": 40}, COMPLETIONS)
        assert answer.report.route is Route.LOCAL
        assert answer.report.computed is not None
        assert answer.report.computed <= 64
        answer = await agent.ask({"prompt": [*prompt, *range(900, 1000)], "max_tokens": 8}, COMPLETIONS)
        assert answer.report.route is Route.WARM


async def test_without_a_conversation_every_turn_is_cold_and_nothing_stays(engines: EngineSet) -> None:
    async with router_on(engines, match_history=False) as (router, reports):
        agent = Agent(router, engines, reports, conversation=None)
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 20, "stream": stream}
            answer = await agent.ask(body)
            assert (answer.report.route, answer.report.reason) == (Route.COLD, Reason.NO_CONVERSATION)
            assert not router.ledger.handles()


async def test_a_client_that_leaves_aborts_the_engines(engines: EngineSet) -> None:
    async with router_on(engines) as (router, reports):
        body = {
            "model": engines.model,
            "messages": [{"role": "user", "content": STORY}],
            "max_tokens": 4000,
            "ignore_eos": True,
            "stream": True,
        }
        reply = await router.handle(
            Request("POST", "/v1/chat/completions", [("x-conversation-id", "leaver")], json.dumps(body).encode())
        )
        async for _ in reply:
            break
        await reply.aclose()
        assert reports[-1].error == "client_gone"
