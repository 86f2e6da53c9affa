"""What is written to Redis behind the answers: in order, again after an outage, and no more of it than there is room for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from backhaul_router.ledger.redis_link import LedgerUnavailable
from backhaul_router.ledger.redis_outbox import Outbox


class Server:
    """Takes what is written, while it answers."""

    def __init__(self) -> None:
        self.answers = True
        self.written: list[int] = []
        self.calls = 0

    async def write(self, things: Sequence[int]) -> None:
        self.calls += 1
        await asyncio.sleep(0)
        if not self.answers:
            raise LedgerUnavailable("away")
        self.written += things


async def test_what_is_put_in_is_written_in_order_and_in_batches() -> None:
    server = Server()
    outbox = Outbox(server.write)
    for thing in range(100):
        outbox.put(thing)
    await outbox.written(10.0)
    assert server.written == list(range(100))
    assert server.calls < 10
    assert len(outbox) == 0
    await outbox.aclose()


async def test_nobody_waits_for_a_server_that_is_away_and_it_is_told_later() -> None:
    server = Server()
    server.answers = False
    outbox = Outbox(server.write)
    for thing in range(3):
        outbox.put(thing)
    async with asyncio.timeout(5):
        await outbox.written(60.0)
    assert (server.written, len(outbox)) == ([], 3)
    server.answers = True
    async with asyncio.timeout(5):
        while server.written != [0, 1, 2]:
            await asyncio.sleep(0.01)
    assert outbox.lost == 0
    await outbox.aclose()


async def test_the_oldest_are_lost_where_there_is_no_room_and_counted() -> None:
    server = Server()
    server.answers = False
    outbox = Outbox(server.write, most=2)
    for thing in range(5):
        outbox.put(thing)
        await outbox.written(60.0)
    server.answers = True
    async with asyncio.timeout(5):
        while len(outbox):
            await asyncio.sleep(0.01)
    assert (server.written, outbox.lost) == ([3, 4], 3)
    await outbox.aclose()


async def test_at_the_end_it_gives_up_what_cannot_be_written() -> None:
    server = Server()
    server.answers = False
    outbox = Outbox(server.write)
    outbox.put(1)
    async with asyncio.timeout(5):
        await outbox.aclose(0.05)
    assert server.written == []
