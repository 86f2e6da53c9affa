"""Conversations as scopes: who is in them, what they collect, and what they release."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator

import anyio
import backhaul
import httpx2
import pytest
from backhaul import Reason, Route
from backhaul_router import scope
from backhaul_router.transport import make_async_transport, make_transport
from fake_router import FakeRouter, report

URL = "http://anywhere/v1/chat/completions"
WAIT_S = 10


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def client(router: FakeRouter) -> Iterator[httpx2.Client]:
    with httpx2.Client(transport=make_transport(router, httpx2)) as client:
        yield client


@pytest.fixture
async def async_client(router: FakeRouter) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(transport=make_async_transport(router, httpx2)) as client:
        yield client


def current_id() -> str | None:
    conversation = scope.current.get()
    return conversation and conversation.id


# The scope


def test_every_conversation_has_a_fresh_id_unless_it_is_given_one() -> None:
    assert backhaul.conversation().id != backhaul.conversation().id
    assert backhaul.conversation("ticket-17").id == "ticket-17"


def test_a_nested_conversation_is_another_one_and_the_outer_returns_after_it() -> None:
    with backhaul.conversation() as outer:
        with backhaul.conversation() as inner:
            assert (current_id(), inner.id != outer.id) == (inner.id, True)
        assert current_id() == outer.id
    assert current_id() is None


async def test_child_tasks_and_threads_of_to_thread_are_inside() -> None:
    async with backhaul.conversation() as chat:
        seen = await asyncio.gather(asyncio.create_task(asyncio.to_thread(current_id)), asyncio.to_thread(current_id))
        assert seen == [chat.id, chat.id]


async def test_tasks_side_by_side_have_their_own_conversations() -> None:
    async def agent() -> tuple[str, str | None]:
        async with backhaul.conversation() as chat:
            await asyncio.sleep(0)
            return chat.id, current_id()

    pairs = await asyncio.gather(*(agent() for _ in range(5)))
    assert all(own == seen for own, seen in pairs)
    assert len({own for own, _ in pairs}) == 5


def test_one_conversation_cannot_be_entered_twice() -> None:
    chat = backhaul.conversation("c1")
    with chat:
        pass
    with pytest.raises(RuntimeError, match="'c1', 0 turns> was entered before"), chat:
        pass


@pytest.mark.parametrize("id", ["", "a" * 257, "ligne\n", "café", " a"])
def test_an_id_that_cannot_travel_is_refused(id: str) -> None:
    with pytest.raises(ValueError, match="1 to 256 printable ASCII"):
        backhaul.conversation(id)


def test_an_id_that_is_no_string_is_refused() -> None:
    with pytest.raises(TypeError, match="not int"):
        backhaul.conversation(17)  # type: ignore[arg-type]


async def test_a_conversation_around_a_yield_can_be_left_in_another_context() -> None:
    async def fixture() -> AsyncIterator[str]:
        async with backhaul.conversation() as chat:
            yield chat.id

    generator = fixture()
    await asyncio.create_task(anext(generator))
    assert await asyncio.create_task(anext(generator, None)) is None


# Its reports


def test_reports_are_collected_in_order(client: httpx2.Client) -> None:
    with backhaul.conversation() as chat:
        assert (chat.reuse.last, chat.reuse.turns) == (None, [])
        client.get(URL)
        client.get(URL)
    assert len(chat.reuse.turns) == 2
    assert chat.reuse.last is chat.reuse.turns[-1]
    assert chat.reuse.last.conversation == chat.id


def test_the_totals_add_up_what_the_reports_know() -> None:
    chat = backhaul.conversation("c")
    turns = [
        report("c", prompt=100, cached=0, computed=100, generated=10),
        report("c", route=Route.WARM, reason=None, prompt=200, cached=150, offered=144, computed=50, saved_ms=12.5),
        report("c", route=Route.LOCAL, reason=Reason.NO_HANDLE, prompt=None, cached=None, computed=None, generated=5),
    ]
    for turn in turns:
        chat.record(turn)
    total = chat.reuse.total
    assert (total.turns, total.prompt, total.reused, total.computed) == (3, 300, 150, 150)
    assert (total.offered, total.generated, total.hit_rate, total.saved_ms) == (144, 15, 0.5, 12.5)
    assert total.routes == {Route.COLD: 1, Route.WARM: 1, Route.LOCAL: 1}
    assert total.reasons == {Reason.FIRST_TURN: 1, Reason.NO_HANDLE: 1}


def test_totals_of_nothing_are_unknown_rather_than_zero() -> None:
    total = backhaul.conversation().reuse.total
    assert (total.turns, total.hit_rate, total.saved_ms) == (0, None, None)


def test_reports_may_come_from_several_threads() -> None:
    chat = backhaul.conversation("c")
    threads = [
        threading.Thread(target=lambda: [chat.record(report("c")) for _ in range(200)] and None) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chat.reuse.total.turns == 800


# What it releases


def test_leaving_ends_the_conversation_on_the_router_that_it_used(client: httpx2.Client, router: FakeRouter) -> None:
    with backhaul.conversation() as chat:
        client.get(URL)
        assert router.ended == []
    assert router.ended == [chat.id]


async def test_leaving_ends_it_on_every_router_that_it_used() -> None:
    routers = [FakeRouter(), FakeRouter()]
    async with backhaul.conversation() as chat:
        for router in routers:
            async with httpx2.AsyncClient(transport=make_async_transport(router, httpx2)) as client:
                await client.get(URL)
                await client.get(URL)
    assert [router.ended for router in routers] == [[chat.id], [chat.id]]


def test_leaving_ends_it_nowhere_when_it_was_not_used(router: FakeRouter) -> None:
    with backhaul.conversation():
        pass
    assert router.ended == []


def test_an_exception_ends_it_too_and_comes_through(client: httpx2.Client, router: FakeRouter) -> None:
    def work() -> None:
        with backhaul.conversation("c1"):
            client.get(URL)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        work()
    assert router.ended == ["c1"]


async def test_cancellation_ends_it_too_and_comes_through(async_client: httpx2.AsyncClient, router: FakeRouter) -> None:
    called = asyncio.Event()

    async def agent() -> None:
        async with backhaul.conversation("c1"):
            await async_client.get(URL)
            called.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(agent())
    await called.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert router.ended == ["c1"]


async def test_a_cancel_scope_that_stays_cancelled_does_not_stop_the_release(
    async_client: httpx2.AsyncClient, router: FakeRouter
) -> None:
    with anyio.CancelScope() as cancelled:
        async with backhaul.conversation("c1"):
            await async_client.get(URL)
            cancelled.cancel()
            await anyio.sleep_forever()
    assert router.ended == ["c1"]


async def test_with_inside_an_event_loop_releases_in_the_background(
    async_client: httpx2.AsyncClient, router: FakeRouter
) -> None:
    with backhaul.conversation("c1"):
        await async_client.get(URL)
    assert await asyncio.to_thread(router.endings.get, timeout=WAIT_S) == "c1"


def test_a_failed_release_is_logged_and_does_not_fail_the_work(
    client: httpx2.Client, router: FakeRouter, caplog: pytest.LogCaptureFixture
) -> None:
    router.end_conversation_error = ConnectionError("decode engine is gone")
    with caplog.at_level(logging.WARNING, "backhaul"), backhaul.conversation("c1"):
        client.get(URL)
    assert "ending conversation 'c1'" in caplog.text
    assert "decode engine is gone" in caplog.text


async def test_a_turn_that_outlives_the_scope_is_released_when_it_ends(
    async_client: httpx2.AsyncClient, router: FakeRouter
) -> None:
    async with backhaul.conversation("c1") as chat:
        answer = await async_client.send(async_client.build_request("POST", URL), stream=True)
    assert router.endings.get_nowait() == "c1"
    await answer.aread()
    assert chat.reuse.total.turns == 1
    assert await asyncio.to_thread(router.endings.get, timeout=WAIT_S) == "c1"
