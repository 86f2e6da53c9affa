"""Restart detection: whether a decode engine is still the process that made the handles on file. No I/O, no clock.

vLLM makes itself an `engine_id` at every start, which handles name. It tells processes apart only where a reader asks for it
again: a stock P that has shaken hands with an id goes on reading by what it learned then, and an id that the operator has fixed
comes back with the next process. Either reads, with status 200, whatever lies in those blocks by now. What does tell processes
apart is when they began, which an engine's `/metrics` say.

So D is asked before a stock P reads, but only while there is a doubt: the handle's id is no random one, or D has refused a
connection, has been added again or has shown another beginning. Its word ends the doubt. So does a new handle with a random id,
since handles with any other are then not used: a D with several API servers never says when it began.

Where D says nothing, nothing follows for what is on file: only the turn that asked does not read.
"""

from __future__ import annotations

import enum
import logging
import re
import threading
from functools import lru_cache
from typing import NamedTuple

from ..wire import process_of
from .engine import Engine, Holder

log = logging.getLogger("backhaul")

_RANDOM = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}(?:_dp\d+)?")
"""`str(uuid.uuid4())`, which is vLLM's own choice (config/kv_transfer.py), and the data-parallel rank."""


@lru_cache(maxsize=256)
def is_fixed(engine_id: str) -> bool:
    """Whether an operator has chosen it, so that the next process has it too."""
    return _RANDOM.fullmatch(engine_id) is None


class ProcessMatch(enum.Enum):
    """Whether a process is the one that made what is on file of its engine."""

    SAME = enum.auto()
    ANOTHER = enum.auto()
    UNKNOWN = enum.auto()


class Fence(NamedTuple):
    """Fencing token: what was known of an engine when it was asked something, to be compared when it has answered."""

    restarts: int = 0
    doubts: int = 0


