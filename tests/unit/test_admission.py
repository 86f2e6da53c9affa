"""Who gets a place, who waits, and who is refused."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from backhaul_router.errors import ConfigError
from backhaul_router.serve.admission import Admission, Limits, Refused


class Turns:
    """Turns that run until they are told to end, and note in which order they got their places."""

    def __init__(self, **limits: float) -> None:
        self.admission = Admission(Limits(**limits))  # type: ignore[arg-type]
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Turns:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        assert (self.admission.running, self.admission.queued) == (0, 0)

    async def ask(self, name: str, tenant: str = "") -> asyncio.Task[None]:
        self._ends[name] = asyncio.Event()
        task = self._tasks[name] = asyncio.create_task(self._run(name, tenant))
        await self._settle()
        return task

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._settle()

    async def _run(self, name: str, tenant: str) -> None:
        async with self.admission.turn(tenant):
            self.begun.append(name)
            await self._ends[name].wait()

    @staticmethod
    async def _settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_without_a_limit_every_turn_runs() -> None:
    async with Turns() as turns:
        for name in "abc":
            await turns.ask(name)
        assert turns.begun == ["a", "b", "c"]


async def test_a_turn_beyond_the_limit_waits_for_one_to_end() -> None:
    async with Turns(max_concurrent_turns=1) as turns:
        await turns.ask("a")
        await turns.ask("b")
        assert (turns.begun, turns.admission.queued) == (["a"], 1)
        await turns.end("a")
        assert turns.begun == ["a", "b"]


async def test_tenants_that_wait_get_places_in_turn_however_many_one_of_them_has_queued() -> None:
    async with Turns(max_concurrent_turns=1) as turns:
        await turns.ask("first", "greedy")
        for name in ("g1", "g2", "g3"):
            await turns.ask(name, "greedy")
        for name in ("m1", "m2"):
            await turns.ask(name, "modest")
        for name in ("first", "g1", "m1", "g2", "m2"):
            await turns.end(name)
        assert turns.begun == ["first", "g1", "m1", "g2", "m2", "g3"]


async def test_a_full_queue_refuses_with_429_and_a_time_to_try_again() -> None:
    async with Turns(max_concurrent_turns=1, max_queued_turns=1) as turns:
        await turns.ask("a")
        await turns.ask("b")
        refused = await turns.ask("c")
        error = refused.exception()
        assert isinstance(error, Refused)
        assert (error.status, dict(error.headers)) == (429, {"retry-after": "1", "x-should-retry": "true"})


async def test_without_a_queue_the_turn_beyond_the_limit_is_refused() -> None:
    async with Turns(max_concurrent_turns=1, max_queued_turns=0) as turns:
        await turns.ask("a")
        assert isinstance((await turns.ask("b")).exception(), Refused)


async def test_a_full_queue_makes_room_for_the_tenant_that_has_fewer_waiting() -> None:
    async with Turns(max_concurrent_turns=1, max_queued_turns=2) as turns:
        await turns.ask("a", "greedy")
        await turns.ask("g1", "greedy")
        newest = await turns.ask("g2", "greedy")
        await turns.ask("m1", "modest")
        assert isinstance(newest.exception(), Refused)
        await turns.end("a")
        await turns.end("g1")
        assert turns.begun == ["a", "g1", "m1"]


async def test_a_full_queue_of_equals_refuses_the_newest() -> None:
    async with Turns(max_concurrent_turns=1, max_queued_turns=2) as turns:
        await turns.ask("a", "one")
        await turns.ask("b", "one")
        await turns.ask("c", "other")
        assert isinstance((await turns.ask("d", "third")).exception(), Refused)


async def test_a_turn_that_waited_for_too_long_is_refused_with_503() -> None:
    async with Turns(max_concurrent_turns=1, queue_timeout_s=0.01) as turns:
        await turns.ask("a")
        late = await turns.ask("b")
        with pytest.raises(Refused, match="queue_timeout_s") as caught:
            await late
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)


async def test_a_client_that_leaves_the_queue_leaves_no_gap_in_it() -> None:
    async with Turns(max_concurrent_turns=1) as turns:
        await turns.ask("a")
        gone = await turns.ask("b")
        await turns.ask("c")
        gone.cancel()
        await asyncio.wait((gone,))
        await turns.end("a")
        assert turns.begun == ["a", "c"]


async def test_a_client_that_leaves_as_its_place_comes_gives_it_to_the_next() -> None:
    async with Turns(max_concurrent_turns=1) as turns:
        await turns.ask("a")
        gone = await turns.ask("b")
        await turns.ask("c")
        turns._ends["a"].set()
        while turns.admission.queued == 2:
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait((gone,))
        await turns._settle()
        assert turns.begun[-1] == "c"


async def test_a_limit_that_is_raised_lets_turns_in_at_once() -> None:
    async with Turns(max_concurrent_turns=1) as turns:
        await turns.ask("a")
        await turns.ask("b")
        turns.admission.limits = Limits(max_concurrent_turns=2)
        await turns._settle()
        assert turns.begun == ["a", "b"]


async def test_a_limit_that_is_lowered_cuts_no_turn() -> None:
    async with Turns(max_concurrent_turns=2) as turns:
        await turns.ask("a")
        await turns.ask("b")
        turns.admission.limits = Limits(max_concurrent_turns=1)
        await turns.ask("c")
        await turns.end("a")
        assert turns.begun == ["a", "b"]
        await turns.end("b")
        assert turns.begun == ["a", "b", "c"]


async def test_a_turn_that_fails_gives_its_place_back() -> None:
    admission = Admission(Limits(max_concurrent_turns=1))
    with pytest.raises(ZeroDivisionError):
        async with admission.turn():
            raise ZeroDivisionError
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(admission.turn())
        assert admission.running == 1


async def test_a_tenant_has_as_many_requests_as_it_may_and_others_theirs() -> None:
    admission = Admission()
    begin = admission.request
    async with begin("a", 2), begin("a", 2), begin("b", 1), begin("c", None):
        with pytest.raises(Refused, match=r"a has 2 requests running, its limit \(max_concurrent_turns\)") as caught:
            async with admission.request("a", 2):
                raise AssertionError("it was let in")
        assert (caught.value.status, caught.value.code) == (429, "too_many_turns")
    async with admission.request("a", 1):
        pass


@pytest.mark.parametrize(
    "wrong", [{"max_concurrent_turns": -1}, {"max_queued_turns": -1}, {"queue_timeout_s": 0.0}], ids=str
)
def test_limits_that_cannot_be_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)  # type: ignore[arg-type]
