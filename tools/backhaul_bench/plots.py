"""The two plots of `backhaul bench ttft`, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .ttft import ROUTES, Result, Row

_COLORS = {"off": "#D55E00", "warm": "#0072B2", "local": "#009E73"}
_MARKERS = {"off": "s", "warm": "o", "local": "^"}
_LABELS = {
    "off": "reuse off: P computes the prompt",
    "warm": "warm: P reads the history from D",
    "local": "local: D computes the new tokens alone",
}
_PARTS = {
    "P reads the history from D": "#0072B2",
    "computes": "#E69F00",
    "rest of the prefill request": "#999999",
    "decode engine, until the first token": "#D9D9D9",
}
_MOST_BARS = 8
_STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "backhaul",
}


def save(result: Result, directory: Path) -> list[Path]:
    """Writes the plots, and returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    with rc_context(_STYLE):  # type: ignore[arg-type]  # the stub wants each key as a literal
        for name, figure in (("ttft", _ttft(result)), ("split", _split(result))):
            for kind in ("png", "svg"):
                path = directory / f"{name}.{kind}"
                # Without a date, equal figures are equal files.
                metadata = {"Date": None} if kind == "svg" else None
                figure.savefig(path, dpi=120, metadata=metadata)
                files.append(path)
    return files


def _head(figure: Figure, title: str, result: Result, spread: str = "") -> None:
    if result.cluster.costs is not None:
        title += " (cost model)"
    lines = [result.cluster.title]
    if result.plan.repeats > 1:
        lines.append(f"medians of {result.plan.repeats} repeats{spread}")
    figure.text(0.02, 0.965, title, fontsize=14, fontweight="bold", va="top")
    figure.text(0.02, 0.905, "; ".join(lines), fontsize=10.5, color="#444444", va="top")


def _ttft(result: Result) -> Figure:
    figure = Figure(figsize=(8, 5.2))
    axes = figure.add_axes((0.1, 0.12, 0.87, 0.7))
    for route in ROUTES:
        rows = [result.row(length, route) for length in result.lengths]
        median = [row.ttft_ms for row in rows]
        spread = [
            [row.ttft_ms - row.ttft_min_ms for row in rows],
            [row.ttft_max_ms - row.ttft_ms for row in rows],
        ]
        axes.errorbar(
            result.lengths,
            median,
            yerr=spread if result.plan.repeats > 1 else None,
            color=_COLORS[route],
            marker=_MARKERS[route],
            markersize=6,
            linewidth=2,
            elinewidth=1,
            capsize=3,
            label=_LABELS[route],
        )
    published = result.cluster.setup.published if result.cluster.setup else ()
    known = [point for point in published if point.prompt_tokens in result.lengths]
    if known:
        axes.plot(
            [point.prompt_tokens for point in known],
            [point.ttft_ms for point in known],
            linestyle="none",
            marker="x",
            markersize=11,
            markeredgewidth=2,
            color="black",
            zorder=5,
            label="published, to which the cost model is fitted",
        )
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel("time to first token (ms)")
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.05)
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.yaxis.set_major_formatter(FuncFormatter(_thousands))
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda place: labels[place].startswith("published"))
    axes.legend([handles[place] for place in order], [labels[place] for place in order], loc="upper left")
    _head(figure, "Time to first token as the conversation grows", result, ", bars from the fastest to the slowest")
    return figure


def _bar(row: Row) -> tuple[float, float, float, float]:
    """One turn's time to first token, in the order of `_PARTS`. What is not known counts as rest."""
    read, compute = row.read_ms or 0.0, row.compute_ms or 0.0
    if row.prefill_ms is None:
        return 0.0, compute, 0.0, max(0.0, row.ttft_ms - compute)
    rest = max(0.0, row.prefill_ms - read - compute)
    return read, compute, rest, max(0.0, row.ttft_ms - row.prefill_ms)


def _split(result: Result) -> Figure:
    figure = Figure(figsize=(10, 5.2))
    lengths = _thinned(result.lengths)
    panels = figure.subplots(1, len(ROUTES), sharey=True)
    for route, axes in zip(ROUTES, panels, strict=True):
        bars = [_bar(result.row(length, route)) for length in lengths]
        places = range(len(lengths))
        bottom = [0.0] * len(lengths)
        for part, (name, color) in enumerate(_PARTS.items()):
            heights = [bar[part] for bar in bars]
            axes.bar(places, heights, 0.72, bottom=bottom, color=color, label=name, edgecolor="white", linewidth=0.4)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        axes.set_title(f"reuse {route}" if route == "off" else route, color=_COLORS[route], fontweight="bold")
        axes.set_xticks(places, [_short(length) for length in lengths], fontsize=10)
        axes.set_xlabel("prompt length (tokens)")
        axes.grid(visible=False, axis="x")
    panels[0].set_ylabel("time to first token (ms)")
    panels[0].yaxis.set_major_formatter(FuncFormatter(_thousands))
    panels[0].yaxis.set_major_locator(MaxNLocator(nbins=8))
    figure.subplots_adjust(left=0.085, right=0.985, top=0.76, bottom=0.2, wspace=0.08)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(_PARTS), fontsize=10)
    _head(figure, "Where the time to first token goes", result)
    return figure


def _thinned(lengths: Sequence[int]) -> list[int]:
    """At most so many as can be told apart, evenly, the longest among them."""
    step = -(-len(lengths) // _MOST_BARS)
    return list(lengths[::-1][::step][::-1])


def _short(tokens: int) -> str:
    return f"{tokens / 1024:g}k" if tokens % 512 == 0 and tokens >= 1024 else str(tokens)


def _thousands(value: float, position: int | None = None) -> str:
    return f"{value:,.0f}"
