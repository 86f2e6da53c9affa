"""Who may operate a router, and what cannot be asked of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Router
from backhaul_router.serve.admin import PATH, Admin, Answer, joined

KEY = "an-admin-key-of-some-length"
CONFIG: dict[str, Any] = {"prefill": ["http://p:1"], "decode": ["http://d:1"]}


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def refusal(
    key: str | None, headers: list[tuple[bytes, bytes]] | None = None, *, on_loopback: bool = True
) -> Answer | None:
    return Admin(Router(RouterConfig(**CONFIG)), key).refusal(headers or [], on_loopback=on_loopback)


@pytest.mark.parametrize("on_loopback", [True, False])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_the_admin_key_opens_from_everywhere(on_loopback: bool, scheme: str) -> None:
    headers = [(b"authorization", f"{scheme} {KEY}".encode())]
    assert refusal(KEY, headers, on_loopback=on_loopback) is None


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(""),
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        [(b"authorization", KEY.encode())],
        [(b"authorization", f"Basic {KEY}".encode())],
        [(b"x-api-key", KEY.encode())],
        bearer("\xff"),
    ],
    ids=repr,
)
def test_with_a_key_nothing_else_opens_not_even_on_this_machine(headers: list[tuple[bytes, bytes]]) -> None:
    refused = refusal(KEY, headers)
    assert refused is not None
    assert (refused.status, refused.headers) == (401, (("www-authenticate", "Bearer"),))
    assert KEY not in json.dumps(refused.value)


def test_without_a_key_clients_on_this_machine_are_answered() -> None:
    assert refusal(None) is None


def test_without_a_key_others_are_not() -> None:
    refused = refusal(None, on_loopback=False)
    assert refused is not None
    assert refused.status == 403


@pytest.mark.parametrize("header", [b"origin", b"sec-fetch-site"])
def test_without_a_key_no_page_in_a_browser_can_ask(header: bytes) -> None:
    refused = refusal(None, [(header, b"null")])
    assert refused is not None
    assert refused.status == 403


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/backhaul/admin", 404),
        ("GET", "/backhaul/admin/nothing", 404),
        ("GET", "/backhaul/admin/flush", 405),
        ("PUT", "/backhaul/admin/engines", 405),
        ("POST", "/backhaul/admin/reload", 409),
    ],
)
async def test_what_is_not_there_is_told(method: str, path: str, status: int) -> None:
    answer = await Admin(Router(RouterConfig(**CONFIG))).answer(method, path, {}, b"")
    assert answer.status == status
    assert answer.value["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"role": "prefill"}', b'{"role": "both", "url": "x"}', b'{"urls": 1}'])
async def test_a_new_engine_takes_a_role_and_a_url(body: bytes) -> None:
    answer = await Admin(Router(RouterConfig(**CONFIG))).answer("POST", "/backhaul/admin/engines", {}, body)
    assert (answer.status, answer.value["error"]["code"]) == (400, "malformed_body")


@pytest.mark.parametrize(("method", "at"), [("POST", "/engines"), ("POST", "/engines/drain"), ("DELETE", "/engines")])
async def test_an_engine_that_is_no_url_is_the_clients_mistake(method: str, at: str) -> None:
    url = "http://[::1:8100"
    body = json.dumps({"role": "decode", "url": url}).encode()
    answer = await Admin(Router(RouterConfig(**CONFIG))).answer(method, PATH + at, {"url": [url]}, body)
    assert answer.status == 400
    assert f"{url!r} is not an engine's URL" in answer.value["error"]["message"]


def test_an_engine_that_replicas_see_differently_is_as_bad_as_the_worst_says() -> None:
    engine = {"url": "http://d:1", "role": "decode", "in_flight": 2, "handles": 1}
    there = {"a:1": [{**engine, "state": "available"}], "b:1": [{**engine, "state": "failing"}], "c:1": []}
    states = {"a:1": "available", "b:1": "failing"}
    assert joined(there) == [{**engine, "state": "failing", "in_flight": 4, "handles": 2, "states": states}]
    absent = {"url": "http://d:1", "role": "decode", "state": "absent"}
    assert joined({"a:1": [absent], "b:1": [absent]}) == [absent]
