"""A flush while turns run, as around a weight update."""

from __future__ import annotations

from typing import Any

import pytest
from backhaul_router.report import Reason
from router_turns import events, first_turn, opening, run_cluster, user

OURS = {"connector": "backhaul"}


@pytest.mark.parametrize("engine", [{}, OURS], ids=["stock", "ours"])
@pytest.mark.parametrize("conversation", ["c", None], ids=["named", "by its messages"])
async def test_what_a_running_turn_leaves_after_a_flush_is_never_read(
    engine: dict[str, Any], conversation: str | None
) -> None:
    async with run_cluster(engine=engine) as cluster:
        messages = opening()
        reply = await cluster.open({"messages": messages, "stream": True}, conversation=conversation)
        chunks = aiter(reply)
        raw = await anext(chunks)
        await cluster.router.flush()
        raw += b"".join([chunk async for chunk in chunks])
        said = "".join(c["delta"].get("content") or "" for e in events(raw) for c in e["choices"])
        assert cluster.router.ledger.handles() == ()
        await cluster.until(lambda: cluster.d.usage == 0)
        again = [*messages, {"role": "assistant", "content": said}, user("Second: go on.")]
        assert (await cluster.exact({"messages": again}, conversation=conversation)).reused.reason is Reason.FLUSHED


async def test_turns_after_a_flush_leave_what_the_next_one_reads() -> None:
    async with run_cluster() as cluster:
        messages = await first_turn(cluster)
        await cluster.router.flush()
        answer = await cluster.exact({"messages": messages})
        again = [*messages, answer.message, user("Third: go on.")]
        assert (await cluster.exact({"messages": again})).reused.reason is None
