"""What `backhaul bench ttft` and `overhead` do: engines, the measurement, and what is written down of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backhaul_connector.launch.cluster import Connector
from backhaul_connector.launch.models import BUILT_IN

from . import clusters, overhead, overhead_table, plots, table
from .clusters import Cluster
from .setups import QWEN3_32B, SETUPS, Setup
from .ttft import ANSWER_TOKENS, Plan, Result, measure

_VLLM_PROMPT_TOKENS = (512, 1024, 2048, 3072, 4096, 6144)
_VLLM_NEW_TOKENS = 256
_VLLM_REPEATS = 5


class OptionsError(Exception):
    """The options cannot work together; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's. `None` is the default of the engines at hand."""

    engines: str = "loopback"
    """`loopback` or `vllm`."""
    setup: str = QWEN3_32B.name
    """Which cost model loopback engines run on."""
    model: str = "tiny"
    python: str | None = None
    connector: Connector = Connector.BACKHAUL
    vllm_args: Sequence[str] = ()
    prompt_tokens: tuple[int, ...] | None = None
    new_tokens: int | None = None
    repeats: int | None = None
    json: Path | None = None
    out: Path | None = None

    def chosen_setup(self) -> Setup:
        if self.setup not in SETUPS:
            raise OptionsError(f"--setup {self.setup}: use one of {', '.join(SETUPS)}")
        return SETUPS[self.setup]

    def plan(self) -> Plan:
        """Raises `OptionsError`."""
        setup = self.chosen_setup() if self.engines == "loopback" else None
        lengths = self.prompt_tokens or (setup.prompt_tokens if setup else _VLLM_PROMPT_TOKENS)
        plan = Plan(
            prompt_tokens=tuple(sorted(set(lengths))),
            new_tokens=self.new_tokens or (setup.new_tokens if setup else _VLLM_NEW_TOKENS),
            repeats=self.repeats or (1 if setup else _VLLM_REPEATS),
        )
        if plan.repeats < 1 or plan.new_tokens < 1:
            raise OptionsError("--repeats and --new-tokens: 1 or more")
        if plan.prompt_tokens[0] < 256:
            raise OptionsError(
                f"--prompt-tokens {plan.prompt_tokens[0]}: 256 or more, so that there is history to reuse"
            )
        for shorter, longer in zip(plan.prompt_tokens, plan.prompt_tokens[1:], strict=False):
            if longer - shorter <= ANSWER_TOKENS:
                raise OptionsError(f"--prompt-tokens {shorter},{longer}: more than {ANSWER_TOKENS} apart")
        return plan


@dataclass(frozen=True, kw_only=True)
class OverheadOptions:
    """Those of `backhaul bench overhead`."""

    body_bytes: tuple[int, ...] = (2_000, 200_000)
    concurrency: tuple[int, ...] = (1, 32)
    turns: int = 200
    connector: str = "backhaul"
    """`backhaul` or `stock`."""
    json: Path | None = None

    def cases(self) -> list[overhead.Case]:
        """Raises `OptionsError`."""
        if self.turns < 1 or min(self.concurrency) < 1:
            raise OptionsError("--turns and --concurrency: 1 or more")
        for size in self.body_bytes:
            if not overhead.SIZES.start <= size < overhead.SIZES.stop:
                raise OptionsError(f"--body-bytes {size}: from {overhead.SIZES.start} to {overhead.SIZES.stop - 1}")
        return overhead.cases(self.body_bytes, self.concurrency, self.turns)


def measure_overhead(options: OverheadOptions) -> int:
    """Measures, and returns the exit status. Raises `OptionsError`, `OSError`, `overhead.NotWarm`."""
    cases = options.cases()
    try:
        with clusters.termination_interrupts():
            ours = options.connector == "backhaul"
            rows = asyncio.run(overhead.measure(cases, _say, ours=ours))
    except KeyboardInterrupt:
        _say("stopped")
        return clusters.INTERRUPTED
    out = table.console()
    out.print(overhead_table.table(rows, options.connector))
    for line in overhead_table.notes(rows):
        out.print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(overhead_table.to_dict(rows, options.connector), indent=1) + "\n")
    return 0


def main(options: Options) -> int:
    """Measures, and returns the exit status: 1 if the routes gave different answers. Raises `OptionsError`, `LaunchError`."""
    plan = options.plan()
    try:
        with clusters.termination_interrupts():
            result = (
                asyncio.run(_on_loopback(options, plan)) if options.engines == "loopback" else _on_vllm(options, plan)
            )
    except KeyboardInterrupt:
        _say("stopped")
        return clusters.INTERRUPTED
    _show(result, options)
    return 0 if result.answers_equal else 1


async def _on_loopback(options: Options, plan: Plan) -> Result:
    async with clusters.loopback(options.chosen_setup(), connector=options.connector, virtual=True) as cluster:
        return await _measure(cluster, plan)


def _on_vllm(options: Options, plan: Plan) -> Result:
    longest = plan.prompt_tokens[-1] + ANSWER_TOKENS
    built_in = BUILT_IN.get(options.model)
    with clusters.vllm(
        options.model,
        python=options.python,
        connector=options.connector,
        vllm_args=options.vllm_args,
        max_model_len=max(built_in.max_model_len, longest) if built_in else None,
        report=_say,
    ) as cluster:
        return asyncio.run(_measure(cluster, plan))


async def _measure(cluster: Cluster, plan: Plan) -> Result:
    _say(cluster.title)
    return await measure(cluster, plan, _say)


def _show(result: Result, options: Options) -> None:
    out = table.console()
    out.print(table.table(result))
    for line in table.notes(result):
        out.print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(table.to_dict(result), indent=1) + "\n")
    if options.out is not None:
        names = ", ".join(path.name for path in plots.save(result, options.out))
        out.print(f"wrote {names} in {options.out}", soft_wrap=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
