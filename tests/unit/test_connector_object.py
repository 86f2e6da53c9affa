"""Our object in transfer parameters: what is read of it, what is passed on, what engines are asked."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from backhaul_protocol.account import Account, DecodeAccount, PrefillAccount
from backhaul_protocol.leases import LeaseOperation, read_lease_answer
from backhaul_protocol.messages import Ask
from backhaul_router.report import Reason
from backhaul_router.wire import connector_object
from backhaul_router.wire.connector_object import Misunderstood, reason_of
from core_values import encoded, says


def test_what_is_meant_for_the_router_is_not_passed_on() -> None:
    said = connector_object.read(
        encoded(says(account={"prompt": 3, "why": "diverged"}, token_ids=[1, 2], more={"x": 1}))
    )
    assert said.passed_on is not None
    assert json.loads(said.passed_on) == says(more={"x": 1})
    assert (said.digests, said.token_ids) == (True, (1, 2))
    assert said.lease is not None
    assert (said.lease.ttl_s, said.lease.shared) == (480.0, True)
    assert said.account is not None
    assert (said.account.prompt, said.account.why) == (3, "diverged")


@pytest.mark.parametrize(
    "raw", [None, b"null", b"{}", b'{"version":2,"digests":"x"}', b'{"version":"1","digests":"x"}']
)
def test_other_versions_say_nothing(raw: bytes | None) -> None:
    assert connector_object.read(raw) == connector_object.NOTHING


@pytest.mark.parametrize("wrong", [{"account": 1}, {"digests": 5}, {"lease": {"ttl_s": "x"}}, {"token_ids": ["a"]}])
def test_a_wrong_shape_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.DecodeError):
        connector_object.read(encoded({"version": 1} | wrong))


def test_a_plugin_without_the_connector_has_nothing_to_pass_on() -> None:
    assert connector_object.read(b'{"version":1,"token_ids":[5]}').passed_on is None


@pytest.mark.parametrize(
    ("ask", "sent"),
    [
        (Ask(retain=False), {"retain": False}),
        (Ask(retain=False, shared=True, retain_s=5.0), {"retain": False}),
        (Ask(retain=True), {"retain": True, "shared": False}),
        (Ask(retain=True, shared=True, retain_s=5.0), {"retain": True, "shared": True, "retain_s": 5.0}),
        (Ask(retain=False, release=("a", "b")), {"retain": False, "release": ["a", "b"]}),
    ],
)
def test_decode_is_asked(ask: Ask, sent: dict[str, Any]) -> None:
    assert json.loads(bytes(connector_object.asking(ask))) == {"version": 1, **sent}


def test_what_prefill_says_goes_beside() -> None:
    beside = b'{"version":1,"prompt_hash":"ab"}'
    assert json.loads(bytes(connector_object.asking(Ask(retain=False), beside))) == {
        "version": 1,
        "prompt_hash": "ab",
        "retain": False,
    }


@pytest.mark.parametrize(
    ("operation", "sent"),
    [
        (LeaseOperation(release=["a"]), {"release": ["a"]}),
        (LeaseOperation(renew=["a"], ttl_s=9.0), {"renew": ["a"], "ttl_s": 9.0}),
        (LeaseOperation(list=True), {"list": True}),
        (LeaseOperation(flush=True, release=[]), {"flush": True}),
    ],
)
def test_a_lease_operation_is_a_request_of_one_token(operation: LeaseOperation, sent: dict[str, Any]) -> None:
    body = json.loads(operation.body("m"))
    assert (body["model"], body["prompt"], body["max_tokens"], body["stream"]) == ("m", [1], 1, False)
    assert body["kv_transfer_params"] == {"backhaul": {"version": 1, "leases": sent}}


def test_an_answer_to_it_is_read() -> None:
    row = {"id": "a", "blocks": 2, "tokens": 32, "age_s": 1.0, "remaining_s": 2.0, "holds": 1, "shared": True}
    leases = {"released": ["b"], "renewed": {"a": 3.5}, "unknown": [], "count": 1, "blocks": 2, "leases": [row]}
    found = read_lease_answer(encoded({"kv_transfer_params": {"backhaul": {"version": 1, "leases": leases}}}))
    assert found is not None
    assert (found.released, found.renewed, found.count, found.leases[0].holds) == (["b"], {"a": 3.5}, 1, 1)


@pytest.mark.parametrize("body", [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {"remote_port": 1}}])
def test_an_engine_that_does_not_know_lease_operations_is_told_apart(body: dict[str, Any]) -> None:
    assert read_lease_answer(encoded(body)) is None


def test_a_word_of_another_release_is_kept_apart_and_the_rest_of_the_account_is_read() -> None:
    account = connector_object.read(
        encoded(says(account={"prompt": 3, "local": 2, "why": "a word of tomorrow"}))
    ).account
    assert account == Account(prompt=3, local=2, unknown_why="a word of tomorrow")
    assert reason_of(account) is Reason.READ_FAILED


@pytest.mark.parametrize("wrong", [{"why": 5}, {"why": ["expired"]}, {"why": "new", "pulled": "x"}, {"prompt": "3"}])
def test_an_account_of_another_shape_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(Misunderstood):
        connector_object.read(encoded(says(account=wrong)))


@pytest.mark.parametrize("account", [PrefillAccount(7, 6, 5, 4, 3, 2, 1.5, 0.5).to_dict(), DecodeAccount(7).to_dict(1)])
def test_the_router_reads_all_that_an_engine_writes_of_itself(account: dict[str, Any]) -> None:
    read = connector_object.read(encoded(says(account=account))).account
    assert {name: getattr(read, name) for name in account} == account
