"""A router of several tenants over real sockets: who is let in, and that nobody sees, reads or ends what is another's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from backhaul_cli import main as cli
from backhaul_loopback import LoopbackPair, loopback_pair
from backhaul_router.config import RouterConfig
from backhaul_router.serve import access, http_limits
from backhaul_router.serve.asgi import make_app
from backhaul_router.serve.tenants import Tenants
from backhaul_router.wire import cache_salt
from served import freed, in_thread, serving

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ON_RECORD = "/backhaul/conversations"
ALICE, ALICES_NEXT, BOB, NOBODY = "alice-0123456789", "alice-9876543210", "bob-0123456789abc", "nobody-0123456789"
ENGINES_KEY = "engines-0123456789"
TENANTS = Tenants.from_mapping({"alice": {"keys": [ALICE, ALICES_NEXT]}, "bob": {"keys": [BOB]}})
STORY = "The cache keeps the keys and values of every token that the engine ran, block by block. " * 8
SETTINGS: dict[str, Any] = {"local_max_tokens": 0, "kv_recompute_threshold": 0, "api_key": ENGINES_KEY}

Message = dict[str, Any]


@pytest.fixture
async def pair() -> AsyncIterator[LoopbackPair]:
    async with loopback_pair() as pair:
        yield pair


@pytest.fixture
async def http(pair: LoopbackPair) -> AsyncIterator[httpx2.AsyncClient]:
    async with in_thread(pair, tenants=TENANTS, **SETTINGS) as http:
        yield http


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def body_for(path: str, pair: LoopbackPair, **more: Any) -> dict[str, Any]:
    question = [{"role": "user", "content": STORY}]
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": question, "max_tokens": 8},
        COMPLETIONS: {"prompt": STORY, "max_tokens": 8},
        RESPONSES: {"input": STORY, "max_output_tokens": 8},
        MESSAGES: {"messages": question, "max_tokens": 8},
        "/v1/embeddings": {"input": STORY},
    }
    return {"model": pair.model, **bodies[path], **more}


async def chat(
    http: httpx2.AsyncClient, key: str, messages: list[Message], conversation: str | None = "c", **headers: str
) -> httpx2.Response:
    named = {"X-Conversation-ID": conversation} if conversation else {}
    asked = {"model": "loopback", "messages": messages, "max_tokens": 16}
    answer = await http.post(CHAT, json=asked, headers={**bearer(key), **named, **headers})
    assert answer.status_code == 200, answer.text
    return answer


async def next_turn(
    http: httpx2.AsyncClient, key: str, messages: list[Message], conversation: str | None = "c", **headers: str
) -> list[Message]:
    """The history with the answer and the next question."""
    answer = await chat(http, key, messages, conversation, **headers)
    said = answer.json()["choices"][0]["message"]["content"]
    return [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on. " + STORY}]


def opening() -> list[Message]:
    return [{"role": "system", "content": STORY}, {"role": "user", "content": "Begin. " + STORY}]


# --- who is let in


NO_KEYS: dict[str, dict[str, str]] = {
    "none": {},
    "unknown": bearer(NOBODY),
    "empty": {"Authorization": "Bearer"},
    "another scheme": {"Authorization": f"Basic {ALICE}"},
    "no scheme": {"Authorization": ALICE},
    "another header": {"x-api-key": ALICE},
    "longer": bearer(ALICE + "x"),
    "no ASCII": bearer("\xe9" * 20),
}


async def test_without_a_known_key_nothing_is_answered(pair: LoopbackPair, http: httpx2.AsyncClient) -> None:
    at_start = len(pair.decode.received)
    for headers in NO_KEYS.values():
        encoded = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
        for method, path in [("POST", CHAT), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/nothing")]:
            answer = await http.request(method, path, headers=encoded, json={"messages": []})
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-should-retry"] == "false"
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert NOBODY not in answer.text
            assert ALICE not in answer.text
    assert len(pair.decode.received) == at_start


async def test_every_key_of_a_tenant_is_let_in_whatever_its_scheme_looks_like(http: httpx2.AsyncClient) -> None:
    for value in (f"Bearer {ALICE}", f"bearer  {ALICES_NEXT}", f"BEARER {BOB}"):
        assert (await http.get("/v1/models", headers={"Authorization": value})).status_code == 200


async def test_two_keys_of_two_tenants_are_no_key(http: httpx2.AsyncClient) -> None:
    both = [("Authorization", f"Bearer {ALICE}"), ("Authorization", f"Bearer {BOB}")]
    assert (await http.get("/v1/models", headers=both)).status_code == 401
    assert (await http.post(MESSAGES, json={}, headers={**bearer(ALICE), "x-api-key": BOB})).status_code == 401


async def test_anthropics_clients_send_the_key_in_their_own_header(
    pair: LoopbackPair, http: httpx2.AsyncClient
) -> None:
    asked = body_for(MESSAGES, pair)
    answer = await http.post(MESSAGES, json=asked, headers={"x-api-key": ALICE, "X-Conversation-ID": "c"})
    assert answer.status_code == 200
    assert (await http.get(f"{ON_RECORD}/c", headers={"x-api-key": ALICE})).status_code == 200
    refused = await http.post(MESSAGES, json=asked, headers={"x-api-key": NOBODY})
    assert (refused.status_code, refused.json()["type"]) == (401, "error")
    assert refused.json()["error"]["type"] == "authentication_error"


async def test_health_asks_for_no_key(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200


async def test_a_client_that_is_still_sending_sees_the_refusal(http: httpx2.AsyncClient) -> None:
    answer = await http.post(CHAT, content=b"x" * 5_000_000, headers=bearer(NOBODY))
    assert answer.status_code == 401


async def test_on_the_routers_own_machine_a_key_is_asked_for_too(http: httpx2.AsyncClient) -> None:
    for method in ("GET", "DELETE"):
        assert (await http.request(method, f"{ON_RECORD}/c")).status_code == 401
    assert (await http.get(ON_RECORD)).status_code == 401


async def test_no_key_of_a_client_goes_to_an_engine_or_into_an_answer(
    pair: LoopbackPair, http: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    history = await next_turn(http, ALICE, opening())
    await chat(http, ALICE, history)
    told = [await http.get(f"{ON_RECORD}/c", headers=bearer(ALICE)), await http.get(ON_RECORD, headers=bearer(ALICE))]
    told.append(await http.post(CHAT, content=b"{", headers=bearer(ALICE)))
    told.append(await http.post("/nothing", headers=bearer(ALICE)))
    pair.prefill.faults.status = 500
    told.append(await http.post(CHAT, json=body_for(CHAT, pair), headers=bearer(ALICE)))
    for answer in told:
        assert ALICE not in answer.text + repr(answer.headers)
    for engine in (pair.prefill, pair.decode):
        for request in engine.received:
            assert ALICE.encode() not in request.raw
            assert ALICE not in repr(request.headers)
            assert request.headers.get("authorization") == f"Bearer {ENGINES_KEY}"
    assert ALICE not in caplog.text


# --- whose conversation it is


async def test_two_tenants_with_one_conversation_id_share_nothing(pair: LoopbackPair, http: httpx2.AsyncClient) -> None:
    history = await next_turn(http, ALICE, opening())
    bobs = await chat(http, BOB, history)
    assert (bobs.headers["x-backhaul-route"], bobs.headers["x-backhaul-reason"]) == ("cold", "first_turn")
    assert bobs.headers["x-backhaul-turn"] == "1"
    assert (await chat(http, ALICE, history)).headers["x-backhaul-route"] == "warm"
    assert await reused(http, BOB) == 0
    assert await reused(http, ALICE) > 0


async def reused(http: httpx2.AsyncClient, key: str) -> int:
    """Prompt tokens that no engine computed for a tenant's conversation, by whatever cache."""
    told = (await http.get(f"{ON_RECORD}/c", headers=bearer(key))).json()
    return int(told["total"]["reused"])


