"""Which conversation a response of `/v1/responses` belongs to, for requests that go on from it by its id."""

from __future__ import annotations

import threading
from collections import OrderedDict

from .ids import fits


class KnownResponses:
    """The last responses' ids and their conversations. Bounded: the one that was named least recently goes first."""

    def __init__(self, max_responses: int = 10_000) -> None:
        self._max_responses = max_responses
        self._known: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<KnownResponses {len(self)}>"

    def note(self, response: str, conversation: str, tenant: str = "") -> None:
        """A turn of a conversation was answered with a response of this id. One that could not be an id is left out."""
        if not fits(response):
            return
        with self._lock:
            self._known[tenant, response] = conversation
            self._known.move_to_end((tenant, response))
            while len(self._known) > self._max_responses:
                self._known.popitem(last=False)

    def conversation_of(self, response: str, tenant: str = "") -> str | None:
        """The conversation that a response belongs to, where it is known."""
        with self._lock:
            if (found := self._known.get((tenant, response))) is not None:
                self._known.move_to_end((tenant, response))
            return found
