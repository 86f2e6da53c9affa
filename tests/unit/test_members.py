"""JSON objects as their members."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from backhaul_router.wire.json_members import put_last, without
from hypothesis import given
from msgspec import Raw

KEYS = st.sampled_from(["ours", "a", "b", "x\\ours", 'quo"te', "\u00fc"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", '"ours":1', ',"ours":1}', "ours"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")])


@given(st.lists(st.tuples(KEYS, VALUES), max_size=4), VALUES, st.integers(0, 4), SPACES, st.booleans())
def test_a_member_is_taken_out_wherever_it_stands(
    others: list[tuple[str, Any]], value: Any, place: int, separators: tuple[str, str], escaped: bool
) -> None:
    kept = {key: other for key, other in others if key != "ours"}
    items = list(kept.items())
    items.insert(place, ("ours", value))
    text = json.dumps(dict(items), separators=separators, ensure_ascii=escaped)
    raw = Raw(json.dumps(value, separators=separators, ensure_ascii=escaped).encode())
    assert json.loads(without(text.encode(), "ours", raw)) == kept


@pytest.mark.parametrize(
    ("data", "left"),
    [
        (b'{"ours":1}', {}),
        (b'{"ours":1,"ours":2}', {}),
        (b'{"a":{"ours":2},"\\u006furs":2}', {"a": {"ours": 2}}),
        (b'{"ours":2,"a":{"b":1,"ours":2}}', {"a": {"b": 1, "ours": 2}}),
    ],
    ids=["alone", "twice", "escaped", "nested"],
)
def test_a_key_in_another_place_is_another_key(data: bytes, left: dict[str, Any]) -> None:
    assert json.loads(without(data, "ours", Raw(b"2" if b"2" in data else b"1"))) == left


def test_a_member_is_put_behind_the_others() -> None:
    assert put_last(b'{"a":{}}', "b", b"[1]") == b'{"a":{},"b":[1]}'
