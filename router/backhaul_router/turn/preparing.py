"""The states of a turn before any engine computes for it: what is on record is taken, the prompt is rendered, a pair of
engines is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import msgspec

from .. import wire
from ..errors import FailureKind, Leg
from ..fleet.engine import Engine
from ..report import Reason
from .effects import (
    Answered,
    Call,
    Check,
    Checked,
    Chunk,
    Ended,
    Event,
    Failed,
    Opened,
    Take,
    Took,
)
from .placement import Placement
from .steps import Actions, Step, UnexpectedEvent

if TYPE_CHECKING:
    from .turn import Turn


class Taking(msgspec.Struct, frozen=True):
    """The ledger is asked for the conversation's history."""

    turn: Turn

    @property
    def need(self) -> Take:
        return Take(self.turn.key, self.turn.chain, self.turn.identity.parent if self.turn.identity else None)

    def next(self, event: Event, now: float) -> Step:
        match event:
            case Took(taken):
                return self.turn.took(taken, now)
            case _:
                raise UnexpectedEvent(self, event)

    def abandon(self, now: float) -> Actions:
        return self.turn.given_up(None, now)


class Rendering(msgspec.Struct, frozen=True):
    """An engine's own renderer turns the messages into token ids, so that they can be compared before anything runs."""

    turn: Turn
    engines: tuple[Engine, ...]
    """The one that is asked, and those that could be."""
    by_tokenize: bytes
    since: float

    @property
    def need(self) -> Call:
        engine, facts = self.engines[0], self.turn.facts
        timeout_s = self.turn.config.prefill_timeout_s
        if engine.renders:
            return Call(Leg.RENDER, engine, f"{facts.endpoint}/render", wire.join(facts.members), timeout_s)
        return Call(Leg.RENDER, engine, "/tokenize", self.by_tokenize, timeout_s)

    def next(self, event: Event, now: float) -> Step:
        turn, engine = self.turn, self.engines[0]
        match event:
            case Answered(200, _, body):
                turn.draft["render_ms"] = (now - self.since) * 1e3
                token_ids = wire.read_rendered(body)
                if token_ids is None:
                    turn.no_proof = True
                elif engine.renders and turn.rewrites_answer(token_ids):
                    return Closing(turn, engine, token_ids, now), ()
                else:
                    turn.rendered(token_ids, engine)
                return turn.placed(now)
            case Answered(400 | 413 | 422):
                return turn.leave_to_decode(Reason.NO_PROOF, now)
            case Failed(FailureKind.BROKEN, message) if not turn.outlives():
                return turn.refuse(None, 502, message, Leg.RENDER, now)
            case Answered() | Failed():
                if len(self.engines) > 1:
                    turn.retry()
                    return msgspec.structs.replace(self, engines=self.engines[1:], since=now), ()
                turn.no_proof = True
                return turn.placed(now)
            case Took() | Checked() | Opened() | Chunk() | Ended():
                raise UnexpectedEvent(self, event)
            case _:
                assert_never(event)

    def abandon(self, now: float) -> Actions:
        return self.turn.given_up(None, now)


class Closing(msgspec.Struct, frozen=True):
    """Where does the last answer end in the prompt? The renderer is asked for the history up to there."""

    turn: Turn
    engine: Engine
    token_ids: tuple[int, ...]
    """The whole prompt's."""
    since: float

    @property
    def need(self) -> Call:
        facts = self.turn.facts
        body = wire.closed_body(facts, self.turn.taken.common + 1)
        return Call(Leg.RENDER, self.engine, f"{facts.endpoint}/render", body, self.turn.config.prefill_timeout_s)

    def next(self, event: Event, now: float) -> Step:
        turn = self.turn
        match event:
            case Answered(status, _, body):
                turn.draft["render_ms"] += (now - self.since) * 1e3
                turn.continued(self.token_ids, (wire.read_rendered(body) or ()) if status == 200 else (), self.engine)
                return turn.placed(now)
            case Failed(FailureKind.BROKEN, message) if not turn.outlives():
                return turn.refuse(None, 502, message, Leg.RENDER, now)
            case Failed():
                turn.continued(self.token_ids, (), self.engine)
                return turn.placed(now)
            case Took() | Checked() | Opened() | Chunk() | Ended():
                raise UnexpectedEvent(self, event)
            case _:
                assert_never(event)

    def abandon(self, now: float) -> Actions:
        return self.turn.given_up(None, now)


class Checking(msgspec.Struct, frozen=True):
    """Nobody has read from this D by way of this P yet, and a P without bi-directional mode would hang; or D may be another
    process than the one that made the handle."""

    turn: Turn
    placement: Placement
    prefill: Engine
    decode: str
    engine_id: str

    @property
    def need(self) -> Check:
        return Check(self.prefill, self.decode, self.engine_id)

    def next(self, event: Event, now: float) -> Step:
        match event:
            case Checked(sure):
                doubted = () if sure else self.turn.doubted()
                state, actions = self.turn.placed(now)
                return state, (*doubted, *actions)
            case Took() | Answered() | Opened() | Chunk() | Ended() | Failed():
                raise UnexpectedEvent(self, event)
            case _:
                assert_never(event)

    def abandon(self, now: float) -> Actions:
        return self.turn.given_up(self.placement, now)
