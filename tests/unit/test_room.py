"""Leases end for the request that is scheduled next, and for no other reason than that it needs their blocks."""

from __future__ import annotations

import pytest
from backhaul_connector.lease_table import LeaseTable
from backhaul_connector.room import Room
from legs import BLOCK, Request, hashes


@pytest.fixture
def leases() -> LeaseTable:
    """Ten leases of four blocks each, of a thousand blocks."""
    table = LeaseTable("D", 1000)
    for number in range(10):
        blocks = [number * 4 + i for i in range(4)]
        name, found = str(number), hashes("abcd", 4 * BLOCK)
        table.add(name, found, [blocks], blocks, block_size=BLOCK, ttl_s=60.0, shared=True)
    return table


def request(blocks: int) -> Request:
    return Request("x" * blocks, None, extra_tokens=0)


def test_a_request_that_fits_ends_no_lease(leases: LeaseTable) -> None:
    Room(leases, BLOCK).make(request(20), 10 * BLOCK, free=10)
    assert leases.count() == (10, 40)


def test_a_request_that_does_not_fit_ends_as_many_as_it_needs(leases: LeaseTable) -> None:
    Room(leases, BLOCK).make(request(20), 10 * BLOCK, free=5)
    assert leases.sweep() == {"0", "1"}


def test_each_group_of_layers_takes_blocks_of_its_own(leases: LeaseTable) -> None:
    Room(leases, BLOCK, groups=2).make(request(20), 10 * BLOCK, free=13)
    assert leases.sweep() == {"0", "1"}


def test_a_cached_prefix_that_lies_in_free_blocks_does_not_keep_its_request_waiting_for_leases(
    leases: LeaseTable,
) -> None:
    """Eight of the ten free blocks are the request's own prefix, and it needs five more."""
    room = Room(leases, BLOCK)
    room.make(request(13), 8 * BLOCK, free=10)
    room.attempted("r")
    assert leases.count() == (10, 40)
    room.make(request(13), 8 * BLOCK, free=10)
    assert leases.sweep() == {"0"}
    room.attempted("r")
    room.make(request(13), 8 * BLOCK, free=10)
    assert not leases.sweep(), "those on their way are counted"


def test_a_request_that_waits_for_the_workers_to_let_go_ends_no_more_leases(leases: LeaseTable) -> None:
    room = Room(leases, BLOCK)
    for _ in range(3):
        room.make(request(20), 10 * BLOCK, free=7)
        room.attempted("r")
    assert leases.sweep() == {"0"}
    leases.forget("0")
    room.make(request(20), 10 * BLOCK, free=11)
    assert not leases.sweep()


@pytest.mark.parametrize("prefix", [0, 8])
def test_a_request_that_has_its_blocks_does_not_come_as_one_that_waits(leases: LeaseTable, prefix: int) -> None:
    """As after a preemption."""
    room = Room(leases, BLOCK)
    room.make(request(13), 8 * BLOCK, free=10)
    room.attempted("r")
    room.over("r")
    room.make(request(13), 8 * BLOCK, free=5 + prefix)
    assert leases.count() == (10, 40)


def test_requests_that_run_find_blocks_to_grow_into(leases: LeaseTable) -> None:
    room = Room(leases, BLOCK)
    room.keep(3, free=6)
    room.keep(0, free=0)
    assert leases.count() == (10, 40)
    room.keep(3, free=1)
    assert leases.sweep() == {"0", "1"}
