"""A router over loopback engines, an agent that asks it, and an engine beside them that never transfers anything: what it
answers to the client's own body is what every turn must answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from backhaul_loopback import Clock, LoopbackEngine
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Reply, Request, Router
from backhaul_router.report import ReuseReport, Route

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BLOCK = 16
GRACE_S = 20.0
"""How long engines may take to notice that what they held was released, or to answer a claim."""
STORY = "The cache keeps the keys and values of every token that the engine ran, block by block. "
SECRETS = ('"kv_transfer_params"', "remote_engine_id", "remote_block_ids", "remote_request_id", "remote_port", "_dp")

Message = dict[str, Any]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    raw: bytes
    report: ReuseReport | None

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.raw)
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        return events(self.raw)

    @property
    def message(self) -> Message:
        """What an agent puts into its history."""
        choice = self.json["choices"][0]
        return {k: v for k, v in choice["message"].items() if v is not None}

    @property
    def reused(self) -> ReuseReport:
        assert self.report is not None
        return self.report


@dataclass
class Cluster:
    prefill: list[LoopbackEngine]
    decode: list[LoopbackEngine]
    reference: LoopbackEngine
    """Serves the same model alone, and transfers nothing."""
    router: Router
    http: aiohttp.ClientSession
    reports: list[ReuseReport] = field(default_factory=list)
    pinned_until_ttl: bool = False
    """Set by a test after which blocks stay pinned, as it shows."""
    released_twice: bool = False
    """Set by a test in which an engine frees blocks on its own that the router has released as well."""

    @property
    def engines(self) -> list[LoopbackEngine]:
        return [*self.prefill, *self.decode]

    @property
    def p(self) -> LoopbackEngine:
        return self.prefill[0]

    @property
    def d(self) -> LoopbackEngine:
        return self.decode[0]

    async def open(
        self,
        body: Mapping[str, Any] | bytes,
        path: str = CHAT,
        *,
        conversation: str | None = "c",
        headers: Sequence[tuple[str, str]] = (),
        route: Route | None = None,
        method: str = "POST",
    ) -> Reply:
        if not isinstance(body, bytes):
            body = json.dumps({"model": self.p.model, **body}).encode()
        named = [("X-Conversation-ID", conversation)] if conversation else []
        return await self.router.handle(Request(method, path, [*named, *headers], body, route=route))

    async def ask(self, body: Mapping[str, Any] | bytes, path: str = CHAT, **how: Any) -> Answer:
        """One turn, read to its end. Nothing of a handle may show in it."""
        before = len(self.reports)
        reply = await self.open(body, path, **how)
        raw = b"".join([chunk async for chunk in reply])
        shown = raw.decode() + repr(reply.headers)
        for secret in (*SECRETS, *(engine.engine_id for engine in self.engines)):
            assert secret not in shown
        report = self.reports[before] if len(self.reports) > before else None
        return Answer(reply.status, dict(reply.headers), raw, report)

    async def direct(self, body: Mapping[str, Any] | bytes, path: str = CHAT) -> tuple[int, bytes]:
        """The client's own body, sent straight to the engine beside."""
        if not isinstance(body, bytes):
            body = json.dumps({"model": self.p.model, **body}).encode()
        headers = {"content-type": "application/json"}
        async with self.http.post(self.reference.url + path, data=body, headers=headers) as response:
            return response.status, await response.read()

    async def exact(self, body: Mapping[str, Any], path: str = CHAT, **how: Any) -> Answer:
        """One turn, whose answer must be that of the engine beside."""
        answer = await self.ask(body, path, **how)
        status, raw = await self.direct(body, path)
        assert answer.status == status, answer.raw
        if body.get("stream") and status == 200:
            assert comparable(answer.events) == comparable(events(raw))
        else:
            assert comparable(answer.json) == comparable(json.loads(raw))
        return answer

    async def ids(self, body: Mapping[str, Any], path: str = CHAT) -> list[int]:
        """The prompt's ids."""
        _, raw = await self.direct(body, f"{path}/render")
        found = json.loads(raw)
        ids: list[int] = (found[0] if isinstance(found, list) else found)["token_ids"]
        return ids

    async def until(self, true: Callable[[], bool]) -> None:
        """Waits for what engines do on their own when they are told something. Fails after a while."""
        await self.router.settled()
        try:
            async with asyncio.timeout(GRACE_S):
                while not true():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"not so after {GRACE_S:g} s: {self.engines}, {self.router!r}") from None

    async def idle(self) -> None:
        """Returns when no engine runs anything."""
        await self.until(lambda: not any(self.busy(engine) for engine in self.engines))

    async def reconnected(self) -> None:
        """Returns when connections to earlier processes of engines are known to be gone."""
        for engine in self.engines:
            _, writer = await asyncio.open_connection(engine.config.host, engine.config.port)
            writer.close()

    async def kill(self, engine: LoopbackEngine) -> None:
        """Returns when connections to it are refused, and those that were open are known to be gone."""
        await engine.stop()
        try:
            _, writer = await asyncio.open_connection(engine.config.host, engine.config.port)
        except ConnectionRefusedError:
            return
        writer.close()
        raise AssertionError(f"{engine} still listens")

    @staticmethod
    def busy(engine: LoopbackEngine) -> int:
        return engine.core.metrics.num_requests_running + engine.core.metrics.num_requests_waiting


