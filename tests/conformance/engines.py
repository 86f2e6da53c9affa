"""One P and one D as the checks see them: two URLs, a model name, and how to talk to them."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

Json = Any

PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}
SETTLE_S = 20.0
"""vLLM renews its gauges when its engine core steps, so what a request changed shows with some delay."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Json:
        return json.loads(self.text)

    @property
    def error(self) -> Json:
        return self.json["error"]

    @property
    def handle(self) -> dict[str, Json]:
        return self.json["kv_transfer_params"]

    @property
    def choice(self) -> Json:
        return self.json["choices"][0]

    @property
    def usage(self) -> Json:
        return self.json["usage"]

    @property
    def cached(self) -> int:
        """Prompt tokens that the engine did not compute."""
        return self.usage["prompt_tokens_details"]["cached_tokens"]

    @property
    def events(self) -> list[Json]:
        """A stream's events, the closing `[DONE]` left out after checking that it is there."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]", self.text
        return [json.loads(line) for line in lines[:-1]]


@dataclass
class Engines:
    prefill_url: str
    decode_url: str
    model: str
    salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Given with every request, so that no prefix cache knows anything of another check, however wrong its KV."""
    speaks_033: bool = False
    """Whether the engines are of vLLM 0.33: where releases differ, each is held to its own way."""
    _http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
        major, minor, *_ = (await self.get(f"{self.decode_url}/version")).json["version"].split(".")
        self.speaks_033 = (int(major), int(minor)) >= (0, 33)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.http.close()

    @property
    def http(self) -> aiohttp.ClientSession:
        assert self._http is not None
        return self._http

    async def get(self, url: str) -> Answer:
        async with self.http.get(url) as response:
            return Answer(response.status, _lower(response.headers), await response.text())

    async def post(self, url: str, body: Json, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        async with self.http.post(url, data=data, headers=sent) as response:
            return Answer(response.status, _lower(response.headers), await response.text())

    async def chat(self, url: str, messages: Json, **fields: Json) -> Answer:
        return await self.post(f"{url}/v1/chat/completions", self.body(messages=messages, **fields))

    async def complete(self, url: str, prompt: Json, **fields: Json) -> Answer:
        return await self.post(f"{url}/v1/completions", self.body(prompt=prompt, **fields))

    def body(self, **fields: Json) -> dict[str, Json]:
        given = {"model": self.model, "temperature": 0, "cache_salt": self.salt, **fields}
        return {name: value for name, value in given.items() if value is not None}

    @asynccontextmanager
    async def open_stream(self, url: str, body: Json) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self.http.post(url, json=body) as response:
            yield response

    # -- the legs of a turn, as a router runs them -----------------------------------------------------------

    async def prefill(self, prompt: Sequence[int], handle: Json = None, **fields: Json) -> Answer:
        """P's leg for a prompt of token ids; with D's handle of the turn before, P reads from D."""
        answer = await self.complete(
            self.prefill_url, list(prompt), max_tokens=1, kv_transfer_params=handle or PREFILL_PARAMS, **fields
        )
        assert answer.status == 200, answer.text
        return answer

    async def decode(self, prompt: Sequence[int], handle: Json, *, max_tokens: int = 24, **fields: Json) -> Answer:
        """D's leg. `ignore_eos`, so that how long the answer gets does not depend on the model."""
        fields = {"ignore_eos": True, "return_token_ids": True, **fields}
        answer = await self.complete(
            self.decode_url, list(prompt), max_tokens=max_tokens, kv_transfer_params=handle, **fields
        )
        assert answer.status == 200, answer.text
        return answer

    async def turn(self, prompt: Sequence[int], handle: Json = None, **fields: Json) -> Answer:
        return await self.decode(prompt, (await self.prefill(prompt, handle)).handle, **fields)

    async def turn_and_release(self, prompt: Sequence[int]) -> None:
        await self.release((await self.turn(prompt)).handle)

    async def prefill_and_drop(self, prompt: Sequence[int], handle: Json, **fields: Json) -> None:
        """A prefill whose own blocks nobody wants: they are let go at once."""
        await self.decode_and_drop(prompt, (await self.prefill(prompt, handle, **fields)).handle, **fields)

    async def decode_and_drop(self, prompt: Sequence[int], handle: Json, **fields: Json) -> None:
        answer = await self.decode(prompt, handle, max_tokens=1, **fields)
        await self.release(answer.handle)

    async def reference(self, prompt: Sequence[int], *, max_tokens: int = 24) -> list[int]:
        """What the model answers to the prompt on an engine that knows nothing of it."""
        answer = await self.complete(
            self.decode_url,
            list(prompt),
            max_tokens=max_tokens,
            ignore_eos=True,
            return_token_ids=True,
            cache_salt=uuid.uuid4().hex,
        )
        assert answer.status == 200, answer.text
        return answer.choice["token_ids"]

    async def release(self, handle: Json) -> Answer:
        """Has P refuse a request that carries D's handle, upon which P tells D that the blocks can go."""
        params = {**handle, "do_remote_prefill": True, "do_remote_decode": False}
        body = {"model": "no-such-model", "prompt": "x", "max_tokens": 1, "kv_transfer_params": params}
        return await self.post(f"{self.prefill_url}/v1/completions", body)

    # -- metrics ---------------------------------------------------------------------------------------------

    async def metric(self, url: str, name: str) -> float:
        """A metric's value, summed over its labels; 0 where the page does not have it yet."""
        page = (await self.get(f"{url}/metrics")).text
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:\{{[^\n]*\}})? (\S+)$", page, re.M))

    async def usage(self, url: str) -> float:
        """The share of blocks that are held, once what was let go before is gone from it."""
        values: list[float] = []
        while len(values) < 3 or len(set(values[-3:])) > 1:
            values.append(await self.metric(url, "vllm:kv_cache_usage_perc"))
            await asyncio.sleep(0.02)
        return values[-1]

    async def wait_for_usage(self, url: str, at_most: float = 0.0) -> None:
        """Until the engine holds no more blocks than that."""
        await self._wait(url, "vllm:kv_cache_usage_perc", lambda value: value <= at_most + 1e-9, f"at most {at_most}")

    async def wait_for_more(self, url: str, name: str, than: float) -> float:
        return await self._wait(url, name, lambda value: value > than, f"more than {than}")

    async def _wait(self, url: str, name: str, fits: Any, wanted: str) -> float:
        deadline = time.monotonic() + SETTLE_S
        while not fits(value := await self.metric(url, name)):
            assert time.monotonic() < deadline, f"{url}: {name} is {value}, not {wanted}, after {SETTLE_S} s"
            await asyncio.sleep(0.05)
        return value

    async def block_size(self) -> int:
        page = (await self.get(f"{self.decode_url}/metrics")).text
        found = re.search(r'^vllm:cache_config_info\{[^}]*\bblock_size="(\d+)"', page, re.M)
        assert found, "no vllm:cache_config_info with a block_size"
        return int(found[1])


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