async def test_a_tenants_new_key_finds_what_its_old_one_left(http: httpx2.AsyncClient) -> None:
    history = await next_turn(http, ALICE, opening())
    assert (await chat(http, ALICES_NEXT, history)).headers["x-backhaul-route"] == "warm"


async def test_a_history_without_a_name_is_found_by_its_own_tenant_alone(http: httpx2.AsyncClient) -> None:
    history = await next_turn(http, ALICE, opening(), None)
    assert (await chat(http, BOB, history, None)).headers["x-backhaul-route"] == "cold"
    assert (await chat(http, ALICE, history, None)).headers["x-backhaul-route"] == "warm"


async def test_another_tenants_conversation_cannot_be_forked(http: httpx2.AsyncClient) -> None:
    history = await next_turn(http, ALICE, opening(), "parent")
    parent = {"X-Backhaul-Parent": "parent"}
    bobs = await chat(http, BOB, history, "child", **parent)
    assert (bobs.headers["x-backhaul-route"], bobs.headers["x-backhaul-reason"]) == ("cold", "first_turn")
    assert (await chat(http, ALICE, history, "child", **parent)).headers["x-backhaul-route"] == "warm"


async def test_a_last_turn_ends_its_own_tenants_conversation(pair: LoopbackPair, http: httpx2.AsyncClient) -> None:
    history = await next_turn(http, ALICE, opening())
    await chat(http, BOB, opening(), **{"X-Backhaul-Last-Turn": "true"})
    assert (await chat(http, ALICE, history)).headers["x-backhaul-route"] == "warm"
    await chat(http, ALICE, history, **{"X-Backhaul-Last-Turn": "true"})
    await freed(pair)


