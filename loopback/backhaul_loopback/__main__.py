"""Command-line entry, `python -m backhaul_loopback --role prefill --port 8100`: one engine as a process of its own.

Prints one line once it listens. Ends on SIGTERM or SIGINT, and when the process that started it is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Sequence

from .clock import CostModel
from .config import EngineConfig
from .engine import LoopbackEngine

_PARENT_CHECK_S = 0.5


def parser() -> argparse.ArgumentParser:
    known = EngineConfig(role="decode")
    args = argparse.ArgumentParser(prog="python -m backhaul_loopback", description=__doc__)
    args.add_argument("--role", required=True, choices=("prefill", "decode"))
    args.add_argument("--vllm-version", default=known.vllm_version, help="whose dialect is spoken")
    args.add_argument("--model", default=known.model)
    args.add_argument("--host", default=known.host)
    args.add_argument("--port", type=int, default=known.port, help="0 takes a free one")
    args.add_argument("--side-channel-port", type=int, default=known.side_channel_port, help="0 takes a free one")
    args.add_argument("--block-size", type=int, default=known.block_size, help="tokens")
    args.add_argument("--num-blocks", type=int, default=known.num_blocks)
    args.add_argument("--max-model-len", type=int, default=known.max_model_len, help="tokens")
    args.add_argument("--no-prefix-caching", dest="prefix_caching", action="store_false")
    args.add_argument("--no-bidirectional", dest="bidirectional_kv_xfer", action="store_false")
    args.add_argument("--no-scale-out", dest="enable_scale_out", action="store_false")
    args.add_argument("--kv-recompute-threshold", type=int, default=known.kv_recompute_threshold, help="tokens")
    args.add_argument("--decoder-kv-blocks-ttl", type=float, default=known.decoder_kv_blocks_ttl, help="seconds")
    args.add_argument("--kv-lease-duration", type=float, default=known.kv_lease_duration, help="seconds")
    args.add_argument("--stream-handles", choices=("plugin", "off"), default=known.stream_handles)
    args.add_argument("--connector", choices=("stock", "backhaul"), default=known.connector)
    args.add_argument("--lease-port", type=int, default=known.lease_port, help="0 takes a free one")
    args.add_argument("--claim-timeout-s", type=float, default=known.claim_timeout_s, help="seconds")
    args.add_argument("--hold-s", type=float, default=known.hold_s, help="seconds")
    args.add_argument("--max-leased-fraction", type=float, default=known.max_leased_fraction, help="of the blocks")
    costs = args.add_argument_group("costs", "seconds; everything is free by default")
    costs.add_argument("--fixed-s", type=float, default=0.0, help="per request")
    for what in ("prefill", "decode", "transfer", "render"):
        costs.add_argument(f"--{what}-s", type=float, default=0.0, help="per token")
    return args


async def serve(engine: LoopbackEngine) -> None:
    """Runs until a signal comes or the parent process is gone."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    parent = os.getppid()
    async with engine:
        print(f"loopback {engine.config.role} engine serves {engine.model} on {engine.url}", flush=True)
        while not stop.is_set() and os.getppid() == parent:
            try:
                await asyncio.wait_for(stop.wait(), _PARENT_CHECK_S)
            except TimeoutError:
                continue


def main(argv: Sequence[str] | None = None) -> None:
    options = vars(parser().parse_args(argv))
    costs = CostModel(
        **{name: options.pop(name) for name in ("fixed_s", "prefill_s", "decode_s", "transfer_s", "render_s")}
    )
    asyncio.run(serve(LoopbackEngine(costs=costs, **options)))


if __name__ == "__main__":
    main()
