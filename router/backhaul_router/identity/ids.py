"""Conversation ids as values: what an id may look like, and where one came from.

With them the conversation that the calling code is in, as a context variable that reaches every framework's calls, and the
conversations of responses, by the responses' ids.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextvars import ContextVar
from typing import Protocol

import msgspec

from ..report import ReuseReport

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


class ConversationScope(Protocol):
    """What the router needs of a conversation: its name, and somewhere to put the reports."""

    @property
    def id(self) -> str: ...

    def record(self, report: ReuseReport) -> None:
        """Takes the report of a turn that has just ended. May be called from another thread."""


def parent_of(scope: ConversationScope | None) -> str | None:
    """The id of the conversation that a scope's is a child of, which it may say as `parent_id`."""
    parent: str | None = getattr(scope, "parent_id", None)
    return parent


current: ContextVar[ConversationScope | None] = ContextVar("backhaul_conversation", default=None)


class ResponseIds:
    """LRU map of the last responses' ids and their conversations, per tenant. Bounded: of a tenant's, the one that was named
    least recently goes first, and none of another tenant's."""

    def __init__(self, max_responses: int = 10_000) -> None:
        self._max_responses = max_responses
        self._known: dict[str, OrderedDict[str, str]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def __repr__(self) -> str:
        return f"<ResponseIds {len(self)}>"

    def note(self, response: str, conversation: str, tenant: str = "") -> None:
        """A turn of a conversation was answered with a response of this id. One that could not be an id is left out."""
        if not fits(response):
            return
        with self._lock:
            known = self._known.setdefault(tenant, OrderedDict())
            known[response] = conversation
            known.move_to_end(response)
            while len(known) > self._max_responses:
                known.popitem(last=False)

    async def learn(self, response: object, tenant: str = "") -> None:
        """Has a response known here that another router knows; where they share nothing, none does."""

    async def aclose(self) -> None:
        """Ends what is under way in this event loop."""

    def conversation_of(self, response: str, tenant: str = "") -> str | None:
        """The conversation that a response belongs to, where it is known; empty where it belongs to none."""
        with self._lock:
            known = self._known.get(tenant)
            if known is None or response not in known:
                return None
            known.move_to_end(response)
            return known[response]
