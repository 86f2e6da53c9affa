"""What a router on a shared ledger remembers to sweep, and that it is not more than there is to sweep."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("redis")

from backhaul_router.ledger.records import Held
from backhaul_router.ledger.redis_local import FiledHandles
from backhaul_router.ledger.redis_records import Name
from core_values import leased

A, B = Name("", "a"), Name("", "b")


def note(filed: FiledHandles, name: Name, *on_file: Held, adds: tuple[Held, ...] = ()) -> None:
    filed.note([name], {held.name: held for held in on_file}, {held.name: name for held in adds})


def until(held: Held, deadline: float) -> Held:
    return msgspec.structs.replace(held, deadline=deadline)


def test_what_was_filed_here_and_is_due_is_told_once() -> None:
    filed, first, last, others = FiledHandles(), leased("1", deadline=10.0), leased("2", deadline=20.0), leased("3")
    note(filed, A, first, last, others, adds=(first, last))
    assert filed.handles() == (first, last)
    assert filed.due(9.9) == {}
    assert filed.due(10.0) == {A: {first.name}}
    assert (filed.due(10.0), filed.handles()) == ({}, (last,))
    assert filed.due(20.0) == {A: {last.name}}
    assert len(filed) == 0


def test_what_is_gone_is_not_due_and_what_was_renewed_is_due_later() -> None:
    filed, gone, kept = FiledHandles(), leased("1", deadline=10.0), leased("2", deadline=10.0)
    note(filed, A, gone, adds=(gone,))
    note(filed, B, kept, adds=(kept,))
    note(filed, A)
    note(filed, B, until(kept, 30.0))
    assert (len(filed), filed.due(29.0)) == (1, {})
    assert filed.due(30.0) == {B: {kept.name}}


def test_a_conversation_takes_no_more_however_often_it_goes_on() -> None:
    filed, handles = FiledHandles(), [leased(str(number), deadline=1_000.0 + number / 100) for number in range(1_000)]
    note(filed, A, handles[0], adds=(handles[0],))
    for handle in handles[1:]:
        note(filed, A, handle, adds=(handle,))
        assert len(filed._deadlines) < 50
    assert filed.handles() == (handles[-1],)
