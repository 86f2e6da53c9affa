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
from backhaul_router.drive.embedded import make_async_transport, make_transport
from backhaul_router.drive.pauses import Paused
from backhaul_router.errors import LeaseError
from backhaul_router.identity.ids import current, parent_of
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
    conversation = current.get()
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


# Its family


def test_a_conversation_inside_another_is_its_child_unless_told_otherwise() -> None:
    with backhaul.conversation("outer") as outer:
        inner = backhaul.conversation("inner")
        alone = backhaul.conversation("alone", parent=False)
        other = backhaul.conversation("other", parent=inner)
        elsewhere = backhaul.conversation(parent="ticket-17")
    assert (inner.parent, inner.parent_id, outer.children) == (outer, "outer", (inner,))
    assert (alone.parent, alone.parent_id) == (None, None)
    assert (other.parent, inner.children) == (inner, (other,))
    assert (elsewhere.parent, elsewhere.parent_id) == (None, "ticket-17")
    assert backhaul.conversation().parent is None


def test_one_that_is_begun_anew_inside_itself_has_no_parent() -> None:
    with backhaul.conversation("c") as chat:
        again = backhaul.conversation("c")
    assert (again.parent, again.parent_id, chat.children) == (None, None, ())


def test_a_parents_id_that_cannot_travel_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 256 printable ASCII"):
        backhaul.conversation(parent="ligne\n")


def test_a_fork_is_a_child_with_an_id_of_its_own() -> None:
    chat = backhaul.conversation("c", keep_alive=False)
    one, two = chat.fork(), chat.fork("mine")
    assert (one.parent, two.id, chat.children) == (chat, "mine", (one, two))
    assert len({chat.id, one.id, two.id}) == 3
    assert one.keep_alive is False
    with one:
        assert current_id() == one.id


def test_the_router_is_told_of_the_parent(client: httpx2.Client, router: FakeRouter) -> None:
    with backhaul.conversation("outer"), backhaul.conversation("inner"):
        client.get(URL)
    assert [parent_of(request.scope) for request in router.requests] == ["outer"]


def test_a_total_can_take_children_in() -> None:
    chat = backhaul.conversation("c")
    child = chat.fork()
    grandchild = child.fork()
    for one, tokens in ((chat, 100), (child, 20), (grandchild, 3)):
        one.record(report(one.id, prompt=tokens, model="m"))
    assert chat.reuse.total.prompt == 100
    assert chat.reuse.total_with_children.prompt == 123
    assert child.reuse.total_with_children.turns == 2
    assert chat.reuse.total_with_children.by_model["m"].turns == 3


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


def test_totals_are_kept_by_model() -> None:
    chat = backhaul.conversation("c")
    for model in ("a", "b", "a", None):
        chat.record(report("c", model=model, prompt=10))
    by_model = chat.reuse.total.by_model
    assert {model: total.prompt for model, total in by_model.items()} == {"a": 20, "b": 10, "": 10}
    assert by_model["a"].by_model == {}


def test_turns_are_told_in_order_and_after_they_are_on_record() -> None:
    heard: list[tuple[int, int]] = []
    chat = backhaul.conversation("c", on_turn=lambda turn: heard.append((turn.turn, chat.reuse.total.turns)))
    for number in (1, 2):
        chat.record(report("c", turn=number))
    assert heard == [(1, 1), (2, 2)]


def test_what_is_no_function_cannot_listen() -> None:
    with pytest.raises(TypeError, match="on_turn: 17 is not a function"):
        backhaul.on_turn(17)  # type: ignore[arg-type]


def test_a_listener_can_be_removed_and_removed_again() -> None:
    heard: list[backhaul.Collapse] = []
    remove, again = backhaul.on_collapse(heard.append), backhaul.on_collapse(heard.append)
    remove()
    remove()
    chat = backhaul.conversation("c")
    chat.record(report("c", turn=2, on_record=5000, prompt=6000, reason=Reason.EXPIRED))
    again()
    assert len(heard) == 1


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


def test_a_closed_generator_ends_it(client: httpx2.Client, router: FakeRouter) -> None:
    def agent() -> Iterator[int]:
        with backhaul.conversation("c1"):
            client.get(URL)
            yield 1

    steps = agent()
    next(steps)
    steps.close()
    assert router.ended == ["c1"]
    assert current_id() is None


async def test_a_closed_async_generator_ends_it(async_client: httpx2.AsyncClient, router: FakeRouter) -> None:
    async def agent() -> AsyncIterator[int]:
        async with backhaul.conversation("c1"):
            await async_client.get(URL)
            yield 1

    steps = agent()
    await anext(steps)
    await steps.aclose()  # type: ignore[attr-defined]
    assert router.ended == ["c1"]


def test_what_is_left_by_return_is_ended(client: httpx2.Client, router: FakeRouter) -> None:
    def agent() -> str:
        with backhaul.conversation("c1"):
            client.get(URL)
            return "done"

    assert (agent(), router.ended) == ("done", ["c1"])


class Renews:
    """A router that keeps what it holds for so many seconds, or cannot be asked."""

    def __init__(self, answer: float | Exception) -> None:
        self.answer = answer

    async def renew(self, conversation: str) -> float:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def pause(self, conversation: str, seconds: float) -> Paused:
        return Paused(kept_s=await self.renew(conversation))

    def renewable(self, conversation: str) -> bool:
        return True

    async def end_conversation(self, conversation: str) -> None:
        pass


async def test_a_router_that_fails_does_not_keep_the_others_from_being_asked() -> None:
    chat = backhaul.conversation("c")
    for router in (Renews(LeaseError("away")), Renews(60.0)):
        chat.attach(router)
    assert await chat.renew() == 60.0
    assert (chat.renewals, chat.failed_renewals) == (1, 1)
    with pytest.raises(LeaseError, match="away"):
        await chat.apause(30.0)
    await chat.aend()
