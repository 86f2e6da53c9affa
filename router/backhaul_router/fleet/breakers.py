"""Circuit breaker per engine and leg: what opens one, and what closes it. No I/O, no clock.

    CLOSED ──refused, or failures of several conversations──▶ OPEN ◀──the probe fails──▶ HALF_OPEN
       ▲                                                        │                            │
       └──────────────── an answer, to a probe or to a turn ────┴────────────────────────────┘

- A refused connection opens every leg of the engine at once: nobody listens there, whatever was to be sent.
- Other failures (a timeout, a connection that broke, a server error) open the leg they happened on, and only when
  `SEVERAL` conversations with as many different histories had one, with no answer in between. A request that breaks engines
  is one conversation or one history however often it comes, and so cannot shut a fleet.
- Only a real answer closes a breaker: `/health` says 200 on engines that cannot generate.

And the poison-message list: requests that were on an engine when its connection broke, which may be why it died. Such a request
gets one other engine, and when that one breaks too it is sent to none any more, whoever sends it.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ..errors import FailureKind, Leg

SEVERAL = 3
"""Conversations, and histories, that must have failed."""
WINDOW_S = 60.0
"""Failures longer ago than this are forgotten."""
_MOST = 64
"""Failures that one breaker remembers."""


class BreakerState(enum.StrEnum):
    """State of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    """Its turns go to others, as long as there are others."""
    HALF_OPEN = "half_open"
    """The same, and a probe is on its way."""


class EngineLeg(NamedTuple):
    """Key of a breaker."""

    url: str
    leg: Leg


class FailedRequest(NamedTuple):
    """Whose request failed."""

    conversation: str
    """Empty where it names none."""
    history: bytes
    """Digests of its messages."""


@dataclass
class _Breaker:
    state: BreakerState = BreakerState.CLOSED
    refused: bool = False
    """Nobody listened when it was last tried."""
    failures: deque[tuple[float, FailedRequest]] = field(default_factory=lambda: deque(maxlen=_MOST))

    def several(self, now: float) -> bool:
        while self.failures and now - self.failures[0][0] > WINDOW_S:
            self.failures.popleft()
        # a request without a conversation is told apart by its history only
        conversations = {who.conversation or who.history for _, who in self.failures}
        return min(len(conversations), len({who.history for _, who in self.failures})) >= SEVERAL


class Breakers:
    """Circuit breakers of a fleet. A healthy engine costs a look into an empty dictionary. Thread-safe, and no method awaits."""

    def __init__(self) -> None:
        self._at: dict[EngineLeg, _Breaker] = {}
        """Only of what has failed since its last answer."""
        self._lock = threading.Lock()
        self.opened = 0
        """How often one has opened."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{at.url} {at.leg}: {state}" for at, state in self.states().items())
        return f"<Breakers {shown or 'all closed'}>"

    def states(self) -> Mapping[EngineLeg, BreakerState]:
        """Of every leg that has failed since its last answer; the others are closed."""
        with self._lock:
            return {at: breaker.state for at, breaker in self._at.items()}

    @property
    def any_open(self) -> bool:
        return bool(self._at) and any(breaker.state is not BreakerState.CLOSED for breaker in tuple(self._at.values()))

    @property
    def all_well(self) -> bool:
        """Whether nothing has failed since its last answer."""
        return not self._at

    def open_legs(self) -> tuple[EngineLeg, ...]:
        """What a probe may close."""
        with self._lock:
            return tuple(at for at, breaker in self._at.items() if breaker.state is not BreakerState.CLOSED)

    def rank(self, url: str, leg: Leg) -> int:
        """How bad it would be to use: 0 where the breaker is closed, 1 where it is not, 2 where nobody listens."""
        breaker = self._at.get(EngineLeg(url, leg)) if self._at else None
        if breaker is None or breaker.state is BreakerState.CLOSED:
            return 0
        return 2 if breaker.refused else 1

    def failed(self, at: EngineLeg, kind: FailureKind, who: FailedRequest, now: float) -> bool:
        """A call failed. Returns whether a breaker opened by it."""
        with self._lock:
            breaker = self._at.setdefault(at, _Breaker())
            if kind is FailureKind.REFUSED:
                breaker.refused = True
                return self._open(breaker)
            breaker.refused = False  # somebody listens
            breaker.failures.append((now, who))
            return breaker.several(now) and self._open(breaker)

    def _open(self, breaker: _Breaker) -> bool:
        was_closed = breaker.state is BreakerState.CLOSED
        if was_closed:
            breaker.state = BreakerState.OPEN
            self.opened += 1
        return was_closed

    def answered(self, at: EngineLeg) -> bool:
        """A real answer came. Returns whether a breaker closed by it."""
        if at not in self._at:
            return False
        with self._lock:
            breaker = self._at.pop(at, None)
        return breaker is not None and breaker.state is not BreakerState.CLOSED

    def probing(self, at: EngineLeg) -> bool:
        """Takes the half-open slot; false where there is nothing to probe, or somebody else is at it."""
        with self._lock:
            breaker = self._at.get(at)
            if breaker is None or breaker.state is not BreakerState.OPEN:
                return False
            breaker.state = BreakerState.HALF_OPEN
            return True

    def probe_failed(self, at: EngineLeg, kind: FailureKind | None) -> None:
        """Gives the half-open slot back. `None`: the probe was given up, and nothing is known."""
        with self._lock:
            breaker = self._at.get(at)
            if breaker is None or breaker.state is not BreakerState.HALF_OPEN:
                return
            breaker.state = BreakerState.OPEN
            if kind is not None:
                breaker.refused = kind is FailureKind.REFUSED

    def forget(self, url: str) -> None:
        """The engine is removed, or is a new one."""
        with self._lock:
            for at in [at for at in self._at if at.url == url]:
                del self._at[at]


# --- requests that may be what breaks engines -----------------------------------------------------------------------------

MAX_DEATHS: Final = 2
"""Engines that one request may take along."""
POISON_WINDOW_S: Final = 600.0
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
                before = (*before[1 - MAX_DEATHS :], (url, now))
            self._deaths[request] = before
            if len(self._deaths) > _MAX:
                del self._deaths[next(iter(self._deaths))]

    def deaths(self, request: bytes, now: float) -> int:
        """How many engines died while they had it, 0 to `MAX_DEATHS`."""
        if not self._deaths:
            return 0
        with self._lock:
            found = self._deaths.get(request, ())
            if found and now - found[-1][1] > POISON_WINDOW_S:
                del self._deaths[request]
                return 0
        return len(found)
