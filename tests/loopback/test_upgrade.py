"""Requests that offer to go on in another protocol, which Backhaul does not speak: they are requests like others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

import h11
import httpx2
import pytest
from backhaul_loopback import LoopbackPair, loopback_pair
from served import serving

CHAT = "/v1/chat/completions"
UPGRADE = [
    ("connection", "Upgrade, HTTP2-Settings"),
    ("upgrade", "h2c"),
    ("http2-settings", "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"),
]
ASKED = {"model": "loopback", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
SMUGGLED = b"GET /backhaul/conversations HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
async def pair() -> AsyncIterator[LoopbackPair]:
    async with loopback_pair() as one:
        yield one


@pytest.fixture(scope="module")
async def url(pair: LoopbackPair) -> AsyncIterator[httpx2.URL]:
    async with serving(pair, "--no-check-pairs") as served:
        yield httpx2.URL(served.url)


def head(method: str, path: str, *more: tuple[str, str]) -> bytes:
    fields = [("host", "x"), ("content-type", "application/json"), *more]
    return "".join([f"{method} {path} HTTP/1.1\r\n", *(f"{n}: {v}\r\n" for n, v in fields), "\r\n"]).encode()


def post(body: bytes, *more: tuple[str, str]) -> bytes:
    return head("POST", CHAT, *UPGRADE, ("content-length", str(len(body))), *more)


async def answers(url: httpx2.URL, *pieces: bytes, expected: int) -> list[tuple[int, bytes]]:
    """Statuses and bodies of what comes back on one connection; nothing follows the expected ones."""
    reader, writer = await asyncio.open_connection(url.host, url.port)
    peer, found, status, body = h11.Connection(h11.CLIENT), list[tuple[int, bytes]](), 0, b""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)
        peer.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        peer.send(h11.EndOfMessage())
        async with asyncio.timeout(20):
            while len(found) < expected:
                match peer.next_event():
                    case h11.NEED_DATA:
                        peer.receive_data(await reader.read(65536))
                    case h11.Response(status_code=status):
                        body = b""
                    case h11.Data(data=data):
                        body += bytes(data)
                    case h11.EndOfMessage():
                        found.append((status, body))
                        if len(found) < expected:
                            peer.start_next_cycle()
                            peer.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
                            peer.send(h11.EndOfMessage())
        assert peer.trailing_data[0] == b""
        with pytest.raises(TimeoutError):  # no answer to what nobody asked
            await asyncio.wait_for(reader.readexactly(1), 0.3)
    finally:
        writer.close()
    return found


def texts(found: Sequence[tuple[int, bytes]]) -> list[str]:
    assert [status for status, _ in found] == [200] * len(found), found
    return [json.loads(body)["choices"][0]["message"]["content"] for _, body in found]


@pytest.fixture(scope="module")
async def right(url: httpx2.URL) -> str:
    async with httpx2.AsyncClient() as http:
        answer = await http.post(f"{url}{CHAT}", json=ASKED)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("padding", [0, 200_000], ids=["small", "large"])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "after the head"])
async def test_the_body_of_a_request_that_offers_h2c_is_read(
    url: httpx2.URL, right: str, padding: int, at_once: bool
) -> None:
    body = json.dumps(ASKED).encode() + b" " * padding
    pieces = (post(body) + body,) if at_once else (post(body), body)
    assert texts(await answers(url, *pieces, expected=1)) == [right]


@pytest.mark.parametrize("pieces", [1, 3])
async def test_so_is_one_in_chunks(url: httpx2.URL, right: str, pieces: int) -> None:
    body = json.dumps(ASKED).encode()
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:])] + [b"0\r\n\r\n"]
    sent = [head("POST", CHAT, *UPGRADE, ("transfer-encoding", "chunked")) + chunks[0], *chunks[1:]]
    sent = [b"".join(sent)] if pieces == 1 else sent
    assert texts(await answers(url, *sent, expected=1)) == [right]


async def test_a_body_is_never_taken_for_the_next_request(url: httpx2.URL) -> None:
    for pieces in ((post(SMUGGLED) + SMUGGLED,), (post(SMUGGLED), SMUGGLED)):
        ((status, body),) = await answers(url, *pieces, expected=1)
        assert (status, json.loads(body)["error"]["code"]) == (400, "malformed_body")


async def test_requests_behind_one_another_all_offer_it(url: httpx2.URL, right: str) -> None:
    body = json.dumps(ASKED).encode()
    get = head("GET", "/v1/models", *UPGRADE)
    found = await answers(url, (get + post(body) + body) * 2 + get, expected=5)
    assert [status for status, _ in found] == [200] * 5
    assert texts([found[1], found[3]]) == [right] * 2
    assert json.loads(found[4][1])["object"] == "list"


async def test_a_thousand_behind_one_another_cost_no_stack(url: httpx2.URL) -> None:
    found = await answers(url, head("GET", "/version", *UPGRADE) * 1_200, expected=1_200)
    assert {status for status, _ in found} == {200}


async def test_an_offer_of_a_websocket_is_no_more_than_a_request(url: httpx2.URL) -> None:
    offer = [("connection", "Upgrade"), ("upgrade", "websocket"), ("sec-websocket-version", "13")]
    ((status, _),) = await answers(url, head("GET", "/version", *offer), expected=1)
    assert status == 200