async def test_a_response_of_another_tenant_is_unknown(pair: LoopbackPair, http: httpx2.AsyncClient) -> None:
    """An engine that keeps responses would go on from anybody's."""
    answer = await http.post(RESPONSES, json=body_for(RESPONSES, pair), headers=bearer(ALICE))
    for named in (answer.json()["id"], "resp_none", 5, ["x"]):
        before = len(pair.decode.requests_to(RESPONSES))
        follow = body_for(RESPONSES, pair, previous_response_id=named)
        refused = await http.post(RESPONSES, json=follow, headers=bearer(BOB))
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_response")
        assert refused.json()["error"]["param"] == "previous_response_id"
        assert len(pair.decode.requests_to(RESPONSES)) == before
    follow = body_for(RESPONSES, pair, previous_response_id=answer.json()["id"])
    await http.post(RESPONSES, json=follow, headers=bearer(ALICE))
    assert pair.decode.requests_to(RESPONSES)[-1].body["previous_response_id"] == answer.json()["id"]


async def test_a_tenant_goes_on_from_its_responses_where_nothing_is_kept(pair: LoopbackPair) -> None:
    async with in_thread(pair, tenants=TENANTS, match_history=False) as http:
        answer = await http.post(RESPONSES, json=body_for(RESPONSES, pair), headers=bearer(ALICE))
        follow = body_for(RESPONSES, pair, previous_response_id=answer.json()["id"])
        await http.post(RESPONSES, json=follow, headers=bearer(ALICE))
        assert "previous_response_id" in pair.decode.requests_to(RESPONSES)[-1].body


async def test_no_tenant_chooses_the_id_under_which_an_engine_keeps_a_response(
    pair: LoopbackPair, http: httpx2.AsyncClient
) -> None:
    await http.post(RESPONSES, json=body_for(RESPONSES, pair, request_id="resp_bobs"), headers=bearer(ALICE))
    assert all("request_id" not in (request.body or {}) for request in pair.decode.requests_to(RESPONSES))


# --- salts


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_engines_get_a_salt_of_the_tenants_own_on_every_leg(
    pair: LoopbackPair, http: httpx2.AsyncClient, path: str
) -> None:
    saids: list[dict[str, Any]] = [{}, {"cache_salt": None}, {"cache_salt": "mine"}, {"cache_salt": "@/\\\0" * 99}]
    for said in saids:
        for name, key in (("alice", ALICE), ("bob", BOB)):
            answer = await http.post(path, json=body_for(path, pair, **said), headers=bearer(key))
            assert answer.status_code == 200, answer.text
            expected = cache_salt.salt_of(name, said.get("cache_salt") or "")
            for engine in (pair.prefill, pair.decode):
                assert engine.requests_to(path)[-1].body["cache_salt"] == expected


async def test_a_request_that_goes_to_one_engine_as_it_is_has_the_salt_too(
    pair: LoopbackPair, http: httpx2.AsyncClient
) -> None:
    ways: list[dict[str, Any]] = [{"n": 2}, {"messages": "?"}, {"prompt_logprobs": 1}, {"max_tokens": "x"}]
    for number, more in enumerate(ways, 1):
        await http.post(CHAT, json=body_for(CHAT, pair, **more), headers=bearer(ALICE))
        assert len(pair.decode.requests_to(CHAT)) == number
        assert pair.decode.requests_to(CHAT)[-1].body["cache_salt"] == cache_salt.salt_of("alice")


async def test_embeddings_have_it_and_what_runs_no_model_has_none(pair: LoopbackPair, http: httpx2.AsyncClient) -> None:
    await http.post("/v1/embeddings", json={"input": "x", "cache_salt": "s"}, headers=bearer(ALICE))
    assert pair.decode.requests_to("/v1/embeddings")[-1].body["cache_salt"] == cache_salt.salt_of("alice", "s")
    await http.post("/tokenize", json={"prompt": "x"}, headers=bearer(ALICE))
    assert "cache_salt" not in pair.decode.requests_to("/tokenize")[-1].body


