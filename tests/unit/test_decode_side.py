"""A turn's decode leg: what D takes from P, what it keeps, and what its handle says."""

from __future__ import annotations

from typing import Any

import pytest
from backhaul_connector import locators
from backhaul_connector.decode_side import DecodeSide
from backhaul_connector.lease_table import Grant, LeaseTable
from backhaul_protocol.lease_channel import Claim
from legs import BLOCK, Request, handle, hashes, shape

STOCK = {"remote_block_ids": [[9, 8, 7, 6, 5]], "remote_num_tokens": 80, "remote_engine_id": "D"}


@pytest.fixture
def leases() -> LeaseTable:
    return LeaseTable("D", 1000)


def side(leases: LeaseTable, **other: Any) -> DecodeSide:
    return DecodeSide(shape(**other), leases, ttl_s=480.0, port=4000, prompt_from_p=lambda tokens: tokens)


def from_p(prompt: str = "abcd", **other: Any) -> dict[str, Any]:
    """P's parameters for D, for a prompt of these blocks and five tokens."""
    blocks = len(prompt) + 1
    params = handle(prompt, remote_block_ids=[list(range(blocks))], remote_num_tokens=len(prompt) * BLOCK + 5)
    ours = {"version": 1, "prompt_tokens": len(prompt) * BLOCK + 5, "prompt_hash": hashes(prompt, 999)[-1].hex()}
    return {**params, "do_remote_prefill": True, "do_remote_decode": False, "backhaul": {**ours, **other}}


def test_whole_blocks_of_what_was_run_are_kept_and_published(leases: LeaseTable) -> None:
    d = side(leases)
    request = Request("abcdef", from_p("abcdef", shared=True, retain_s=60.0), generated=20)
    request.block_hashes = hashes("abcdefg", 999)
    decode = d.admit(request, request.kv_transfer_params)
    tokens = d.kept_tokens(request, decode)
    assert tokens is not None
    assert tokens == (96 + 5 + 20 - 1) // BLOCK * BLOCK == 7 * BLOCK
    out = {**STOCK, "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7, 8]], "remote_num_tokens": 120}
    made = d.keep(request, decode, tokens, ([1, 2, 3, 4, 5, 6, 7, 8],), out)
    assert (made["remote_block_ids"], made["remote_num_tokens"]) == ([[1, 2, 3, 4, 5, 6, 7]], 7 * BLOCK)
    ours = made["backhaul"]
    assert ours["digests"] == locators.publish(hashes("abcdefg", 999))
    assert (ours["version"], ours["block_size"], ours["epoch"]) == (1, BLOCK, leases.epoch)
    assert ours["lease"] == {"port": 4000, "ttl_s": 60.0, "shared": True}
    assert leases.count() == (1, 8)
    answer = leases.claim(Claim(1, "r", "D", leases.epoch, 2, hashes("ab", 32)[1], hold_s=9.0, claim="c"))
    assert answer == Grant([[1, 2]], 32)


@pytest.mark.parametrize(
    ("computed", "in_flight", "tokens"),
    [(100, 0, 96), (101, 0, 96), (101, 1, 96), (96, 1, 80), (200, 0, 96), (10, 0, None)],
)
def test_what_is_in_flight_or_was_only_sampled_is_not_kept(
    leases: LeaseTable, computed: int, in_flight: int, tokens: int | None
) -> None:
    d = side(leases)
    request = Request("abcdef", {"backhaul": {"version": 1}})
    request.num_computed_tokens, request.num_in_flight_tokens = computed, in_flight
    assert d.kept_tokens(request, d.admit(request, request.kv_transfer_params)) == tokens


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"backhaul": {"version": 1}}, True),
        ({"backhaul": {"version": 1, "retain": False}}, False),
        ({"backhaul": {"version": 2}}, False),
        ({"backhaul": "x"}, False),
        ({"anything": 1}, False),
        (from_p("abcdef"), True),
        ({**from_p("abcdef"), "backhaul": None}, True),
    ],
)
def test_a_turn_is_kept_where_a_router_means_it(leases: LeaseTable, params: dict[str, Any], kept: bool) -> None:
    d = side(leases)
    request = Request("abcdef", params)
    assert (d.kept_tokens(request, d.admit(request, params)) is not None) == kept


def test_nothing_is_kept_on_an_engine_that_is_not_bidirectional(leases: LeaseTable) -> None:
    d = side(leases, bidirectional=False)
    request = Request("abcdef", from_p("abcdef"))
    assert d.kept_tokens(request, d.admit(request, request.kv_transfer_params)) is None


def test_where_blocks_cannot_be_compared_the_handle_is_vllms_own(leases: LeaseTable) -> None:
    d = side(leases, unsupported="sliding window")
    request = Request("abcdef", {**from_p("abcdef"), "backhaul": {"version": 1}})
    decode = d.admit(request, request.kv_transfer_params)
    tokens = d.kept_tokens(request, decode)
    assert tokens is not None
    assert tokens == 0
    made = d.keep(request, decode, tokens, ([9, 8, 7, 6, 5],), dict(STOCK))
    assert (made["remote_block_ids"], made["remote_num_tokens"]) == ([[9, 8, 7, 6, 5]], 80)
    assert "digests" not in made["backhaul"]
    assert leases.count() == (1, 5)


