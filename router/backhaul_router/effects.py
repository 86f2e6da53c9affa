"""The vocabulary between a turn and whoever drives it: what a state needs, what came back, what is to be done on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .engine_client import FailureKind
from .errors import Leg
from .fleet import Engine, Holder
from .ledger import Branch, Key, Taken
from .report import Reason, ReuseReport

Headers = Sequence[tuple[str, str]]

# --- what a state needs, and what comes back ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Take:
    """Ask the ledger for this conversation's history."""

    key: Key
    chain: bytes
    parent: str | None = None
    """The conversation that this one forks, perhaps."""


@dataclass(frozen=True, slots=True)
class Call:
    """Send a body to an engine and read the whole answer."""

    leg: Leg
    engine: Engine
    path: str
    body: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Check:
    """Find out whether this P can read what that D holds, unless it is known."""

    prefill: Engine
    decode: str
    """D's URL."""


@dataclass(frozen=True, slots=True)
class Open:
    """Send a body to the decode engine and read the head of its answer."""

    engine: Engine
    path: str
    body: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Read:
    """Read the next piece of the answer that `Open` began."""


Need = Take | Check | Call | Open | Read


@dataclass(frozen=True, slots=True)
class Took:
    taken: Taken


@dataclass(frozen=True, slots=True)
class Checked:
    """The fleet knows by now."""


@dataclass(frozen=True, slots=True)
class Answered:
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    status: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Chunk:
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer ended as its framing says it should."""


@dataclass(frozen=True, slots=True)
class Failed:
    kind: FailureKind
    message: str


Event = Took | Checked | Answered | Opened | Chunk | Ended | Failed


# --- what is to be done on the way -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Respond:
    """The head of the client's answer."""

    status: int
    headers: Headers


@dataclass(frozen=True, slots=True)
class Send:
    """A piece of the body of the client's answer."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """Have a handle's blocks freed, by way of an engine of the other role."""

    params: bytes
    via: Engine


@dataclass(frozen=True, slots=True)
class EndLease:
    """A lease on a decode engine that runs our connector, of which the turn has no use: it is told so by name."""

    holder: Holder
    id: str


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The turn does not need the handle taken any more, and did not use it up: it goes back into the ledger."""

    key: Key
    taken: Taken


@dataclass(frozen=True, slots=True)
class Lost:
    """The handle taken is used up or void, and the turn left no other."""

    key: Key
    taken: Taken
    reason: Reason


@dataclass(frozen=True, slots=True)
class Settle:
    """File what the turn left."""

    key: Key
    taken: Taken
    branch: Branch


@dataclass(frozen=True, slots=True)
class DropEngine:
    """A decode engine restarted: the handles of its earlier process are void."""

    decode: str
    engine_id: str


@dataclass(frozen=True, slots=True)
class NoteResponse:
    """A conversation's answer has an id, by which a later request may go on from it."""

    response: str
    conversation: str
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """The turn's report is complete."""

    report: ReuseReport


Action = Respond | Send | Release | EndLease | GiveBack | Lost | Settle | DropEngine | NoteResponse | Record
Actions = tuple[Action, ...]
