"""Effects as values: what a turn's state needs, what came back, and what is to be done on the way. A driver is written against
this module; it makes the calls and performs the actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from ..errors import FailureKind, Leg
from ..fleet.engine import Engine, Holder
from ..ledger.records import Branch, Key, Taken
from ..report import Reason, ReuseReport

Headers = Sequence[tuple[str, str]]

# --- what a state needs, and what comes back ---------------------------------------------------------------------------


class Take(msgspec.Struct, frozen=True):
    """Ask the ledger for this conversation's history."""

    key: Key
    chain: bytes
    parent: str | None = None
    """The conversation that this one forks, perhaps."""


class Call(msgspec.Struct, frozen=True):
    """Send a body to an engine and read the whole answer."""

    leg: Leg
    engine: Engine
    path: str
    body: bytes
    timeout_s: float


class Check(msgspec.Struct, frozen=True):
    """Find out whether this P can read what that D holds, unless it is known."""

    prefill: Engine
    decode: str
    """D's URL."""
    engine_id: str = ""
    """That of the handle that P is about to read; empty where engines find out by themselves whose it is."""


class Open(msgspec.Struct, frozen=True):
    """Send a body to the decode engine and read the head of its answer."""

    engine: Engine
    path: str
    body: bytes
    timeout_s: float


class Read(msgspec.Struct, frozen=True):
    """Read the next piece of the answer that `Open` began."""


Need = Take | Check | Call | Open | Read


class Took(msgspec.Struct, frozen=True):
    taken: Taken


class Checked(msgspec.Struct, frozen=True):
    """The fleet knows by now."""

    sure: bool = True
    """Whether D has said which process it is; where it has not, nobody knows whose the handle is."""


class Answered(msgspec.Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    body: bytes


class Opened(msgspec.Struct, frozen=True):
    status: int
    headers: Mapping[str, str]


class Chunk(msgspec.Struct, frozen=True):
    data: bytes


class Ended(msgspec.Struct, frozen=True):
    """The answer ended as its framing says it should."""


class Failed(msgspec.Struct, frozen=True):
    kind: FailureKind
    message: str


Event = Took | Checked | Answered | Opened | Chunk | Ended | Failed


# --- what is to be done on the way -------------------------------------------------------------------------------------


class Respond(msgspec.Struct, frozen=True):
    """The head of the client's answer."""

    status: int
    headers: Headers


class Send(msgspec.Struct, frozen=True):
    """A piece of the body of the client's answer."""

    data: bytes


class Release(msgspec.Struct, frozen=True):
    """Have a handle's blocks freed, by way of an engine of the other role."""

    params: bytes
    via: Engine


class EndLease(msgspec.Struct, frozen=True):
    """A lease on a decode engine that runs our connector, of which the turn has no use: it is told so by name."""

    holder: Holder
    id: str


class GiveBack(msgspec.Struct, frozen=True):
    """The turn does not need the handle taken any more, and did not use it up: it goes back into the ledger."""

    key: Key
    taken: Taken


class Lost(msgspec.Struct, frozen=True):
    """The handle taken is used up or void, and the turn left no other."""

    key: Key
    taken: Taken
    reason: Reason


class Settle(msgspec.Struct, frozen=True):
    """File what the turn left."""

    key: Key
    taken: Taken
    branch: Branch


class DropEngine(msgspec.Struct, frozen=True):
    """A decode engine restarted: the handles of its earlier process are void."""

    decode: str
    engine_id: str


class NoteResponse(msgspec.Struct, frozen=True):
    """A conversation's answer has an id, by which a later request may go on from it."""

    response: str
    conversation: str
    tenant: str = ""


class Record(msgspec.Struct, frozen=True):
    """The turn's report is complete."""

    report: ReuseReport


Action = Respond | Send | Release | EndLease | GiveBack | Lost | Settle | DropEngine | NoteResponse | Record
Actions = tuple[Action, ...]


# --- what states have in common ----------------------------------------------------------------------------------------


class State(Protocol):
    """A turn that is not done."""

    def ask(self) -> Need:
        """What the state needs next. It is built here, bodies and all: call it once."""

    def next(self, event: Event, now: float) -> Step:
        """The state that follows what came back, and what to do before its need is met."""

    def abandon(self, now: float) -> Actions:
        """What remains to be done when the client leaves now."""


class Done(msgspec.Struct, frozen=True):
    """Nothing more to do."""


Step = tuple[State | Done, Actions]


class UnexpectedEvent(AssertionError):
    """A driver's bug: it answered a need with an event of another kind."""

    def __init__(self, state: object, event: object) -> None:
        super().__init__(f"{type(state).__name__} got {type(event).__name__}")
