"""Agents that do anything: whatever they edit, repeat, drop or abandon, on whatever route, every answer is exact."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest
from backhaul_router.report import Route
from router_turns import STORY, Cluster, Message, run_cluster, system, user

SEEDS = int(os.environ.get("BACKHAUL_SEEDS", "8"))
STEPS = 12


class Agent:
    """One history, changed at random before each turn."""

    def __init__(self, cluster: Cluster, rng: random.Random, name: str) -> None:
        self.cluster, self.rng, self.name = cluster, rng, name
        self.history: list[Message] = [system(f"You are {name[:3]}. {STORY}")]

    def text(self) -> str:
        return STORY[self.rng.randrange(40) :][: self.rng.choice([3, 20, 80])]

    def change(self) -> None:
        rng, history = self.rng, self.history
        at = rng.randrange(len(history))
        match rng.choice(["extend"] * 6 + ["edit", "edit", "drop", "insert", "shorten", "repeat"]):
            case "edit" if isinstance(history[at].get("content"), str):
                old = history[at]["content"]
                cut = rng.randrange(len(old) + 1)
                history[at] = {**history[at], "content": old[:cut] + self.text() + old[cut + rng.randrange(9) :]}
            case "drop" if len(history) > 2:
                del history[at]
            case "insert":
                history.insert(at, user(self.text()))
            case "shorten":
                del history[max(1, at) :]
        if not history or history[-1]["role"] != "user":
            history.append(user(self.text()))

    def shape(self) -> dict[str, Any]:
        rng = self.rng
        odd: list[dict[str, Any]] = [
            {"n": 2},
            {"stop": [" "]},
            {"max_tokens": rng.randrange(1, 40)},
            {"logprobs": True},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
            {"documents": [{"text": "x"}]},
            {"temperature": -1},
        ]
        return {"stream": rng.random() < 0.5, **(rng.choice(odd) if rng.random() < 0.3 else {})}

    async def turn(self) -> None:
        self.change()
        body = {"messages": list(self.history), **self.shape()}
        route = self.rng.choice([None, None, None, *Route])
        if self.cluster.pinned_until_ttl and self.rng.random() < 0.2:
            await self.abandon(body, route)
            return
        answer = await self.cluster.exact(body, conversation=self.name, route=route)
        if answer.status == 200:
            message = None if body["stream"] else answer.message
            self.history.append(message or {"role": "assistant", "content": said(answer.events)})

    async def abandon(self, body: dict[str, Any], route: Route | None) -> None:
        reply = await self.cluster.open(body, conversation=self.name, route=route)
        async for _ in reply:
            if self.rng.random() < 0.3:
                break
        await reply.aclose()


def said(events: list[dict[str, Any]]) -> str:
    deltas = [event["choices"][0] for event in events if event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in deltas if choice["index"] == 0)


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_whatever_agents_do_every_answer_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    settings = {
        "prefill": rng.choice([1, 2]),
        "decode": rng.choice([1, 2]),
        "p": {"prefix_caching": rng.random() < 0.5},
        "engine": {"enable_scale_out": rng.random() < 0.5, "stream_handles": rng.choice(["plugin", "plugin", "off"])},
        "local_max_tokens": rng.choice([0, 64]),
        "kv_recompute_threshold": rng.choice([0, 64]),
        "max_branches": rng.choice([1, 8]),
    }
    async with run_cluster(**settings) as cluster:
        # A client may leave just when decode has pinned its blocks, and the handle is on its way.
        clients_leave = rng.random() < 0.3
        cluster.pinned_until_ttl = clients_leave or settings["engine"]["stream_handles"] == "off"
        cluster.released_twice = True  # a decode engine that rejects a turn tells prefill itself
        agents = [Agent(cluster, rng, name) for name in ("one", "one", "two")]
        for _ in range(STEPS):
            match rng.choice(["turn"] * 8 + ["at once"] * 2 + ["read fails", "restart", "flush", "end"]):
                case "turn":
                    await rng.choice(agents).turn()
                case "at once":
                    await asyncio.gather(*(agent.turn() for agent in agents))
                case "read fails":
                    rng.choice(cluster.prefill).faults.fail_kv_loads = 1
                case "restart":
                    await rng.choice(cluster.decode).restart()
                    await cluster.reconnected()
                case "flush":
                    await cluster.router.flush()
                case "end":
                    await cluster.router.end_conversation(rng.choice(agents).name)
