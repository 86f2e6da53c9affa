"""What comes in as `kv_transfer_params` is understood or refused, and never raises."""

from __future__ import annotations

from typing import Any

import pytest
from backhaul_connector import handles
from backhaul_protocol import messages
from backhaul_protocol.messages import Published, read_asked, read_published
from hypothesis import given
from hypothesis import strategies as st

HANDLE: dict[str, Any] = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[5, 6, 7]],
    "remote_engine_id": "D",
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 90,
    "tp_size": 1,
    "transfer_mode": "pull",
    "backhaul": {
        "version": 1,
        "digests": "AAAAAA==",
        "block_size": 32,
        "epoch": "e",
        "lease": {"port": 4000, "shared": True},
    },
}


def test_a_handle_of_ours_is_read_with_its_offer() -> None:
    handle = handles.read_handle(HANDLE)
    assert handle is not None
    assert (handle.remote_port, handle.remote_block_ids, handle.tp_size) == (5600, [[5, 6, 7]], 1)
    offer = read_published(HANDLE)
    assert isinstance(offer, Published)
    assert (offer.lease.port, offer.lease.shared, offer.block_size) == (4000, True, 32)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("remote_block_ids", "5"),
        ("remote_block_ids", []),
        ("remote_block_ids", [5]),
        ("remote_block_ids", [["5"]]),
        ("remote_block_ids", [[-1]]),
        ("remote_block_ids", [[2**31]]),
        ("remote_block_ids", [[1.5]]),
        ("remote_engine_id", 7),
        ("remote_engine_id", ""),
        ("remote_request_id", None),
        ("remote_request_id", "x" * 2000),
        ("remote_host", ["127.0.0.1"]),
        ("remote_port", "5600"),
        ("remote_port", 0),
        ("remote_port", 70000),
        ("remote_port", True),
        ("remote_num_tokens", -1),
        ("remote_num_tokens", "90"),
        ("tp_size", 0),
        ("tp_size", 10**9),
        ("dcp_size", "1"),
        ("pp_size", None),
        ("remote_blocks_expiry_time", "soon"),
    ],
)
def test_a_handle_with_a_wrong_field_is_no_handle(field: str, value: object) -> None:
    assert handles.read_handle({**HANDLE, field: value}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"digests": 7},
        {"block_size": 0},
        {"epoch": None},
        {"lease": None},
        {"lease": {"port": 0}},
        {"lease": {}},
    ],
)
def test_an_offer_with_a_wrong_field_is_malformed(change: dict[str, Any]) -> None:
    assert read_published({**HANDLE, "backhaul": {**HANDLE["backhaul"], **change}}) == "malformed"


@pytest.mark.parametrize("ours", [None, {}, {"version": 1}, "text", [1], {"version": 1, "proof": "tokens"}])
def test_a_handle_without_digests_says_so(ours: object) -> None:
    assert read_published({**HANDLE, "backhaul": ours}) == "no_digests"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*HANDLE, "dcp_size", "_remote_blocks_processed"]), JSON))
def test_nothing_that_a_client_can_write_raises(change: dict[str, Any]) -> None:
    params = {**HANDLE, **change}
    handles.normalize(params)
    handle = handles.read_handle(params)
    if handle is not None:
        handle.cut(32, 64)
    read_published(params)
    messages.has_token_proof(params)
    handles.has_handle(params)
    read_asked(params)
    handles.strip(params)
    assert not handles.has_handle(params)


@given(JSON)
def test_no_value_of_our_key_raises(ours: object) -> None:
    assert not isinstance(read_published({**HANDLE, "backhaul": ours}), Published)
    read_asked({"backhaul": ours})
    messages.has_token_proof({"backhaul": ours})


def test_what_is_asked_is_read_beside_what_p_said() -> None:
    asked = read_asked(
        {
            "backhaul": {
                "version": 1,
                "account": {},
                "prompt_hash": "ab",
                "prompt_tokens": 7,
                "retain": True,
                "retain_s": 120,
                "shared": True,
                "release": ["x"],
            }
        }
    )
    assert asked is not None
    assert (asked.retain_s, asked.shared, asked.release, asked.prompt_tokens) == (120.0, True, ["x"], 7)


def test_lease_operations_are_read() -> None:
    asked = read_asked({"backhaul": {"version": 1, "leases": {"renew": ["a"], "ttl_s": 5.0, "list": True}}})
    assert asked is not None
    assert asked.leases is not None
    assert (asked.leases.renew, asked.leases.ttl_s, asked.leases.list, asked.leases.flush) == (
        ["a"],
        5.0,
        True,
        False,
    )


def test_flags_become_booleans_of_which_one_holds() -> None:
    params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": "yes", "_remote_blocks_processed": True}
    handles.normalize(params)
    assert params == {"do_remote_decode": True, "do_remote_prefill": False}


def test_a_first_turns_null_fields_are_no_handle() -> None:
    assert not handles.has_handle({"do_remote_decode": True, "remote_engine_id": None, "remote_block_ids": None})


@pytest.mark.parametrize(
    ("held", "ids", "tokens", "cut"),
    [
        (90, [[5, 6, 7]], 64, [[5, 6]]),
        (90, [[5, 6, 7]], 90, [[5, 6, 7]]),
        (96, [[5, 6, 7], [1, 2, 3]], 32, [[5], [1]]),
        (90, [[5, 6, 7]], 91, None),
        (90, [[5, 6]], 64, None),
        (90, [[5, 6, 7, 8]], 64, None),
        (None, [[5, 6, 7]], 64, None),
    ],
)
def test_a_handle_is_cut_only_where_its_lists_are_as_long_as_it_says(
    held: int | None, ids: list[list[int]], tokens: int, cut: list[list[int]] | None
) -> None:
    handle = handles.read_handle({**HANDLE, "remote_num_tokens": held, "remote_block_ids": ids})
    assert handle is not None
    assert handle.cut(32, tokens) == cut


@pytest.mark.parametrize("key", ["remote_block_ids", "remote_port", "tp_size"])
def test_half_a_surrogate_pair_is_malformed_like_anything_else(key: str) -> None:
    """JSON can spell one, and it cannot be encoded."""
    assert handles.read_handle({**HANDLE, key: "\ud800"}) is None
    assert read_asked({"backhaul": {"version": "\ud800"}}) is None
    assert read_asked({"backhaul": "\ud800"}) is None
