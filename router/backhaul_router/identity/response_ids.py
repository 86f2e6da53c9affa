"""LRU map from a response of `/v1/responses` to its conversation, for requests that go on from it by its id."""

from __future__ import annotations

import threading
from collections import OrderedDict

from .ids import fits


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

    def conversation_of(self, response: str, tenant: str = "") -> str | None:
        """The conversation that a response belongs to, where it is known; empty where it belongs to none."""
        with self._lock:
            known = self._known.get(tenant)
            if known is None or response not in known:
                return None
            known.move_to_end(response)
            return known[response]
