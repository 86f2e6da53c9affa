"""Whether a decode engine is still the process that made the handles on file. No I/O, no clock.

vLLM makes itself an `engine_id` at every start, which handles name. It tells processes apart only where a reader asks for it
again: a stock P that has shaken hands with an id goes on reading by what it learned then, and an id that the operator has fixed
comes back with the next process. Either reads, with status 200, whatever lies in those blocks by now. What does tell processes
apart is when they began, which an engine's `/metrics` say.

So D is asked before a stock P reads, but only while there is a doubt: its id is no random one, it has refused a connection
since it was last asked, or its load showed another beginning.
"""

from __future__ import annotations

import logging
import re
import threading
from functools import lru_cache

log = logging.getLogger("backhaul")

_RANDOM = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}(?:_dp\d+)?")
"""`str(uuid.uuid4())`, which is vLLM's own choice (config/kv_transfer.py), and the data-parallel rank."""


@lru_cache(maxsize=256)
def is_fixed(engine_id: str) -> bool:
    """Whether an operator has chosen it, so that the next process has it too."""
    return _RANDOM.fullmatch(engine_id) is None


class Processes:
    """When the processes behind the decode engines began. Methods never await."""

    def __init__(self) -> None:
        self.shared = False
        """Other routers file handles too, of processes that this one may never have seen."""
        self._began: dict[str, float | None] = {}
        self._doubts: set[str] = set()
        self._fixed: set[str] = set()
        self._restarts: dict[str, int] = {}
        self._lock = threading.Lock()

    def know(self, url: str, began: float | None) -> None:
        """What an engine said when it was described."""
        with self._lock:
            self._began[url] = began
            self._doubts.discard(url)

    def forget(self, url: str) -> None:
        """It is not there any more."""
        with self._lock:
            self._began.pop(url, None)
            self._doubts.discard(url)
            self._fixed.discard(url)

    def doubt(self, url: str) -> None:
        """It may be another process from now on: nobody listened there."""
        with self._lock:
            if url in self._began:
                self._doubts.add(url)

    def showed(self, url: str, began: float | None) -> None:
        """What its metrics said when they were read for something else."""
        if began is not None and began != self._began.get(url):
            self.doubt(url)

    def in_doubt(self, url: str, engine_id: str = "") -> bool:
        """Whether what is on file may be an earlier process's, so that the engine has to be asked. `engine_id` is that of a
        handle that is about to be read."""
        if engine_id and url not in self._fixed and is_fixed(engine_id):
            self._note_fixed(url, engine_id)
        return url in self._doubts or url in self._fixed

    def _note_fixed(self, url: str, engine_id: str) -> None:
        with self._lock:
            first = url not in self._fixed
            self._fixed.add(url)
        if first:
            log.warning(
                "decode engine %s has a fixed engine_id (%r): handles of an earlier process look valid, so it is asked before "
                "each read when it was started, and turns are cold where that does not tell. Leave engine_id out of "
                "--kv-transfer-config.",
                url,
                engine_id,
            )

    def is_never_sure(self, url: str, engine_id: str) -> bool:
        """Whether nobody will be able to tell whose handle it is, so that it is not worth keeping."""
        if not is_fixed(engine_id) or not (self.shared or self._began.get(url) is None):
            return False
        if url not in self._fixed:
            self._note_fixed(url, engine_id)
        return True

    def is_another(self, url: str, began: float | None) -> bool:
        """Whether what the engine now says is not what it said before. One that does not say is taken for another, as is one
        with a fixed id of which another router may have filed a handle before this one knew it."""
        return began is None or began != self._began.get(url) or (self.shared and url in self._fixed)

    def confirmed(self, url: str) -> None:
        """It is the same process."""
        with self._lock:
            self._doubts.discard(url)

    def replaced(self, url: str, began: float | None) -> None:
        """It is another process as far as is known, of which nothing is on file yet: what turns have taken before is void."""
        with self._lock:
            self._restarts[url] = self._restarts.get(url, 0) + 1
            if began is not None:
                self._began[url] = began
            self._doubts.discard(url)

    def restarts(self, url: str) -> int:
        """Counts what `replaced` was told: a handle that was taken when it was less is void."""
        return self._restarts.get(url, 0)
