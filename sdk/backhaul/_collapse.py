"""Collapse detection: the turn at which a conversation stopped reusing its history, why, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass

from backhaul_router.report import Reason, ReuseReport

COLLAPSE_FLOOR = 256
"""Tokens: losing fewer than these is what whole blocks and re-tokenised answers cost."""
_TOLERANCE = 0.05
_ALL = 0.9
_SHRUNK = 0.5
_SAYS_NOTHING = (None, Reason.DIVERGED, Reason.BELOW_THRESHOLD, Reason.FIRST_TURN)
"""Reasons under which it is the prompt that differs, rather than what was held for it that is gone."""


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """A turn that reused materially less than the history that was on record for it."""

    conversation: str | None
    turn: int
    reason: str
    """`compacted`: the prompt is less than half of the history, and differs from it. `diverged`: a message was changed, `message`
    says which. `unexpected`: nothing explains it. Else the report's own, such as `expired`, `no_handle` or `flushed`."""
    message: int | None
    """Index of the first message that differs from the record."""
    expected: int
    """Tokens on record."""
    reused: int
    tokens_lost: int
    """`expected - reused`."""

    def __str__(self) -> str:
        where = "" if self.message is None else f" at message {self.message}"
        return f"turn {self.turn} reused {self.reused} of {self.expected} tokens on record: {self.reason}{where}"


class Detector:
    """Judges one conversation's reports in the order in which its turns ended."""

    def __init__(self, floor: int = COLLAPSE_FLOOR) -> None:
        if floor < 1:
            raise ValueError(f"collapse_floor={floor}: a number of tokens, 1 or more")
        self.floor = floor
        self.current: Collapse | None = None
        """Until a later turn reuses its history again."""
        self._before: ReuseReport | None = None

    def judge(self, report: ReuseReport) -> Collapse | None:
        """The collapse that begins with this turn. One that goes on is not told again."""
        before, self._before = self._before, report if report.prompt else self._before
        expected = _on_record(report, before)
        failed = report.error is not None or report.status != 200
        if failed or not expected or report.cached is None or report.reason is Reason.REUSE_OFF:
            return None
        lost = expected - report.cached
        if lost < self.floor or lost <= _TOLERANCE * expected or _reused_itself(report, expected):
            self.current = None
            return None
        if self.current is not None:
            return None
        self.current = Collapse(
            conversation=report.conversation,
            turn=report.turn,
            reason=_reason(report, expected),
            message=report.diverged_at,
            expected=expected,
            reused=report.cached,
            tokens_lost=lost,
        )
        return self.current


def _reused_itself(report: ReuseReport, expected: int) -> bool:
    """Whether a prompt that is somewhat shorter than the record, as where an answer is made anew, reused all that it could.
    One that is much shorter is a compaction."""
    if report.prompt is None or report.cached is None or not _SHRUNK * expected <= report.prompt < expected:
        return False
    return report.cached >= _ALL * report.prompt


def _on_record(report: ReuseReport, before: ReuseReport | None) -> int:
    """Tokens that the turn could have reused. A report that was made from the answer alone does not say: then it is what the
    turn before it left."""
    if report.on_record is not None:
        return report.on_record
    if before is None or report.turn == 1 or report.reason is Reason.FIRST_TURN:
        return 0
    return (before.prompt or 0) + max(0, (before.generated or 0) - 1)


def _reason(report: ReuseReport, expected: int) -> str:
    if report.diverged_at is not None and report.prompt is not None and report.prompt < _SHRUNK * expected:
        return "compacted"
    if report.diverged_at is not None and report.reason in _SAYS_NOTHING:
        return "diverged"
    return "unexpected" if report.reason is None else str(report.reason)
