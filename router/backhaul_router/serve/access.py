"""What a served request must be before anything is done for it: not too large a head, and one of a tenant's keys.

Refusals are answers in the shape of the API that the path belongs to. None of them repeats what the client sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..wire import Endpoint, api_of
from .admission import Refused
from .tenants import Tenant, Tenants

RawHeaders = Sequence[tuple[bytes, bytes]]

MAX_HEADERS = 200
MAX_HEADER_BYTES = 64 * 1024
"""Of all names and values together. Coding agents send some 30 headers of 4 KiB in all."""

_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
_BY_API_KEY = (Endpoint.MESSAGES, "/backhaul/")
"""Paths where Anthropic's own header counts too; its clients ask after their conversations like others'."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is given without reading the request's body."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    retry: bool = False
    """Whether the same request may be answered later."""


def admit(tenants: Tenants, path: str, headers: RawHeaders) -> tuple[Tenant | None, RawHeaders]:
    """Whose request it is, and its headers without the keys. `None` where no key is known, or two are of two tenants."""
    by_api_key = path.startswith(_BY_API_KEY)
    found: set[Tenant] = set()
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() != b"bearer":
                continue
        elif name == b"x-api-key" and by_api_key:
            key = value
        else:
            continue
        if (tenant := tenants.find(key.strip().decode("latin-1"))) is not None:
            found.add(tenant)
    kept = [(name, value) for name, value in headers if name not in _CREDENTIALS]
    return (found.pop() if len(found) == 1 else None), kept


def refusal_of_head(path: str, headers: RawHeaders) -> Refusal | None:
    """Where there are too many headers, or too long ones."""
    if len(headers) > MAX_HEADERS:
        what = f"{len(headers)} headers; the limit is {MAX_HEADERS}"
    elif (size := sum(len(name) + len(value) for name, value in headers)) > MAX_HEADER_BYTES:
        what = f"headers of {size} bytes; the limit is {MAX_HEADER_BYTES}"
    else:
        return None
    message = f"the request has {what}"
    return Refusal(431, api_of(path).error(message, type_="invalid_request_error", code="headers_too_large"))


def refusal_of_key(path: str) -> Refusal:
    """Where there is no key, or one that nobody has."""
    header = "Authorization: Bearer KEY"
    if path.startswith(_BY_API_KEY):
        header += " or x-api-key: KEY"
    message = f"no valid API key: send one that this router knows, as {header}"
    body = api_of(path).error(message, type_="authentication_error", code="invalid_api_key")
    return Refusal(401, body, (("www-authenticate", "Bearer"),))


def refusal_of_turn(path: str, refused: Refused) -> Refusal:
    """Where a tenant has as many requests running as it may."""
    body = api_of(path).error(str(refused), type_="rate_limit_error", code=refused.code)
    return Refusal(refused.status, body, (("retry-after", str(refused.retry_after_s)),), retry=True)
