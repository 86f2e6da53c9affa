"""A served router in operation: engines that come and go, limits, readiness, the configuration read again, TLS, IPv6."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from backhaul_loopback import CostModel, LoopbackEngine, LoopbackPair, loopback_pair
from backhaul_router.config import RouterConfig
from backhaul_router.errors import ConfigError
from backhaul_router.serve.admission import Limits
from backhaul_router.serve.settings import ServerSettings, Settings
from backhaul_router.serve.tenants import NO_TENANTS, Tenants
from served import freed, in_thread, operating

CHAT = "/v1/chat/completions"
ADMIN = "/backhaul/admin"
KEY = "an-admin-key-of-some-length"
CERTIFICATE = Path(__file__).parents[1] / "unit" / "localhost.pem"
"""Self-signed, for localhost and 127.0.0.1, with its key."""
SLOW = {"costs": CostModel(decode_s=0.05)}
QUESTION: Any = {"role": "user", "content": "What is carried back, and where to? " * 20}


@pytest.fixture
async def pair() -> AsyncIterator[LoopbackPair]:
    async with loopback_pair() as pair:
        yield pair


def body(pair: LoopbackPair, **more: Any) -> dict[str, Any]:
    return {"model": pair.model, "messages": [QUESTION], "max_tokens": 8, "temperature": 0, **more}


def settings(
    pair: LoopbackPair,
    *,
    server: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    tenants: Tenants = NO_TENANTS,
    admin_key: str | None = None,
    **router: Any,
) -> Settings:
    config = {"prefill": [pair.prefill.url], "decode": [pair.decode.url], "local_max_tokens": 0, **router}
    return Settings(
        router=RouterConfig(**config),
        server=ServerSettings(**(server or {})),
        limits=Limits(**(limits or {})),
        tenants=tenants,
        admin_key=admin_key,
    )


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


async def engines(http: httpx2.AsyncClient) -> dict[str, str]:
    """State by URL."""
    answer = await http.get(f"{ADMIN}/engines")
    assert answer.status_code == 200, answer.text
    return {one["url"]: one["state"] for one in answer.json()["engines"]}


async def until_engines_are(http: httpx2.AsyncClient, expected: dict[str, str]) -> None:
    async with asyncio.timeout(10):
        while await engines(http) != expected:
            await asyncio.sleep(0.02)


# --- engines


async def test_an_engine_is_added_drained_and_removed_while_turns_run(pair: LoopbackPair) -> None:
    async with in_thread(pair) as http, LoopbackEngine("decode") as other:
        added = await http.post(f"{ADMIN}/engines", json={"role": "decode", "url": other.url})
        assert (added.status_code, added.json()["state"]) == (200, "available")
        drained = await http.post(f"{ADMIN}/engines/drain", params={"url": pair.decode.url})
        assert drained.json() == {"url": pair.decode.url, "in_flight": 0, "handles": 0, "done": True}
        assert await engines(http) == {
            pair.prefill.url: "available",
            pair.decode.url: "draining",
            other.url: "available",
        }
        assert (await http.post(CHAT, json=body(pair))).status_code == 200
        assert other.requests_to(CHAT)
        assert not pair.decode.requests_to(CHAT)
        removed = await http.delete(f"{ADMIN}/engines", params={"url": pair.decode.url})
        assert removed.json() == {"removed": pair.decode.url}
        assert pair.decode.url not in await engines(http)


async def test_an_engine_that_does_not_answer_is_not_added(pair: LoopbackPair) -> None:
    async with in_thread(pair) as http:
        answer = await http.post(f"{ADMIN}/engines", json={"role": "decode", "url": "http://127.0.0.1:9"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "cannot_be_done")
        assert "http://127.0.0.1:9" not in await engines(http)


@pytest.mark.parametrize(("method", "at"), [("DELETE", "engines"), ("POST", "engines/drain")])
async def test_an_engine_that_is_not_there_is_404(pair: LoopbackPair, method: str, at: str) -> None:
    async with in_thread(pair) as http:
        answer = await http.request(method, f"{ADMIN}/{at}", params={"url": "http://127.0.0.1:9"})
        assert answer.status_code == 404
        assert (await http.request(method, f"{ADMIN}/{at}")).status_code == 400


async def test_the_last_engine_of_a_role_stays(pair: LoopbackPair) -> None:
    async with in_thread(pair) as http:
        answer = await http.delete(f"{ADMIN}/engines", params={"url": pair.decode.url})
        assert answer.status_code == 400
        assert "only decode engine" in answer.text


async def test_a_configured_engine_that_never_answered_is_listed_and_can_be_taken_out(pair: LoopbackPair) -> None:
    absent = "http://127.0.0.1:9"
    async with in_thread(pair, decode=[pair.decode.url, absent]) as http:
        assert (await engines(http))[absent] == "absent"
        assert (await http.delete(f"{ADMIN}/engines", params={"url": absent})).status_code == 200
        assert absent not in await engines(http)


async def test_a_flush_releases_what_the_engines_hold(pair: LoopbackPair) -> None:
    async with in_thread(pair) as http:
        await http.post(CHAT, json=body(pair), headers={"X-Conversation-ID": "c"})
        assert pair.decode.pinned_blocks
        assert (await http.post(f"{ADMIN}/flush")).json() == {"flushed": True}
        await freed(pair)


# --- who may


async def test_the_admin_key_is_another_than_the_tenants(pair: LoopbackPair) -> None:
    tenants = Tenants.from_mapping({"a": ["a-tenant-key-of-some-length"]})
    async with operating(settings(pair, tenants=tenants, admin_key=KEY)) as http:
        for key, status in ((KEY, 200), ("a-tenant-key-of-some-length", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await http.get(f"{ADMIN}/engines", headers=headers)).status_code == status
        assert (await http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})).status_code == 401


# --- readiness


async def test_a_router_is_ready_while_both_roles_have_an_engine(pair: LoopbackPair) -> None:
    async with in_thread(pair) as http:
        answer = await http.get("/ready")
        assert (answer.status_code, answer.json()) == (
            200,
            {
                "ready": True,
                "reason": None,
                "prefill": {"available": 1, "configured": 1},
                "decode": {"available": 1, "configured": 1},
            },
        )
        await http.post(f"{ADMIN}/engines/drain", params={"url": pair.decode.url})
        answer = await http.get("/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "no decode engine is available")
        assert (await http.get("/health")).status_code == 200


async def test_a_load_balancer_needs_no_key_to_ask(pair: LoopbackPair) -> None:
    tenants = Tenants.from_mapping({"a": ["a-tenant-key-of-some-length"]})
    async with in_thread(pair, tenants=tenants) as http:
        assert (await http.get("/ready")).status_code == 200


# --- limits


async def test_turns_beyond_the_limit_wait_and_beyond_the_queue_are_told_when_to_come_back() -> None:
    async with loopback_pair(decode=SLOW) as pair:
        limits = {"max_concurrent_turns": 1, "max_queued_turns": 1}
        async with operating(settings(pair, limits=limits)) as http:
            async with http.stream("POST", CHAT, json=body(pair, stream=True, max_tokens=30)) as first:
                others = [asyncio.create_task(http.post(CHAT, json=body(pair, max_tokens=1))) for _ in range(2)]
                done, waiting = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
                assert (await http.get("/v1/models")).status_code == 200
                assert (await first.aread()).endswith(b"data: [DONE]\n\n")
            [refused], [waited] = [task.result() for task in done], [await task for task in waiting]
            assert (refused.status_code, waited.status_code) == (429, 200)
            assert (refused.headers["retry-after"], refused.headers["x-should-retry"]) == ("1", "true")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert refused.json()["error"]["code"] == "too_many_turns"


async def test_a_turn_that_waits_for_too_long_is_503() -> None:
    async with loopback_pair(decode=SLOW) as pair:
        limits = {"max_concurrent_turns": 1, "queue_timeout_s": 0.05}
        async with operating(settings(pair, limits=limits)) as http:
            async with http.stream("POST", CHAT, json=body(pair, stream=True, max_tokens=4000)) as first:
                chunks = first.aiter_raw()
                await anext(chunks)
                late = await http.post("/v1/messages", json=body(pair))
            assert (late.status_code, late.headers["x-should-retry"]) == (503, "true")
            assert late.json()["type"] == "error"  # in Anthropic's shape
            assert not pair.prefill.requests_to("/v1/messages")


async def test_a_client_that_leaves_the_queue_is_not_asked_of_an_engine() -> None:
    async with loopback_pair(decode=SLOW) as pair:
        async with operating(settings(pair, limits={"max_concurrent_turns": 1})) as http:
            async with http.stream("POST", CHAT, json=body(pair, stream=True, max_tokens=4000)) as first:
                chunks = first.aiter_raw()
                await anext(chunks)
                with pytest.raises(httpx2.ReadTimeout):
                    await http.post(CHAT, json=body(pair), timeout=httpx2.Timeout(60, read=0.1))
            assert (await http.post(CHAT, json=body(pair))).status_code == 200
            assert len(pair.decode.requests_to(CHAT)) == 2


# --- the configuration, read again


class Configuration:
    """What the next reload reads."""

    def __init__(self, now: Settings) -> None:
        self.now: Settings | ConfigError = now

    def __call__(self) -> Settings:
        if isinstance(self.now, ConfigError):
            raise self.now
        return self.now


@asynccontextmanager
async def reloadable(first: Settings) -> AsyncIterator[tuple[httpx2.AsyncClient, Configuration]]:
    configuration = Configuration(first)
    async with operating(first, configuration) as http:
        yield http, configuration


async def test_what_can_change_at_once_does_and_the_rest_is_named(pair: LoopbackPair) -> None:
    async with reloadable(settings(pair)) as (http, configuration):
        configuration.now = settings(
            pair, max_body_bytes=100, max_branches=2, server={"port": 9, "log_format": "json"}, admin_key=KEY
        )
        answer = await http.post(f"{ADMIN}/reload")
        assert answer.json() == {
            "changed": ["[router] max_body_bytes", "[admin] key"],
            "needs_restart": ["[router] max_branches", "[server] port", "[server] log_format"],
            "added": [],
            "draining": [],
        }
        assert (await http.post(CHAT, json=body(pair))).status_code == 413
        assert (await http.get(f"{ADMIN}/engines")).status_code == 401
        again = await http.post(f"{ADMIN}/reload", headers={"Authorization": f"Bearer {KEY}"})
        assert (again.json()["changed"], len(again.json()["needs_restart"])) == ([], 3)


async def test_engines_come_and_go_with_the_configuration(pair: LoopbackPair) -> None:
    async with reloadable(settings(pair)) as (http, configuration), LoopbackEngine("decode") as other:
        configuration.now = settings(pair, decode=[other.url])
        answer = await http.post(f"{ADMIN}/reload")
        assert (answer.json()["added"], answer.json()["draining"]) == ([other.url], [pair.decode.url])
        await until_engines_are(http, {pair.prefill.url: "available", other.url: "available"})
        assert (await http.post(CHAT, json=body(pair))).status_code == 200


async def test_an_engine_leaves_when_the_conversations_that_it_holds_are_over(pair: LoopbackPair) -> None:
    async with reloadable(settings(pair)) as (http, configuration), LoopbackEngine("decode") as other:
        await http.post(CHAT, json=body(pair), headers={"X-Conversation-ID": "c"})
        configuration.now = settings(pair, decode=[other.url])
        await http.post(f"{ADMIN}/reload")
        assert (await engines(http))[pair.decode.url] == "draining"
        await http.delete("/backhaul/conversations/c")
        await until_engines_are(http, {pair.prefill.url: "available", other.url: "available"})


async def test_an_engine_that_is_named_again_while_it_drains_stays(pair: LoopbackPair) -> None:
    async with reloadable(settings(pair)) as (http, configuration), LoopbackEngine("decode") as other:
        await http.post(CHAT, json=body(pair), headers={"X-Conversation-ID": "c"})
        for decode in ([other.url], [pair.decode.url, other.url]):
            configuration.now = settings(pair, decode=decode)
            await http.post(f"{ADMIN}/reload")
        assert (await engines(http))[pair.decode.url] == "available"


@pytest.mark.parametrize("wrong", ["the file", "an engine", "a role"])
async def test_where_anything_is_wrong_nothing_changes(pair: LoopbackPair, wrong: str) -> None:
    async with reloadable(settings(pair)) as (http, configuration), LoopbackEngine("decode") as other:
        before = await engines(http)
        match wrong:
            case "the file":
                configuration.now = ConfigError("[server] port: a whole number, not 'x'")
            case "an engine":
                configuration.now = settings(pair, decode=[other.url, "http://127.0.0.1:9"], max_body_bytes=100)
            case "a role":
                roles = {"prefill": [pair.decode.url], "decode": [other.url]}
                configuration.now = settings(pair, **roles, max_body_bytes=100)
        answer = await http.post(f"{ADMIN}/reload")
        assert answer.status_code == 400
        assert await engines(http) == before
        assert (await http.post(CHAT, json=body(pair))).status_code == 200


@pytest.mark.parametrize("was", ["available", "draining", "leaving"])
async def test_an_engine_that_a_refused_reload_names_stays_what_it_was(pair: LoopbackPair, was: str) -> None:
    async with LoopbackEngine("decode") as other:
        both, one = [pair.decode.url, other.url], [pair.decode.url]
        async with reloadable(settings(pair, decode=both if was == "leaving" else one)) as (http, configuration):
            if was == "leaving":
                await until_turns_are_held_by(other, http, pair)
                configuration.now = settings(pair)
                assert (await http.post(f"{ADMIN}/reload")).json()["draining"] == [other.url]
            else:
                await http.post(f"{ADMIN}/engines", json={"role": "decode", "url": other.url})
            if was == "draining":
                await http.post(f"{ADMIN}/engines/drain", params={"url": other.url})
            before = await engines(http)
            configuration.now = settings(pair, decode=[*both, "http://127.0.0.1:9"])
            assert (await http.post(f"{ADMIN}/reload")).status_code == 400
            assert (before[other.url], await engines(http)) == ("draining" if was == "leaving" else was, before)


async def until_turns_are_held_by(engine: LoopbackEngine, http: httpx2.AsyncClient, pair: LoopbackPair) -> None:
    number = 0
    async with asyncio.timeout(10):
        while not engine.requests_to(CHAT):
            number += 1
            await http.post(CHAT, json=body(pair), headers={"X-Conversation-ID": f"c{number}"})


async def test_an_engine_that_had_not_answered_is_asked_on_after_a_refused_reload(pair: LoopbackPair) -> None:
    port = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{port.getsockname()[1]}"
    port.close()
    async with reloadable(settings(pair, prefill=[pair.prefill.url, url])) as (http, configuration):
        before = await engines(http)
        assert before[url] == "absent"
        async with LoopbackEngine("decode", port=int(url.rpartition(":")[2])):
            configuration.now = settings(pair, decode=[pair.decode.url, url, "http://127.0.0.1:9"])
            assert (await http.post(f"{ADMIN}/reload")).status_code == 400
            assert await engines(http) == before


async def test_limits_change_while_turns_wait() -> None:
    async with loopback_pair(decode=SLOW) as pair:
        async with reloadable(settings(pair, limits={"max_concurrent_turns": 1})) as (http, configuration):
            async with http.stream("POST", CHAT, json=body(pair, stream=True, max_tokens=4000)) as first:
                chunks = first.aiter_raw()
                await anext(chunks)
                waiting = asyncio.create_task(http.post(CHAT, json=body(pair)))
                configuration.now = settings(pair)
                await http.post(f"{ADMIN}/reload")
                assert (await waiting).status_code == 200


async def test_tenants_change_with_the_configuration(pair: LoopbackPair) -> None:
    async with reloadable(settings(pair)) as (http, configuration):
        configuration.now = settings(pair, tenants=Tenants.from_mapping({"a": ["a-tenant-key-of-some-length"]}))
        await http.post(f"{ADMIN}/reload")
        assert (await http.get("/v1/models")).status_code == 401


# --- TLS and IPv6


async def test_it_serves_https(pair: LoopbackPair) -> None:
    trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
    async with operating(settings(pair, server={"tls_cert": str(CERTIFICATE)}), verify=trusting) as http:
        assert http.base_url.scheme == "https"
        async with http.stream("POST", CHAT, json=body(pair, stream=True)) as answer:
            assert (await answer.aread()).endswith(b"data: [DONE]\n\n")


async def test_a_certificate_that_was_renewed_is_used_after_a_reload(pair: LoopbackPair, tmp_path: Path) -> None:
    file = tmp_path / "cert.pem"
    file.write_bytes(CERTIFICATE.read_bytes())
    secure = settings(pair, server={"tls_cert": str(file)})
    trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
    async with operating(secure, lambda: secure, verify=trusting) as http:
        file.write_text("nothing")
        answer = await http.post(f"{ADMIN}/reload")
        assert (answer.status_code, "not a certificate" in answer.text) == (400, True)
        file.write_bytes(CERTIFICATE.read_bytes())
        assert (await http.post(f"{ADMIN}/reload")).status_code == 200
        async with httpx2.AsyncClient(base_url=http.base_url, trust_env=False, verify=trusting) as new:
            assert (await new.get("/health")).status_code == 200


@asynccontextmanager
async def behind_tls(engine: LoopbackEngine) -> AsyncIterator[str]:
    """The engine's URL by way of something that speaks TLS for it."""

    async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while data := await source.read(65536):
                to.write(data)
                await to.drain()
        to.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, to_engine = await asyncio.open_connection(engine.config.host, engine.config.port)
        await asyncio.gather(copy(reader, to_engine), copy(inner, writer))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    front = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{front.sockets[0].getsockname()[1]}"
    finally:
        front.close()