class Restarts:
    """Ids, ranks and beginnings of the processes behind the decode engines, by URL. Thread-safe, and no method awaits."""

    def __init__(self) -> None:
        self.shared = False
        """Other routers file handles too, of processes that this one may never have seen."""
        self._engine_ids: dict[str, str] = {}
        self._ranks: dict[str, set[str]] = {}
        self._began: dict[str, float | None] = {}
        self._stale: set[str] = set()
        """Another process has made a handle since: its beginning is not known."""
        self._shown: dict[str, float] = {}
        """Beginnings that gave rise to a doubt."""
        self._doubts: set[str] = set()
        self._doubted: dict[str, int] = {}
        self._restarts: dict[str, int] = {}
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def know(self, url: str, began: float | None) -> None:
        """What an engine said when it was described. Of one that is known already, it can only raise a doubt: the handles on
        file are those of the process that was there before."""
        with self._lock:
            known = url in self._began
            self._began.setdefault(url, began)
        if known and (began is None or began != self._began[url]):
            self.doubt(url, began)

    def forget(self, url: str) -> None:
        """It is not there any more. What its turns leave now is void, should it be added again."""
        with self._lock:
            self._engine_ids.pop(url, None)
            self._began.pop(url, None)
            self._stale.discard(url)
            self._end_doubt(url)
            self._warned.discard(url)
            self._restarts[url] = self._restarts.get(url, 0) + 1

    def began(self, url: str) -> float | None:
        """When the process began that made the handles on file, as far as is known."""
        return self._began.get(url)

    def is_known(self, url: str) -> bool:
        """Whether `began` is surely that of the process that made them."""
        return self._began.get(url) is not None and url not in self._stale

    def doubt(self, url: str, shown: float | None = None) -> None:
        """It may be another process from now on: nobody listened there, or it has `shown` another beginning."""
        with self._lock:
            if url in self._began:
                self._doubts.add(url)
                self._doubted[url] = self._doubted.get(url, 0) + 1
                if shown is None:
                    self._shown.pop(url, None)
                else:
                    self._shown[url] = shown

    def showed(self, url: str, began: float | None) -> None:
        """What its metrics said when they were read for something else."""
        if began is not None and began not in (self._began.get(url), self._shown.get(url)):
            self.doubt(url, began)

    def in_doubt(self, url: str, engine_id: str) -> bool:
        """Whether a handle with this id may be an earlier process's, so that the engine has to be asked before it is read."""
        return url in self._doubts or is_fixed(engine_id)

    def warn_of_fixed(self, url: str, engine_id: str) -> None:
        """Once, until the engine is removed."""
        if url in self._warned or not is_fixed(engine_id):
            return
        self._warned.add(url)
        log.warning(
            "decode engine %s has a fixed engine_id (%r): handles of an earlier process look valid, so it is asked before "
            "each read when it was started, and turns are cold where that does not tell. Leave engine_id out of "
            "--kv-transfer-config.",
            url,
            engine_id,
        )

    def is_never_sure(self, url: str, engine_id: str) -> bool:
        """Whether nobody will be able to tell whose handle it is, so that it is not worth keeping."""
        return is_fixed(engine_id) and (self.shared or self._began.get(url) is None)

    def match(self, url: str, began: float | None, engine_id: str) -> ProcessMatch:
        """What the engine's word on its beginning says of a handle. One that does not say, or did not, may be any; so may one
        with a fixed id of which another router may have filed a handle before this one knew it."""
        known = self._began.get(url)
        if began is None or known is None or (self.shared if is_fixed(engine_id) else url in self._stale):
            return ProcessMatch.UNKNOWN
        return ProcessMatch.SAME if began == known else ProcessMatch.ANOTHER

    def fence(self, url: str) -> Fence:
        """To be taken before an engine is asked."""
        return Fence(self._restarts.get(url, 0), self._doubted.get(url, 0))

    def confirmed(self, url: str, fence: Fence) -> None:
        """It was the process that is known when it was asked, and no doubt was raised since."""
        with self._lock:
            if fence.doubts == self._doubted.get(url, 0):
                self._end_doubt(url)

    def made_handle(self, url: str, engine_id: str, fence: Fence) -> None:
        """It has answered with a new handle, and no other id is used from now on. A random one tells who is there: no doubt is
        left, and the beginning that it had shown before it was asked is that process's."""
        if url not in self._doubts or is_fixed(engine_id):
            return
        with self._lock:
            if fence.doubts == self._doubted.get(url, 0):
                if (shown := self._shown.get(url)) is not None:
                    self._began[url] = shown
                    self._stale.discard(url)
                self._end_doubt(url)

    def _end_doubt(self, url: str) -> None:
        self._doubts.discard(url)
        self._shown.pop(url, None)

    def void(self, url: str) -> None:
        """What turns have taken is not the present process's, whose beginning is not known."""
        with self._lock:
            self._restarts[url] = self._restarts.get(url, 0) + 1
            self._stale.add(url)

    def replaced(self, url: str, began: float) -> None:
        """It is another process, whose id is not known and of which nothing is on file yet: what turns have taken before is
        void."""
        with self._lock:
            self._engine_ids.pop(url, None)
            self._restarts[url] = self._restarts.get(url, 0) + 1
            self._began[url] = began
            self._stale.discard(url)
            self._end_doubt(url)

    def count(self, url: str) -> int:
        """Counts `replaced` and `void`: a handle that was taken when it was less is void."""
        return self._restarts.get(url, 0)

    # --- engine ids

    def engine_id(self, url: str) -> str | None:
        """The id of the process that last made a handle there, as `process_of` has it."""
        return self._engine_ids.get(url)

    def saw_engine_id(self, url: str, engine_id: str, fence: Fence | None = None) -> str | None:
        """Notes the id in an engine's newest handle, which was asked for when `fence` was taken. Returns the id before, when the
        engine has restarted since: its blocks are gone. Data-parallel ranks differ by a suffix and are no restart."""
        base = process_of(engine_id)
        with self._lock:
            before = self._engine_ids.get(url)
            self._engine_ids[url] = base
            if base is not engine_id and (rank := Holder.of(url, engine_id).rank) is not None:
                self._ranks.setdefault(url, set()).add(rank)
        changed = before is not None and before != base
        if changed:
            self.void(url)
        if fence is not None:
            self.made_handle(url, engine_id, fence)
        return before if changed else None

    def is_outlived(self, url: str, engine_id: str, fence: Fence) -> bool:
        """Whether a handle that was asked for then may be of a process that has been replaced since."""
        if fence.restarts == self.count(url):
            return False
        return is_fixed(engine_id) or self._engine_ids.get(url) != process_of(engine_id)

    def made_by_current(self, url: str, engine_id: str) -> bool:
        """Whether a handle's engine is configured and, as far as is known, still the same process."""
        known = self._engine_ids.get(url)
        return url in self._began and (known is None or known == process_of(engine_id))

    def holders(self, decode: Engine) -> tuple[Holder, ...]:
        """The processes of a decode engine that hold leases: its data-parallel ranks, where it has several."""
        with self._lock:
            ranks = decode.ranks | self._ranks.get(decode.url, set())
        return tuple(Holder(decode.url, rank) for rank in sorted(ranks)) or (Holder(decode.url),)
