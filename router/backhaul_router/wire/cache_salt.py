"""Hash that stands for the `cache_salt` that engines are sent for a tenant's requests: its own, so that no engine's prefix
cache tells one tenant what another has asked.

It is made from the tenant's name and the salt that the client sent, if any, and is the same on every leg, in every turn, on
every router and under every API key of the tenant: block hashes include it, and so do those that our connector compares. No
client can name another tenant's, since what it sends is only ever hashed with its own name.
"""

from __future__ import annotations

from hashlib import blake2b

from msgspec import Raw, structs

from .json_members import NULL, MalformedBody, Members, encode, join, split, value_of
from .request import Facts

_FIELD = "cache_salt"
_SIZE = 32
"""Bytes, twice as many characters: vLLM allows 128, and neither `@`, `/`, a backslash nor NUL (`validate_cache_salt`)."""


def salt_of(tenant: str, salt: str = "") -> str:
    """What stands for `salt` on the engines. Tenants' names hold no NUL, so that no two pairs are written alike."""
    return blake2b(f"{tenant}\0{salt}".encode(), digest_size=_SIZE, person=b"backhaul-salt").hexdigest()


def salted(facts: Facts, tenant: str) -> Facts:
    """A tenant's request under the tenant's salt. Raises `MalformedBody` for a salt that is no text: no engine is to judge it,
    as it would run the request without one if it took it for none.

    The id that a client wants for a response is left out: under one id an engine keeps one answer, whoever asked for it."""
    salt = salt_of(tenant, _said(facts.members))
    members = {**facts.members, _FIELD: Raw(encode(salt))}
    if facts.api.refers_to_answers:
        members.pop("request_id", None)
    return structs.replace(facts, members=members, cache_salt=salt)


def salted_body(body: bytes, tenant: str) -> bytes:
    """The same for a body that is passed to an engine otherwise as it is. Raises `MalformedBody`."""
    members = split(body)
    return join({**members, _FIELD: Raw(encode(salt_of(tenant, _said(members))))})


def _said(members: Members) -> str:
    salt = value_of(members.get(_FIELD, NULL))
    if salt is None:
        return ""
    if not isinstance(salt, str):
        raise MalformedBody(f"{_FIELD} is a text, not {type(salt).__name__}")
    return salt
