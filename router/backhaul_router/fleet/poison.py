"""Poison-message list: requests that were on an engine when its connection broke, which may be why it died. Such a request gets
one other engine, and when that one breaks too it is sent to none any more, whoever sends it. No I/O, no clock."""

from __future__ import annotations

import threading
from typing import Final

MOST: Final = 2
"""Engines that one request may take along."""
WINDOW_S: Final = 600.0
"""For so long after its last one."""
_ONE_DEATH_S: Final = 5.0
"""Connections to one engine that break within so many seconds broke by one death of it."""
_MAX: Final = 4096


class PoisonList:
    """Poison-message list by a digest of the request's messages. A fleet whose connections hold costs a look at an empty
    dictionary."""

    def __init__(self) -> None:
        self._deaths: dict[bytes, tuple[tuple[str, float], ...]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<PoisonList {len(self._deaths)}>"

    def broke(self, request: bytes, url: str, now: float) -> None:
        """The connection to an engine broke while the request was there."""
        with self._lock:
            before = self._deaths.pop(request, ())
            if not any(url == at and now - when < _ONE_DEATH_S for at, when in before):
                before = (*before[1 - MOST :], (url, now))
            self._deaths[request] = before
            if len(self._deaths) > _MAX:
                del self._deaths[next(iter(self._deaths))]

    def deaths(self, request: bytes, now: float) -> int:
        """How many engines died while they had it, 0 to `MOST`."""
        if not self._deaths:
            return 0
        with self._lock:
            found = self._deaths.get(request, ())
            if found and now - found[-1][1] > WINDOW_S:
                del self._deaths[request]
                return 0
        return len(found)
