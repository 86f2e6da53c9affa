"""Two thousand turns of many agents, in virtual time: hours of prefilling, decoding and thinking pass in seconds, every
answer is exact, every handle is accounted for, and the engines end as empty as they began."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
from backhaul_loopback import CostModel, LoopbackEngine, VirtualClock, kv
from backhaul_loopback.bodies import ChatBody, convert
from backhaul_loopback.pins import Pins
from backhaul_loopback.requests import chat_call
from backhaul_loopback.template import tool_call_text
from backhaul_loopback.tokenizer import EOS, decode
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Request, Router
from backhaul_router.report import Reason, ReuseReport, Route
from router_turns import CHAT, GRACE_S, STORY, Message, events, system, user

TURNS = 2_000
SEEDS = int(os.environ.get("BACKHAUL_SEEDS", "1"))
AGENTS = 30
AT_ONCE = 8
COSTS = CostModel(fixed_s=1.0, prefill_s=0.005, decode_s=0.1, transfer_s=0.0005, render_s=0.0001)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


# --- what every answer must be ------------------------------------------------------------------------------------------


@lru_cache(maxsize=50_000)
def state_after(state: int, keys: tuple[int, ...]) -> int:
    for key in keys:
        state = kv.attend(state, (kv.kv_value(state, key),))
    return state


@dataclass(frozen=True)
class Expected:
    """What an engine answers that serves this one request and has nothing cached, read or shared."""

    prompt: int
    text: str
    """The tool call as its text, where it is one."""
    generated: int

    @classmethod
    def of(cls, body: dict[str, Any]) -> Expected:
        parsed = convert(body, ChatBody)
        call = chat_call(parsed, request_id="r", max_model_len=131_072, model=body["model"])
        [prompt], [limit] = call.prompts, call.max_tokens
        keys, state = prompt.keys(), kv.initial_state(body["model"])
        for at in range(0, len(keys), 64):
            state = state_after(state, tuple(keys[at : at + 64]))
        tokens = []
        for token in call.script.tokens(kv.kv_value(state, 0)):
            tokens.append(token)
            if len(tokens) == limit:
                break
        return cls(len(keys), decode(token for token in tokens if token != EOS), len(tokens))


def text_of(raw: bytes, *, streamed: bool) -> str:
    if streamed:
        return "".join(choice["delta"].get("content") or "" for event in events(raw) for choice in event["choices"])
    message = json.loads(raw)["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return (message["content"] or "") + "".join(tool_call_text(call["name"], call["arguments"]) for call in calls)


# --- the engines' books -------------------------------------------------------------------------------------------------


class CountedPins(Pins):
    """Remembers how each pin ended."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        self.given: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        """Read, or released by request."""
        self.lapsed: Counter[str] = Counter()

    def add(self, request_id: str, blocks: Sequence[Any], deadline: float | None) -> None:
        super().add(request_id, blocks, deadline)
        self.given[request_id] += 1

    def end(self, request_id: str) -> Sequence[Any] | None:
        late = self.remaining(request_id, self.clock.now()) <= 0
        blocks = super().end(request_id)
        if blocks is not None:
            (self.lapsed if late else self.told)[request_id] += 1
        return blocks


@dataclass
class Shown:
    """Handles that requests brought to the engines of one role, by the request that had left them."""

    used: Counter[str] = field(default_factory=Counter)
    released: Counter[str] = field(default_factory=Counter)
    offered: dict[str, int] = field(default_factory=dict)
    """Tokens to read, by turn: the router numbers the engine calls of one `x-request-id`."""

    def take_in(self, engine: LoopbackEngine) -> None:
        for request in engine.requests_to(CHAT) + engine.requests_to("/v1/completions"):
            params = request.body.get("kv_transfer_params") or {}
            if (left_by := params.get("remote_request_id")) is None:
                continue
            if request.body["model"] != engine.model:
                self.released[left_by] += 1
                continue
            self.used[left_by] += 1
            turn, _, _ = request.headers["x-request-id"].rpartition("-")
            self.offered[turn] = params["remote_num_tokens"]
        engine.received.clear()


# --- the fleet and its agents -------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """One turn's conversation, as the router sees its caller, and where the report comes in."""

    id: str
    reports: list[ReuseReport] = field(default_factory=list)

    def record(self, report: ReuseReport) -> None:
        self.reports.append(report)


