"""One prefill and one decode engine to measure on: loopback engines in this process, or vLLM's as `backhaul up` runs them."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from backhaul_connector.launch.cluster import Connector, Device, Engines, EnginesConfig
from backhaul_connector.launch.interpreter import Interpreter, find
from backhaul_connector.launch.models import BUILT_IN
from backhaul_loopback import CostModel, RealClock, VirtualClock, loopback_pair

from .setups import Setup


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Running engines. P's prefix caching is off, as in the published experiment: P is the engine that has forgotten, or
    never had, the conversation."""

    prefill: str
    """Base URL."""
    decode: str
    model: str
    title: str
    """What the engines are, for people; says so where figures come from a cost model."""
    connector: Connector = Connector.STOCK
    costs: CostModel | None = None
    """The cost model, for engines that have one; `None` means that times are measured."""
    setup: Setup | None = None
    clock: Callable[[], float] = time.perf_counter
    """Seconds, in the time that the engines live in."""
    virtual: bool = False
    """Whether that time only passes when all wait."""

    def describe(self) -> dict[str, Any]:
        """For JSON files."""
        costs = self.costs
        return {
            "kind": "vllm" if costs is None else "loopback",
            "title": self.title,
            "model": self.model,
            "connector": str(self.connector),
            "setup": self.setup.name if self.setup else None,
            "costs": {name: getattr(costs, name) for name in _COSTS} if costs else None,
            "virtual_time": self.virtual,
        }


_COSTS = ("fixed_s", "prefill_s", "transfer_s", "decode_s", "render_s")


@contextlib.asynccontextmanager
async def loopback(
    setup: Setup, *, connector: Connector = Connector.BACKHAUL, virtual: bool = False
) -> AsyncIterator[Cluster]:
    """Loopback engines in the running event loop. In virtual time their figures are the cost model's own, whatever else
    this machine does."""
    clock = VirtualClock(auto=True) if virtual else RealClock()
    async with loopback_pair(
        clock=clock, costs=setup.costs, connector=str(connector), prefill={"prefix_caching": False}
    ) as pair:
        yield Cluster(
            prefill=pair.prefill.url,
            decode=pair.decode.url,
            model=pair.model,
            connector=connector,
            title=f"loopback engines, {setup.title}, {connector} connector",
            costs=setup.costs,
            setup=setup,
            clock=clock.now,
            virtual=virtual,
        )


def on_vllm(model: str, python: str | None, **more: Any) -> tuple[Interpreter, EnginesConfig]:
    """What to start vLLM engines with. Built-in models compute in float32 on CPUs, where equal KV gives equal answers. Raises
    `LaunchError`."""
    found = find(python)
    dtype = "float32" if found.device is Device.CPU and model in BUILT_IN else None
    return found, EnginesConfig(model=model, python=found.path, device=found.device, dtype=dtype, **more)


@contextlib.contextmanager
def vllm(
    model: str,
    *,
    python: str | None = None,
    connector: Connector = Connector.BACKHAUL,
    vllm_args: Sequence[str] = (),
    max_model_len: int | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Cluster]:
    """vLLM engines, which takes a minute or two. Raises `LaunchError`; the logs are kept then, and removed otherwise."""
    found, config = on_vllm(
        model,
        python,
        connector=connector,
        max_model_len=max_model_len,
        prefill_prefix_caching=False,
        vllm_args=tuple(vllm_args),
    )
    where = "this CPU" if found.device is Device.CPU else "GPUs"
    with Engines(config, report=report) as engines:
        yield Cluster(
            prefill=engines.prefill[0].url,
            decode=engines.decode[0].url,
            model=engines.model,
            connector=connector,
            title=f"vLLM {found.vllm} on {where}, model {engines.model}, {connector} connector",
        )


def say(line: str) -> None:
    """How a measurement goes on; what comes of it is on standard output."""
    print(line, file=sys.stderr, flush=True)


INTERRUPTED = 130
"""Exit status of a command that Ctrl-C or SIGTERM ended."""


@contextlib.contextmanager
def termination_interrupts() -> Iterator[None]:
    """SIGTERM is as Ctrl-C in the block, in asyncio's `run` too, so that everything is taken down on the way out.

    Also where SIGINT is ignored, as in what a shell script starts in the background."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
