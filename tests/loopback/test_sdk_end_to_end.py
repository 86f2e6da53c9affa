"""The SDK end to end: drop-in clients on an embedded router over loopback engines, whose answers tell a wrong reuse."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from collections.abc import AsyncIterator
from typing import Any

import backhaul
import httpx
import openai
import pytest
from backhaul import ConfigError, Reason, Route
from backhaul_loopback import CostModel, LoopbackEngine, LoopbackPair, loopback_pair
from pydantic import BaseModel

pytestmark = pytest.mark.openai

SYSTEM = {"role": "system", "content": "You are a patient agent that answers at length. " * 8}
QUESTIONS = ["Who are you?", "What did I ask before this question?", "And what comes after it, in your opinion?"]
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
async def pair() -> AsyncIterator[LoopbackPair]:
    async with loopback_pair() as pair:
        yield pair


@pytest.fixture
async def reference(pair: LoopbackPair) -> AsyncIterator[openai.AsyncOpenAI]:
    """Stock openai on one engine of the same model: what every answer is held against."""
    async with (
        LoopbackEngine("decode") as engine,
        openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none") as client,
    ):
        yield client


def engines(pair: LoopbackPair, **settings: Any) -> dict[str, Any]:
    return {"prefill": [pair.prefill.url], "decode": [pair.decode.url], **settings}


async def talk(client: openai.AsyncOpenAI, model: str, *, stream: bool = False) -> list[str]:
    """A conversation of three turns; returns the answers."""
    history: list[Any] = [SYSTEM]
    answers = []
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        answer: Any = await client.chat.completions.create(model=model, messages=history, max_tokens=32, stream=stream)
        answers.append(
            "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
            if stream
            else answer.choices[0].message.content
        )
        history.append({"role": "assistant", "content": answers[-1]})
    return answers


def talk_sync(client: openai.OpenAI, model: str, *, stream: bool = False) -> list[str]:
    history: list[Any] = [SYSTEM]
    answers = []
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        answer: Any = client.chat.completions.create(model=model, messages=history, max_tokens=32, stream=stream)
        answers.append(
            "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            if stream
            else answer.choices[0].message.content
        )
        history.append({"role": "assistant", "content": answers[-1]})
    return answers


async def freed(pair: LoopbackPair) -> None:
    """Returns when the decode engine holds nothing any more. P passes a release on after it has answered."""
    async with asyncio.timeout(10):
        while pair.decode.pinned_blocks:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_agent_gets_the_answers_of_one_engine_and_its_history_is_read_back(
    pair: LoopbackPair, reference: openai.AsyncOpenAI, stream: bool
) -> None:
    expected = await talk(reference, pair.model)
    async with backhaul.AsyncOpenAI(**engines(pair, local_max_tokens=0)) as client:
        async with backhaul.conversation() as chat:
            assert await talk(client, pair.model, stream=stream) == expected
            assert pair.decode.pinned_blocks > 0
        await freed(pair)
    assert [turn.route for turn in chat.reuse.turns] == [Route.COLD, Route.WARM, Route.WARM]
    total = chat.reuse.total
    assert (total.turns, total.reasons) == (3, {Reason.FIRST_TURN: 1})
    assert total.offered > 0
    assert total.hit_rate is not None
    assert total.hit_rate > 0.5


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_synchronous_agent_gets_the_same(
    pair: LoopbackPair, reference: openai.AsyncOpenAI, stream: bool
) -> None:
    def agent() -> tuple[list[str], backhaul.Conversation]:
        with backhaul.OpenAI(**engines(pair, local_max_tokens=0)) as client, backhaul.conversation() as chat:
            return talk_sync(client, pair.model, stream=stream), chat

    answers, chat = await asyncio.to_thread(agent)
    assert answers == await talk(reference, pair.model)
    assert [turn.route for turn in chat.reuse.turns] == [Route.COLD, Route.WARM, Route.WARM]
    await freed(pair)


async def test_agents_side_by_side_keep_to_their_own_conversations(
    pair: LoopbackPair, reference: openai.AsyncOpenAI
) -> None:
    expected = await talk(reference, pair.model)
    async with backhaul.AsyncOpenAI(**engines(pair)) as client:

        async def agent() -> backhaul.ReuseTotal:
            async with backhaul.conversation() as chat:
                assert await talk(client, pair.model, stream=True) == expected
            return chat.reuse.total

        totals = await asyncio.gather(*(agent() for _ in range(6)))
    assert [total.turns for total in totals] == [3] * 6
    assert all(total.reasons == {Reason.FIRST_TURN: 1} for total in totals)
    await freed(pair)


async def test_a_bound_client_reuses_without_a_scope(pair: LoopbackPair) -> None:
    async with backhaul.AsyncOpenAI(**engines(pair)) as client:
        async with client.for_conversation("ticket-17") as bound:
            await talk(bound, pair.model)
        await freed(pair)
        assert bound.reuse.total.turns == 3
        assert bound.reuse.last is not None
        assert bound.reuse.last.conversation == "ticket-17"


async def test_a_stream_left_early_is_aborted_on_the_engine() -> None:
    async with loopback_pair(costs=CostModel(decode_s=0.05)) as pair:
        async with backhaul.AsyncOpenAI(**engines(pair)) as client, backhaul.conversation() as chat:
            history: list[Any] = [SYSTEM, {"role": "user", "content": "Count."}]
            async with await client.chat.completions.create(
                model=pair.model, messages=history, max_tokens=4000, stream=True
            ) as stream:
                await anext(stream)
            assert chat.reuse.last is not None
            assert chat.reuse.last.error == "client_gone"
        await freed(pair)


async def test_a_cancelled_agent_leaves_nothing_pinned(pair: LoopbackPair) -> None:
    talked = asyncio.Event()

    async def agent(client: backhaul.AsyncOpenAI) -> None:
        async with backhaul.conversation():
            await talk(client, pair.model)
            talked.set()
            await asyncio.Event().wait()

    async with backhaul.AsyncOpenAI(**engines(pair)) as client:
        task = asyncio.create_task(agent(client))
        await talked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await freed(pair)


async def test_closing_the_client_releases_what_no_scope_did(pair: LoopbackPair) -> None:
    async with backhaul.AsyncOpenAI(**engines(pair)) as client:
        await talk(client.with_options(default_headers={"X-Conversation-ID": "c1"}), pair.model)
        assert pair.decode.pinned_blocks > 0
    await freed(pair)


@pytest.mark.parametrize("kind", ["OpenAI", "AsyncOpenAI"])
async def test_a_process_that_just_ends_leaves_nothing_pinned(pair: LoopbackPair, kind: str) -> None:
    """The client is neither closed nor the conversation left: the interpreter's exit releases, over names too."""
    here = os.path.dirname(__file__)
    urls = [url.replace("127.0.0.1", "localhost") for url in (pair.prefill.url, pair.decode.url)]
    code = textwrap.dedent(f"""
        import asyncio, sys
        sys.path.insert(0, {here!r})
        import backhaul
        from test_sdk_end_to_end import talk, talk_sync
        client = backhaul.{kind}(prefill=[{urls[0]!r}], decode=[{urls[1]!r}])
        chat = backhaul.conversation("c1").__enter__()
        asyncio.run(talk(client, "loopback")) if {kind == "AsyncOpenAI"} else talk_sync(client, "loopback")
        print("held", chat.reuse.last.handle_remaining_s is not None)
    """)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"held True\n", b"")
    await freed(pair)