class Agent:
    """One history, changed at random before each turn. Two agents may share one conversation id."""

    def __init__(self, rng: random.Random, conversation: str, name: str) -> None:
        self.rng, self.conversation = rng, conversation
        self.history: list[Message] = [system(f"You are {name}. {STORY}")]

    def text(self) -> str:
        return STORY[self.rng.randrange(40) :] * self.rng.choice([1, 1, 1, 2])

    def change(self) -> None:
        rng, history = self.rng, self.history
        at = rng.randrange(len(history))
        match rng.choice(["extend"] * 9 + ["edit", "drop", "insert", "shorten"]):
            case "edit":
                old = history[at]["content"]
                cut = rng.randrange(len(old) + 1)
                history[at] = {**history[at], "content": old[:cut] + self.text() + old[cut + rng.randrange(9) :]}
            case "drop" if at > 0:
                del history[at]
            case "insert":
                history.insert(at, user(self.text()))
            case "shorten":
                del history[max(1, at) :]
        if len(history) > 12:
            del history[1:6]
        if history[-1]["role"] != "user":
            history.append(user(self.text()))

    def shape(self) -> dict[str, Any]:
        rng = self.rng
        if rng.random() < 0.1:
            return {"stream": False, "tools": [TOOL]}
        limit = {"max_tokens": rng.randrange(1, 24)} if rng.random() < 0.7 else {}
        return {"stream": rng.random() < 0.5, **limit}


@dataclass
class Fleet:
    clock: VirtualClock
    prefill: list[LoopbackEngine]
    decode: list[LoopbackEngine]
    router: Router
    reports: dict[str, ReuseReport] = field(default_factory=dict)
    """By `x-request-id`."""
    begun: int = 0
    """Turns."""
    to_prefill: Shown = field(default_factory=Shown)
    to_decode: Shown = field(default_factory=Shown)

    @property
    def engines(self) -> list[LoopbackEngine]:
        return [*self.prefill, *self.decode]

    async def turn(self, agent: Agent) -> None:
        """One turn, whose answer must be the expected one."""
        self.begun += 1
        request_id = f"turn-{self.begun}"
        agent.change()
        body = {"model": self.decode[0].model, "messages": list(agent.history), **agent.shape()}
        expected = Expected.of(body)
        turn = Turn(agent.conversation)
        route = agent.rng.choice([None] * 6 + list(Route))
        headers = [("X-Request-ID", request_id)]
        reply = await self.router.handle(Request("POST", CHAT, headers, json.dumps(body).encode(), turn, route))
        raw = b"".join([chunk async for chunk in reply])
        assert reply.status == 200, raw
        text = text_of(raw, streamed=body["stream"])
        assert text == expected.text
        agent.history.append({"role": "assistant", "content": text})
        [report] = turn.reports
        assert (report.prompt, report.generated) == (expected.prompt, expected.generated)
        assert (report.status, report.error) == (200, None)
        self.reports[request_id] = report

    async def at_rest(self) -> None:
        """Returns when the releases are done; then notes what was brought to the engines."""
        await self.router.settled()
        for engine in self.prefill:
            self.to_prefill.take_in(engine)
        for engine in self.decode:
            self.to_decode.take_in(engine)

    async def emptied(self) -> None:
        """Returns when no engine holds a block any more."""
        await self.at_rest()
        try:
            async with asyncio.timeout(GRACE_S):
                while any(engine.usage for engine in self.engines):
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"blocks are still held: {self.engines}, {self.router!r}") from None


