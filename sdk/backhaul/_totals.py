"""Running sums of reuse reports: of a conversation, of a process, of a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from backhaul_router.report import Reason, ReuseReport, Route
from backhaul_router.serve.report_log import Total

from ._collapse import Collapse
from ._listeners import Listeners

_NO_MODEL = ""


@dataclass(frozen=True, kw_only=True)
class ReuseTotal:
    """Several turns together. Token counts add up what their reports know."""

    turns: int
    prompt: int
    reused: int
    """Prompt tokens that were found cached or read, and so not computed."""
    computed: int
    offered: int
    generated: int
    errors: int = 0
    """Turns that ended early, by whoever's fault."""
    hit_rate: float | None
    """`reused / prompt` over the turns that know both; `None` when none does."""
    saved_ms: float | None
    """Estimated time to first token saved; `None` when no turn has an estimate."""
    routes: Mapping[Route, int]
    reasons: Mapping[Reason, int]
    by_model: Mapping[str, ReuseTotal] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    """The same for each model, by the name that requests used (`""` where they used none). Empty within it."""


class Tally:
    """A running sum. Safe to use from any thread."""

    def __init__(self, reports: Iterable[ReuseReport] = ()) -> None:
        self._lock = threading.Lock()
        self._all = Total()
        self._by_model: dict[str, Total] = {}
        for report in reports:
            self.add(report)

    def add(self, report: ReuseReport) -> None:
        with self._lock:
            self._all.add(report)
            self._by_model.setdefault(report.model or _NO_MODEL, Total()).add(report)

    @property
    def total(self) -> ReuseTotal:
        with self._lock:
            return _shown(self._all, {model: _shown(total) for model, total in self._by_model.items()})


def _shown(total: Total, by_model: Mapping[str, ReuseTotal] = MappingProxyType({})) -> ReuseTotal:
    return ReuseTotal(
        turns=total.turns,
        prompt=total.prompt,
        reused=total.reused,
        computed=total.computed,
        offered=total.offered,
        generated=total.generated,
        errors=total.errors,
        hit_rate=total.hit_rate,
        saved_ms=total.saved_ms,
        routes=MappingProxyType({Route(route): count for route, count in total.routes.items()}),
        reasons=MappingProxyType({Reason(reason): count for reason, count in total.reasons.items()}),
        by_model=MappingProxyType(dict(by_model)),
    )


# --- of this process

_tally = Tally()
_turn_listeners: Listeners[ReuseReport] = Listeners("on_turn")
collapse_listeners: Listeners[Collapse] = Listeners("on_collapse")


def note(report: ReuseReport) -> None:
    """Counts a turn of this process's clients."""
    _tally.add(report)
    _turn_listeners.tell(report)


def turns_are_heard() -> bool:
    """Whether anybody wants each turn's report."""
    return bool(_turn_listeners)


def totals() -> ReuseTotal:
    """Every turn so far of this process's Backhaul clients, inside and outside of conversations. Of a turn on a router elsewhere
    that ran outside of one only what its answer says is known, which is not what was reused."""
    return _tally.total


def on_turn(listener: Callable[[ReuseReport], object]) -> Callable[[], None]:
    """Has `listener` called with the report of each turn that `totals` counts. Returns a function that ends that.

    It is called when the turn has ended, in whatever thread that is, and should return soon. What it raises is logged."""
    return _turn_listeners.add(listener)


def on_collapse(listener: Callable[[Collapse], object]) -> Callable[[], None]:
    """The same for `Collapse`s of this process's conversations."""
    return collapse_listeners.add(listener)
