"""An agent's side of the real-engine tests: turns through a router, each compared with a reference: the client's own body
sent straight to the decode engine, under a cache salt of its own. No decode engine is ever given another one's handle,
and under a fresh salt nothing that anyone computed before can serve the answer."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from backhaul_bench import answers
from backhaul_bench.answers import CHAT, COMPLETIONS
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Request, Router
from backhaul_router.report import ReuseReport
from real_engines import EngineSet, direct, direct_stream, metrics, wait_for_baseline

__all__ = ["CHAT", "COMPLETIONS", "Agent", "Answer", "pulled_bytes", "pulled_tokens", "router_on"]

SECRETS = (
    b"kv_transfer_params",
    b"remote_engine_id",
    b"remote_block_ids",
    b"remote_request_id",
    b"remote_port",
    b"remote_host",
)


@dataclass
class Answer:
    """One turn's answer, however it came."""

    status: int
    raw: bytes
    report: ReuseReport
    choices: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None

    @property
    def choice(self) -> dict[str, Any]:
        (choice,) = self.choices
        return choice

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message as an agent would put it back into its history."""
        return answers.message(self.choice)

    @property
    def token_ids(self) -> list[int]:
        """The generated ids, where the request asked for them."""
        return list(self.choice["token_ids"])

    @property
    def text(self) -> str:
        return str(self.choice["message"].get("content") if "message" in self.choice else self.choice["text"])


@dataclass
class Agent:
    """Runs the turns of one conversation, and checks what must hold for every one of them."""

    router: Router
    engines: EngineSet
    reports: list[ReuseReport]
    conversation: str | None = field(default_factory=lambda: uuid.uuid4().hex)

    async def ask(
        self, body: Mapping[str, Any], path: str = CHAT, *, check: bool = True, route: Any = None, status: int = 200
    ) -> Answer:
        """One turn. Its answer must equal the reference, and hold nothing of a handle."""
        body = {"model": self.engines.model, "temperature": 0, **body}
        headers = [("X-Conversation-ID", self.conversation)] if self.conversation else []
        before = len(self.reports)
        reply = await self.router.handle(Request("POST", path, headers, json.dumps(body).encode(), route=route))
        raw = b"".join([chunk async for chunk in reply])
        assert reply.status == status, raw.decode()
        assert len(self.reports) == before + 1
        sent_and_said = raw + repr(reply.headers).encode()
        for secret in (*SECRETS, *await self._engine_ids()):
            assert secret not in sent_and_said
        answer = Answer(reply.status, raw, self.reports[-1])
        if status == 200:
            if body.get("stream"):
                chunks = answers.events(raw)
                answer.choices = answers.assemble(chunks)
                answer.usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
            else:
                parsed = json.loads(raw)
                answer.choices, answer.usage = parsed["choices"], parsed["usage"]
            if check:
                url = self.engines.decode[0]
                expected = await reference_choices(url, path, body)
                if answers.comparable(answer.choices) != answers.comparable(expected):
                    assert await answers.near_tie(partial(direct, url), path, body, answer.choices, expected)
        return answer

    async def _engine_ids(self) -> list[bytes]:
        return [value.encode() for value in self.router.fleet.restarts._engine_ids.values()]


async def reference_choices(url: str, path: str, body: Mapping[str, Any]) -> answers.Choices:
    """What the client's own body gives on an engine without any help."""
    if body.get("stream"):
        return answers.assemble(await direct_stream(url, path, body))
    choices: answers.Choices = (await direct(url, path, body))["choices"]
    return choices


@asynccontextmanager
async def router_on(engines: EngineSet, **settings: Any) -> AsyncIterator[tuple[Router, list[ReuseReport]]]:
    """A router over a set of engines. When it is gone, so is everything that the engines held for it."""
    reports: list[ReuseReport] = []
    given = {"prefill": engines.prefill, "decode": engines.decode, "local_max_tokens": 0, "place_by_cost": False}
    router = Router(RouterConfig(**{**given, **settings}), on_report=reports.append, seed=0)
    try:
        yield router, reports
    finally:
        await router.aclose()
    for url in (*engines.prefill, *engines.decode):
        await wait_for_baseline(url)


async def pulled_bytes(url: str) -> float:
    """Bytes that an engine says it has read from others."""
    return (await metrics(url)).total("vllm:nixl_bytes_transferred_sum")


async def pulled_tokens(url: str, since: float, bytes_per_token: int, expected: int) -> float:
    """Tokens whose KV an engine has read since it had read `since` bytes. An engine renews the number when it steps, so this
    waits for `expected` tokens to show, and then for more than expected."""
    deadline = time.monotonic() + 15.0
    while time.monotonic() < deadline and (await pulled_bytes(url) - since) / bytes_per_token < expected:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    return (await pulled_bytes(url) - since) / bytes_per_token
