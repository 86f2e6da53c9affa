"""The options of `backhaul serve`: one for every setting that is no secret. What is given goes before the configuration file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import engine_key
from ..engine_key import ENGINE_KEY_VARIABLE
from .settings import REDIS_URL_VARIABLE, SETTINGS, Setting, Settings, load

_TITLES = {"server": "server", "engines": "engines", "limits": "limits", "router": "settings"}
_HELP: Mapping[str, tuple[str, str]] = {
    "prefill": ("URL", "repeat for several engines"),
    "decode": ("URL", "repeat for several engines"),
    "engine_ca_file": ("FILE", "authorities to trust engines behind https by, PEM (default: the system's)"),
    "host": ("HOST", "where it listens"),
    "port": ("PORT", "0 takes a free one"),
    "grace_s": ("SECONDS", "how long requests may take to finish when it is told to stop"),
    "shutdown_delay_s": (
        "SECONDS",
        "how long it goes on before that, with /ready at 503, so that nothing new is sent to it",
    ),
    "workers": (
        "N",
        "processes that serve the address together, with --redis-url: as many as there are processors for them",
    ),
    "tls_cert": ("FILE", "serve https with this certificate and those that lead to its authority, PEM"),
    "tls_key": ("FILE", "the certificate's private key (default: in the certificate's file)"),
    "log_format": ("", "what its log looks like"),
    "log_turns": ("", "whether the log has a line for each turn"),
    "metrics_public": ("", "whether /metrics answers to clients on other machines"),
    "otlp_endpoint": (
        "URL",
        "OpenTelemetry collector for spans of every turn, as http://host:4318 (or OTEL_EXPORTER_OTLP_ENDPOINT)",
    ),
    "api_keys": (
        "FILE",
        "TOML with [tenants.NAME] keys = [...]: who may ask (or BACKHAUL_API_KEYS=name=key,...; default: everybody)",
    ),
    "max_concurrent_turns": ("N", "turns that run at a time; 0 is no limit"),
    "max_queued_turns": ("N", "turns that wait for one to end; more are answered 429"),
    "queue_timeout_s": ("SECONDS", "longest wait; a turn that still has no place then is answered 503"),
    "reuse": ("", "without: run every turn cold, and release what it leaves"),
    "match_history": (
        "",
        "whether requests that name no conversation go by their messages; without, they leave nothing to reuse",
    ),
    "exact_histories": ("", "put the engine's own tokens in place of an answer that comes back as other tokens"),
    "route": ("", "force a route wherever it is possible and exact"),
    "decoder_kv_blocks_ttl": ("SECONDS", "how long decode engines keep a finished turn's blocks: as they were started"),
    "lease_margin_s": ("SECONDS", "a handle is not used in the last seconds before its lease ends"),
    "kv_recompute_threshold": ("TOKENS", "fewer reusable tokens than these are computed rather than read"),
    "local_max_tokens": ("TOKENS", "an uncached suffix of at most this length runs on the decode engine alone"),
    "place_by_cost": ("", "choose routes by the thresholds alone, whatever was measured"),
    "load_interval_s": ("SECONDS", "how often engines are asked for their load, where a role has several; 0 never"),
    "prefill_timeout_s": ("SECONDS", "limit of a prefill"),
    "check_pairs": (
        "",
        "whether to try if a stock prefill engine can read from a decode engine before it is asked to",
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
    "redis_url": (
        "URL",
        "a Redis or Valkey server on which routers share conversations, such as redis://host:6379/0; one with a password is "
        f"better in {REDIS_URL_VARIABLE}",
    ),
    "redis_prefix": ("NAME", "begins every key there"),
    "redis_timeout_s": ("SECONDS", "longest wait for an answer of that server"),
    "max_idle_s": ("SECONDS", "a conversation that was silent for this long is forgotten"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options. Those that are not given are not in the namespace: the file and the defaults count."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML; options that are given go before it")
    parser.add_argument(
        "--check", action="store_true", help="say what is wrong with the configuration, ask no engine, and end"
    )
    for table, title in _TITLES.items():
        group = parser.add_argument_group(title)
        for setting in SETTINGS:
            if setting.table == table and not setting.secret:
                _add_setting(group, setting)


def _add_setting(group: argparse._ArgumentGroup, setting: Setting) -> None:
    flag = f"--{setting.name.replace('_', '-')}"
    metavar, text = _HELP.get(setting.name, ("VALUE", ""))
    if setting.default is not None:
        default = "yes" if setting.default is True else "no" if setting.default is False else setting.default
        text = f"{text} (default: {default})".strip()
    words: dict[str, Any]
    if setting.kind is bool:
        words = {"action": argparse.BooleanOptionalAction}
    elif setting.kind is list:
        words = {"action": "append", "metavar": metavar}
    elif setting.kind in (int, float, str):
        words = {"type": setting.kind, "metavar": metavar}
    else:
        words = {"choices": [str(one) for one in setting.kind]}
    group.add_argument(flag, default=argparse.SUPPRESS, help=text, **words)


def settings_from(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Settings:
    """What the options, their file and the environment come to; may be called again, and reads the file anew. Raises
    `ConfigError`."""
    given = vars(args)
    return load(args.config, {one.name: given[one.name] for one in SETTINGS if one.name in given}, environ)


def engine_api_key() -> str | None:
    """The environment's. Raises `ConfigError` for one that cannot be sent."""
    if key := os.environ.get(ENGINE_KEY_VARIABLE):
        engine_key.check(key)
    return key or None
