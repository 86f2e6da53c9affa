"""Chain of resolvers: which conversation a request belongs to, by what the caller says, else by the scope and the framework that
it runs in, else by what its tool sends of its own accord. Where there is none of these the router goes by the history
(`ledger.find`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from . import agent_headers
from .ids import MAX_ID_BYTES, Identity, fits
from .response_ids import ResponseIds

HEADERS = ("x-conversation-id", "x-session-id")
PARENT_HEADER = "x-backhaul-parent"
FIELDS = ("conversation_id", "session_id")
_EXPLICIT: Final = (
    *((f"header:{name}", name, False) for name in HEADERS),
    *((f"body:{name}", name, True) for name in FIELDS),
)
"""Where an id can be named, by what name, and whether that is in the body."""
_SESSIONS_PARENT: Final = "x-parent-session-id"
"""Sent by OpenCode beside `x-session-id`."""


class IdentityError(ValueError):
    """The request's ids are malformed or contradict each other; the message is meant for the client."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def identify(
    headers: Mapping[str, str],
    fields: Mapping[str, object],
    scope: str | None = None,
    *,
    framework: Identity | None = None,
    responses: ResponseIds | None = None,
    tenant: str = "",
) -> Identity | None:
    """The conversation that a request names, or `None`.

    `headers` has lower-case names; `fields` holds what of the body may name it (`wire.Facts.ids`). Ids match exactly, never
    by prefix; an empty id counts as none. Raises `IdentityError` when an explicit one is not a string, longer than 256 bytes
    of UTF-8, holds control characters, or when two explicit ids differ: a silent pick would mix two histories. Ids that were
    not made for this router are passed over when they are malformed.
    """
    found = _explicit(headers, fields)
    if found is not None:
        return found
    if scope:
        return Identity(_checked(scope, "scope", "conversation"), "scope")
    return (
        framework
        or agent_headers.of_headers(headers)
        or agent_headers.of_prompt_cache_key(fields)
        or agent_headers.of_conversation(fields)
        or _of_previous_response(fields, responses, tenant)
        or agent_headers.of_metadata(fields)
        or agent_headers.of_baggage(headers)
    )


def _explicit(headers: Mapping[str, str], fields: Mapping[str, object]) -> Identity | None:
    found: Identity | None = None
    for source, name, in_body in _EXPLICIT:
        value = fields.get(name) if in_body else headers.get(name)
        if value is None or value == "":
            continue
        identity = Identity(_checked(value, source, name), source)
        if found is None:
            found = identity
        elif found.conversation != identity.conversation:
            raise IdentityError(
                f"{found.source} says {found.conversation!r} and {source} says {identity.conversation!r}: "
                "name one conversation, or leave one out",
                name,
            )
    if found is not None and fits(parent := headers.get(_SESSIONS_PARENT)):
        return msgspec.structs.replace(found, parent=parent)
    return found


def _of_previous_response(fields: Mapping[str, object], responses: ResponseIds | None, tenant: str) -> Identity | None:
    before = fields.get("previous_response_id")
    if responses is None or not isinstance(before, str):
        return None
    conversation = responses.conversation_of(before, tenant)
    return Identity(conversation, "body:previous_response_id") if conversation else None


def with_parent(identity: Identity | None, headers: Mapping[str, str], inside: str | None) -> Identity | None:
    """The same with the parent that the request names or, where the scope names the conversation, the scope's. Raises
    `IdentityError`."""
    named = headers.get(PARENT_HEADER)
    if identity is None:
        return None
    parent = identity.parent or (inside if identity.source == "scope" else None)
    if named:
        parent = _checked(named, f"header:{PARENT_HEADER}", PARENT_HEADER)
    return identity if parent in (None, identity.conversation) else msgspec.structs.replace(identity, parent=parent)


def _checked(value: object, source: str, name: str) -> str:
    if not isinstance(value, str):
        raise IdentityError(f"{source} must be a string, not {type(value).__name__}", name)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise IdentityError(f"{source} is not valid Unicode", name) from None
    if size > MAX_ID_BYTES:
        raise IdentityError(f"{source} is {size} bytes long; a conversation id has at most {MAX_ID_BYTES}", name)
    if not value.isprintable():
        raise IdentityError(f"{source} holds control characters", name)
    return value
