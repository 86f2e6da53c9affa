"""An agent's side of the real-engine tests: turns through a router, each compared with a reference: the client's own body
sent straight to the decode engine, under a cache salt of its own. No decode engine is ever given another one's handle,
and under a fresh salt nothing that anyone computed before can serve the answer."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from backhaul_router.config import RouterConfig
from backhaul_router.report import ReuseReport
from backhaul_router.router import Request, Router
from real_engines import EngineSet, direct, direct_stream, metrics, wait_for_baseline

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
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
        message = {key: value for key, value in self.choice["message"].items() if value}
        return {"content": "", **message}

    @property
    def token_ids(self) -> list[int]:
        """The generated ids, where the request asked for them."""
        if self.choices and "token_ids" in self.choice:
            return list(self.choice["token_ids"])
        return [i for chunk in events(self.raw) for c in chunk["choices"] for i in c.get("token_ids") or []]

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
                answer.choices, answer.usage = assemble(events(raw))
            else:
                parsed = json.loads(raw)
                answer.choices, answer.usage = parsed["choices"], parsed["usage"]
            if check:
                expected = await reference_choices(self.engines.decode[0], path, body)
                if comparable(answer.choices) != comparable(expected):
                    assert await is_near_tie(self.engines.decode[0], path, body, answer.choices, expected)
        return answer

    async def _engine_ids(self) -> list[bytes]:
        return [value.encode() for value in self.router.fleet._engine_ids.values()]


async def reference_choices(url: str, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the client's own body gives on an engine without any help."""
    if body.get("stream"):
        return assemble(await direct_stream(url, path, body))[0]
    choices: list[dict[str, Any]] = (await direct(url, path, body))["choices"]
    return choices


NEAR_TIE = 1e-4
"""Difference of two log probabilities that float32 does not tell apart when a prompt is computed in other pieces."""


async def is_near_tie(
    url: str, path: str, body: Mapping[str, Any], ours: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> bool:
    """Whether two answers part at a token for which the reference has another one as good as equal: there the order of
    additions decides, and either is right. With wrong KV they part where one token is clearly the best."""
    if len(ours) != 1 or len(expected) != 1:
        return False
    texts = [str(c["message"].get("content") if "message" in c else c["text"]) for c in (ours[0], expected[0])]
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    asked = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    asked |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    logprobs = (await direct(url, path, asked))["choices"][0]["logprobs"]
    if path == CHAT:
        tokens = [(e["token"], [top["logprob"] for top in e["top_logprobs"]]) for e in logprobs["content"]]
    else:
        tokens = [
            (t, list(tops.values())) for t, tops in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
        ]
    said, unsure = 0, 16  # in characters: the parts of one character count as one each here
    for token, best in tokens:
        first, second = sorted(best, reverse=True)[:2]
        if abs(said - same) <= unsure and first - second < NEAR_TIE:
            return True
        said += len(token)
        unsure += token.count("\ufffd")
    return False


def events(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of a stream's events; the last one must be `[DONE]`."""
    *data, done, rest = raw.decode().split("\n\n")
    assert done == "data: [DONE]"
    assert rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in data]


def assemble(chunks: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Choices and usage of a whole stream, in the shape of an answer that is not streamed."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        assert "error" not in chunk, chunk
        usage = chunk.get("usage") or usage
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"index": piece["index"], "parts": []})
            choice["finish_reason"] = piece.get("finish_reason") or choice.get("finish_reason")
            if "text" in piece:
                choice["text"] = choice.get("text", "") + piece["text"]
                continue
            message = choice.setdefault("message", {"role": "assistant", "content": ""})
            message["content"] += piece["delta"].get("content") or ""
            for call in piece["delta"].get("tool_calls") or []:
                calls = message.setdefault("tool_calls", [])
                while len(calls) <= call["index"]:
                    calls.append({"name": "", "arguments": ""})
                for key in ("name", "arguments"):
                    calls[call["index"]][key] += call.get("function", {}).get(key) or ""
    for choice in choices.values():
        del choice["parts"]
    return [choices[index] for index in sorted(choices)], usage


def comparable(value: Any) -> Any:
    """An answer without what differs between any two runs: random ids, and logprobs beyond four digits."""
    if isinstance(value, Mapping):
        skip = {"id", "created", "logprobs_token_offset"}
        return {key: comparable(item) for key, item in value.items() if key not in skip}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


@asynccontextmanager
async def router_on(engines: EngineSet, **settings: Any) -> AsyncIterator[tuple[Router, list[ReuseReport]]]:
    """A router over a set of engines. When it is gone, so is everything that the engines held for it."""
    reports: list[ReuseReport] = []
    config = RouterConfig(**{"prefill": engines.prefill, "decode": engines.decode, "local_max_tokens": 0, **settings})
    router = Router(config, on_report=reports.append)
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