async def test_a_salt_that_is_no_text_is_refused_before_an_engine_sees_it(
    pair: LoopbackPair, http: httpx2.AsyncClient
) -> None:
    for path in (CHAT, MESSAGES, "/v1/embeddings"):
        for salt in (b"5", b"[]", b"true"):
            raw = b'{"model": "m", "messages": [], "input": "x", "cache_salt": ' + salt + b"}"
            answer = await http.post(path, content=raw, headers=bearer(ALICE))
            assert answer.status_code == 400
            assert "cache_salt" in answer.json()["error"]["message"]
        assert not pair.decode.requests_to(path)


async def test_one_tenants_prompt_is_not_in_the_prefix_cache_for_another(
    pair: LoopbackPair, http: httpx2.AsyncClient
) -> None:
    cached: list[bool] = []
    for key in (ALICE, BOB, BOB, ALICE):
        await chat(http, key, opening(), f"c{len(cached)}")
        told = (await http.get(f"{ON_RECORD}/c{len(cached)}", headers=bearer(key))).json()
        cached.append(told["reports"][0]["cached"] > 0)
    assert cached == [False, False, True, True]


async def test_with_our_connector_a_tenants_next_turn_is_warm() -> None:
    """Blocks are compared by hashes, in which the salt is."""
    ours: Any = {"connector": "backhaul", "claim_timeout_s": 20.0, "kv_recompute_threshold": 0, "prefix_caching": False}
    async with loopback_pair(prefill=ours, decode=ours) as pair, in_thread(pair, tenants=TENANTS, **SETTINGS) as http:
        history = await next_turn(http, ALICE, opening())
        assert (await chat(http, BOB, history)).headers["x-backhaul-route"] == "cold"
        history = await next_turn(http, ALICE, history)
        told = (await http.get(f"{ON_RECORD}/c", headers=bearer(ALICE))).json()["reports"][-1]
        assert (told["route"], told["proof"], told["tenant"]) == ("warm", "connector", "alice")
        assert told["pulled"] > 0


# --- what is on record


async def test_a_tenant_sees_and_ends_its_own_conversations_only(pair: LoopbackPair, http: httpx2.AsyncClient) -> None:
    history = await next_turn(http, ALICE, opening(), "alices")
    await chat(http, BOB, opening(), "bobs")
    listed = (await http.get(ON_RECORD, headers=bearer(BOB))).json()["conversations"]
    assert [one["id"] for one in listed] == ["bobs"]
    for method, path in [
        ("GET", f"{ON_RECORD}/alices"),
        ("GET", f"{ON_RECORD}/alices?turn=1&wait=0.01"),
        ("DELETE", f"{ON_RECORD}/alices"),
    ]:
        answer = await http.request(method, path, headers=bearer(BOB))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_conversation")
    paused = await http.post(f"{ON_RECORD}/alices/pause?seconds=80000", headers=bearer(BOB))
    assert (paused.json()["released"], paused.json()["kept_s"]) == (0, None)
    renewed = await http.post(f"{ON_RECORD}/alices/renew", headers=bearer(BOB))
    assert renewed.json() == {"remaining_s": None}
    assert (await chat(http, ALICE, history, "alices")).headers["x-backhaul-route"] == "warm"
    assert (await http.delete(f"{ON_RECORD}/alices", headers=bearer(ALICE))).status_code == 204
    assert (await http.delete(f"{ON_RECORD}/bobs", headers=bearer(BOB))).status_code == 204
    await freed(pair)


async def test_a_tenant_pauses_and_renews_its_own() -> None:
    ours: Any = {"connector": "backhaul", "claim_timeout_s": 20.0, "kv_recompute_threshold": 0}
    async with loopback_pair(prefill=ours, decode=ours) as pair, in_thread(pair, tenants=TENANTS, **SETTINGS) as http:
        await chat(http, ALICE, opening())
        assert (await http.post(f"{ON_RECORD}/c/renew", headers=bearer(BOB))).json()["remaining_s"] is None
        assert (await http.post(f"{ON_RECORD}/c/renew", headers=bearer(ALICE))).json()["remaining_s"] > 0
        paused = await http.post(f"{ON_RECORD}/c/pause?seconds=80000", headers=bearer(ALICE))
        assert paused.json()["released"] == 1
        await freed(pair)


