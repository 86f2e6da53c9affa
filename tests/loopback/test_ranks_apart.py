"""Data-parallel ranks behind one address: each conversation stays with its own. Loopback engines have no ranks; what is looked at
here is what they are sent."""

from __future__ import annotations

import json

import pytest
from backhaul_loopback import LoopbackEngine
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Request, Router
from backhaul_router.errors import ConfigError
from backhaul_router.fleet.engine import Role
from backhaul_router.report import ReuseReport
from router_turns import CHAT, opening

RANK = "x-data-parallel-rank"


async def test_a_conversation_stays_with_its_rank() -> None:
    reports: list[ReuseReport] = []
    body = json.dumps({"model": "loopback", "messages": opening(), "max_tokens": 4}).encode()
    async with LoopbackEngine("prefill") as p, LoopbackEngine("decode") as d:
        by_rank = (f"{d.url}#dp=0", f"{d.url}#dp=1")
        config = RouterConfig(prefill=[p.url], decode=by_rank, local_max_tokens=0, check_pairs=False)
        router = Router(config, on_report=reports.append, seed=0)
        try:
            for _ in range(2):
                for conversation in ("a", "b"):
                    headers = [("x-conversation-id", conversation), (RANK, "7")]
                    reply = await router.handle(Request("POST", CHAT, headers, body))
                    assert (reply.status, bool([chunk async for chunk in reply])) == (200, True)
            with pytest.raises(ConfigError, match="by its data-parallel ranks"):
                await router.add_engine(Role.DECODE, d.url)
            with pytest.raises(ConfigError, match="one role"):
                await router.add_engine(Role.PREFILL, f"{d.url}#dp=2")
        finally:
            await router.aclose()
    assert {r.conversation: r.decode_engine for r in reports} == {"a": by_rank[0], "b": by_rank[1]}
    asked = [request for request in d.received if request.path == CHAT]
    assert [request.headers[RANK] for request in asked] == ["0", "1", "0", "1"]
    assert RANK not in p.received[-1].headers