async def test_engines_behind_https_are_trusted_by_the_authority_that_is_named(pair: LoopbackPair) -> None:
    async with behind_tls(pair.prefill) as prefill, behind_tls(pair.decode) as decode:
        secure = settings(pair, prefill=[prefill], decode=[decode], engine_ca_file=str(CERTIFICATE))
        async with operating(secure) as http:
            assert (await http.post(CHAT, json=body(pair))).status_code == 200
        with pytest.raises(ConfigError, match="the TLS certificate is not valid"):
            async with operating(settings(pair, prefill=[prefill], decode=[decode])):
                pass


async def test_router_and_engines_all_on_ipv6() -> None:
    async with loopback_pair(prefill={"host": "::1"}, decode={"host": "::1"}) as pair:
        assert pair.decode.url.startswith("http://[::1]:")
        async with operating(settings(pair, server={"host": "::1"})) as http:
            history = [QUESTION]
            for turn in (1, 2):
                answer = await http.post(CHAT, json=body(pair, messages=history), headers={"X-Conversation-ID": "c"})
                assert answer.status_code == 200
                assert answer.headers["x-backhaul-route"] == ("cold" if turn == 1 else "warm")
                history += [answer.json()["choices"][0]["message"], QUESTION]
            url = f"http://[::1]:{pair.decode.config.port}/"
            drained = await http.post(f"{ADMIN}/engines/drain", params={"url": url})
            assert (drained.status_code, drained.json()["handles"]) == (200, 1)
