"""Conversation ids as values: what an id may look like, and where one came from."""

from __future__ import annotations

import msgspec

MAX_ID_BYTES = 256


class Identity(msgspec.Struct, frozen=True):
    """Conversation id, and where it came from, such as `body:session_id`."""

    conversation: str
    source: str
    parent: str | None = None
    """The conversation that this one is a child of."""
    by_history: bool = False
    """The id is the router's own, or one run's: a conversation whose history the request continues goes before it."""
    new: bool = False
    """The router has just made the id, so that there is nothing on record to look up."""


def fits(value: object) -> bool:
    """Whether a value can be an id: a printable string of 1 to 256 bytes of UTF-8."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_BYTES or not value.isprintable():
        return False
    try:
        return len(value.encode()) <= MAX_ID_BYTES
    except UnicodeEncodeError:
        return False


def named(
    space: str, id: object, source: str, *, parent: str | None = None, by_history: bool = False
) -> Identity | None:
    """The identity for an id that a tool or a framework gave: within that tool's name space, whole or not at all."""
    conversation = f"{space}:{id}" if isinstance(id, str) and id else None
    if conversation is None or not fits(conversation):
        return None
    return Identity(conversation, source, parent if fits(parent) else None, by_history)


def nested(space: str, id: object, path: object, source: str, *, above: str | None = None) -> Identity | None:
    """The same of a sub-agent, as `<parent>/<path>`; without a path it is the parent itself. `above` is the path of the
    agent that started it, where that is a sub-agent too."""
    if not isinstance(id, str) or not id or not isinstance(path, str) or path in ("", id):
        return named(space, id, source)
    root = f"{space}:{id}"
    parent = f"{root}/{above}" if above and above not in (id, path) else root
    return named(space, f"{id}/{path}", source, parent=parent)
