"""What `backhaul bench ttft` does: engines, the measurement, and what is written down of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from backhaul_cli.options import Numbers
from backhaul_connector.launch.command import Connector
from backhaul_connector.launch.models import BUILT_IN

from . import clusters, plots, table
from .clusters import Cluster, say
from .options import MovesKv, OnEngines, OptionsError
from .setups import QWEN3_32B, SETUPS, Setup
from .ttft import ANSWER_TOKENS, Plan, Result, measure

_VLLM_PROMPT_TOKENS = (512, 1024, 2048, 3072, 4096, 6144)
_VLLM_NEW_TOKENS = 256
_VLLM_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Options(OnEngines):
    """`None` is the default of the engines at hand."""

    setup: Annotated[str, "loopback: the cost model"] = QWEN3_32B.name
    connector: MovesKv = Connector.BACKHAUL
    vllm_args: tuple[str, ...] = ()
    prompt_tokens: Annotated[Numbers | None, "prompt lengths"] = None
    new_tokens: Annotated[int | None, "what each turn adds to its history"] = None
    repeats: Annotated[int | None, "of each measurement"] = None
    out: Annotated[Path | None, "DIR", "write two plots, as PNG and SVG"] = None

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


def main(options: Options) -> int:
    """Measures, and returns the exit status: 1 if the routes gave different answers. Raises `OptionsError`, `LaunchError`."""
    plan = options.plan()
    result = asyncio.run(_on_loopback(options, plan)) if options.engines == "loopback" else _on_vllm(options, plan)
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
        report=say,
    ) as cluster:
        return asyncio.run(_measure(cluster, plan))


async def _measure(cluster: Cluster, plan: Plan) -> Result:
    say(cluster.title)
    return await measure(cluster, plan, say)


def _show(result: Result, options: Options) -> None:
    out = table.console()
    out.print(table.table(result))
    for line in table.notes(result):
        out.print(line)
    options.write(table.to_dict(result))
    if options.out is not None:
        names = ", ".join(path.name for path in plots.save(result, options.out))
        out.print(f"wrote {names} in {options.out}", soft_wrap=True)
