"""Facade of the launcher: prefill and decode engines on this machine, with the right flags, while `backhaul up` runs.

For Python code the same is `with Engines(EnginesConfig(model="tiny")) as engines:`, and `engines.prefill[0].url`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from . import interpreter
from .command import Connector, Device, EngineCommand, EnginesConfig, Role, plan
from .engines import Engine, Engines
from .models import LaunchError

__all__ = [
    "Connector",
    "Device",
    "Engine",
    "EngineCommand",
    "Engines",
    "EnginesConfig",
    "LaunchError",
    "Role",
    "how_to_reach",
    "up",
]


def _say(line: str) -> None:
    print(line, flush=True)


def up(
    config: EnginesConfig,
    *,
    dry_run: bool = False,
    say: Callable[[str], None] = _say,
    run: Callable[[Engines], None] | None = None,
) -> int:
    """Runs engines until Ctrl-C or SIGTERM, and returns 0. Raises `LaunchError` if they cannot be started, or one ends
    of itself; no process is left either way.

    `run` is what is done while they run, such as a router: it says how to reach it, calls `engines.check()` now and then,
    and returns when all is to end. By default the engines are only watched."""
    if dry_run:
        for command in dry_commands(config):
            say(command.shell())
        return 0
    engines = Engines(config, report=say)
    try:
        with _termination_interrupts(), engines:
            if run is None:
                say(how_to_reach(engines))
                engines.watch()
            run(engines)
    except KeyboardInterrupt:
        pass
    say("stopped")
    return 0


def dry_commands(config: EnginesConfig) -> tuple[EngineCommand, ...]:
    """What `up` would run. With a Python and a device named, nothing needs to be installed here."""
    python = config.python or sys.executable
    device = config.device or interpreter.find(python).device
    cores = len(os.sched_getaffinity(0))
    return plan(config, python=python, device=device, cores=cores, gpus=interpreter.visible_gpus())


def how_to_reach(engines: Engines, router: str | None = None) -> str:
    """The addresses, of a router's base URL too where there is one, and what one pastes into a program."""
    prefill, decode = ([engine.url for engine in role] for role in (engines.prefill, engines.decode))
    arguments = [f"prefill={json.dumps(prefill)}", f"decode={json.dumps(decode)}"]
    defaults = EnginesConfig()
    arguments += [
        f"{name}={getattr(engines.config, name):g}"
        for name in ("decoder_kv_blocks_ttl", "kv_recompute_threshold")
        if getattr(engines.config, name) != getattr(defaults, name)
    ]
    embedded = f"client = AsyncOpenAI({', '.join(arguments)})"
    lines = [f"model    {engines.model}", f"prefill  {' '.join(prefill)}", f"decode   {' '.join(decode)}"]
    clients = [embedded]
    if router is not None:
        lines.append(f"router   {router}")
        clients = [
            f'client = AsyncOpenAI(base_url="{router}", api_key="none")',
            "# or, with a router inside your own process:",
            embedded,
        ]
    program = "\n    ".join(["from backhaul import AsyncOpenAI", *clients])
    what = "the engines" if router is None else "everything"
    return "\n" + "\n".join(lines) + f"\n\n    {program}\n\nCtrl-C stops {what}."


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
