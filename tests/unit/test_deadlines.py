"""Things by the time when they are due: none is missed, none comes twice, and few places are taken by what is void."""

from __future__ import annotations

import math
from dataclasses import dataclass

from backhaul_router.ledger.indexes import CalendarQueue
from hypothesis import given
from hypothesis import strategies as st


@dataclass(eq=False)
class Thing:
    at: float | None = None


def due() -> CalendarQueue[Thing]:
    return CalendarQueue(lambda thing: thing.at)


def put(queue: CalendarQueue[Thing], thing: Thing, at: float | None) -> None:
    """Under this time, or under none any more."""
    before, thing.at = thing.at, at
    if before is not None:
        queue.void(before)
    if at is not None:
        queue.put(thing, at)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "drop", "take", "take any"]),
        st.integers(0, 7),
        st.integers(-20, 80).map(lambda n: n / 4),
    ),
    max_size=60,
)


@given(STEPS)
def test_what_is_taken_is_the_first_of_what_is_awaited(steps: list[tuple[str, int, float]]) -> None:
    queue, things = due(), [Thing() for _ in range(8)]
    for what, which, at in steps:
        if what in ("put", "drop"):
            put(queue, things[which], at if what == "put" else None)
            continue
        until = at if what == "take" else math.inf
        first = min((thing.at for thing in things if thing.at is not None and thing.at <= until), default=None)
        taken = queue.take(until)
        assert (taken.at if taken is not None else None) == first
        if taken is not None:
            taken.at = None
    while (taken := queue.take(math.inf)) is not None:
        taken.at = None
    assert all(thing.at is None for thing in things)
    assert len(queue) == 0


def test_of_things_due_at_one_time_the_first_comes_first() -> None:
    queue, things = due(), [Thing() for _ in range(5)]
    for thing in things:
        put(queue, thing, 7.5)
    assert [queue.take(7.5) for _ in things] == things


def test_what_is_void_is_cleaned_where_it_lies() -> None:
    queue, live = due(), [Thing() for _ in range(100)]
    for thing in live:
        put(queue, thing, 10.5)
    for _ in range(1_000):
        gone = Thing()
        put(queue, gone, 10.25)
        put(queue, gone, None)
        assert len(queue) < 1.5 * len(live)


def test_what_is_void_is_cleaned_in_the_span_that_was_reached_too() -> None:
    queue, first, last = due(), Thing(), Thing()
    put(queue, first, 90.25)
    put(queue, last, 90.5)
    assert queue.take(math.inf) is first
    for number in range(1_000):
        gone = Thing()
        put(queue, gone, number / 100)
        put(queue, gone, None)
        assert len(queue) < 20
    assert queue.take(math.inf) is last


def test_a_thing_that_is_put_back_and_forth_takes_one_place_and_a_few() -> None:
    queue, thing = due(), Thing()
    for number in range(1_000):
        put(queue, thing, float(number % 2))
    assert len(queue) < 40
    assert (queue.take(0.0), queue.take(1.0)) == (None, thing)
