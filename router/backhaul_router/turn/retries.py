"""The retry policy: whether a request that failed goes out again, and to which engine.

It does where it was refused before it was read, where reading the handle may be what failed, where an engine answered with an
error, or where a prefill took too long; after a broken connection once, since the request may be what broke the engine
(`fleet.poison`)."""

from __future__ import annotations

from .. import wire
from ..errors import FailureKind
from ..fleet import poison
from ..fleet.engine import Engine, Role
from .turn import Turn


def another(turn: Turn, failed: Engine, kind: FailureKind) -> Engine | None:
    """The engine to try after one that failed: where nobody read it, or, once, after an error, a broken connection or a
    prefill that took too long."""
    again = kind is FailureKind.ERROR or (kind is FailureKind.TIMEOUT and failed.role is Role.PREFILL)
    if (again or (kind is FailureKind.BROKEN and outlives(turn))) and failed.role not in turn.erred:
        turn.erred |= {failed.role}
    elif kind is not FailureKind.REFUSED:
        return None
    return turn.fleet.pick(failed.role, None, turn.failed_on | {failed.url})


def outlives(turn: Turn) -> bool:
    """Whether the request may go out again after a connection broke: one engine may have died of it, and no second one."""
    turn.deaths += 1
    return turn.deaths < poison.MOST


def is_misplaced(turn: Turn, engine: Engine, body: bytes, now: float) -> bool:
    """Whether an engine's 404 is about a model that it served when it was asked what it is."""
    misplaced = turn.facts.model in engine.models and wire.disowns_model(body)
    if misplaced:
        turn.fleet.note_other_model(engine, turn.facts.model, now)
    return misplaced
