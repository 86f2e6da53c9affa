"""What `backhaul bench overhead` does: the measurement, its table, and its JSON."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from backhaul_cli.options import Numbers
from backhaul_connector.launch.command import Connector
from rich.table import Table

from . import overhead
from .clusters import say
from .options import MovesKv, OptionsError, Written
from .table import console, plain_table

LIMIT_MS = 1.0
"""What the embedded router may add to the median turn of 2 kB, one at a time."""


@dataclass(frozen=True, kw_only=True)
class Options(Written):
    body_bytes: Annotated[Numbers, "of a request"] = (2_000, 200_000)
    concurrency: Annotated[Numbers, "turns at a time"] = (1, 32)
    turns: Annotated[int, "for each figure; large bodies get a quarter"] = 200
    connector: MovesKv = Connector.BACKHAUL

    def cases(self) -> list[overhead.Case]:
        """Raises `OptionsError`."""
        if self.turns < 1 or min(self.concurrency) < 1:
            raise OptionsError("--turns and --concurrency: 1 or more")
        for size in self.body_bytes:
            if not overhead.SIZES.start <= size < overhead.SIZES.stop:
                raise OptionsError(f"--body-bytes {size}: from {overhead.SIZES.start} to {overhead.SIZES.stop - 1}")
        return overhead.cases(self.body_bytes, self.concurrency, self.turns)


def main(options: Options) -> int:
    """Measures, and returns the exit status. Raises `OptionsError`, `OSError`, `overhead.NotWarm`."""
    ours = options.connector is Connector.BACKHAUL
    rows = asyncio.run(overhead.measure(options.cases(), say, ours=ours))
    out = console()
    out.print(table(rows, options.connector))
    for line in notes(rows):
        out.print(line)
    options.write(to_dict(rows, options.connector))
    return 0


def table(rows: Sequence[overhead.Row], connector: str) -> Table:
    """A line a case."""
    calls = "two" if connector == "backhaul" else "three"
    made = plain_table(
        title="What the router adds to a warm turn, in ms\n"
        f"over the {calls} engine calls that it makes, on loopback engines, {connector} connector",
        caption="direct: by hand, with the router's HTTP client; aiohttp: by hand, with that library\n"
        "CPU per turn: direct, aiohttp and embedded are this process, served is the router's, and so is RSS (MB)",
    )
    for name in ("body", "answer", "at a time", "turns", "direct p50", "p99", "CPU"):
        made.add_column(name, justify="left" if name == "answer" else "right")
    for name in ("aiohttp p50", "CPU"):
        made.add_column(name, justify="right", min_width=min(len(name), len("aiohttp")))
    for variant in ("embedded", "served"):
        for name in (f"{variant} p50", "p99", "CPU"):
            made.add_column(name, justify="right", min_width=min(len(name), len(variant)))
    made.add_column("RSS", justify="right")
    for case in by_case(rows):
        direct, aio, *routed = case
        made.add_row(
            f"{direct.body_bytes / 1000:,.0f} kB",
            "stream" if direct.stream else "whole",
            str(direct.concurrency),
            str(direct.turns),
            *map(_figure, (direct.p50_ms, direct.p99_ms, direct.cpu_ms)),
            _figure(aio.added_p50_ms, "+"),
            _figure(aio.cpu_ms),
            *(cell for row in routed for cell in _added(row)),
            _figure(routed[-1].rss_mb),
        )
    return made


def by_case(rows: Iterable[overhead.Row]) -> list[list[overhead.Row]]:
    """The variants of each case together, in their order."""
    return [list(case) for _, case in itertools.groupby(rows, lambda r: (r.body_bytes, r.stream, r.concurrency))]


def notes(rows: Sequence[overhead.Row]) -> list[str]:
    """What a reader of the table must know."""
    lines = [
        f"Everything shares {os.cpu_count()} cores here: with many turns at a time, what is added is mostly waiting for a core."
    ]
    for row in rows:
        if row.variant == "embedded" and row.concurrency == 1 and not row.stream and row.body_bytes < 4_000:
            holds = "under" if row.added_p50_ms < LIMIT_MS else "NOT under"
            lines.append(
                f"Embedded, {row.body_bytes / 1000:,.0f} kB, one at a time: {row.added_p50_ms:.2f} ms added to the median turn, "
                f"{holds} {LIMIT_MS:g} ms."
            )
    return lines


def to_dict(rows: Sequence[overhead.Row], connector: str) -> dict[str, Any]:
    """For the JSON file."""
    return {
        "engines": {"kind": "loopback", "costs": None, "connector": connector},
        "cores": os.cpu_count(),
        "rows": [asdict(row) for row in rows],
    }


def _added(row: overhead.Row) -> tuple[str, ...]:
    return _figure(row.added_p50_ms, "+"), _figure(row.added_p99_ms, "+"), _figure(row.cpu_ms)


def _figure(value: float | None, sign: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:{sign},.{2 if abs(value) < 50 else 0}f}"
