"""A worker trusts no read that ended after its hold."""

from __future__ import annotations

from backhaul_connector.holds import Holds, Moment


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


def test_a_read_that_ends_after_its_hold_is_late_and_any_other_is_not() -> None:
    clock = Clock()
    holds = Holds(clock)
    holds.begin({"a": 10.0, "b": 20.0})
    clock.now += 10.1
    assert holds.late({"a", "b", "without a hold"}, under_way=()) == {"a"}


def test_a_read_goes_on_being_watched_until_it_ends() -> None:
    clock = Clock()
    holds = Holds(clock)
    holds.begin({"a": 10.0})
    clock.now += 30.0
    assert holds.late((), under_way={"a"}) == set()
    assert holds.late({"a"}, under_way={"a"}) == {"a"}
    assert holds.late({"a"}, under_way={"a"}) == set()


def test_a_read_that_never_began_is_forgotten() -> None:
    clock = Clock()
    holds = Holds(clock)
    holds.begin({"a": 10.0})
    holds.late((), under_way=())
    clock.now += 30.0
    assert holds.late({"a"}, under_way=()) == set()


def test_a_hold_goes_on_while_its_order_is_on_the_way() -> None:
    """As when a worker is stalled, or a step takes long: D's clock does not wait for it."""
    clock = Clock()
    holds = Holds(clock)
    sent = Moment(clock.now, boot="here")
    clock.now += 8.0
    holds.begin({"a": 10.0}, sent.age_s(Moment(clock.now, boot="here")))
    clock.now += 2.1
    assert holds.late({"a"}, under_way=()) == {"a"}


def test_clocks_of_two_machines_are_not_compared() -> None:
    assert Moment(5.0, boot="here").age_s(Moment(9.0, boot="there")) == 0.0
    assert Moment(5.0, boot=None).age_s(Moment(9.0, boot=None)) == 0.0
    assert 0.0 <= Moment.now().age_s(Moment.now()) < 1.0
