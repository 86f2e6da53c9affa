"""The served router over real sockets: what it answers, what it keeps to itself, and how it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import msgspec
import pytest
from backhaul_cli import main as cli
from backhaul_connector.launch.supervise import descendants
from backhaul_loopback import CostModel, LoopbackEngine, LoopbackPair, RealClock, loopback_pair
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Request, Router
from backhaul_router.report import ReuseReport
from backhaul_router.serve.answers import is_loopback
from backhaul_router.serve.asgi import App, make_app
from backhaul_router.serve.report_log import ReportLogs
from served import LIMIT_S, freed, in_thread, run, serving

CHAT = "/v1/chat/completions"
ON_RECORD = "/backhaul/conversations"
ENDLESS = {"decode": {"costs": CostModel(decode_s=0.05)}}
"""A decode engine that takes minutes for the answers asked of it here."""
QUESTION: Any = {"role": "user", "content": "What is carried back, and where to? " * 20}


@pytest.fixture
async def pair() -> AsyncIterator[LoopbackPair]:
    async with loopback_pair() as pair:
        yield pair


def body(pair: LoopbackPair, **more: Any) -> dict[str, Any]:
    return {"model": pair.model, "messages": [QUESTION], "max_tokens": 8, "temperature": 0, **more}


async def reported(http: httpx2.AsyncClient, conversation: str = "c1", turn: int = 1) -> dict[str, Any]:
    """The report of a turn that has ended or is about to."""
    answer = await http.get(f"{ON_RECORD}/{conversation}", params={"turn": turn, "wait": 5})
    assert answer.status_code == 200, answer.text
    [report] = answer.json()["reports"]
    return dict(report)


# --- what the router answers


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_answers_are_those_of_one_engine_and_hold_no_handle(pair: LoopbackPair, stream: bool) -> None:
    asked = body(pair, stream=stream)
    async with (
        LoopbackEngine("decode") as engine,
        httpx2.AsyncClient() as direct,
        in_thread(pair) as http,
    ):
        expected = await direct.post(engine.url + CHAT, json=asked)
        answer = await http.post(CHAT, json=asked)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == expected.headers["content-type"]
    assert text_of(answer) == text_of(expected)
    assert "remote_engine_id" not in answer.text
    assert 'kv_transfer_params":{' not in answer.text


def text_of(answer: httpx2.Response) -> str:
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return str(answer.json()["choices"][0]["message"]["content"])
    assert answer.content.endswith(b"data: [DONE]\n\n")
    return text_in(answer.content)


def text_in(stream: bytes) -> str:
    """What the whole events of a stream say."""
    *events, _ = stream.split(b"\n\n")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events if not event.endswith(b"[DONE]")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def test_a_report_has_no_more_of_a_models_name_than_any_engine_would_have(pair: LoopbackPair) -> None:
    async with in_thread(pair) as http:
        named = {"X-Conversation-ID": "c1"}
        assert (await http.post(CHAT, json=body(pair, model="m" * 100_000), headers=named)).status_code == 404
        assert (await reported(http))["model"] == "m" * 1024


@pytest.mark.parametrize("path", ["/v1/models", "/version"])
async def test_what_is_no_turn_is_passed_to_an_engine(pair: LoopbackPair, path: str) -> None:
    async with httpx2.AsyncClient() as direct, in_thread(pair) as http:
        expected, answer = await direct.get(pair.decode.url + path), await http.get(path)
    assert answer.status_code == 200
    assert answer.json().keys() == expected.json().keys()


class OneWord(RealClock):
    """Lets one step be decoded, which on loopback engines is a word; the second never is."""

    COST_S = 1234.5

    def __init__(self) -> None:
        self._left = asyncio.Semaphore(1)

    async def sleep(self, seconds: float) -> None:
        await (self._left.acquire() if seconds >= self.COST_S else super().sleep(seconds))


async def test_the_first_word_comes_before_the_engine_has_made_the_second() -> None:
    costs = CostModel(decode_s=OneWord.COST_S)
    async with loopback_pair(clock=OneWord(), decode={"costs": costs}) as pair, in_thread(pair) as http:
        async with http.stream("POST", CHAT, json=body(pair, stream=True)) as answer:
            chunks = answer.aiter_raw()
            seen = b""
            while text_in(seen) == "":
                seen += await anext(chunks)


async def test_a_client_that_leaves_a_stream_ends_the_turn_on_the_engines() -> None:
    async with loopback_pair(**ENDLESS) as pair, in_thread(pair) as http:
        asked = body(pair, stream=True, max_tokens=4000)
        async with http.stream("POST", CHAT, json=asked, headers={"X-Conversation-ID": "c1"}) as answer:
            await anext(answer.aiter_raw())
            assert pair.decode.usage > 0
        assert (await reported(http))["error"] == "client_gone"
        await freed(pair)
        async with asyncio.timeout(10):
            while pair.decode.usage or pair.prefill.pinned_blocks:
                await asyncio.sleep(0.002)


async def test_a_client_that_leaves_before_the_head_ends_the_turn_too(pair: LoopbackPair) -> None:
    async with in_thread(pair) as http:
        await http.get("/v1/models")
        pair.prefill.faults.stall = True
        waiting = asyncio.create_task(http.post(CHAT, json=body(pair), headers={"X-Conversation-ID": "c1"}))
        async with asyncio.timeout(10):
            while not pair.prefill.requests_to(CHAT):
                await asyncio.sleep(0.002)
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert (await reported(http))["error"] == "client_gone"


# --- what it refuses


async def test_a_body_over_the_limit_is_refused_before_it_is_read(pair: LoopbackPair) -> None:
    async with in_thread(pair, max_body_bytes=1000) as http:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**12}\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
        writer.close()
        assert head.startswith(b"HTTP/1.1 413 ")


async def test_a_body_whose_length_nobody_announced_is_refused_at_the_limit(pair: LoopbackPair) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * 1000

    async with in_thread(pair, max_body_bytes=10_000) as http:
        answer = await http.post(CHAT, content=chunks())
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert (await http.post(CHAT, json=body(pair))).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "sent", "headers", "status", "code"),
    [
        ("POST", CHAT, b"{", {}, 400, "malformed_body"),
        ("POST", CHAT, b'{"session_id": "a"}', {"X-Conversation-ID": "b"}, 400, "conflicting_ids"),
        ("POST", "/v1/audio/speech", b"{}", {}, 404, "not_found"),
        ("GET", "/backhaul", b"", {}, 404, "not_found"),
        ("GET", f"{ON_RECORD}/unknown", b"", {}, 404, "unknown_conversation"),
        ("DELETE", f"{ON_RECORD}/unknown", b"", {}, 404, "unknown_conversation"),
        *(
            ("GET", f"{ON_RECORD}/c1?{query}", b"", {}, 400, "malformed_query")
            for query in ("turn=one", "turn=1&wait=nan", "turn=0", f"turn={-(2**63) - 1}", f"turn={10**26}")
        ),
        ("POST", ON_RECORD, b"{}", {}, 405, "method_not_allowed"),
    ],
)
async def test_errors_have_openais_shape(
    pair: LoopbackPair, method: str, path: str, sent: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    async with in_thread(pair) as http:
        answer = await http.request(method, path, content=sent, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert answer.json()["error"]["code"] == code


async def test_a_turn_that_failed_says_which_one_it_was_and_has_a_report(pair: LoopbackPair) -> None:
    async with in_thread(pair) as http:
        await http.get("/v1/models")
        pair.prefill.faults.drop = True
        answer = await http.post(CHAT, json=body(pair), headers={"X-Conversation-ID": "c1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "prefill_failed")
        assert answer.headers["x-backhaul-turn"] == "1"
        assert (await reported(http))["error"] == "prefill_failed"


# --- what it keeps on record


async def test_a_conversation_is_on_record_until_it_is_ended_and_then_nothing_is_held(pair: LoopbackPair) -> None:
    name = "a/b%20c"
    where = f"{ON_RECORD}/a%2Fb%2520c"
    async with in_thread(pair) as http:
        for n in (1, 2):
            await http.post(CHAT, json=body(pair, messages=[QUESTION] * n), headers={"X-Conversation-ID": name})
        await http.post(CHAT, json=body(pair), headers={"X-Conversation-ID": "other"})
        await http.post(CHAT, json=body(pair))

        listed = (await http.get(ON_RECORD)).json()["conversations"]
        unnamed = listed[0]["id"]
        assert unnamed.startswith("anon-")
        assert [(one["id"], one["total"]["turns"]) for one in listed] == [(unnamed, 1), ("other", 1), (name, 2)]
        shown = (await http.get(where)).json()
        assert shown["total"]["turns"] == 2
        assert [report["turn"] for report in shown["reports"]] == [1, 2]
        assert shown["reports"][0].keys() == {field.name for field in msgspec.structs.fields(ReuseReport)}
        only = (await http.get(where, params={"turn": 2})).json()["reports"]
        assert only == shown["reports"][1:]
        assert "remote_block_ids" not in json.dumps(shown)

        assert pair.decode.pinned_blocks > 0
        for each in (where, f"{ON_RECORD}/other", f"{ON_RECORD}/{unnamed}"):
            ended = await http.delete(each)
            assert (ended.status_code, ended.content) == (204, b"")
        await freed(pair)
        assert (await http.get(where)).status_code == 404


async def test_health_counts_the_engines(pair: LoopbackPair) -> None:
    async with in_thread(pair, decode=[pair.decode.url, "http://127.0.0.1:9"]) as http:
        answer = await http.get("/health")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "ok",
        "prefill": {"connected": 1, "configured": 1},
        "decode": {"connected": 1, "configured": 2},
    }


# --- as an ASGI application

CONFIG: dict[str, Any] = {"prefill": ["http://p:8100"], "decode": ["http://d:8200"]}


async def call(app: App, method: str, path: str, client: Any, sent: bytes = b"") -> tuple[int, bytes]:
    """One request from `client`, an address or `None`."""
    messages: list[Any] = []
    incoming: asyncio.Queue[Any] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": sent, "more_body": False})
    scope = {"type": "http", "method": method, "path": path, "headers": [], "client": client and (client, 1)}

    async def send(message: Any) -> None:
        messages.append(message)

    await app(scope, incoming.get, send)
    start, *rest = messages
    return start["status"], b"".join(message.get("body", b"") for message in rest)


@pytest.mark.parametrize(
    ("client", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.7", False),
        ("::ffff:10.0.0.7", False),
        ("fe80::1%eth0", False),
        ("testclient", False),
        (None, False),
    ],
)
async def test_only_clients_on_this_machine_see_and_end_conversations(client: str | None, local: bool) -> None:
    app = make_app(RouterConfig(**CONFIG))
    assert is_loopback(client and (client, 1)) is local  # type: ignore[arg-type]
    for method, path in (("GET", ON_RECORD), ("GET", f"{ON_RECORD}/c1"), ("DELETE", f"{ON_RECORD}/c1")):
        app.reports.record(ReuseReport(conversation="c1", turn=1, route="cold"))  # type: ignore[arg-type]
        app.router.membership.connected = False
        status, _ = await call(app, method, path, client)
        assert (status == 403) is not local
    await app.router.aclose()


@pytest.mark.parametrize(("client", "named"), [("127.0.0.1", True), ("10.0.0.7", False)])
async def test_engine_urls_in_errors_are_for_clients_on_this_machine(client: str, named: bool) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        app = make_app(RouterConfig(prefill=(url,), decode=("http://127.0.0.1:9",)))
        status, text = await call(app, "POST", CHAT, client, b'{"model": "m", "messages": []}')
        await app.router.aclose()
    assert (status, json.loads(text)["error"]["code"]) == (503, "not_connected")
    assert (url.encode() in text) is named


async def test_health_says_that_the_process_is_alive_whatever_the_engines_do() -> None:
    app = make_app(RouterConfig(**CONFIG))
    status, text = await call(app, "GET", "/health", "10.0.0.7")
    assert (status, json.loads(text)["status"]) == (200, "ok")
    assert json.loads(text)["prefill"] == {"connected": 0, "configured": 1}
    await app.router.aclose()


async def lifespan(app: App, during: Callable[[], Any] = lambda: None) -> list[Any]:
    told: list[Any] = []
    messages = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> Any:
        kind = next(messages)
        if kind == "lifespan.shutdown":
            await during()
        return {"type": kind}

    async def send(message: Any) -> None:
        told.append(message)

    await app({"type": "lifespan"}, receive, send)
    return told


async def test_under_another_server_the_lifespan_connects_and_releases(pair: LoopbackPair) -> None:
    app = make_app(RouterConfig(prefill=(pair.prefill.url,), decode=(pair.decode.url,)))

    async def during() -> None:
        reply = await app.router.handle(
            Request("POST", CHAT, [("x-session-id", "c1")], json.dumps(body(pair)).encode())
        )
        async for _ in reply:
            pass
        assert pair.decode.pinned_blocks > 0

    told = await lifespan(app, during)
    assert [message["type"] for message in told] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    await freed(pair)


async def test_under_another_server_a_fleet_that_cannot_work_is_told() -> None:
    told = await lifespan(make_app(RouterConfig(prefill=("http://127.0.0.1:9",), decode=("http://127.0.0.1:8",))))
    assert [message["type"] for message in told] == ["lifespan.startup.failed"]
    assert "no prefill engine answers" in told[0]["message"]


class Flood:
    """A reply that has more to say than anybody wants to hear."""

    status = 200
    headers = (("content-type", "text/event-stream"),)

    def __init__(self) -> None:
        self.taken = 0
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.taken += 1
            yield b"data: x\n\n"

    async def aclose(self) -> None:
        self.closed = True


async def test_a_client_that_reads_slowly_slows_the_engine_down(monkeypatch: pytest.MonkeyPatch) -> None:
    flood = Flood()
    router = Router(RouterConfig(**CONFIG))
    left = asyncio.Event()
    full = asyncio.Event()

    async def handle(request: Request) -> Flood:
        return flood

    async def receive() -> Any:
        if not full.is_set():
            full.set()
            return {"type": "http.request"}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            left.set()
            await asyncio.Event().wait()  # a full socket

    monkeypatch.setattr(router, "handle", handle)
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "client": ("127.0.0.1", 1)}
    await asyncio.wait_for(App(router, ReportLogs())(scope, receive, send), LIMIT_S)
    assert (flood.taken, flood.closed) == (1, True)
    await router.aclose()


# --- as a process


async def test_told_to_stop_it_lets_requests_finish_and_releases_everything() -> None:
    costs = {"costs": CostModel(decode_s=0.02)}
    async with loopback_pair(decode=costs) as pair, serving(pair, "--no-log-turns") as served:
        await served.http.post(CHAT, json=body(pair), headers={"X-Conversation-ID": "c1"})
        assert pair.decode.pinned_blocks > 0
        async with served.http.stream("POST", CHAT, json=body(pair, stream=True, max_tokens=50)) as answer:
            chunks = answer.aiter_raw()
            await anext(chunks)
            stopping = asyncio.create_task(served.stop())
            rest = b"".join([chunk async for chunk in chunks])
        assert rest.endswith(b"data: [DONE]\n\n")
        status, out, err = await stopping
        assert (status, out.splitlines()[-1], err) == (0, "stopped", "")
        await freed(pair)


async def test_a_request_that_outlasts_the_grace_time_ends_with_an_error_event() -> None:
    async with loopback_pair(**ENDLESS) as pair, serving(pair, "--grace-s", "1") as served:
        async with served.http.stream("POST", CHAT, json=body(pair, stream=True, max_tokens=4000)) as answer:
            chunks = answer.aiter_raw()
            await anext(chunks)
            stopping = asyncio.create_task(served.stop())
            rest = b"".join([chunk async for chunk in chunks])
        last = rest.split(b"\n\n")[-2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        assert (await stopping)[0] == 0
        await freed(pair)


async def test_a_second_signal_ends_it_at_once() -> None:
    async with loopback_pair(**ENDLESS) as pair, serving(pair, "--grace-s", "600") as served:
        async with served.http.stream("POST", CHAT, json=body(pair, stream=True, max_tokens=4000)) as answer:
            await anext(answer.aiter_raw())
            served.process.send_signal(signal.SIGINT)
            async with asyncio.timeout(LIMIT_S):
                while await accepts(served.http):
                    await asyncio.sleep(0.01)
            assert (await served.stop(signal.SIGINT))[0] == 0
        await freed(pair)


async def accepts(http: httpx2.AsyncClient) -> bool:
    try:
        _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def test_a_server_that_is_killed_leaves_no_process_and_no_running_request() -> None:
    async with loopback_pair(**ENDLESS) as pair, serving(pair) as served:
        async with served.http.stream("POST", CHAT, json=body(pair, stream=True, max_tokens=4000)) as answer:
            await anext(answer.aiter_raw())
            assert descendants(served.process.pid) == []
            status, _, _ = await served.stop(signal.SIGKILL)
        assert status == -signal.SIGKILL
        async with asyncio.timeout(10):
            while pair.decode.usage:
                await asyncio.sleep(0.002)


async def test_a_port_in_use_is_one_line(pair: LoopbackPair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        engines = ("--prefill", pair.prefill.url, "--decode", pair.decode.url)
        for command in (("serve", *engines), ("up", "--python", "/nowhere")):
            process = await run(*command, "--port", port)
            out, err = await process.communicate()
            assert (process.returncode, out) == (2, b"")
            told = f"backhaul {command[0]}: port {port} of 127.0.0.1 is in use: choose another with --port\n"
            assert err.decode() == told


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:8"], "no prefill engine answers"),
        (["--prefill", "p:8100", "--decode", "http://d:8200"], "'p:8100' is not an engine's URL"),
        (["--prefill", "http://p:1", "--decode", "http://d:1", "--port", "70000"], "port 70000: from 0 to 65535"),
        (["--prefill", "http://p:1", "--decode", "http://d:1", "--host", "no.such.invalid"], "'no.such.invalid'"),
        (["--prefill", "http://p:1", "--decode", "http://d:1", "--host", "192.0.2.1"], "of 192.0.2.1: Cannot assign"),
        (["--prefill", "http://p:1", "--decode", "http://d:1", "--max-branches", "0"], "max_branches=0"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments if "--port" in arguments else [*arguments, "--port", "0"]
    assert cli.main(["serve", *given]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("backhaul serve: ")
    assert complaint in err


def test_every_setting_of_the_router_has_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(RouterConfig):
        if field.name != "api_key":
            flag = field.name.replace("_", "-")
            assert f"--{flag} " in text or f"--no-{flag}" in text


async def test_it_serves_on_ipv6(pair: LoopbackPair) -> None:
    async with in_thread(pair, host="::1") as http:
        assert str(http.base_url).startswith("http://[::1]:")
        assert (await http.get(ON_RECORD)).status_code == 200
