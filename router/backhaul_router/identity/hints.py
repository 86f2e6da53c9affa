"""Hints of a caller, who knows of a conversation's future what the engines do not: this turn is the last, or a long pause
follows.

A request says so in headers, which never reach the engines. Inside a process the SDK says it through `current`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextvars import ContextVar

import msgspec

from ..config import RouterConfig

LAST_TURN_HEADER = "x-backhaul-last-turn"
PAUSE_HEADER = "x-backhaul-pause"
REPORT_HEADER = "x-backhaul-report"
"""Asks for the turn's report in a comment of the stream, whose events need not have usage."""
DYNAMO_FINAL_HEADER = "x-dynamo-session-final"
MAX_PAUSE_S = 86_400.0
"""Of what may be asked for; how much of it a router grants is `longest_pause_s`."""
_PAUSE_TTLS = 10
_WORDS = {"true": True, "1": True, "false": False, "0": False, "": False}


class Hints(msgspec.Struct, frozen=True):
    """Hints about one conversation's future."""

    last_turn: bool = False
    """The turn leaves nothing, and at its end everything that is held for its conversation is released."""
    pause_s: float | None = None
    """The next turn comes about so many seconds after this one."""


NO_HINTS = Hints()

current: ContextVar[tuple[str, Hints] | None] = ContextVar("backhaul_hints", default=None)
"""Hints of the calling code, and the conversation that they are about."""


def inside(conversation: str | None) -> Hints:
    """The calling code's hints about this conversation."""
    found = current.get()
    return found[1] if found is not None and found[0] == conversation else NO_HINTS


class HintError(ValueError):
    """A hint is malformed; the message is meant for whoever gave it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def read_hints(headers: Mapping[str, str], inside: Hints = NO_HINTS) -> Hints:
    """A request's hints: those of its headers (lower-case names), else those of the code that makes it. Raises `HintError`."""
    last_turn, pause_s = inside.last_turn, inside.pause_s
    if (said := headers.get(DYNAMO_FINAL_HEADER)) is not None:
        # Another product's header: its other values are its own.
        last_turn = _WORDS.get(said.strip().lower(), last_turn)
    if (said := headers.get(LAST_TURN_HEADER)) is not None:
        word = said.strip().lower()
        if word not in _WORDS:
            raise HintError(f"header:{LAST_TURN_HEADER} is {said[:40]!r}: use true or false", LAST_TURN_HEADER)
        last_turn = _WORDS[word]
    if (said := headers.get(PAUSE_HEADER)) is not None:
        try:
            pause_s = checked_pause(float(said))
        except ValueError:
            raise HintError(f"header:{PAUSE_HEADER} is {said[:40]!r}: {_PAUSE_RULE}", PAUSE_HEADER) from None
    return Hints(last_turn, pause_s) if last_turn or pause_s is not None else NO_HINTS


_PAUSE_RULE = f"a pause is a number of seconds above 0 and at most {MAX_PAUSE_S:,.0f}"


def checked_pause(seconds: float) -> float:
    """Raises `ValueError`."""
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_PAUSE_S):
        raise ValueError(f"pause of {seconds!r} s: {_PAUSE_RULE}")
    return float(seconds)


def longest_pause_s(config: RouterConfig) -> float:
    """Seconds for which a router has blocks kept at most: D's memory is others' too, and a conversation that is silent for
    `max_idle_s` is forgotten."""
    return min(_PAUSE_TTLS * config.decoder_kv_blocks_ttl, config.max_idle_s)


def why_not_kept(pause_s: float, config: RouterConfig, *, renewable: bool, remaining_s: float) -> str | None:
    """Why something held for `remaining_s` more seconds is not kept over a pause; `None` where it is."""
    if pause_s <= remaining_s:
        return None
    if not renewable:
        return (
            f"it ends in {max(0.0, remaining_s):.0f} s, before the pause does, and a stock decode engine cannot be asked to "
            "keep it for longer"
        )
    if pause_s > (longest := longest_pause_s(config)):
        return (
            f"the pause is longer than the {longest:.0f} s for which this router has blocks kept at most: the lower of "
            f"{_PAUSE_TTLS} times decoder_kv_blocks_ttl and max_idle_s"
        )
    return None
