"""Endings that states have in common: an error of ours, an engine's own, a client that has left. Each settles and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .. import wire
from ..errors import Leg
from .accounting import record
from .effects import Actions, Done, Headers, Respond, Send, Step
from .placement import Placement
from .settlement import unfinished
from .turn import Turn

_PASSED_HEADERS: Final = ("content-type", "retry-after", "retry-after-ms", "x-request-id", "cache-control")


def given_up(turn: Turn, placement: Placement | None, now: float) -> Actions:
    """The client has left without an answer: what is on record is put right, and the report."""
    return (*unfinished(turn), record(turn, placement, now, error="client_gone"))


def refuse(
    turn: Turn,
    placement: Placement | None,
    status: int,
    message: str,
    leg: Leg,
    now: float,
    rest: Actions = (),
    *,
    unread: bool = False,
) -> Step:
    """An error of ours, in OpenAI's shape. The client is told to send the request again only if no engine read it."""
    code = f"{leg}_timeout" if status == 504 else f"{leg}_failed"
    body = turn.facts.api.error(message, type_="server_error", code=code)
    headers = (("content-type", "application/json"), ("x-should-retry", "true" if unread else "false"))
    report = record(turn, placement, now, status=status, error=code)
    return Done(), (*rest, *unfinished(turn), report, Respond(status, headers), Send(body))


def pass_on(
    turn: Turn,
    placement: Placement,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    now: float,
    rest: Actions = (),
) -> Step:
    """An engine's own error, as it is; unless it quotes a handle."""
    if wire.quotes_handle(body):
        message = "the engine rejected the request"
        body = turn.facts.api.error(message, type_="invalid_request_error", code="rejected")
    report = record(turn, placement, now, status=status, error=f"status_{status}")
    return Done(), (*rest, *unfinished(turn), report, Respond(status, head(turn, placement, headers)), Send(body))


def head(turn: Turn, placement: Placement, upstream: Mapping[str, str]) -> Headers:
    """The head of the answer: what of the engine's concerns the client, and the route."""
    headers = [(name, upstream[name]) for name in _PASSED_HEADERS if name in upstream]
    if turn.identity is not None:
        headers += [("x-backhaul-route", str(placement.route)), ("x-backhaul-turn", str(turn.draft.turn))]
        if placement.reason:
            headers.append(("x-backhaul-reason", str(placement.reason)))
    return headers
