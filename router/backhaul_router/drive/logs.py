"""Structured logging of the server: one line for each turn, and which turn it was on every line that is written during one.

A line never has a body, a key or a handle. Where the application runs under somebody else's logging, a turn's line is text that
says it all; `to_stderr` is for the server's own process.
"""

from __future__ import annotations

import datetime
import enum
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from ..report import ReuseReport
    from ..turn.turn import Turn

log = logging.getLogger("backhaul.turns")

_FIELDS = (
    "conversation",
    "turn",
    "tenant",
    "model",
    "route",
    "reason",
    "status",
    "error",
    "prompt",
    "cached",
    "computed",
    "generated",
    "render_ms",
    "prefill_ms",
    "claim_ms",
    "read_ms",
    "first_byte_ms",
    "total_ms",
    "retries",
    "prefill_engine",
    "decode_engine",
)
"""Of a report, in the order in which they are written. What is not known is left out."""
_LONGEST = 256
"""Characters of a value: a client can name any model."""
_ATTRIBUTE = "backhaul_turn"
"""Of a log record: what a turn's line says."""


class LogFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


class Running:
    """Log context: the turn that a request has come to, once it is known."""

    __slots__ = ("turn",)

    def __init__(self) -> None:
        self.turn: Turn | None = None

    def names(self) -> dict[str, Any]:
        """What a log line says of it."""
        if self.turn is None:
            return {}
        named: dict[str, Any] = {}
        if self.turn.identity is not None:
            named["conversation"] = self.turn.identity.conversation
        if (number := self.turn.draft.turn) is not None:
            named["turn"] = number
        if self.turn.tenant:
            named["tenant"] = self.turn.tenant
        return named


_worker: dict[str, Any] = {}
"""Which one this process is, where a router has several."""


def name_worker(number: int) -> None:
    """From now on every line of this process says which worker it is."""
    _worker["worker"] = number


_running: ContextVar[Running | None] = ContextVar("backhaul_running", default=None)


@contextmanager
def request() -> Iterator[None]:
    """Lines that are written in the block, and by tasks that it starts, say which turn it was, up to its end."""
    running = Running()
    token = _running.set(running)
    try:
        yield
    finally:
        _running.reset(token)
        running.turn = None  # what goes on in the background is nobody's turn


def note(turn: Turn) -> None:
    """This is the turn of the request that is being answered, where its server asked for that."""
    if (running := _running.get()) is not None:
        running.turn = turn


def log_turn(report: ReuseReport) -> None:
    """Writes a turn's line."""
    if not log.isEnabledFor(logging.INFO):
        return
    said: dict[str, Any] = {}
    for name in _FIELDS:
        value = getattr(report, name, None)
        if value is not None and value != "":
            said[name] = round(value, 2) if isinstance(value, float) else _short(value)
    log.info("turn %s", _Pairs(said), extra={_ATTRIBUTE: said})


@contextmanager
def to_stderr(format: LogFormat, level: int = logging.INFO) -> Iterator[None]:
    """Has this process write its log to stderr, in place of how it did before and will afterwards."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if format is LogFormat.JSON else TextFormatter())
    root = logging.getLogger()
    before = root.handlers[:], root.level
    root.handlers[:] = [handler]
    root.setLevel(level)
    try:
        yield
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])


class TextFormatter(logging.Formatter):
    """A line for people; `conversation=` and the like follow the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        line = super().formatMessage(record)
        names = _worker if hasattr(record, _ATTRIBUTE) else {**_worker, **_names()}
        return f"{line} [{_Pairs(names)}]" if names else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (RFC 3339, UTC), `level`, `logger`, `message`, and what there is of a turn's fields."""

    def format(self, record: logging.LogRecord) -> str:
        said: Mapping[str, Any] | None = getattr(record, _ATTRIBUTE, None)
        line = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage() if said is None else "turn",
            **_worker,
            **(_names() if said is None else said),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return msgspec.json.encode(line).decode()


def _names() -> dict[str, Any]:
    running = _running.get()
    return running.names() if running is not None else {}


class _Pairs:
    """`name=value name=value`, written when it is shown. What a client made up cannot end the line or look like another pair."""

    def __init__(self, pairs: Mapping[str, Any]) -> None:
        self._pairs = pairs

    def __str__(self) -> str:
        return " ".join(f"{name}={_shown(value)}" for name, value in self._pairs.items())


def _short(value: Any) -> Any:
    return f"{value[:_LONGEST]}..." if isinstance(value, str) and len(value) > _LONGEST else value


def _shown(value: Any) -> str:
    text = str(value)
    if text and text.isascii() and text.isprintable() and not set(text) & {" ", '"', "=", "[", "]"}:
        return text
    return ascii(text) if not text.isprintable() else msgspec.json.encode(text).decode()
