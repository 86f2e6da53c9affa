"""What an agent framework puts into a call survives it, with an embedded router and with a served one: parameters, headers,
time limits, cancellation, raw responses. What fails is tried again by one of them, not by both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import backhaul
import openai
import pytest
from backhaul import Reason, Route
from backhaul_loopback import CostModel, LoopbackPair, loopback_pair
from served import freed, in_thread
from test_sdk_end_to_end import SYSTEM

pytestmark = pytest.mark.openai

CHAT = "/v1/chat/completions"
HISTORY: list[Any] = [SYSTEM, {"role": "user", "content": "Count."}]
PARAMETERS: dict[str, Any] = {"seed": 7, "presence_penalty": 0.5, "logit_bias": {"9": 1}, "user": "u", "top_p": 0.9}
UNKNOWN: dict[str, Any] = {
    "top_k": 5,
    "chat_template_kwargs": {"enable_thinking": False},
    "vllm_xargs": {"mine": 1},
    "priority": 3,
    "a_field_of_tomorrow": {"b": [1, None]},
}


@asynccontextmanager
async def running(
    where: str, costs: CostModel | None = None, **options: Any
) -> AsyncIterator[tuple[Any, LoopbackPair]]:
    async with loopback_pair(costs=costs or CostModel(), prefill={"prefix_caching": False}) as pair:
        engines: dict[str, Any] = {"prefill": [pair.prefill.url], "decode": [pair.decode.url], "local_max_tokens": 0}
        if where == "embedded":
            async with backhaul.AsyncOpenAI(**engines, **options) as client:
                yield client, pair
        else:
            async with in_thread(pair, local_max_tokens=0) as http:
                at: dict[str, Any] = {"base_url": f"{str(http.base_url).rstrip('/')}/v1", "api_key": "none"}
                async with backhaul.AsyncOpenAI(**at, **options) as client:
                    yield client, pair


@pytest.fixture(params=["embedded", "served"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def ask(client: Any, pair: LoopbackPair, **words: Any) -> Any:
    return await client.chat.completions.create(**{"model": pair.model, "messages": HISTORY, "max_tokens": 8, **words})


async def test_parameters_that_nobody_here_knows_reach_the_engine_as_they_are(where: str) -> None:
    async with running(where) as (client, pair), backhaul.conversation():
        await ask(client, pair, **PARAMETERS, extra_body=UNKNOWN)
        body = pair.decode.requests_to(CHAT)[-1].body
    wanted = {**PARAMETERS, **UNKNOWN}
    assert {name: body.get(name) for name in wanted} == wanted


async def test_trace_headers_reach_both_engines(where: str) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with running(where) as (client, pair):
        await ask(client, pair, extra_headers={"traceparent": trace, "tracestate": "a=b"})
        for engine in (pair.prefill, pair.decode):
            headers = engine.requests_to(CHAT)[-1].headers
            assert (headers["traceparent"], headers["tracestate"]) == (trace, "a=b")


async def test_a_raw_response_has_headers_and_the_engines_own_json(where: str) -> None:
    async with running(where) as (client, pair):
        raw = await client.chat.completions.with_raw_response.create(model=pair.model, messages=HISTORY, max_tokens=8)
        assert raw.headers["x-backhaul-route"] == Route.COLD
        assert raw.retries_taken == 0
        assert raw.parse().choices[0].message.content == raw.http_response.json()["choices"][0]["message"]["content"]


async def test_a_streaming_response_is_the_engines_own_events(where: str) -> None:
    async with running(where) as (client, pair):
        async with client.chat.completions.with_streaming_response.create(
            model=pair.model, messages=HISTORY, max_tokens=8, stream=True
        ) as response:
            lines = [line async for line in response.iter_lines() if line]
    assert all(line.startswith("data: {") for line in lines[:-1])
    assert lines[-1] == "data: [DONE]"


async def test_a_call_that_takes_longer_than_its_time_limit_ends_on_the_engine(where: str) -> None:
    async with running(where, CostModel(decode_s=0.05), max_retries=0) as (client, pair):
        await client.models.list()
        began = time.monotonic()
        with pytest.raises(openai.APITimeoutError):
            await ask(client, pair, max_tokens=4000, extra_body={"ignore_eos": True}, timeout=0.3)
        assert time.monotonic() - began < 10
        await freed(pair)


async def test_a_cancelled_call_ends_on_the_engine(where: str) -> None:
    async with running(where, CostModel(decode_s=0.05)) as (client, pair):
        await client.models.list()
        call = asyncio.create_task(ask(client, pair, max_tokens=4000, extra_body={"ignore_eos": True}))
        while not pair.decode.requests_to(CHAT):
            await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await freed(pair)


async def test_what_the_router_tries_again_is_one_call_and_one_turn(where: str) -> None:
    async with running(where) as (client, pair), backhaul.conversation() as chat:
        said = list(HISTORY)
        for number in range(3):
            pair.prefill.faults.fail_kv_loads = 1 if number == 2 else 0
            raw = await client.chat.completions.with_raw_response.create(model=pair.model, messages=said, max_tokens=8)
            assert raw.retries_taken == 0
            said += [raw.parse().choices[0].message, {"role": "user", "content": "And on. " * 40}]
    assert [(turn.turn, turn.retries, turn.reason) for turn in chat.reuse.turns] == [
        (1, 0, Reason.FIRST_TURN),
        (2, 0, None),
        (3, 1, Reason.READ_FAILED),
    ]


async def test_what_the_router_has_given_up_the_client_does_not_try_again(where: str) -> None:
    async with running(where) as (client, pair), backhaul.conversation() as chat:
        await client.models.list()
        assert client.max_retries == 2
        pair.prefill.faults.drop = True
        with pytest.raises(openai.InternalServerError):
            await ask(client, pair)
    assert len(pair.prefill.requests_to(CHAT)) == 1
    assert [turn.status for turn in chat.reuse.turns] == [502]


async def test_an_engines_refusal_is_the_clients_exception(where: str) -> None:
    async with running(where) as (client, pair):
        with pytest.raises(openai.BadRequestError, match="temperature must be non-negative") as caught:
            await ask(client, pair, temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await ask(client, pair, model="another")
