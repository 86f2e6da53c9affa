"""The collapse detector: which turns count as one, why, and when it is told."""

from __future__ import annotations

from typing import Any

import backhaul
import pytest
from backhaul import Collapse, Reason, ReuseReport, Route
from fake_router import report


def turn(number: int, *, prompt: int, cached: int | None, on_record: int | None, **fields: Any) -> ReuseReport:
    given = {"turn": number, "route": Route.WARM, "reason": None, "computed": None, "generated": 100, **fields}
    return report("c", prompt=prompt, cached=cached, on_record=on_record, **given)


def first(prompt: int = 10_000) -> ReuseReport:
    return turn(1, prompt=prompt, cached=0, on_record=0, route=Route.COLD, reason=Reason.FIRST_TURN)


def good(number: int = 2, **fields: Any) -> ReuseReport:
    return turn(number, **{"prompt": 10_300, "cached": 10_080, "on_record": 10_099, **fields})


def lost(number: int = 3, **fields: Any) -> ReuseReport:
    given = {"prompt": 10_600, "cached": 0, "on_record": 10_399, "route": Route.COLD, "reason": Reason.EXPIRED}
    return turn(number, **{**given, **fields})


def after(*reports: ReuseReport, **options: Any) -> Collapse | None:
    chat = backhaul.conversation("c", **options)
    for one in reports:
        chat.record(one)
    return chat.reuse.collapse


def test_a_turn_that_reuses_what_is_on_record_is_none() -> None:
    assert after(first(), good(), good(3)) is None


def test_first_turns_and_forks_are_none() -> None:
    assert after(first()) is None
    assert after(turn(1, prompt=500, cached=0, on_record=0, route=Route.COLD, reason=Reason.IN_USE)) is None


def test_a_turn_that_reuses_nothing_is_one_with_its_reason_and_cost() -> None:
    assert after(first(), good(), lost()) == Collapse(
        conversation="c", turn=3, reason="expired", message=None, expected=10_399, reused=0, tokens_lost=10_399
    )


@pytest.mark.parametrize("reason", [Reason.FLUSHED, Reason.NO_HANDLE, Reason.ENGINE_CHANGED, Reason.READ_FAILED])
def test_what_was_held_and_is_gone_is_the_reports_reason(reason: Reason) -> None:
    found = after(first(), lost(2, reason=reason))
    assert found is not None
    assert found.reason == reason


def test_an_edited_message_is_named_with_what_it_cost() -> None:
    found = after(first(), good(), lost(prompt=10_500, cached=2_000, reason=None, route=Route.WARM, diverged_at=3))
    assert found is not None
    assert (found.reason, found.message, found.tokens_lost) == ("diverged", 3, 8_399)
    assert str(found) == "turn 3 reused 2000 of 10399 tokens on record: diverged at message 3"


def test_a_prompt_that_shrank_and_differs_was_compacted() -> None:
    found = after(first(), good(), lost(prompt=900, cached=480, diverged_at=1, reason=None))
    assert found is not None
    assert (found.reason, found.message) == ("compacted", 1)


def test_a_handle_that_expired_explains_more_than_a_late_edit() -> None:
    found = after(first(), lost(2, reason=Reason.EXPIRED, diverged_at=7))
    assert found is not None
    assert found.reason == "expired"


def test_a_loss_that_nothing_explains_is_unexpected() -> None:
    found = after(first(), good(cached=2_000))
    assert found is not None
    assert found.reason == "unexpected"


@pytest.mark.parametrize(
    ("on_record", "cached", "collapsed"),
    [
        (10_000, 9_500, False),  # 5 %
        (10_000, 9_400, True),
        (1_000, 745, False),  # a quarter, but 255 tokens
        (1_000, 744, True),
    ],
)
def test_a_shortfall_counts_above_five_per_cent_and_from_the_floor_on(
    on_record: int, cached: int, collapsed: bool
) -> None:
    assert (after(first(), good(on_record=on_record, cached=cached)) is not None) is collapsed


def test_the_floor_can_be_set_and_children_inherit_it() -> None:
    small = good(on_record=200, prompt=220, cached=150)
    assert after(first(), small) is None
    assert after(first(), small, collapse_floor=50) is not None
    parent = backhaul.conversation(collapse_floor=50)
    assert parent.fork().reuse.collapse_floor == 50
    with pytest.raises(ValueError, match="collapse_floor=0: a number of tokens, 1 or more"):
        backhaul.conversation(collapse_floor=0)


@pytest.mark.parametrize(
    "unjudged",
    [
        lost(cached=None),
        lost(error="client_gone"),
        lost(status=502),
        lost(reason=Reason.REUSE_OFF),
    ],
    ids=["cached tokens not known", "left early", "failed", "switched off"],
)
def test_turns_that_say_nothing_about_reuse_are_not_judged(unjudged: ReuseReport) -> None:
    assert after(first(), good(), unjudged) is None


def test_it_is_told_once_until_the_history_is_reused_again() -> None:
    told: list[Collapse] = []
    chat = backhaul.conversation("c", on_collapse=told.append)
    for one in (first(), good(), lost(), lost(4), lost(5, error="client_gone")):
        chat.record(one)
    assert [collapse.turn for collapse in told] == [3]
    assert chat.reuse.collapse == told[0]
    chat.record(good(6))
    assert chat.reuse.collapse is None
    chat.record(lost(7))
    assert [collapse.turn for collapse in told] == [3, 7]


def test_the_process_hears_of_every_conversations_until_it_is_removed() -> None:
    told: list[Collapse] = []
    remove = backhaul.on_collapse(told.append)
    after(first(), lost(2))
    remove()
    after(first(), lost(2))
    assert [(collapse.conversation, collapse.turn) for collapse in told] == [("c", 2)]


def test_reports_made_from_answers_alone_are_held_against_the_turn_before() -> None:
    made_do = [first(), good(on_record=None), lost(on_record=None)]
    found = after(*made_do)
    assert found is not None
    assert (found.turn, found.expected, found.reason) == (3, 10_300 + 99, "expired")
    assert after(turn(4, prompt=900, cached=0, on_record=None)) is None


@pytest.mark.parametrize(("prompt", "cached"), [(950, 944), (961, 960), (1035, 944)])
def test_a_prompt_that_is_shorter_than_the_record_and_reused_is_none(prompt: int, cached: int) -> None:
    """A long answer is made anew, left out, or sent back shortened."""
    assert after(first(900), turn(2, prompt=prompt, cached=cached, on_record=1549)) is None
