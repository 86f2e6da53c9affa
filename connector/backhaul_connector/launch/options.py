"""Command-line options of `backhaul up`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..settings import Settings
from .command import Connector, Device, EnginesConfig
from .models import BUILT_IN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options; their defaults are those of `EnginesConfig`."""
    defaults = EnginesConfig()
    parser.add_argument(
        "--model",
        default=defaults.model,
        metavar="DIR_OR_NAME",
        help=f"a directory, a name that vLLM knows, or {' or '.join(BUILT_IN)}, built on first use (default: %(default)s)",
    )
    parser.add_argument("--prefill-engines", type=int, default=defaults.prefill_engines, metavar="N")
    parser.add_argument("--decode-engines", type=int, default=defaults.decode_engines, metavar="N")
    parser.add_argument("--python", metavar="PATH", help="the Python that has vLLM (default: this one)")
    parser.add_argument(
        "--device",
        choices=["auto", *(str(device) for device in Device)],
        default="auto",
        help="auto: what the installed vLLM was built for (default: %(default)s)",
    )
    parser.add_argument(
        "--connector",
        choices=[str(connector) for connector in Connector],
        default=str(defaults.connector),
        help="what moves KV: backhaul's own, which proves every read, or vLLM's (default: %(default)s)",
    )
    parser.add_argument(
        "--connector-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"a setting of backhaul's connector ({', '.join(Settings.__struct_fields__)}); may be repeated",
    )
    parser.add_argument("--dtype", metavar="TYPE", help="such as float32 (default: the model's)")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS")
    parser.add_argument(
        "--no-prefix-caching-on-prefill",
        dest="prefill_prefix_caching",
        action="store_false",
        help="so that whatever a prefill engine does not compute was read from a decode engine",
    )
    parser.add_argument(
        "--decoder-kv-blocks-ttl",
        type=float,
        default=defaults.decoder_kv_blocks_ttl,
        metavar="SECONDS",
        help="how long a decode engine keeps a finished turn's blocks (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-recompute-threshold",
        type=int,
        default=defaults.kv_recompute_threshold,
        metavar="TOKENS",
        help="fewer reusable tokens than these are computed rather than read (default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the engines' command lines, and start nothing")


def config_from(args: argparse.Namespace, vllm_args: Sequence[str]) -> EnginesConfig:
    """The configuration that the options describe. Raises `LaunchError`."""
    return EnginesConfig(
        model=args.model,
        prefill_engines=args.prefill_engines,
        decode_engines=args.decode_engines,
        python=args.python,
        device=None if args.device == "auto" else Device(args.device),
        connector=Connector(args.connector),
        connector_options=tuple(args.connector_option),
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        prefill_prefix_caching=args.prefill_prefix_caching,
        decoder_kv_blocks_ttl=args.decoder_kv_blocks_ttl,
        kv_recompute_threshold=args.kv_recompute_threshold,
        vllm_args=tuple(vllm_args),
    )
