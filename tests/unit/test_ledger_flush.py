"""A flush covers the turns that run: nothing that they have taken or leave is filed after it."""

from __future__ import annotations

import msgspec
from backhaul_router.ledger import digests
from backhaul_router.ledger.memory import MemoryLedger
from backhaul_router.ledger.records import Held, Key, Taken
from backhaul_router.report import Reason
from core_values import branch, held, leased

KEY = Key("", "m", "", "c")


def take(ledger: MemoryLedger, *messages: bytes) -> Taken:
    return ledger.take(KEY, digests.chain(messages), 0.0, lambda _: None)


def filed(*messages: bytes, handle: Held | None) -> MemoryLedger:
    """A ledger after one turn."""
    ledger = MemoryLedger()
    ledger.settle(KEY, take(ledger, *messages), branch(messages, held=handle), 0.0)
    return ledger


def test_what_a_running_turn_leaves_is_released_instead_of_filed() -> None:
    ledger, left = MemoryLedger(), held("1")
    running = take(ledger, b"a")
    assert ledger.flush() == ()
    assert ledger.settle(KEY, running, branch((b"a",), held=left), 0.0) == (left,)
    assert ledger.handles() == ()
    assert take(ledger, b"a", b"b").reason is Reason.FLUSHED


def test_what_a_running_turn_has_taken_and_gives_back_is_released() -> None:
    before = held("1")
    ledger = filed(b"a", handle=before)
    running = take(ledger, b"a", b"b")
    assert ledger.flush() == ()
    assert ledger.give_back(KEY, running) == (before,)
    assert take(ledger, b"a", b"b").reason is Reason.FLUSHED


def test_a_shared_handle_is_released_when_the_turn_that_reads_it_is_done() -> None:
    before, left = leased("1"), leased("2")
    ledger = filed(b"a", handle=before)
    running = take(ledger, b"a", b"b")
    assert ledger.flush() == ()
    dropped = ledger.settle(KEY, running, branch((b"a", b"b"), held=left), 0.0)
    assert sorted(one.handle.request_id for one in dropped) == ["1", "2"]


def test_a_turn_without_a_name_that_began_before_the_flush_leaves_nothing() -> None:
    ledger, left = MemoryLedger(), held("1")
    running = Taken(reason=Reason.FIRST_TURN, flushes=ledger.flushes)
    ledger.flush()
    new = msgspec.structs.replace(branch((b"a",), held=left), by_history=True)
    assert ledger.settle(KEY, running, new, 0.0) == (left,)
    assert ledger.handles() == ()


def test_turns_after_the_flush_leave_and_find_handles_again() -> None:
    ledger = filed(b"a", handle=held("1"))
    ledger.flush()
    left = held("2")
    assert ledger.settle(KEY, take(ledger, b"a", b"b"), branch((b"a", b"b"), held=left), 0.0) == ()
    assert take(ledger, b"a", b"b", b"c").held == left
