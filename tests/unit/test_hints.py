"""What callers say of a conversation's future: how it is written, and what a router makes of it."""

from __future__ import annotations

import pytest
from backhaul_router.identity.hints import NO_HINTS, HintError, Hints, inside, longest_pause_s, read_hints, why_not_kept
from core_values import config


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({}, NO_HINTS),
        ({"x-backhaul-last-turn": "true"}, Hints(last_turn=True)),
        ({"x-backhaul-last-turn": " TRUE "}, Hints(last_turn=True)),
        ({"x-backhaul-last-turn": "1"}, Hints(last_turn=True)),
        ({"x-backhaul-last-turn": "false"}, NO_HINTS),
        ({"x-dynamo-session-final": "true"}, Hints(last_turn=True)),
        ({"x-dynamo-session-final": "what?"}, NO_HINTS),
        ({"x-backhaul-pause": "90"}, Hints(pause_s=90.0)),
        ({"x-backhaul-pause": "86400"}, Hints(pause_s=86_400.0)),
        ({"x-backhaul-pause": "0.5"}, Hints(pause_s=0.5)),
    ],
)
def test_hints_in_headers(headers: dict[str, str], found: Hints) -> None:
    assert read_hints(headers) == found


@pytest.mark.parametrize("said", ["0", "-1", "86401", "inf", "nan", "soon", "", "1e999"])
def test_a_pause_that_is_none_is_refused_with_its_rule(said: str) -> None:
    with pytest.raises(HintError, match="above 0 and at most 86,400") as refused:
        read_hints({"x-backhaul-pause": said})
    assert refused.value.param == "x-backhaul-pause"


def test_a_last_turn_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(HintError, match="'maybe': use true or false"):
        read_hints({"x-backhaul-last-turn": "maybe"})


def test_headers_go_before_the_code_around() -> None:
    assert read_hints({"x-backhaul-last-turn": "false"}, Hints(last_turn=True)) == NO_HINTS
    assert read_hints({}, Hints(last_turn=True)) == Hints(last_turn=True)


def test_nobody_has_hints_outside() -> None:
    assert inside("c") is NO_HINTS


def test_a_pause_is_kept_for_as_long_as_conversations_are() -> None:
    assert longest_pause_s(config()) == 3600.0
    assert longest_pause_s(config(decoder_kv_blocks_ttl=60.0)) == 600.0


def test_why_something_is_not_kept() -> None:
    assert why_not_kept(60.0, config(), renewable=False, remaining_s=100.0) is None
    assert why_not_kept(3600.0, config(), renewable=True, remaining_s=100.0) is None
    stock = why_not_kept(200.0, config(), renewable=False, remaining_s=100.0)
    assert stock is not None
    assert "a stock decode engine cannot be asked to keep it for longer" in stock
    long = why_not_kept(3601.0, config(), renewable=True, remaining_s=100.0)
    assert long is not None
    assert "longer than the 3600 s for which this router has blocks kept at most" in long