async def test_a_client_elsewhere_sees_its_conversations_but_no_engines_url(pair: LoopbackPair) -> None:
    app = make_app(RouterConfig(prefill=(pair.prefill.url,), decode=(pair.decode.url,)), TENANTS)
    elsewhere = httpx2.ASGITransport(app, client=("203.0.113.7", 4711))
    try:
        async with httpx2.AsyncClient(transport=elsewhere, base_url="http://router") as http:
            await chat(http, ALICE, opening())
            shown = await http.get(f"{ON_RECORD}/c", headers=bearer(ALICE))
            assert shown.json()["reports"][0]["decode_engine"] == "(url withheld)"
            assert pair.decode.url not in shown.text
            assert int(shown.headers["content-length"]) == len(shown.content)
            assert (await http.delete(f"{ON_RECORD}/c", headers=bearer(ALICE))).status_code == 204
            assert (await http.get(ON_RECORD)).status_code == 401
    finally:
        await app.router.aclose()


# --- limits


async def test_a_tenant_with_too_much_running_waits_for_itself_alone(pair: LoopbackPair) -> None:
    limited = Tenants.from_mapping({"alice": {"keys": [ALICE], "max_concurrent_turns": 1}, "bob": [BOB]})
    async with in_thread(pair, tenants=limited) as http:
        await http.get("/v1/models", headers=bearer(ALICE))
        pair.prefill.faults.stall = True
        waiting = asyncio.create_task(http.post(CHAT, json=body_for(CHAT, pair), headers=bearer(ALICE)))
        async with asyncio.timeout(10):
            while not pair.prefill.requests_to(CHAT):
                await asyncio.sleep(0.002)
        refused = await http.post(CHAT, json=body_for(CHAT, pair), headers=bearer(ALICE))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.headers["x-should-retry"] == "true"
        assert refused.json()["error"]["code"] == "too_many_turns"
        assert (await http.get("/v1/models", headers=bearer(ALICE))).status_code == 200
        pair.prefill.faults.stall = False
        assert (await http.post(CHAT, json=body_for(CHAT, pair), headers=bearer(BOB))).status_code == 200
        waiting.cancel()
        await asyncio.wait((waiting,))
        async with asyncio.timeout(10):
            while (await http.post(CHAT, json=body_for(CHAT, pair), headers=bearer(ALICE))).status_code != 200:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "headers",
    [
        [(f"x-{number}", "") for number in range(access.MAX_HEADERS + 1)],
        [("x-long", "x" * access.MAX_HEADER_BYTES)],
    ],
    ids=["many", "long"],
)
async def test_too_many_or_too_long_headers_are_refused(
    http: httpx2.AsyncClient, headers: list[tuple[str, str]]
) -> None:
    answer = await http.get("/v1/models", headers=[*headers, *bearer(ALICE).items()])
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")


async def test_headers_that_do_not_end_are_not_kept(http: httpx2.AsyncClient) -> None:
    _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    writer.write(b"GET /health HTTP/1.1\r\nx: ")
    async with asyncio.timeout(10):
        with pytest.raises(ConnectionError):
            await send_for_ever(writer, b"x" * http_limits.MAX_HEAD_BYTES)
    writer.close()


async def send_for_ever(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()


async def test_what_follows_a_body_is_no_header(pair: LoopbackPair, http: httpx2.AsyncClient) -> None:
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    head = "POST /v1/models HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ntrailer: authorization\r\n\r\n"
    writer.write(head.encode() + f"0\r\nauthorization: Bearer {ALICE}\r\n\r\n".encode())
    assert b" 401 " in await reader.readline()
    writer.close()


# --- the command line


async def test_keys_come_from_a_file(pair: LoopbackPair, tmp_path: Any) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[tenants.alice]\nkeys = ["{ALICE}"]\n')
    async with serving(pair, "--api-keys", str(file)) as router:
        assert (await router.http.get("/v1/models")).status_code == 401
        assert (await router.http.get("/v1/models", headers=bearer(ALICE))).status_code == 200
        status, out, err = await router.stop()
    assert status == 0
    assert ALICE not in out + err


def test_a_file_of_keys_that_is_wrong_ends_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    engines = ("--prefill", "http://x:1", "--decode", "http://y:2")
    assert cli.main(["serve", *engines, "--api-keys", "/nowhere.toml"]) == 2
    assert "/nowhere.toml: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "tenants", "warns"), [("0.0.0.0", None, True), ("0.0.0.0", TENANTS, False), ("127.0.0.1", None, False)]
)
async def test_a_server_that_anybody_may_ask_says_so_at_its_start(
    pair: LoopbackPair, caplog: pytest.LogCaptureFixture, host: str, tenants: Tenants | None, warns: bool
) -> None:
    async with in_thread(pair, host, tenants or Tenants()):
        pass
    assert caplog.text.count("without API keys") == warns
