"""Which conversation a request belongs to, by what the caller said explicitly, else by the scope that it runs in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_ID_BYTES = 256
HEADERS = ("x-conversation-id", "x-session-id")
FIELDS = ("conversation_id", "session_id")


@dataclass(frozen=True, slots=True)
class Identity:
    """A conversation's id and where it came from, such as `body:session_id`."""

    conversation: str
    source: str


class IdentityError(ValueError):
    """The request's ids are malformed or contradict each other; the message is meant for the client."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def identify(headers: Mapping[str, str], fields: Mapping[str, object], scope: str | None = None) -> Identity | None:
    """The conversation that a request names, or `None`.

    `headers` has lower-case names; `fields` holds the body's values of `FIELDS`, where present. Ids match exactly, never
    by prefix; an empty id counts as none. Raises `IdentityError` when one is not a string, longer than 256 bytes of UTF-8,
    holds control characters, or when two explicit ids differ: a silent pick would mix two histories.
    """
    explicit: list[tuple[str, str, object]] = [(f"header:{name}", name, headers.get(name)) for name in HEADERS]
    explicit += [(f"body:{name}", name, fields.get(name)) for name in FIELDS]
    found: Identity | None = None
    for source, name, value in explicit:
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
    if found is None and scope:
        found = Identity(_checked(scope, "scope", "conversation"), "scope")
    return found


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
