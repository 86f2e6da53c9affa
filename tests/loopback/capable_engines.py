"""Loopback engines that answer as a capable model would: they call a tool when they are asked to, with what the user said."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import served
from anyio.from_thread import start_blocking_portal
from backhaul_loopback import LoopbackPair, loopback_pair, requests
from backhaul_loopback.bodies import ChatBody
from backhaul_loopback.script import Script
from backhaul_loopback.template import Prompt

Json = Any

MODEL = "capable"


@dataclass(frozen=True)
class Cluster:
    """Engines, and a router in front of them, in a thread of their own."""

    pair: LoopbackPair
    router: str
    """Base URL for clients, with `/v1`."""

    @property
    def engines(self) -> dict[str, Any]:
        return {"prefill": [self.pair.prefill.url], "decode": [self.pair.decode.url]}


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Outside of the tests' event loop, so that synchronous tests can wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "chat_script", script)
        patch.setattr(requests, "render_chat", hear(requests.render_chat))
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(_running()) as running:
            yield running


@asynccontextmanager
async def _running() -> AsyncIterator[Cluster]:
    async with loopback_pair(model=MODEL, num_blocks=4096) as pair, served.in_thread(pair) as http:
        yield Cluster(pair, str(http.base_url).rstrip("/") + "/v1")


def script(body: ChatBody) -> Script:
    """What the answer to a request is to be."""
    said = text_of(body.messages[-1]) if body.messages else ""
    tools = {tool["function"]["name"]: tool["function"] for tool in body.tools or ()}
    choice = body.tool_choice
    if isinstance(choice, dict):
        return call(tools[choice["function"]["name"]], said)
    asks = body.messages[-1].get("role") == "user" and choice != "none"
    if tools and (asks or choice == "required"):
        return call(next((tool for name, tool in tools.items() if name in said), next(iter(tools.values()))), said)
    wanted = body.response_format or {}
    if wanted.get("type") == "json_object":
        keys = re.findall(r"'(\w+)'", said)
        return Script(schema={"type": "object", "properties": {key: {"type": "string"} for key in keys}})
    if wanted.get("type") == "json_schema":
        return Script(schema=wanted["json_schema"]["schema"])
    return Script()


def hear(render: Callable[[ChatBody], Prompt]) -> Callable[[ChatBody], Prompt]:
    """Takes audio too, as an image: what a part holds counts, not what it means."""

    def heard(part: Json) -> Json:
        return {**part, "type": "image_url"} if isinstance(part, dict) and part.get("type") == "input_audio" else part

    def render_all(body: ChatBody) -> Prompt:
        contents = [message.get("content") for message in body.messages]
        parts = [[heard(part) for part in content] if isinstance(content, list) else content for content in contents]
        messages = [{**message, "content": c} for message, c in zip(body.messages, parts, strict=True)]
        return render(msgspec.structs.replace(body, messages=messages))

    return render_all


def call(tool: Mapping[str, Json], said: str) -> Script:
    """A call with the numbers and quoted words of what was said, as far as the parameters take them."""
    parameters = tool.get("parameters") or {}
    given = {int: [int(n) for n in re.findall(r"\d+", said)], str: re.findall(r"'([^']+)'", said)}
    fields = {}
    for name, schema in (parameters.get("properties") or {}).items():
        values = given[int if schema.get("type") in ("integer", "number") else str]
        fields[name] = {"const": values.pop(0)} if values else schema
    return Script(tool={"name": tool["name"], "parameters": {**parameters, "properties": fields}})


def text_of(message: Mapping[str, Json]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return " ".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""
