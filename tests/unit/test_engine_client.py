"""The engines' HTTP client against servers that speak raw bytes, and misbehave on purpose."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from backhaul_router.engines import http_connection
from backhaul_router.engines.client import Detached, EngineCall, EngineFailure
from backhaul_router.engines.http_client import HttpClient
from backhaul_router.errors import FailureKind

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
PATH = "/v1/chat/completions"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Peer:
    """The engine's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def request(self) -> tuple[str, dict[str, str], bytes]:
        """Request line, headers with names in lower case, body."""
        line, *fields = (await self._reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
        return line, headers, await self._reader.readexactly(int(headers.get("content-length", 0)))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def gone(self) -> None:
        """Returns when the client has closed the connection."""
        try:
            while await self._reader.read(2**16):
                pass
        except ConnectionResetError:
            pass

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    def reset(self) -> None:
        """Closes with a TCP reset."""
        linger_for_no_time = b"\1\0\0\0\0\0\0\0"
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_no_time)
        self._writer.transport.abort()


@asynccontextmanager
async def engine(
    behave: Callable[[Peer], Awaitable[None]], *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Serves each connection with `behave` and then closes it. Yields the base URL."""
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await behave(Peer(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            connections.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


def answering(*answers: bytes) -> Callable[[Peer], Awaitable[None]]:
    """An engine that gives one answer to each request of a connection, and then closes it."""

    async def behave(peer: Peer) -> None:
        for answer in answers:
            await peer.request()
            await peer.send(answer)

    return behave


def post(base: str, body: bytes = b"{}", *, timeout_s: float = 30.0, **headers: str) -> EngineCall:
    return EngineCall(base + PATH, body, headers, timeout_s)


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient(connect_timeout_s=10.0)
    yield client
    await client.aclose()


async def failure_of(awaitable: Awaitable[object]) -> EngineFailure:
    with pytest.raises(EngineFailure) as caught:
        await awaitable
    return caught.value


# What is sent


async def test_a_body_makes_it_a_post_of_json_and_none_a_get(client):
    seen = []

    async def behave(peer: Peer) -> None:
        for _ in range(2):
            seen.append(await peer.request())
            await peer.send(OK)

    async with engine(behave) as base:
        await client.call(post(base, b'{"a": 1}'))
        await client.call(EngineCall(f"{base}/v1/models?x=1"))
    (posted, headers, body), (got, got_headers, _) = seen
    assert (posted, body) == (f"POST {PATH} HTTP/1.1", b'{"a": 1}')
    assert headers["content-type"] == "application/json"
    assert headers["accept-encoding"] == "identity"
    assert got == "GET /v1/models?x=1 HTTP/1.1"
    assert "content-type" not in got_headers
    assert "authorization" not in headers


async def test_the_api_key_replaces_whatever_authorization_the_caller_passes():
    seen = {}

    async def behave(peer: Peer) -> None:
        seen.update((await peer.request())[1])
        await peer.send(OK)

    client = HttpClient(api_key="sk-engine")
    async with engine(behave) as base:
        await client.call(post(base, authorization="Bearer sk-client"))
    await client.aclose()
    assert seen["authorization"] == "Bearer sk-engine"


async def test_headers_about_the_callers_own_connection_are_not_passed_on(client):
    seen = {}

    async def behave(peer: Peer) -> None:
        _, headers, body = await peer.request()
        seen.update(headers, body=body)
        await peer.send(OK)

    async with engine(behave) as base:
        headers = {"Content-Length": "1", "Transfer-Encoding": "chunked", "Host": "elsewhere", "X-Request-Id": "r1"}
        await client.call(EngineCall(base + PATH, b"12345", headers))
        assert seen["host"] == base.removeprefix("http://")
    assert seen["body"] == b"12345"
    assert seen["x-request-id"] == "r1"


@pytest.mark.parametrize(
    "headers", [{"X-Request-Id": "a\r\nX-Evil: 1"}, {"X-A\r\nX-Evil": "1"}, {"X A": "1"}, {"X-A": "\0"}]
)
async def test_headers_that_would_become_others_are_not_sent(client, headers):
    async with engine(answering(OK)) as base:
        with pytest.raises(ValueError, match="is not a header that can be sent"):
            await client.call(EngineCall(base + PATH, b"{}", headers))


async def test_paths_are_sent_as_they_are_and_what_cannot_be_in_one_is_quoted(client):
    seen = []

    async def behave(peer: Peer) -> None:
        for _ in range(2):
            seen.append((await peer.request())[0])
            await peer.send(OK)

    async with engine(behave) as base:
        await client.call(EngineCall(f"{base}/v1/models/org%2Fmodel:a@b?x=%41&y=1"))
        await client.call(EngineCall(f"{base}/v1/models/a b\u00e9#part"))
    assert seen == ["GET /v1/models/org%2Fmodel:a@b?x=%41&y=1 HTTP/1.1", "GET /v1/models/a%20b%C3%A9 HTTP/1.1"]


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "http://", "http://host:99999/x", "no url", "http://[::1:1/x", "http://[foo]:1/x"]
)
async def test_what_is_no_url_is_refused(client, url):
    failure = await failure_of(client.call(EngineCall(url)))
    assert failure.kind is FailureKind.REFUSED
    assert failure.message.endswith("this is not a usable URL")


async def test_a_body_of_many_megabytes_arrives_whole(client):
    body = bytes(range(256)) * 2**15
    received = []

    async def behave(peer: Peer) -> None:
        received.append((await peer.request())[2])
        await peer.send(OK)

    async with engine(behave) as base:
        await client.call(post(base, body))
    assert received == [body]


# What comes back


@pytest.mark.parametrize("status", [200, 307, 404, 500])
async def test_any_status_is_an_answer_and_redirects_are_not_followed(client, status):
    head = b"HTTP/1.1 %d Some\r\nLocation: /other\r\nX-Two: a\r\nx-two: b\r\nContent-Length: 4\r\n\r\n" % status
    async with engine(answering(head + b"body")) as base:
        answer = await client.call(post(base))
    assert (answer.status, answer.body) == (status, b"body")
    assert answer.headers == {"location": "/other", "x-two": "a, b", "content-length": "4"}


async def test_cookies_are_not_sent_back(client):
    seen = []

    async def behave(peer: Peer) -> None:
        for _ in range(2):
            seen.append((await peer.request())[1])
            await peer.send(OK.replace(b"\r\n\r\n", b"\r\nSet-Cookie: a=b\r\n\r\n"))

    async with engine(behave) as base:
        await client.call(post(base))
        await client.call(post(base))
    assert ["cookie" in headers for headers in seen] == [False, False]


async def test_a_stream_hands_each_chunk_over_before_the_next_one_is_sent(client):
    handed_over: asyncio.Queue[bytes] = asyncio.Queue()
    events = [b"data: %d\n\n" % i for i in range(5)]

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        for event in events:
            await peer.send(chunk(event))
            assert await handed_over.get() == event
        await peer.send(LAST_CHUNK)

    async with engine(behave) as base:
        stream = await client.open(post(base))
        assert (stream.status, stream.headers["content-type"]) == (200, "text/event-stream")
        async for data in stream:
            handed_over.put_nowait(data)
    assert handed_over.empty()


async def test_events_of_a_megabyte_and_chunks_of_a_byte_pass_unchanged(client):
    large = b"data: " + bytes(range(256)) * 2**12 + b"\n\n"
    small = [b"%d" % (i % 10) for i in range(5000)]
    wire = CHUNKED + chunk(large) + b"".join(chunk(byte) for byte in small) + chunk(large) + LAST_CHUNK
    async with engine(answering(wire)) as base:
        stream = await client.open(post(base))
        assert b"".join([data async for data in stream]) == large + b"".join(small) + large


async def test_interim_answers_are_passed_over(client):
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
    async with engine(answering(early + OK)) as base:
        answer = await client.call(post(base))
    assert (answer.status, answer.body, dict(answer.headers)) == (200, b"ok", {"content-length": "2"})


async def test_a_body_without_a_length_ends_with_its_connection(client):
    async with engine(answering(b"HTTP/1.1 200 OK\r\n\r\nall of it")) as base:
        assert (await client.call(post(base))).body == b"all of it"


async def test_compressed_bytes_are_not_touched(client):
    wire = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\n\x1f\x8bnot"
    async with engine(answering(wire)) as base:
        answer = await client.call(post(base))
    assert (answer.headers["content-encoding"], answer.body) == ("gzip", b"\x1f\x8bnot")


# Connections


async def test_a_connection_is_used_again_after_an_answer_and_after_a_stream_read_to_its_end(client):
    connections = []

    async def behave(peer: Peer) -> None:
        connections.append(peer)
        await answering(OK, CHUNKED + chunk(b"x") + LAST_CHUNK, OK)(peer)

    async with engine(behave) as base:
        await client.call(post(base))
        stream = await client.open(post(base))
        assert [data async for data in stream] == [b"x"]
        await stream.aclose()
        await client.call(post(base))
    assert len(connections) == 1


async def test_closing_a_stream_before_its_end_closes_its_connection_at_once(client):
    noticed = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED + chunk(b"first"))
        await peer.gone()
        noticed.set()

    async with engine(behave) as base:
        stream = await client.open(post(base))
        assert await anext(stream) == b"first"
        await stream.aclose()
        async with asyncio.timeout(10):
            await noticed.wait()
        assert (await failure_of(anext(stream))).kind is FailureKind.BROKEN


@pytest.mark.parametrize("head", [b"", CHUNKED], ids=["before the head", "before a chunk"])
async def test_cancelling_the_wait_closes_the_connection(client, head):
    waiting, noticed = asyncio.Event(), asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(head)
        waiting.set()
        await peer.gone()
        noticed.set()

    async with engine(behave) as base:
        call = asyncio.create_task(client.call(post(base)))
        await waiting.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(10):
            await noticed.wait()


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("sent", [b"", CHUNKED, CHUNKED + chunk(b"first")], ids=["nothing", "a head", "a chunk"])
async def test_an_exchange_that_is_kept_is_left_at_once_and_what_was_sent_by_then_is_read(tmp_path, sent, secure):
    waiting, noticed = asyncio.Event(), asyncio.Event()
    detached = Detached()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(sent)
        waiting.set()
        await peer.gone()
        noticed.set()

    client = HttpClient(ca_file=str(CERTIFICATE) if secure else None)
    async with engine(behave, tls=server_tls() if secure else None) as base:
        base = base.replace("127.0.0.1", "localhost")
        call = asyncio.create_task(client.call(EngineCall(base + PATH, b"{}", detached=detached)))
        await waiting.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert detached.stream is not None
        detached.stream.leave()
        async with asyncio.timeout(10):
            await noticed.wait()
        if b"first" in sent:
            assert await anext(detached.stream) == b"first"
        assert (await failure_of(anext(detached.stream))).kind is FailureKind.BROKEN
    await client.aclose()


async def test_an_answer_that_ends_as_it_is_left_is_whole_and_its_connection_is_not_used_again(client):
    detached, answer = Detached(), asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK[:-1])
        answer.set()
        await peer.gone()
        await peer.send(OK[-1:])
        await peer.request()
        raise AssertionError("a connection of which one half is closed was used again")

    async with engine(behave) as base:
        call = asyncio.create_task(client.call(EngineCall(base + PATH, b"{}", detached=detached)))
        await answer.wait()
        await asyncio.sleep(0.01)  # part of it has been read
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert detached.stream is not None
        detached.stream.leave()
        assert b"".join([data async for data in detached.stream]) == b"ok"
    async with engine(answering(OK)) as base:
        assert (await client.call(post(base))).body == b"ok"


async def test_a_kept_exchange_that_takes_too_long_is_closed(client):
    detached, noticed = Detached(), asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.gone()
        noticed.set()

    async with engine(behave) as base:
        failure = await failure_of(client.call(EngineCall(base + PATH, b"{}", timeout_s=0.05, detached=detached)))
        assert failure.kind is FailureKind.TIMEOUT
        async with asyncio.timeout(10):
            await noticed.wait()


async def test_an_idle_connection_that_the_engine_closed_is_not_used(client):
    async def behave(peer: Peer) -> None:
        await answering(OK)(peer)
        await peer.close()
        closed.set()

    async with engine(behave) as base:
        for _ in range(3):
            closed = asyncio.Event()
            assert (await client.call(post(base))).body == b"ok"
            await closed.wait()
            for _ in range(5):
                await asyncio.sleep(0)  # the FIN is in the client's socket by now: the loop has to see it


async def test_a_post_on_a_kept_connection_that_closes_unanswered_is_not_sent_again(client):
    posts = []

    async def behave(peer: Peer) -> None:
        posts.append(await peer.request())
        await peer.send(OK)
        posts.append(await peer.request())

    async with engine(behave) as base:
        await client.call(post(base))
        failure = await failure_of(client.call(post(base)))
    assert failure.kind is FailureKind.BROKEN
    assert len(posts) == 2


async def test_a_get_on_a_kept_connection_that_closes_unanswered_is_sent_again(client):
    lines = []

    async def behave(peer: Peer) -> None:
        lines.append((await peer.request())[0])
        await peer.send(OK)
        lines.append((await peer.request())[0])

    async with engine(behave) as base:
        await client.call(post(base))
        answer = await client.call(EngineCall(f"{base}/health"))
    assert answer.body == b"ok"
    assert lines == [f"POST {PATH} HTTP/1.1", "GET /health HTTP/1.1", "GET /health HTTP/1.1"]


async def test_bytes_behind_an_answer_are_not_taken_for_the_next_one(client):
    connections = []

    async def behave(peer: Peer) -> None:
        connections.append(peer)
        await answering(OK + OK.replace(b"ok", b"no"), OK)(peer)
        await peer.gone()

    async with engine(behave) as base:
        answers = [(await client.call(post(base))).body for _ in range(2)]
    assert answers == [b"ok", b"ok"]
    assert len(connections) == 2


async def test_an_answer_that_says_close_is_the_connections_last(client):
    connections = []

    async def behave(peer: Peer) -> None:
        connections.append(peer)
        await answering(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), OK)(peer)

    async with engine(behave) as base:
        for _ in range(2):
            await client.call(post(base))
    assert len(connections) == 2


async def test_an_answer_while_the_request_is_still_being_written_ends_the_writing(client):
    refused = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"
    connections = []

    async def behave(peer: Peer) -> None:
        connections.append(peer)
        if len(connections) == 1:
            await peer.send(refused)
            await peer.gone()
        else:
            await answering(OK)(peer)

    async with engine(behave) as base:
        answer = await client.call(post(base, b"x" * 2**25))
        assert (answer.status, answer.body) == (413, b"no")
        assert (await client.call(post(base))).body == b"ok"


async def test_a_reader_that_is_slow_holds_the_engine_back(client):
    piece = b"x" * 2**20
    sent = []

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        for _ in range(64):
            await peer.send(chunk(piece))
            sent.append(1)
        await peer.send(LAST_CHUNK)

    async with engine(behave) as base:
        stream = await client.open(post(base))
        size = len(await anext(stream))
        while (before := len(sent)) == 0 or before != await _later(sent):
            pass
        assert before < 64
        async for data in stream:
            size += len(data)
    assert size == 64 * len(piece)


async def _later(sent: list[int]) -> int:
    await asyncio.sleep(0.1)
    return len(sent)


async def test_idle_connections_are_closed_from_this_side(client, monkeypatch):
    monkeypatch.setattr(http_connection, "KEEPALIVE_S", 0.05)
    noticed = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await answering(OK)(peer)
        await peer.gone()
        noticed.set()

    async with engine(behave) as base:
        await client.call(post(base))
        async with asyncio.timeout(10):
            await noticed.wait()


async def test_a_connection_that_was_idle_while_the_loop_stood_still_is_not_used(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a tool of an agent blocks: neither the timer nor the engine's end of the stream was seen."""
    monkeypatch.setattr(http_connection, "KEEPALIVE_S", 0.05)
    connections = []

    async def behave(peer: Peer) -> None:
        connections.append(peer)
        await answering(OK, OK)(peer)
        await peer.gone()

    async with engine(behave) as base:
        await client.call(post(base))
        time.sleep(0.1)  # noqa: ASYNC251
        await client.call(post(base))
    assert len(connections) == 2


@pytest.mark.parametrize("rounds", range(1, 8))
async def test_a_call_ends_when_the_client_is_closed_while_it_connects(rounds: int) -> None:
    client = HttpClient()

    async def behave(peer: Peer) -> None:
        await peer.gone()

    async with engine(behave) as base:
        call = asyncio.create_task(client.call(post(base, timeout_s=30.0)))
        for _ in range(rounds):
            await asyncio.sleep(0)
        await client.aclose()
        async with asyncio.timeout(10):
            with pytest.raises((EngineFailure, RuntimeError)):
                await call


async def test_a_body_without_a_length_that_is_cut_by_closing_is_not_taken_for_the_whole() -> None:
    client = HttpClient()
    sent = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        sent.set()
        await peer.gone()

    async with engine(behave) as base:
        stream = await client.open(post(base))
        assert await anext(stream) == b"half"
        await client.aclose()
        assert (await failure_of(anext(stream))).kind is FailureKind.BROKEN


# Failures: each says whether the engine can have seen the request, where, and what happened


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_nothing_listening_is_refused(client):
    url = f"http://127.0.0.1:{unused_port()}"
    failure = await failure_of(client.call(post(url)))
    assert failure.kind is FailureKind.REFUSED
    assert failure.message == f"{url}{PATH}: cannot connect (connection refused)"


async def test_a_name_that_does_not_resolve_is_refused(client):
    failure = await failure_of(client.open(post("http://engine.invalid:8100")))
    assert failure.kind is FailureKind.REFUSED
    assert failure.message.startswith(f"http://engine.invalid:8100{PATH}: cannot resolve the host's name (")


async def test_a_tls_handshake_that_hangs_is_refused_after_the_connect_timeout():
    client = HttpClient(connect_timeout_s=0.1)
    async with engine(Peer.gone) as base:
        url = base.replace("http:", "https:")
        failure = await failure_of(client.call(post(url)))
    await client.aclose()
    assert failure.kind is FailureKind.REFUSED
    assert failure.message == f"{url}{PATH}: no connection within 0.1 s"


@pytest.mark.alone
async def test_a_blocked_event_loop_is_no_engine_that_does_not_answer():
    client = HttpClient(connect_timeout_s=0.1)
    async with engine(answering(OK)) as base:
        call = asyncio.create_task(client.call(post(base)))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(time.sleep, 0.3)
        assert (await call).status == 200
    await client.aclose()


async def test_a_call_that_is_cancelled_while_it_connects_leaves_no_socket_open(monkeypatch):
    left_open = []
    monkeypatch.setattr(sys, "unraisablehook", left_open.append)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        for steps in range(6):
            client = HttpClient()
            call = asyncio.create_task(client.call(post(url)))
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await client.aclose()
    gc.collect()
    assert not left_open


async def test_tls_to_an_engine_without_it_is_refused(client):
    async def behave(peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with engine(behave) as base:
        failure = await failure_of(client.call(post(base.replace("http:", "https:"))))
    assert failure.kind is FailureKind.REFUSED
    assert "the TLS handshake failed" in failure.message


async def test_a_call_is_limited_as_a_whole_even_while_bytes_arrive(client):
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        while True:
            await peer.send(chunk(b"."))
            await asyncio.sleep(0.01)

    async with engine(behave) as base:
        failure = await failure_of(client.call(post(base, timeout_s=0.2)))
    assert failure.kind is FailureKind.TIMEOUT
    assert failure.message == f"{base}{PATH}: no complete answer within 0.2 s"


async def test_a_stream_may_last_longer_than_its_timeout_while_bytes_arrive(client):
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        for _ in range(12):
            await asyncio.sleep(0.3)
            await peer.send(chunk(b"."))
        await peer.send(LAST_CHUNK)

    async with engine(behave) as base:
        stream = await client.open(post(base, timeout_s=3.0))
        assert b"".join([data async for data in stream]) == b"." * 12


@pytest.mark.parametrize(
    ("sent", "timeout_s", "message"),
    [
        (b"", 0.1, "no answer began within 0.1 s"),
        (CHUNKED + chunk(b"x"), 2.0, "the answer fell silent for 2 s before its end"),
    ],
    ids=["before the head", "between chunks"],
)
async def test_silence_of_a_stream_times_out_and_closes_the_connection(client, sent, timeout_s, message):
    noticed = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(sent)
        await peer.gone()
        noticed.set()

    async def read(call: EngineCall) -> None:
        async for _ in await client.open(call):
            pass

    async with engine(behave) as base:
        failure = await failure_of(read(post(base, timeout_s=timeout_s)))
        async with asyncio.timeout(10):
            await noticed.wait()
    assert failure.kind is FailureKind.TIMEOUT
    assert failure.message == f"{base}{PATH}: {message}"


async def test_an_engine_that_never_reads_the_request_times_out(client):
    release = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await release.wait()

    async with engine(behave) as base:
        failure = await failure_of(client.open(post(base, b"x" * 2**25, timeout_s=0.2)))
        release.set()
    assert failure.kind is FailureKind.TIMEOUT


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "the engine closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "the engine closed the connection without an answer"),
        (b"SSH-2.0-server\r\n\r\n", "the answer is not valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "the connection ended before the answer was complete"),
        (CHUNKED + chunk(b"x"), "the connection ended before the answer was complete"),
        (CHUNKED + b"5\r\nab", "the connection ended before the answer was complete"),
        (CHUNKED + chunk(b"x") + b"no size\r\n", "the answer is not valid HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X-A: %b\r\n" % (b"a" * 2**10) * 80 + b"\r\n", "the answer is not valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 2**20, "the answer is not valid HTTP"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 2**14, "the answer is not valid HTTP"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "the answer is not valid HTTP"),
    ],
    ids=[
        "nothing",
        "half a head",
        "no HTTP",
        "short body",
        "no last chunk",
        "half a chunk",
        "no chunk",
        "endless head",
        "endless field",
        "endless interim answers",
        "another protocol",
    ],
)
async def test_an_answer_that_ends_early_or_is_no_http_is_broken(client, sent, message):
    async with engine(answering(sent)) as base:
        failure = await failure_of(client.call(post(base)))
    assert failure.kind is FailureKind.BROKEN
    assert failure.message == f"{base}{PATH}: {message}"


@pytest.mark.parametrize("sent", [b"", CHUNKED + chunk(b"x")], ids=["before the head", "in the body"])
async def test_a_reset_connection_is_broken(client, sent):
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(sent)
        peer.reset()

    async with engine(behave) as base:
        failure = await failure_of(client.call(post(base)))
    assert failure.kind is FailureKind.BROKEN


async def test_a_stream_that_breaks_hands_over_what_arrived_before(client):
    handed_over = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await answering(CHUNKED + chunk(b"first"))(peer)
        await handed_over.wait()

    async with engine(behave) as base:
        stream = await client.open(post(base))
        assert await anext(stream) == b"first"
        handed_over.set()
        assert (await failure_of(anext(stream))).kind is FailureKind.BROKEN


async def test_messages_hold_neither_query_nor_headers_nor_bodies(client):
    async with engine(answering(b"secret-answer\r\n\r\n")) as base:
        call = EngineCall(f"{base}{PATH}?token=secret-query", b"secret-body", {"X-Key": "secret-header"})
        failure = await failure_of(client.call(call))
    assert failure.message == f"{base}{PATH}: the answer is not valid HTTP"


# Addresses

CERTIFICATE = Path(__file__).with_name("localhost.pem")
"""Self-signed, for localhost, with its key: for these tests only."""


def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


async def test_an_unknown_certificate_is_refused(client):
    async with engine(answering(OK), tls=server_tls()) as base:
        failure = await failure_of(client.call(post(base)))
    assert failure.kind is FailureKind.REFUSED
    assert "the TLS certificate is not valid (" in failure.message


async def test_https_with_a_certificate_that_the_system_trusts():
    program = f"""
import asyncio, sys
from backhaul_router.engines.http_client import HttpClient
from backhaul_router.engines.client import EngineCall

async def main():
    client = HttpClient()
    answer = await client.call(EngineCall(sys.argv[1] + {PATH!r}, b"{{}}"))
    await client.aclose()
    print(answer.body.decode())

asyncio.run(main())
"""
    async with engine(answering(OK), tls=server_tls()) as base:
        ran = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-W", "error", "-c", program, base],
            env={"SSL_CERT_FILE": str(CERTIFICATE)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (ran.stdout, ran.stderr) == ("ok\n", "")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", *(["::1"] if has_ipv6() else [])])
async def test_numeric_addresses_of_either_family(client, host):
    async with engine(answering(OK), host=host) as base:
        assert (await client.call(post(base))).body == b"ok"


# Event loops, threads, the end


async def test_one_client_serves_loops_that_come_and_go_and_leaves_nothing_open_in_them(client):
    ended: asyncio.Queue[int] = asyncio.Queue()

    async def behave(peer: Peer) -> None:
        await answering(OK)(peer)
        await peer.gone()
        ended.put_nowait(1)

    async with engine(behave) as base:
        for _ in range(3):
            answer = await asyncio.to_thread(asyncio.run, client.call(post(base)))
            assert answer.body == b"ok"
            async with asyncio.timeout(10):
                await ended.get()
    gc.collect()  # finds unclosed sockets, if there are any, which fails the test
    assert repr(client) == "<HttpClient event_loops=1>"


async def test_a_client_that_was_dropped_leaves_nothing_open():
    ended = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await answering(OK)(peer)
        await peer.gone()
        ended.set()

    async with engine(behave) as base:
        await HttpClient().call(post(base))
        gc.collect()
        async with asyncio.timeout(10):
            await ended.wait()


async def test_two_loops_at_once(client):
    async with engine(answering(OK)) as base:
        answers = await asyncio.gather(
            client.call(post(base)),
            asyncio.to_thread(asyncio.run, client.call(post(base))),
            client.call(post(base)),
        )
    assert [answer.body for answer in answers] == [b"ok"] * 3


async def test_closing_ends_what_is_in_progress_here_and_in_other_loops():
    client = HttpClient()
    waiting: asyncio.Queue[int] = asyncio.Queue()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        waiting.put_nowait(1)
        await peer.gone()

    async with engine(behave) as base:
        here = asyncio.create_task(failure_of(client.call(post(base))))
        elsewhere = asyncio.create_task(asyncio.to_thread(asyncio.run, failure_of(client.call(post(base)))))
        await waiting.get()
        await waiting.get()
        await client.aclose()
        async with asyncio.timeout(10):
            failures = [await here, await elsewhere]
        with pytest.raises(RuntimeError, match="this client is closed"):
            await client.call(post(base))
    assert [failure.kind for failure in failures] == [FailureKind.BROKEN, FailureKind.BROKEN]


async def test_closing_twice_or_unused_is_fine():
    client = HttpClient()
    await client.aclose()
    await client.aclose()
