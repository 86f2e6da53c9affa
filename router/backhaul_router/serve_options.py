"""The options of `backhaul serve`: the engines, the address, and one for each setting of `RouterConfig`."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from .config import RouterConfig
from .report import Route

API_KEY_VARIABLE = "BACKHAUL_ENGINE_API_KEY"
"""What the engines want as a bearer token. Not an option: everybody on a machine can read command lines."""

_ELSEWHERE = ("prefill", "decode", "api_key")
_HELP: Mapping[str, tuple[str, str]] = {
    "reuse": ("", "run every turn cold, and release what it leaves"),
    "match_history": (
        "",
        "do not go by the messages of requests that name no conversation: they leave nothing to reuse",
    ),
    "exact_histories": ("", "put the engine's own tokens in place of an answer that comes back as other tokens"),
    "route": ("", "force a route wherever it is possible and exact"),
    "decoder_kv_blocks_ttl": ("SECONDS", "how long decode engines keep a finished turn's blocks: as they were started"),
    "lease_margin_s": ("SECONDS", "a handle is not used in the last seconds before its lease ends"),
    "kv_recompute_threshold": ("TOKENS", "fewer reusable tokens than these are computed rather than read"),
    "local_max_tokens": ("TOKENS", "an uncached suffix of at most this length runs on the decode engine alone"),
    "prefill_timeout_s": ("SECONDS", "limit of a prefill"),
    "check_pairs": (
        "",
        "do not try whether a stock prefill engine can read from a decode engine before it is asked to",
    ),
    "retained_tokens_budget": (
        "TOKENS",
        "a decode engine keeps at most so many for conversations that may go on (default: half of its KV cache)",
    ),
    "one_shot_s": ("SECONDS", "how long what a request without a conversation leaves is kept, unless one continues it"),
    "decode_timeout_s": ("SECONDS", "longest silence of a decode engine"),
    "connect_timeout_s": ("SECONDS", "limit of connecting to an engine"),
    "max_body_bytes": ("BYTES", "a larger request is answered 413"),
    "max_conversations": ("N", "so many are kept; beyond, the one that was silent for longest is dropped"),
    "max_conversations_per_tenant": ("N", "so many of one tenant's, where there are API keys"),
    "max_branches": ("N", "histories that one conversation keeps at a time"),
    "max_idle_s": ("SECONDS", "a conversation that was silent for this long is forgotten"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options; defaults are those of `RouterConfig`."""
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", action="append", required=True, metavar="URL", help="repeat for several engines"
        )
    settings = parser.add_argument_group("settings")
    for field in dataclasses.fields(RouterConfig):
        if field.name not in _ELSEWHERE:
            _add_setting(settings, field)


def _add_setting(settings: argparse._ArgumentGroup, field: dataclasses.Field[Any]) -> None:
    flag = field.name.replace("_", "-")
    metavar, text = _HELP.get(field.name, ("VALUE", ""))
    if isinstance(field.default, bool):
        if field.default:
            settings.add_argument(f"--no-{flag}", dest=field.name, action="store_false", help=text)
        else:
            settings.add_argument(f"--{flag}", action="store_true", help=text)
    elif field.name == "route":
        settings.add_argument("--route", choices=[str(route) for route in Route], help=text)
    elif isinstance(field.default, int | float):
        kind = type(field.default)
        shown = f"{text} (default: %(default)s)".strip()
        settings.add_argument(f"--{flag}", type=kind, default=field.default, metavar=metavar, help=shown)
    elif field.type == "int | None":
        settings.add_argument(f"--{flag}", type=int, default=field.default, metavar=metavar, help=text)
    else:
        settings.add_argument(f"--{flag}", default=field.default, metavar=metavar, help=text)


def config_from(args: argparse.Namespace) -> RouterConfig:
    """The configuration that the options and the environment describe. Raises `ConfigError`."""
    names = [field.name for field in dataclasses.fields(RouterConfig) if field.name not in _ELSEWHERE]
    settings = {name: getattr(args, name) for name in names}
    return RouterConfig(prefill=args.prefill, decode=args.decode, api_key=engine_api_key(), **settings)


def engine_api_key() -> str | None:
    return os.environ.get(API_KEY_VARIABLE) or None
