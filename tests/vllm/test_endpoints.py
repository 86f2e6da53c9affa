"""Anthropic's and OpenAI's newer API over real engines: warm turns, equal to the engine's own answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

import pytest
from backhaul_router.drive.router import Request
from backhaul_router.report import Proof, Reason, ReuseReport, Route
from real_engines import EngineSet, client, salted
from vllm_agents import SECRETS, router_on

STORY = "The cache keeps the keys and values of every token that the engine has run, block by block. "
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def body(path: str, model: str, history: list[dict[str, Any]]) -> dict[str, Any]:
    said = (
        {"messages": history, "system": STORY * 5, "max_tokens": 24}
        if path == MESSAGES
        else {"input": history, "instructions": STORY * 5, "max_output_tokens": 24}
    )
    return {"model": model, "temperature": 0, "stream": True, **said}


def told(path: str, raw: str) -> tuple[str, Mapping[str, Any]]:
    """The text of a stream, and its last event but for `message_stop`."""
    events = [json.loads(event.split("data: ", 1)[1]) for event in raw.split("\n\n") if event]
    kind = "content_block_delta" if path == MESSAGES else "response.output_text.delta"
    deltas = [event["delta"] for event in events if event["type"] == kind]
    # 24 tokens cut an answer off: up to 0.32 the event said `completed` even so.
    ends = {"message_stop"} if path == MESSAGES else {"response.completed", "response.incomplete"}
    assert events[-1]["type"] in ends
    text = "".join(delta["text"] if path == MESSAGES else delta for delta in deltas)
    return text, events[-2 if path == MESSAGES else -1]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_three_turns_are_warm_from_the_second_and_exact(connector_engines: EngineSet, path: str) -> None:
    for report, usage in await conversation(connector_engines, path):
        assert (report.route, report.reason, report.proof) == (Route.WARM, None, Proof.CONNECTOR)
        assert report.pulled == cached(path, usage)
        assert report.pulled
        assert usage["backhaul"]["route"] == "warm"


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_on_stock_engines_the_tokens_prove_it(engines: EngineSet, path: str) -> None:
    for report, usage in await conversation(engines, path):
        assert (report.route, report.reason, report.proof) == (Route.WARM, None, Proof.TOKENS)
        assert report.offered == report.cached == cached(path, usage)


def cached(path: str, usage: Mapping[str, Any]) -> int:
    found: int = (
        usage["cache_read_input_tokens"] if path == MESSAGES else usage["input_tokens_details"]["cached_tokens"]
    )
    return found


async def conversation(engines: EngineSet, path: str) -> list[tuple[ReuseReport, Mapping[str, Any]]]:
    """Three streamed turns, each answered as the engine answers the same body: reports and usage from the second on."""
    history: list[dict[str, Any]] = []
    found = []
    async with router_on(engines) as (router, reports), client() as http:
        headers = [("X-Conversation-ID", uuid.uuid4().hex)]
        for turn in range(3):
            history.append({"role": "user", "content": f"Question {turn}: {STORY}"})
            asked = body(path, engines.model, history)
            reply = await router.handle(Request("POST", path, headers, json.dumps(asked).encode()))
            raw = b"".join([chunk async for chunk in reply])
            assert reply.status == 200, raw.decode()
            assert not [secret for secret in SECRETS if secret in raw]
            text, last = told(path, raw.decode())
            expected = await http.post(engines.decode[0] + path, json=salted(asked))
            assert text == told(path, expected.text)[0]
            history.append({"role": "assistant", "content": text})
            found.append((reports[-1], last["usage"] if path == MESSAGES else last["response"]["usage"]))
    assert (found[0][0].route, found[0][0].reason) == (Route.COLD, Reason.FIRST_TURN)
    return found[1:]