def events(raw: bytes) -> list[dict[str, Any]]:
    """A stream's events. The last one must be `[DONE]`."""
    *data, done, rest = raw.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(one.removeprefix("data: ")) for one in data]


_DIFFERS = {"id", "created", "system_fingerprint", "prompt_tokens_details", "backhaul"} | {
    f"{x}_transfer_params" for x in ("kv", "ec")
}


def comparable(answer: Any) -> Any:
    """Without what differs from one run to the next, or by where tokens were cached."""
    if isinstance(answer, list):
        return [comparable(one) for one in answer]
    if isinstance(answer, dict):
        return {key: comparable(value) for key, value in answer.items() if key not in _DIFFERS or "function" in answer}
    return answer


@asynccontextmanager
async def run_cluster(
    *,
    prefill: int = 1,
    decode: int = 1,
    engine: Mapping[str, Any] | None = None,
    p: Mapping[str, Any] | None = None,
    d: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
    **config: Any,
) -> AsyncIterator[Cluster]:
    """`engine` goes to all engines, `p` and `d` to those of one role, the rest to the router. At the end, when the router
    has closed, no engine may hold a block for it, nor have served a read of blocks that were gone."""
    shared = {"claim_timeout_s": GRACE_S, **(engine or {})}
    async with AsyncExitStack() as stack:

        async def start(role: Any, **settings: Any) -> LoopbackEngine:
            return await stack.enter_async_context(LoopbackEngine(role, clock=clock, **shared | settings))

        ps = [await start("prefill", **(p or {})) for _ in range(prefill)]
        ds = [await start("decode", **(d or {})) for _ in range(decode)]
        reference = await stack.enter_async_context(LoopbackEngine("decode", **shared))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        reports: list[ReuseReport] = []
        urls = {"prefill": [e.url for e in ps], "decode": [e.url for e in ds]}
        given = {
            "local_max_tokens": 0,
            "place_by_cost": False,
            "connect_timeout_s": 10.0,
            "check_pairs": False,
            **urls,
            **config,
        }
        router = Router(RouterConfig(**given), on_report=reports.append, seed=0)
        cluster = Cluster(ps, ds, reference, router, http, reports)
        try:
            yield cluster
        finally:
            await router.aclose()
        if not cluster.pinned_until_ttl:
            await cluster.until(lambda: not any(engine.usage for engine in cluster.engines))
        stale = sum(e.core.metrics.nixl_num_notifications_after_expiry for e in cluster.engines)
        assert not stale or cluster.released_twice, "an engine served, or was told of, blocks that it had freed"
        assert "in flight {}" in repr(router) or "not connected" in repr(router)


# --- histories -----------------------------------------------------------------------------------------------------------


def system(text: str = STORY * 2) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def opening(text: str = "First: " + STORY) -> list[Message]:
    return [system(), user(text)]


async def first_turn(cluster: Cluster, body: Mapping[str, Any] | None = None, **how: Any) -> list[Message]:
    """The history after one turn, with the next question."""
    messages = opening()
    answer = await cluster.exact({"messages": messages, **(body or {})}, **how)
    return [*messages, answer.message, user("Second: " + STORY)]
