"""Conversations without a name are found by the messages that a request continues, and nothing of them grows without bound."""

from __future__ import annotations

import pytest
from backhaul_router.ledger import digests
from backhaul_router.ledger.indexes import HistoryIndex
from backhaul_router.ledger.memory import MemoryLedger
from backhaul_router.ledger.records import Held, Key, Taken
from backhaul_router.report import Reason
from core_values import branch, held
from hypothesis import given
from hypothesis import strategies as st

ANY = Key("", "m", "", "")
NEW = Taken(reason=Reason.FIRST_TURN)


def chain(messages: str) -> bytes:
    """Of a history in which every letter is a message."""
    return digests.chain(letter.encode() for letter in messages)


def file(ledger: MemoryLedger, name: str, messages: str, *, handle: Held | None = None, now: float = 0.0) -> list[str]:
    """A turn of a conversation without a name; returns the handles to release."""
    key = ANY._replace(conversation=name)
    taken = ledger.take(key, chain(messages), now, lambda _: None) if name in known(ledger) else NEW
    of = branch([letter.encode() for letter in messages], held=handle, by_history=True)
    return [dropped.handle.request_id for dropped in ledger.settle(key, taken, of, now)]


def known(ledger: MemoryLedger) -> set[str]:
    return {key.conversation for key in ledger._conversations}


def find(ledger: MemoryLedger, messages: str, key: Key = ANY) -> str | None:
    return ledger.find(key, chain(messages))


def test_a_request_that_goes_on_is_found_by_all_that_was_said() -> None:
    ledger = MemoryLedger()
    file(ledger, "x", "su")
    assert find(ledger, "suav") == "x"
    assert [find(ledger, other) for other in ("su", "s", "sv", "tuav", "")] == [None] * 5


def test_the_history_that_it_continues_furthest_counts() -> None:
    ledger = MemoryLedger()
    file(ledger, "short", "s")
    file(ledger, "long", "suav")
    file(ledger, "other", "sub")
    assert (find(ledger, "suavbw"), find(ledger, "suaw")) == ("long", "short")


def test_of_equal_histories_the_last_one_counts() -> None:
    ledger = MemoryLedger()
    for name in "xyx":
        file(ledger, name, "su")
    assert find(ledger, "suav") == "x"


def test_a_conversation_is_found_where_it_is_now() -> None:
    ledger = MemoryLedger()
    file(ledger, "x", "su")
    file(ledger, "x", "suav")
    assert (find(ledger, "suavbw"), find(ledger, "suaw")) == ("x", None)


@pytest.mark.parametrize("other", [{"tenant": "t"}, {"model": "m2"}, {"cache_salt": "s"}])
def test_nothing_is_found_across_tenants_models_and_salts(other: dict[str, str]) -> None:
    ledger = MemoryLedger()
    file(ledger, "x", "su")
    assert find(ledger, "suav", ANY._replace(**other)) is None


def test_a_conversation_with_a_name_is_never_found() -> None:
    ledger = MemoryLedger()
    key = ANY._replace(conversation="named")
    ledger.settle(key, ledger.take(key, chain("su"), 0.0, lambda _: None), branch((b"s", b"u")), 0.0)
    assert find(ledger, "suav") is None


def test_a_conversation_that_is_named_later_is_not_found_any_more() -> None:
    ledger = MemoryLedger()
    file(ledger, "x", "su")
    key = ANY._replace(conversation="x")
    taken = ledger.take(key, chain("suav"), 0.0, lambda _: None)
    ledger.settle(key, taken, branch((b"s", b"u", b"a", b"v")), 0.0)
    assert find(ledger, "suavbw") is None


def test_a_turn_that_leaves_nothing_opens_no_conversation() -> None:
    ledger = MemoryLedger()
    assert ledger.give_back(ANY._replace(conversation="x"), NEW) == ()
    assert len(ledger) == 0


def test_a_conversation_that_has_ended_is_not_opened_again_by_its_last_turn() -> None:
    ledger = MemoryLedger()
    file(ledger, "x", "su", handle=held("1"))
    key = ANY._replace(conversation="x")
    taken = ledger.take(key, chain("suav"), 0.0, lambda _: None)
    ledger.forget("x")
    left = branch((b"s",), held=held("2"), by_history=True)
    assert ledger.settle(key, taken, left, 0.0) == (left.held,)
    assert (len(ledger), find(ledger, "suavbw")) == (0, None)


def test_a_call_that_nobody_went_on_with_is_forgotten_when_its_handle_expires() -> None:
    ledger = MemoryLedger()
    file(ledger, "once", "su", handle=held("1", deadline=60.0))
    file(ledger, "twice", "tu", handle=held("2", deadline=60.0))
    file(ledger, "twice", "tuav", handle=held("3", deadline=60.0))
    assert sorted(h.handle.request_id for h in ledger.sweep(60.0)) == ["1", "3"]
    assert known(ledger) == {"twice"}
    assert (find(ledger, "suav"), find(ledger, "tuavbw")) == (None, "twice")


def test_calls_without_a_name_make_room_for_each_other_and_not_for_named_conversations() -> None:
    ledger = MemoryLedger(max_conversations=4)
    named = ANY._replace(conversation="named")
    ledger.settle(named, ledger.take(named, chain("n"), 0.0, lambda _: None), branch((b"n",), held=held("n")), 0.0)
    dropped = [file(ledger, name, f"s{name}", handle=held(name)) for name in "abcde"]
    assert dropped == [[], [], ["a"], ["b"], ["c"]]
    assert known(ledger) == {"named", "d", "e"}


KEYS = [Key("", "m", salt, name) for salt in ("", "s") for name in ("x", "y", "z")]
CHAINS = st.text("ab", max_size=4).map(chain)


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.lists(CHAINS, max_size=3)), max_size=20), st.text("ab", max_size=5))
def test_what_is_found_is_what_a_search_of_all_histories_finds(puts: list[tuple[Key, list[bytes]]], asked: str) -> None:
    histories, model = HistoryIndex(max_conversations=3), dict[Key, list[bytes]]()
    for key, chains in puts:
        crowded_out = histories.put(key, chains)
        model.pop(key, None)
        if any(chains):
            model[key] = [one for one in chains if one]
        assert crowded_out == (next(iter(model)) if len(model) > 3 else None)
        if crowded_out is not None:
            histories.drop(crowded_out)
            del model[crowded_out]
    assert len(histories) == len(model)
    for salt in ("", "s"):
        request = chain(asked)
        continued = [
            (len(one), at, key.conversation)
            for at, (key, chains) in enumerate(model.items())
            if key.cache_salt == salt
            for one in chains
            if len(one) < len(request) and request.startswith(one)
        ]
        expected = max(continued)[2] if continued else None
        assert histories.find(ANY._replace(cache_salt=salt), request) == expected
    for key in list(model):
        histories.drop(key)
    assert (len(histories), histories._found) == (0, {})
