"""The SDK on a router that asks for keys: its own reports, its own conversations, and an error that openai's clients know."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import backhaul
import httpx2
import openai
import pytest
from backhaul._remote import follow
from backhaul_loopback import LoopbackPair, loopback_pair
from backhaul_router.report import Route
from backhaul_router.serve.tenants import Tenants
from served import freed, in_thread

pytestmark = pytest.mark.openai

ALICE, BOB = "alice-0123456789", "bob-0123456789abc"
TENANTS = Tenants.from_mapping({"alice": [ALICE], "bob": [BOB]})
STORY = "The cache keeps the keys and values of every token that the engine ran, block by block. " * 8


@pytest.fixture
async def pair() -> AsyncIterator[LoopbackPair]:
    async with loopback_pair() as pair:
        yield pair


async def talk(client: Any, pair: LoopbackPair) -> None:
    messages: list[Any] = [{"role": "user", "content": STORY}]
    for _ in range(2):
        answer = await client.chat.completions.create(model=pair.model, messages=messages, max_tokens=16)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": "Go on. " + STORY},
        ]


async def test_a_client_with_a_key_gets_its_reports_and_ends_its_conversation(pair: LoopbackPair) -> None:
    async with in_thread(pair, tenants=TENANTS, local_max_tokens=0) as http:
        for name, key in (("alice", ALICE), ("bob", BOB)):
            async with backhaul.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key=key) as client:
                async with backhaul.conversation("c") as chat:
                    await talk(client, pair)
                    assert [report.route for report in chat.reuse.turns] == [Route.COLD, Route.WARM]
                    assert [report.tenant for report in chat.reuse.turns] == [name, name]
                    assert chat.reuse.last is not None
                    assert chat.reuse.last.total_ms > 0
            await freed(pair)


async def test_a_client_without_a_key_of_the_routers_is_told(pair: LoopbackPair) -> None:
    async with in_thread(pair, tenants=TENANTS) as http:
        async with backhaul.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="nobody") as client:
            with pytest.raises(openai.AuthenticationError, match="no valid API key") as error:
                await talk(client, pair)
    assert error.value.code == "invalid_api_key"


async def test_a_client_that_sends_its_key_as_anthropics_do_has_reports_too(pair: LoopbackPair) -> None:
    asked = {"model": pair.model, "messages": [{"role": "user", "content": STORY}], "max_tokens": 8}
    async with in_thread(pair, tenants=TENANTS) as http:
        async with httpx2.AsyncClient(base_url=http.base_url, headers={"x-api-key": ALICE}) as client:
            follow(client)
            async with backhaul.conversation("c") as chat:
                answer = await client.post("/v1/messages", json=asked, headers={"X-Conversation-ID": "c"})
                assert answer.status_code == 200
                assert chat.reuse.last is not None
                assert chat.reuse.last.tenant == "alice"
        await freed(pair)
