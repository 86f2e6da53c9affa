"""The demo's table: a row a turn, filled in as the turns end; on a terminal it is live."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from backhaul_router.report import Route
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .agent import SCRIPT, Turn

_PLAIN_WIDTH = 118
_WIDE = 110
_ROUTE_STYLES = {Route.COLD: "blue", Route.WARM: "yellow", Route.LOCAL: "green"}
_OFF, _ON = "red", "green"


class Screen:
    """Shows a demo. Without a terminal the table is printed once, at the end."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(highlight=False)
        if not console.is_terminal:
            console = Console(file=console.file, highlight=False, width=max(_PLAIN_WIDTH, console.width))
        self.console = console
        self.off: list[Turn] = []
        self.on: list[Turn] = []
        self._running = ""
        self._live = Live(console=console, get_renderable=self._render, auto_refresh=console.is_terminal)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._running = ""
        if self.console.is_terminal:
            self._live.stop()
        elif error is None:
            self.console.print(self._render())

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def begin(self, *, reuse: bool) -> None:
        self._running = "on" if reuse else "off"
        if self.console.is_terminal:
            self._live.refresh()

    def add(self, turn: Turn, *, reuse: bool) -> None:
        (self.on if reuse else self.off).append(turn)

    def _render(self) -> RenderableType:
        if not self._running:
            return self._table()
        return Group(self._table(), Text(f"running the conversation with reuse {self._running} ...", style="dim"))

    def _table(self) -> Table:
        narrow = self.console.width < _WIDE
        table = Table(box=None, pad_edge=False, padding=(0, 1 if narrow else 2, 0, 0), header_style="bold")
        knows_pulled = any(turn.report.pulled is not None for turn in self.on)
        table.add_column("#" if narrow else "turn", justify="right", no_wrap=True)
        table.add_column("what happened", width=14 if narrow else max(len(step.what) for step in SCRIPT))
        table.add_column("prompt", justify="right", no_wrap=True)
        table.add_column("route", no_wrap=True)
        for name in ("offered", "pulled" if knows_pulled else "cached", "computed"):
            table.add_column(name, justify="right", no_wrap=True)
        head = "TTFT, reuse " if narrow else "time to first token, reuse "
        table.add_column(Text.assemble(head, ("off", _OFF), " / ", ("on", _ON)), no_wrap=True)
        width = max(4, min(40, self.console.width - (64 if narrow else 84)))
        longest = max((turn.ttft_ms for turn in (*self.off, *self.on)), default=1.0)
        for index, step in enumerate(SCRIPT):
            off = self.off[index] if index < len(self.off) else None
            on = self.on[index] if index < len(self.on) else None
            table.add_row(str(index + 1), step.what, *_facts(off, on), _bars(off, on, width / longest))
        return table


def _facts(off: Turn | None, on: Turn | None) -> list[RenderableType]:
    """The prompt as soon as it is known; the rest is about the turn with reuse."""
    known = on or off
    prompt = _count(known.report.prompt) if known else ""
    if on is None:
        return [prompt, "", "", "", ""]
    report = on.report
    read = report.cached if report.pulled is None else report.pulled
    route = Text(report.route, style=_ROUTE_STYLES[report.route])
    return [prompt, route, _count(report.offered), _count(read), _count(report.computed)]


def _bars(off: Turn | None, on: Turn | None, per_ms: float) -> Text:
    """One line for each of the two runs; the bars of all rows have one scale."""
    lines = Text()
    for turn, style in ((off, _OFF), (on, _ON)):
        if turn is not None:
            bar = "█" * round(turn.ttft_ms * per_ms) or "▏"
            lines.append(f"{turn.ttft_ms:6,.0f} ms ")
            lines.append(bar, style=style)
        if turn is off:
            lines.append("\n")
    return lines


def _count(tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens:,}"
