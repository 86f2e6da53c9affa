"""Keeping leases: when a conversation is due, what puts that off, and what a failure does. Time is the test's."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable

import pytest
from backhaul._keepalive import KeepAlive
from backhaul_router.errors import LeaseError


class Time:
    """A clock, and timers that go off when it is moved on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.timers.append((self.now + delay_s, call))

    async def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= until]:
            timer = min(due, key=lambda one: one[0])
            self.timers.remove(timer)
            self.now = max(self.now, timer[0])
            timer[1]()
            for _ in range(4):
                await asyncio.sleep(0)
        self.now = until


class Chat:
    """A conversation whose router answers from a script; the last answer goes on."""

    def __init__(self, time: Time, *answers: float | Exception | None) -> None:
        self.renewed_at: list[float] = []
        self.failures = 0
        self.ended = False
        self._time, self._answers = time, list(answers)

    async def renew(self) -> float | None:
        self.renewed_at.append(self._time.now - 1000.0)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def renewal_failed(self) -> bool:
        self.failures += 1
        return not self.ended


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def keeper(time: Time) -> KeepAlive:
    return KeepAlive(lambda: time.now, time.later)


async def test_a_conversation_is_renewed_when_half_of_its_time_is_gone_and_again(time: Time, keeper: KeepAlive) -> None:
    chat = Chat(time, 470.0)
    keeper.watch(chat, 470.0)
    await time.advance(1000)
    assert chat.renewed_at == [235.0, 470.0, 705.0, 940.0]


async def test_a_turn_puts_it_off(time: Time, keeper: KeepAlive) -> None:
    chat = Chat(time, 470.0)
    for _ in range(20):
        keeper.watch(chat, 470.0)
        await time.advance(100)
    assert chat.renewed_at == []


async def test_nothing_runs_when_there_is_nothing_to_renew(time: Time, keeper: KeepAlive) -> None:
    chat = Chat(time, None)
    assert time.timers == []
    keeper.watch(chat, 100.0)
    assert len(time.timers) == 1
    await time.advance(1000)
    assert (chat.renewed_at, time.timers, len(keeper)) == ([50.0], [], 0)


async def test_one_that_is_over_is_not_renewed(time: Time, keeper: KeepAlive) -> None:
    chat = Chat(time, 100.0)
    keeper.watch(chat, 100.0)
    keeper.forget(chat)
    await time.advance(1000)
    assert (chat.renewed_at, time.timers) == ([], [])


async def test_one_that_was_dropped_is_not_renewed(time: Time, keeper: KeepAlive) -> None:
    keeper.watch(Chat(time, 100.0), 100.0)
    gc.collect()
    await time.advance(1000)
    assert (len(keeper), time.timers) == (0, [])


async def test_many_share_one_timer(time: Time, keeper: KeepAlive) -> None:
    chats = [Chat(time, None) for _ in range(50)]
    for number, chat in enumerate(chats):
        keeper.watch(chat, 100.0 + number)
    assert len(time.timers) == 1
    await time.advance(1000)
    assert [chat.renewed_at for chat in chats] == [[50.0 + number / 2] for number in range(50)]


async def test_an_earlier_one_takes_the_timers_place(time: Time, keeper: KeepAlive) -> None:
    late, early = Chat(time, None), Chat(time, None)
    keeper.watch(late, 100.0)
    keeper.watch(early, 20.0)
    await time.advance(1000)
    assert (early.renewed_at, late.renewed_at) == ([10.0], [50.0])


async def test_a_failure_is_logged_counted_and_tried_again_while_there_is_time(
    time: Time, keeper: KeepAlive, caplog: pytest.LogCaptureFixture
) -> None:
    chat = Chat(time, LeaseError("decode engine is away"), LeaseError("still away"), 100.0, None)
    with caplog.at_level(logging.WARNING, "backhaul"):
        keeper.watch(chat, 100.0)
        await time.advance(90)
    assert chat.renewed_at == [50.0, 75.0, 87.5]
    assert chat.failures == 2
    assert "end in 50 s if that fails again: decode engine is away" in caplog.text


async def test_without_time_left_it_gives_up(time: Time, keeper: KeepAlive, caplog: pytest.LogCaptureFixture) -> None:
    chat = Chat(time, LeaseError("decode engine is away"))
    keeper.watch(chat, 100.0)
    await time.advance(1000)
    assert 5 <= chat.failures <= 8
    assert time.timers == []
    assert "and end now: decode engine is away" in caplog.text


async def test_one_that_ended_while_its_renewal_failed_is_not_watched_again(time: Time, keeper: KeepAlive) -> None:
    chat = Chat(time, LeaseError("decode engine is away"))
    chat.ended = True
    keeper.watch(chat, 100.0)
    await time.advance(90)
    assert (chat.renewed_at, len(keeper), time.timers) == ([50.0], 0, [])
