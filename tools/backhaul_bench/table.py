"""The table of `backhaul bench ttft`, and its JSON."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from .ttft import ROUTES, Result, Row

_PLAIN_WIDTH = 118


def console() -> Console:
    """Standard output; wide enough for the table where it is no terminal."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=max(_PLAIN_WIDTH, made.width))


def plain_table(
    title: str, caption: str | None = None, columns: Iterable[str] = (), left: Container[str] = ()
) -> Table:
    """A table without lines, as every bench prints it. Columns are to the right but for those named in `left`."""
    made = Table(
        title=title,
        caption=caption,
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        header_style="bold",
        title_style="bold",
    )
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right")
    return made


def table(result: Result) -> Table:
    """A line a prompt length: medians in milliseconds, with the fastest and the slowest repeat."""
    repeats = result.plan.repeats
    spread = f", median (min to max) of {repeats}" if repeats > 1 else ""
    made = plain_table(
        title=f"Time to first token in ms{spread}\n{result.cluster.title}",
        caption="read: time that P spent on reading from D; local turns read nothing",
        columns=("prompt", *ROUTES, "warm saves", "local saves", "read", "offered", "computed"),
    )
    for length in result.lengths:
        off, warm, local = (result.row(length, route) for route in ROUTES)
        made.add_row(
            f"{length:,}",
            *(_times(row) for row in (off, warm, local)),
            f"{1 - warm.ttft_ms / off.ttft_ms:.0%}",
            f"{1 - local.ttft_ms / off.ttft_ms:.0%}",
            "-" if warm.read_ms is None else f"{warm.read_ms:,.1f}",
            f"{warm.offered:,}",
            "-" if warm.computed is None else f"{warm.computed:,}",
        )
    return made


def notes(result: Result) -> list[str]:
    """What a reader of the table must know."""
    lines = [
        "The answers of all turns were equal on all routes."
        if result.answers_equal
        else "Some ANSWERS DIFFERED between the routes."
    ]
    stray = [row for row in result.rows if not row.as_meant]
    if stray:
        turns = ", ".join(f"{row.route} at {row.prompt_tokens:,}" for row in stray)
        lines.append(f"* not every repeat ran on its route: {turns}")
    if result.cluster.costs is not None:
        lines.append("These are figures of a cost model, not of an accelerator.")
    return lines


def to_dict(result: Result) -> dict[str, Any]:
    """For the JSON file. `compute_ms` is the cost model's on loopback engines; on vLLM, `read_ms` and `compute_ms` are the
    differences that `scrape` makes."""
    from_metrics = result.cluster.costs is None
    return {
        "engines": result.cluster.describe(),
        "new_tokens": result.plan.new_tokens,
        "repeats": result.plan.repeats,
        "answers_equal": result.answers_equal,
        "read_ms_basis": "vllm:nixl_xfer_time_seconds on the prefill engine",
        "compute_ms_basis": "vllm:request_prefill_time_seconds" if from_metrics else "cost model",
        "rows": [asdict(row) for row in result.rows],
    }


def _times(row: Row) -> str:
    mark = "" if row.as_meant else "*"
    if row.repeats == 1:
        return f"{row.ttft_ms:,.0f}{mark}"
    return f"{row.ttft_ms:,.0f}{mark} ({row.ttft_min_ms:,.0f} to {row.ttft_max_ms:,.0f})"
