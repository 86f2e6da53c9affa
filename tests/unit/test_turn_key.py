"""Whose histories a turn may go on from."""

from __future__ import annotations

import pytest
from backhaul_router.identity.ids import Identity
from backhaul_router.ledger.records import Key
from backhaul_router.turn.turn import Turn
from core_values import config, facts, fleet


def key(tenant: str = "t", conversation: str = "c", **fields: str) -> Key:
    return Turn(
        facts(**{"cache_salt": "s", **fields}), Identity(conversation, "scope"), config(), fleet(), 0.0, tenant=tenant
    ).key


def test_it_has_the_tenant_the_model_the_salt_and_the_conversation() -> None:
    assert key() == Key("t", "m", "s", "c")


@pytest.mark.parametrize(
    "other", [{"tenant": "u"}, {"model": "n"}, {"cache_salt": "r"}, {"conversation": "d"}], ids=str
)
def test_a_turn_that_differs_in_any_of_them_has_others(other: dict[str, str]) -> None:
    assert key(**other) != key()
