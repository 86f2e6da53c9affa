"""Which conversation a request belongs to."""

from __future__ import annotations

import re

import pytest
from backhaul_router.identity.identify import IdentityError, identify
from backhaul_router.identity.ids import Identity

NAMES = [
    ("header:x-conversation-id", {"x-conversation-id": "c"}, {}),
    ("header:x-session-id", {"x-session-id": "c"}, {}),
    ("body:conversation_id", {}, {"conversation_id": "c"}),
    ("body:session_id", {}, {"session_id": "c"}),
]


@pytest.mark.parametrize(("source", "headers", "fields"), NAMES)
def test_a_conversation_is_named_in_a_header_or_in_the_body(
    source: str, headers: dict[str, str], fields: dict[str, object]
) -> None:
    assert identify(headers, fields) == Identity("c", source)


def test_a_request_that_names_none_belongs_to_none() -> None:
    assert identify({"authorization": "Bearer c", "user-agent": "c"}, {"user": "c", "id": "c"}) is None


def test_the_scope_counts_where_nothing_is_said() -> None:
    assert identify({}, {}, "s") == Identity("s", "scope")
    assert identify({"x-conversation-id": ""}, {"session_id": ""}, "s") == Identity("s", "scope")


@pytest.mark.parametrize(("source", "headers", "fields"), NAMES)
def test_what_is_said_goes_before_the_scope(source: str, headers: dict[str, str], fields: dict[str, object]) -> None:
    assert identify(headers, fields, "another") == Identity("c", source)


@pytest.mark.parametrize("nothing", ["", None])
def test_an_empty_id_is_none(nothing: object) -> None:
    assert identify({"x-session-id": ""}, {"conversation_id": nothing, "session_id": "c"}) == Identity(
        "c", "body:session_id"
    )


def test_the_same_id_said_twice_is_one() -> None:
    found = identify({"x-conversation-id": "c", "x-session-id": "c"}, {"conversation_id": "c", "session_id": "c"})
    assert found == Identity("c", "header:x-conversation-id")


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({"x-conversation-id": "a", "x-session-id": "b"}, {}, "x-session-id"),
        ({"x-conversation-id": "a"}, {"conversation_id": "b"}, "conversation_id"),
        ({}, {"conversation_id": "a", "session_id": "b"}, "session_id"),
        ({"x-conversation-id": "a"}, {"session_id": "A"}, "session_id"),
        ({"x-conversation-id": "a"}, {"session_id": "a "}, "session_id"),
        ({"x-conversation-id": "é"}, {"session_id": "e\u0301"}, "session_id"),
    ],
)
def test_ids_that_differ_are_refused_and_both_are_named(
    headers: dict[str, str], fields: dict[str, object], param: str
) -> None:
    with pytest.raises(IdentityError, match="name one conversation") as caught:
        identify(headers, fields)
    assert caught.value.param == param
    for value in (*headers.values(), *fields.values()):
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize("fits", ["c" * 256, "é" * 128])
def test_an_id_has_at_most_256_bytes(fits: str) -> None:
    assert identify({}, {"session_id": fits}) == Identity(fits, "body:session_id")
    with pytest.raises(IdentityError, match="257 bytes"):
        identify({}, {"session_id": fits + "x"})


@pytest.mark.parametrize("value", [0, 1, 1.5, True, False, [], ["c"], {}, float("inf")])
@pytest.mark.parametrize("name", ["conversation_id", "session_id"])
def test_an_id_of_the_body_is_a_string(name: str, value: object) -> None:
    with pytest.raises(IdentityError, match=f"body:{name} must be a string") as caught:
        identify({}, {name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("value", ["a\nb", "a\r\nx-data-parallel-rank: 1", "\x00", "\x7f", "\x9b"])
def test_an_id_that_could_not_be_a_header_is_refused(value: str) -> None:
    with pytest.raises(IdentityError, match=re.escape("holds control characters")):
        identify({}, {"conversation_id": value})


def test_an_id_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(IdentityError, match="not valid Unicode"):
        identify({}, {"conversation_id": "\ud800"})


@pytest.mark.parametrize("value", ["user 7/thread 3", "会話", "naïve"])
def test_any_readable_id_will_do(value: str) -> None:
    assert identify({}, {"conversation_id": value}) == Identity(value, "body:conversation_id")


def test_the_scopes_id_is_checked_as_well() -> None:
    with pytest.raises(IdentityError, match="257 bytes"):
        identify({}, {}, "c" * 257)
