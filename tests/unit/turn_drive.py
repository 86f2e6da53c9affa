"""A turn that is driven by hand, and what engines may answer it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from backhaul_router.errors import FailureKind, Leg
from backhaul_router.fleet.fleet import Fleet
from backhaul_router.identity.ids import Identity
from backhaul_router.ledger import digests
from backhaul_router.ledger.records import Branch, Held, Taken
from backhaul_router.report import Reason, ReuseReport, Route
from backhaul_router.turn.effects import (
    Action,
    Answered,
    Call,
    Chunk,
    Done,
    Event,
    Need,
    Open,
    Opened,
    Record,
    Release,
    Send,
    Settle,
    State,
    Take,
    Took,
)
from backhaul_router.turn.states import begin
from backhaul_router.turn.turn import Turn
from backhaul_router.wire import Facts
from core_values import BLOCK, D1, P1, config, encoded, facts, fleet, handle, params

REFUSED, TIMEOUT, BROKEN = FailureKind.REFUSED, FailureKind.TIMEOUT, FailureKind.BROKEN
JSON = {"content-type": "application/json"}
SSE = {"content-type": "text/event-stream; charset=utf-8"}
DONE = b"data: [DONE]\n\n"
NAN = float("nan")
A = TypeVar("A")

PROMPT = tuple(range(1000, 1200))
"""The next turn's prompt; its first 128 tokens are what the turn before ran."""
OLD = "old-d"
NAMED = Identity("c", "header:x-conversation-id")
MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "so"},
]


def history(ran: Sequence[int] = PROMPT[:128], *, common: bool = True, holds: int | None = None) -> Taken:
    """A branch that was asked with the first of `MESSAGES` and holds a handle named `OLD`."""
    first = (encoded(MESSAGES[0] if common else {"role": "user", "content": "else"}),)
    left = Held(handle(OLD, tokens=len(ran)), D1, 1000.0, len(ran) if holds is None else holds)
    on_file = Branch(
        chain=digests.chain(first),
        blocks=digests.block_chain(ran, BLOCK),
        block_size=BLOCK,
        tokens=len(ran),
        message_bytes=10,
        decode=D1,
        prefill=P1,
        held=left,
    )
    return Taken(1, 2, on_file, left, None, int(common))


FIRST = Taken(1, 1, reason=Reason.FIRST_TURN)


class Drive:
    """A turn and everything that it asked for."""

    def __init__(
        self,
        taken: Taken | None = None,
        *,
        request: Facts | None = None,
        on: Fleet | None = None,
        identity: Identity | None = NAMED,
        route: Route | None = None,
        **settings: Any,
    ) -> None:
        self.fleet = on or fleet()
        self.now = 100.0
        self.actions: list[Action] = []
        self.needs: list[Need] = []
        given = request or facts(messages=MESSAGES)
        cfg = config(**{"local_max_tokens": 0, "check_pairs": False, **settings})
        self.turn = Turn(given, identity, cfg, self.fleet, self.now, route)
        self.state: State | Done = Done()
        self._follow(begin(self.turn, self.now))
        if identity is not None:
            assert isinstance(self.need, Take)
            self.feed(Took(taken if taken is not None else history()))

    def _follow(self, step: tuple[State | Done, tuple[Action, ...]]) -> tuple[Action, ...]:
        self.state, actions = step
        self.actions += actions
        if not isinstance(self.state, Done):
            self.needs.append(self.state.ask())
        return actions

    @property
    def need(self) -> Need:
        return self.needs[-1]

    def feed(self, *events: Event) -> tuple[Action, ...]:
        """Actions of the last event."""
        actions: tuple[Action, ...] = ()
        for one in events:
            assert not isinstance(self.state, Done)
            self.now += 1.0
            actions = self._follow(self.state.next(one, self.now))
        return actions

    def leave(self) -> tuple[Action, ...]:
        """The client leaves."""
        assert not isinstance(self.state, Done)
        self.now += 1.0
        actions = self.state.abandon(self.now)
        self.state = Done()
        self.actions += actions
        return actions

    def all(self, kind: type[A]) -> list[A]:
        return [action for action in self.actions if isinstance(action, kind)]

    def one(self, kind: type[A]) -> A:
        (found,) = self.all(kind)
        return found

    @property
    def report(self) -> ReuseReport:
        return self.one(Record).report

    @property
    def released(self) -> list[tuple[str, str]]:
        """Request ids of the handles to release, and by way of which engine."""
        return [(json.loads(r.params)["remote_request_id"], r.via.url) for r in self.all(Release)]

    @property
    def sent(self) -> bytes:
        return b"".join(action.data for action in self.all(Send))

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.sent)["error"]
        return found

    @property
    def filed(self) -> Branch:
        return self.one(Settle).branch

    def asked(self, leg: Leg) -> Call:
        """The current need, which is a call on `leg`."""
        assert isinstance(self.need, Call)
        assert self.need.leg is leg
        return self.need

    def opening(self) -> Open | Call:
        """The decode engine is asked."""
        assert isinstance(self.need, Open) or (isinstance(self.need, Call) and self.need.leg is Leg.DECODE)
        return self.need

    @property
    def body(self) -> dict[str, Any]:
        """What the engine is sent now."""
        assert isinstance(self.need, Call | Open)
        found: dict[str, Any] = json.loads(self.need.body)
        return found


def rendered(ids: Sequence[int] = PROMPT) -> Answered:
    return Answered(200, JSON, encoded({"token_ids": list(ids), "features": None}))


def prefilled(name: str = "p-1", *, prompt: int = len(PROMPT), cached: int | None = 128, **fields: Any) -> Answered:
    usage = {"prompt_tokens": prompt, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
    given = params(name, tokens=prompt, engine_id="p", do_remote_prefill=True, do_remote_decode=False)
    return Answered(200, JSON, encoded({"choices": [], "usage": usage, "kv_transfer_params": given, **fields}))


def whole(name: str | None = "d-1", *, generated: Sequence[int] = (1, 2, 3), **fields: Any) -> Chunk:
    """D's answer, not streamed."""
    tokens = len(PROMPT) + len(generated) - 1
    body = {
        "choices": [{"index": 0, "message": {"content": "ok"}, "token_ids": list(generated), "finish_reason": "stop"}],
        "usage": {"prompt_tokens": len(PROMPT), "completion_tokens": len(generated)},
        "prompt_token_ids": list(PROMPT),
        "kv_transfer_params": params(name, tokens=tokens) if name else None,
    }
    return Chunk(encoded(body | fields))


def sse(*data: object) -> Chunk:
    return Chunk(b"".join(b"data: " + encoded(one) + b"\n\n" for one in data))


def delta(text: str = "a", **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **fields}


def finish(name: str | None = "d-1", *, generated: Sequence[int] | None = (1, 2, 3)) -> dict[str, Any]:
    tokens = len(PROMPT) + len(generated or (0,)) - 1
    found: dict[str, Any] = params(name, tokens=tokens) if name else {}
    if generated is not None:
        found["backhaul"] = {"version": 1, "token_ids": list(generated)}
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "kv_transfer_params": found}


USAGE = {"choices": [], "usage": {"prompt_tokens": len(PROMPT), "completion_tokens": 3}}
BODY, STREAM = Opened(200, JSON), Opened(200, SSE)
STREAMED = facts(messages=MESSAGES, stream=True)


def kinds(actions: Sequence[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]
