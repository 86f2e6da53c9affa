"""`backhaul bench idle`: the processor time of a decode engine that has nothing to do, without a lease and with one.

Real engines, which the command starts. What is measured is the CPU time of all processes of the decode engine, by what they call
themselves, from Linux's /proc.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from backhaul_cli.options import Count
from backhaul_connector.launch.cluster import Connector, Engine, Engines, EnginesConfig

from .options import MovesKv, OnVllm

_SETTLES_S = 3.0
_PROMPT = [*range(100, 400)]


@dataclass(frozen=True, kw_only=True)
class Options(OnVllm):
    connector: MovesKv = Connector.BACKHAUL
    seconds: Annotated[Count, "S", "for each line"] = 10


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: percent of one core, by process."""

    connector: str
    leases: int
    percent: Mapping[str, float]


def measure(options: Options, report: Any = print) -> list[Row]:
    """Raises `LaunchError`."""
    config = EnginesConfig(model=options.model, python=options.python, connector=options.connector)
    with Engines(config, report=report) as engines:
        engine = engines.decode[0]
        _turn(engines, keep=False)
        rows = [_row(options, engine, 0)]
        _turn(engines, keep=True)
        rows.append(_row(options, engine, 1))
        return rows


def _row(options: Options, engine: Engine, leases: int) -> Row:
    time.sleep(_SETTLES_S)
    before, began = _cpu_s(engine.pids()), time.monotonic()
    time.sleep(options.seconds)
    took = time.monotonic() - began
    after = _cpu_s(engine.pids())
    percent = {name: round(100 * (spent - before[name]) / took, 1) for name, spent in sorted(after.items())}
    return Row(connector=str(options.connector), leases=leases, percent=percent)


def _cpu_s(pids: Sequence[int]) -> dict[str, float]:
    """CPU seconds so far, summed by process name; `server` is vLLM's front end."""
    found: dict[str, float] = defaultdict(float)
    for pid in pids:
        try:
            title = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        name = (
            title.removeprefix("VLLM::") if title.startswith("VLLM::") else "server" if "vllm" in title else "helpers"
        )
        found[name] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def _turn(engines: Engines, *, keep: bool) -> None:
    """One turn over both engines, whose blocks D keeps or not."""
    asked = {"model": engines.model, "prompt": _PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    if not keep:
        _post(engines.decode[0], asked)
        return
    first = _post(engines.prefill[0], {**asked, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})
    _post(engines.decode[0], {**asked, "kv_transfer_params": first["kv_transfer_params"]})


def _post(engine: Engine, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{engine.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def main(options: Options) -> int:
    """Prints the table, and returns 0. Raises `LaunchError`."""
    rows = measure(options)
    print(
        f"\nprocessor time of an idle decode engine over {options.seconds} s, {options.connector} connector, % of one core"
    )
    names = sorted({name for row in rows for name in row.percent})
    print(f"{'':10}" + "".join(f"{name:>14}" for name in names))
    for row in rows:
        label = "one lease" if row.leases else "no lease"
        print(f"{label:10}" + "".join(f"{row.percent.get(name, 0.0):>14.1f}" for name in names))
    options.write([asdict(row) for row in rows])
    return 0
