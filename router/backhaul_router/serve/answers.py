"""ASGI messages: bodies that are read up to a limit, answers that are sent whole, and errors in the shape of their API."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from ..report import WITHHELD
from ..wire import Endpoint
from ..wire.endpoint import Api
from .access import Refusal

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_LINGER_S = 2.0
"""How long a refused body is still read and thrown away: a client that is writing sees the refusal only afterwards."""
JSON = ("content-type", "application/json")
_OPENAI = Endpoint.CHAT.api


class ClientGone(Exception):
    """The client left before its request was complete."""


class BodyTooLarge(Exception):
    """The request's body exceeds the limit, of which no more than the limit was read."""


def is_loopback(client: Sequence[Any] | None) -> bool:
    """Whether an ASGI `client` (host and port) is on this machine. One that the server does not know is not."""
    try:
        address = ipaddress.ip_address(str(client[0]).partition("%")[0]) if client else None
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address is not None and address.is_loopback


# --- requests


def raw_path(scope: Message) -> str:
    raw: bytes | None = scope.get("raw_path")
    return quote(scope["path"]) if raw is None else raw.partition(b"?")[0].decode("latin-1")


async def read_body(scope: Message, receive: Receive, limit: int) -> bytes:
    """A request's body. Raises `ClientGone` and `BodyTooLarge`."""
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > limit:
            raise BodyTooLarge
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLarge
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


# --- answers


async def refuse(receive: Receive, send: Send, refusal: Refusal) -> None:
    """Answers without having read the body, which is thrown away."""
    body = refusal.body
    again = "true" if refusal.retry else "false"
    headers = [JSON, ("x-should-retry", again), ("connection", "close"), *refusal.headers]
    await send(start(refusal.status, [*headers, ("content-length", str(len(body)))]))
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})


def start(status: int, headers: Sequence[tuple[str, str]]) -> Message:
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
    return {"type": "http.response.start", "status": status, "headers": encoded}


async def send_whole(send: Send, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
    await send(start(status, [*headers, ("content-length", str(len(body)))]))
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: object) -> None:
    await send_whole(send, status, [JSON, ("cache-control", "no-store")], msgspec.json.encode(value))


async def send_error(send: Send, status: int, message: str, code: str) -> None:
    await send_whole(send, status, [JSON], error_body(status, message, code))


def error_body(status: int, message: str, code: str, api: Api = _OPENAI) -> bytes:
    type_ = "server_error" if status >= 500 else "invalid_request_error"
    return api.error(message, type_=type_, code=code)


def closing(send: Send) -> Send:
    """Has the client make another connection for its next request, and so ask the load balancer in between."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [(name, value) for name, value in message.get("headers", ()) if name.lower() != b"connection"]
            message = {**message, "headers": [*kept, (b"connection", b"close")]}
        await send(message)

    return closing


def withholding(send: Send, urls: Sequence[bytes]) -> Send:
    """Takes the engines' URLs, which are nothing to clients elsewhere, out of an answer whose body is sent at once."""
    head: Message = {}

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            head.update(message)
            return
        body = without(urls, message["body"])
        length = [(b"content-length", str(len(body)).encode())] if body else []
        headers = [(name, value) for name, value in head["headers"] if name != b"content-length"]
        await send({**head, "headers": headers + length})
        await send({**message, "body": body})

    return sent


def without(urls: Sequence[bytes], message: bytes) -> bytes:
    for url in urls:
        message = message.replace(url, WITHHELD.encode())
    return message