async def test_tool_calls_run_through(pair: LoopbackPair, reference: openai.AsyncOpenAI) -> None:
    async def agent(client: openai.AsyncOpenAI) -> list[Any]:
        history: list[Any] = [SYSTEM, {"role": "user", "content": "Look around."}]
        first = await client.chat.completions.create(model=pair.model, messages=history, tools=[TOOL])
        [call] = first.choices[0].message.tool_calls or []
        history += [
            first.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "a table"},
        ]
        second = await client.chat.completions.create(model=pair.model, messages=history, tools=[TOOL])
        return [first.choices[0].finish_reason, call.function.name, second.choices[0].message.content]

    expected = await agent(reference)
    assert expected[:2] == ["tool_calls", "look"]
    async with backhaul.AsyncOpenAI(**engines(pair)) as client, backhaul.conversation():
        assert await agent(client) == expected


class Anything(BaseModel):
    name: str


async def test_structured_output_several_choices_and_logprobs_run_through(pair: LoopbackPair) -> None:
    messages: list[Any] = [SYSTEM, {"role": "user", "content": "Hi."}]
    async with backhaul.AsyncOpenAI(**engines(pair)) as client, backhaul.conversation() as chat:
        parsed = await client.chat.completions.parse(model=pair.model, messages=messages, response_format=Anything)
        assert isinstance(parsed.choices[0].message.parsed, Anything)
        several = await client.chat.completions.create(
            model=pair.model, messages=messages, n=2, logprobs=True, max_tokens=4
        )
        assert [choice.index for choice in several.choices] == [0, 1]
        assert all(choice.logprobs and choice.logprobs.content for choice in several.choices)
    assert chat.reuse.last is not None
    assert chat.reuse.last.reason is Reason.MULTIPLE_CHOICES


async def test_a_stock_openai_client_runs_on_an_http_client_of_ours(
    pair: LoopbackPair, reference: openai.AsyncOpenAI
) -> None:
    http_client = backhaul.async_http_client(**engines(pair, local_max_tokens=0), module=httpx)
    async with openai.AsyncOpenAI(api_key="none", http_client=http_client) as client, backhaul.conversation() as chat:
        assert await talk(client, pair.model) == await talk(reference, pair.model)
    assert chat.reuse.total.routes == {Route.COLD: 1, Route.WARM: 2}


async def test_the_clients_timeout_reaches_a_silent_engine(pair: LoopbackPair) -> None:
    async with backhaul.AsyncOpenAI(**engines(pair), max_retries=0) as client, backhaul.conversation() as chat:
        await client.models.list()
        pair.decode.faults.stall = True
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(
                model=pair.model, messages=[{"role": "user", "content": "Hi."}], timeout=0.5
            )
    assert chat.reuse.last is not None
    assert chat.reuse.last.error == "client_gone"


async def test_engines_that_cannot_be_reached_are_named_at_the_first_call(pair: LoopbackPair) -> None:
    await pair.decode.stop()
    async with backhaul.AsyncOpenAI(**engines(pair)) as client:
        with pytest.raises(ConfigError, match=f"no decode engine answers: decode engine {pair.decode.url}"):
            await talk(client, pair.model)
