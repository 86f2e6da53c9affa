"""A client that leaves just as an engine has answered: what the engine keeps for the answer that nobody reads is released."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from backhaul_loopback import LoopbackEngine
from backhaul_router.engines.http_connection import Connection
from router_turns import STORY, Cluster, first_turn, run_cluster, user


class Leaving:
    """A client that leaves before one engine's handle is read: it lies in the socket's buffer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._turn: asyncio.Task[None] | None = None
        self._engine: LoopbackEngine | None = None
        read = Connection.data_received

        def data_received(connection: Connection, data: bytes) -> None:
            turn, engine = self._turn, self._engine
            if turn and engine and connection.address[2] == engine.config.port and b"remote_request_id" in data:
                turn.cancel()
                asyncio.get_running_loop().call_soon(read, connection, data)
            else:
                read(connection, data)

        monkeypatch.setattr(Connection, "data_received", data_received)

    async def ask(self, cluster: Cluster, engine: LoopbackEngine, body: dict[str, Any]) -> None:
        async def turn() -> None:
            async for _ in await cluster.open(body):
                pass

        self._turn, self._engine = asyncio.create_task(turn()), engine
        with pytest.raises(asyncio.CancelledError):
            await self._turn
        self._engine = None


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> Leaving:
    return Leaving(monkeypatch)


@pytest.mark.parametrize("connector", ["stock", "backhaul"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_what_an_answer_that_is_not_read_any_more_shows_to_be_kept_is_released(
    leaving: Leaving, where: str, stream: bool, connector: str
) -> None:
    async with run_cluster(engine={"connector": connector}, p={"prefix_caching": False}) as cluster:
        cluster.released_twice = True  # what D has read, P has freed
        history = await first_turn(cluster)
        engine = cluster.p if where == "prefill" else cluster.d
        await leaving.ask(cluster, engine, {"messages": history, "stream": stream})
        streamed = stream and engine is cluster.d  # its end is read before the turn is given up
        assert cluster.reports[-1].error == (None if streamed else "client_gone")
        await cluster.router.end_conversation("c")
        await cluster.until(lambda: not any(engine.usage for engine in cluster.engines))
        assert cluster.router.fleet.counters.failed_releases == 0


async def test_the_next_turn_goes_on(leaving: Leaving) -> None:
    async with run_cluster(p={"prefix_caching": False}) as cluster:
        cluster.released_twice = True  # what D has read, P has freed
        history = await first_turn(cluster)
        for engine in (cluster.p, cluster.d):
            await leaving.ask(cluster, engine, {"messages": history})
            answer = await cluster.exact({"messages": history})
            history = [*history, answer.message, user("More. " + STORY)]


async def test_a_router_that_closes_reads_it_first(leaving: Leaving) -> None:
    async with run_cluster(p={"prefix_caching": False}) as cluster:
        cluster.released_twice = True  # what D has read, P has freed
        history = await first_turn(cluster)
        await leaving.ask(cluster, cluster.p, {"messages": history})
        await cluster.router.aclose()
        await cluster.until(lambda: not any(engine.usage for engine in cluster.engines))


async def test_a_client_that_leaves_while_the_end_of_a_stream_is_awaited_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D has sent its last event, and never says that it was the last."""
    read, held = Connection.data_received, set[Connection]()

    def data_received(connection: Connection, data: bytes) -> None:
        if b"data: [DONE]" in data:
            held.add(connection)
        read(connection, data.removesuffix(b"0\r\n\r\n") if connection in held else data)

    monkeypatch.setattr(Connection, "data_received", data_received)
    async with run_cluster() as cluster:
        reply = await cluster.open({"messages": [user(STORY)], "stream": True})

        async def turn() -> None:
            async for _ in reply:
                pass

        left = asyncio.create_task(turn())
        while not (held and cluster.reports):
            await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait((left,))
        await cluster.until(lambda: all(connection.lost for connection in held))
        assert len(held) == 1
