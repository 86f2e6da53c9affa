"""What is remembered of requests that engines broke with."""

from __future__ import annotations

from backhaul_router.fleet.breakers import MAX_DEATHS, POISON_WINDOW_S, PoisonList


def test_the_death_of_one_engine_counts_once_however_many_it_took_along() -> None:
    poison_list = PoisonList()
    for n in range(16):
        poison_list.broke(b"the same question of 16 agents", "http://p1", n / 100)
    assert poison_list.deaths(b"the same question of 16 agents", 1.0) == 1


def test_engines_that_die_one_after_another_count_each() -> None:
    poison_list = PoisonList()
    poison_list.broke(b"request", "http://p1", 0.0)
    poison_list.broke(b"request", "http://p2", 0.1)
    assert poison_list.deaths(b"request", 0.2) == MAX_DEATHS
    assert poison_list.deaths(b"another", 0.2) == 0


def test_an_engine_that_comes_back_and_dies_again_counts_again() -> None:
    poison_list = PoisonList()
    poison_list.broke(b"request", "http://p1", 0.0)
    poison_list.broke(b"request", "http://p1", 30.0)
    assert poison_list.deaths(b"request", 31.0) == MAX_DEATHS


def test_after_a_while_it_may_be_tried_again() -> None:
    poison_list = PoisonList()
    poison_list.broke(b"request", "http://p1", 0.0)
    poison_list.broke(b"request", "http://p2", 0.0)
    assert poison_list.deaths(b"request", POISON_WINDOW_S) == MAX_DEATHS
    assert poison_list.deaths(b"request", POISON_WINDOW_S + 1) == 0
    assert poison_list.deaths(b"request", POISON_WINDOW_S + 1) == 0


def test_what_is_remembered_is_bounded() -> None:
    poison_list = PoisonList()
    for n in range(10_000):
        poison_list.broke(b"%d" % n, "http://p1", 0.0)
    assert poison_list.deaths(b"9999", 0.0) == 1
    assert poison_list.deaths(b"0", 0.0) == 0