@asynccontextmanager
async def run_fleet() -> AsyncIterator[Fleet]:
    """Two engines of each role. One P has no prefix cache, so that what it does not compute was read from D."""
    clock = VirtualClock(auto=True)
    async with AsyncExitStack() as stack:

        async def start(role: Any, **settings: Any) -> LoopbackEngine:
            engine = LoopbackEngine(role, clock=clock, costs=COSTS, **settings)
            engine.core.pins = CountedPins(clock)
            return await stack.enter_async_context(engine)

        prefill = [await start("prefill", prefix_caching=cached) for cached in (False, True)]
        decode = [await start("decode") for _ in range(2)]
        urls = {"prefill": tuple(e.url for e in prefill), "decode": tuple(e.url for e in decode)}
        config = RouterConfig(**urls, check_pairs=False)
        router = Router(config, clock=clock.now, seed=0)
        try:
            yield Fleet(clock, prefill, decode, router)
        finally:
            await router.aclose()


async def live(fleet: Fleet, rng: random.Random) -> None:
    """Rounds of turns that run at once, and time to think between them, now and then longer than any lease."""
    agents = [Agent(rng, f"conversation-{number * 5 // 6}", f"agent {number}") for number in range(AGENTS)]
    while fleet.begun < TURNS:
        at_once = rng.sample(agents, min(rng.randint(1, AT_ONCE), TURNS - fleet.begun))
        await asyncio.gather(*(fleet.turn(agent) for agent in at_once))
        await fleet.at_rest()
        await fleet.clock.advance(500.0 if rng.random() < 0.02 else rng.choice([1.0, 5.0, 20.0]))
        if rng.random() < 0.05:
            await fleet.router.end_conversation(rng.choice(agents).conversation)


def check_handles(by: list[LoopbackEngine], shown: Shown) -> None:
    """Every handle that the engines `by` gave was used or released by the router, and that once; and its blocks were freed
    once, because the engine was told or because the lease had ended before."""
    given, told, expired = (
        sum((getattr(engine.core.pins, which) for engine in by), Counter()) for which in ("given", "told", "lapsed")
    )
    assert set(given.values()) == {1}
    assert told + expired == given
    assert shown.used + shown.released == given
    assert shown.used <= told, "a handle was used after its lease had ended"


def check_account(fleet: Fleet) -> None:
    """What the reports say is what the engines counted."""
    reports = fleet.reports.values()
    assert {
        turn: report.offered for turn, report in fleet.reports.items() if report.offered
    } == fleet.to_prefill.offered
    for engines, of_role in (
        (fleet.prefill, [report for report in reports if report.route is not Route.LOCAL]),
        (fleet.decode, [report for report in reports if report.route is Route.LOCAL]),
    ):
        metrics = [engine.core.metrics for engine in engines]
        assert sum(report.computed or 0 for report in of_role) == sum(m.local_compute for m in metrics)
        assert sum(m.nixl_num_failed_transfers + m.nixl_num_failed_notifications for m in metrics) == 0
    [without_cache, _] = fleet.prefill
    read = sum(r.offered for r in reports if r.prefill_engine == without_cache.url)
    assert read == without_cache.core.metrics.external_kv_transfer
    cached = sum(r.cached or 0 for r in reports if r.route is not Route.LOCAL)
    counted = [engine.core.metrics for engine in fleet.prefill]
    assert cached == sum(m.local_cache_hit + m.external_kv_transfer for m in counted)


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_hours_of_agents_pass_in_seconds_exactly_and_every_handle_is_accounted_for(seed: int) -> None:
    async with run_fleet() as fleet:
        began = fleet.clock.now()
        await live(fleet, random.Random(seed))
        hours = (fleet.clock.now() - began) / 3600
        await fleet.router.flush()
        await fleet.emptied()
    assert len(fleet.reports) == TURNS
    assert hours > 3
    check_handles(fleet.decode, fleet.to_prefill)
    check_handles(fleet.prefill, fleet.to_decode)
    check_account(fleet)
    routes = Counter(report.route for report in fleet.reports.values())
    assert min(routes[route] for route in Route) > TURNS / 20, routes
    reasons = {report.reason for report in fleet.reports.values()}
    assert reasons >= {None, Reason.FIRST_TURN, Reason.EXPIRED, Reason.DIVERGED, Reason.NO_HANDLE}