def test_p_is_trusted_with_the_prompt_that_it_computed(leases: LeaseTable) -> None:
    request = Request("abcd", from_p())
    decode = side(leases).admit(request, request.kv_transfer_params)
    assert (decode.notify_only, decode.account.why) == (False, None)
    assert request.kv_transfer_params["do_remote_prefill"] is True


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"backhaul": from_p("abxd")["backhaul"]}, "prompt_differs"),
        ({"backhaul": from_p("abc")["backhaul"]}, "prompt_differs"),
        ({"remote_block_ids": [[1, 2]]}, "malformed"),
    ],
)
def test_p_is_told_that_blocks_of_another_prompt_are_not_wanted(
    leases: LeaseTable, change: dict[str, Any], why: str
) -> None:
    request = Request("abcd", {**from_p(), **change})
    decode = side(leases).admit(request, request.kv_transfer_params)
    assert (decode.notify_only, decode.account.why) == (True, why)


def test_a_prompt_that_differs_behind_its_last_whole_block_is_not_ps(leases: LeaseTable) -> None:
    """The hash of P's last whole block is the prompt's, and so is its length."""
    request = Request("abcd", {})
    tail = shape().tail_hash(request, request.num_prompt_tokens)
    assert tail is not None
    for given, notify_only, why in ((tail.hex(), False, None), ("00" * 32, True, "prompt_differs")):
        request = Request("abcd", from_p(prompt_tail=given))
        decode = side(leases).admit(request, request.kv_transfer_params)
        assert (decode.notify_only, decode.account.why) == (notify_only, why)


@pytest.mark.parametrize(
    "change", [{"remote_block_ids": None}, {"remote_block_ids": [[1], [2]]}, {"remote_num_tokens": "x"}]
)
def test_p_is_told_that_blocks_which_nobody_can_read_are_not_wanted(leases: LeaseTable, change: dict[str, Any]) -> None:
    request = Request("abcd", {**from_p(), **change})
    decode = side(leases).admit(request, request.kv_transfer_params)
    assert (decode.notify_only, decode.account.why) == (True, "malformed")
    params = request.kv_transfer_params
    assert params["do_remote_prefill"] is True
    assert (params["remote_request_id"], params["remote_block_ids"], params["tp_size"]) == ("lease", [[]], 1)


@pytest.mark.parametrize(
    "change", [{"remote_request_id": None}, {"remote_host": 5}, {"remote_port": "x"}, {"tp_size": 0}]
)
def test_a_handle_that_is_none_leaves_d_alone_with_the_prompt(leases: LeaseTable, change: dict[str, Any]) -> None:
    request = Request("abcd", {**from_p(), **change})
    decode = side(leases).admit(request, request.kv_transfer_params)
    assert (decode.notify_only, decode.account.why) == (False, "malformed")
    assert request.kv_transfer_params["do_remote_prefill"] is False
    assert "remote_block_ids" not in request.kv_transfer_params


def test_a_list_that_is_longer_than_the_prompt_is_cut(leases: LeaseTable) -> None:
    request = Request("abcd", {**from_p(), "remote_block_ids": [list(range(7))], "remote_num_tokens": 100})
    side(leases).admit(request, request.kv_transfer_params)
    assert request.kv_transfer_params["remote_block_ids"] == [[0, 1, 2, 3, 4]]


def test_a_turn_releases_what_it_supersedes(leases: LeaseTable) -> None:
    leases.add("old", [b"h"], [[1]], [1], block_size=BLOCK, ttl_s=9.0, shared=True)
    request = Request("abcd", from_p(release=["old", "never"]))
    side(leases).admit(request, request.kv_transfer_params)
    assert leases.sweep() == {"old"}


def test_operations_on_leases_are_done_and_answered(leases: LeaseTable) -> None:
    for name in ("a", "b", "c"):
        leases.add(name, [b"h"], [[1]], [1], block_size=BLOCK, ttl_s=9.0, shared=True)
    ops = {"release": ["a", "x"], "renew": ["b", "x"], "ttl_s": 60.0, "list": True}
    params: dict[str, Any] = {"do_remote_prefill": True, "backhaul": {"version": 1, "leases": ops}}
    returned = side(leases).lease_operations(params)
    assert returned is not None
    answer: Any = returned["backhaul"]
    assert answer["version"] == 1
    listed = answer["leases"].pop("leases")
    assert [lease["id"] for lease in listed] == ["b", "c"]
    assert answer["leases"] == {
        "released": ["a"],
        "renewed": {"b": 60.0},
        "unknown": ["x"],
        "epoch": leases.epoch,
        "count": 2,
        "blocks": 1,
    }
    assert params == {"backhaul": {"version": 1}}


def test_a_flush_answers_with_the_new_epoch(leases: LeaseTable) -> None:
    before = leases.epoch
    returned: Any = side(leases).lease_operations({"backhaul": {"version": 1, "leases": {"flush": True}}})
    answer = returned["backhaul"]["leases"]
    assert (answer["flushed"], answer["epoch"] == leases.epoch, answer["epoch"] != before) == (0, True, True)


def test_a_turn_is_no_operation(leases: LeaseTable) -> None:
    for params in ({}, {"backhaul": {"version": 1}}, {"backhaul": {"version": 1, "leases": None}}, from_p()):
        assert side(leases).lease_operations(dict(params)) is None
