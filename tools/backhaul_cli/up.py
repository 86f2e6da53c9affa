"""`backhaul up`: engines and a router on this machine, which end together."""

from __future__ import annotations

import argparse
import contextlib
import socket
from collections.abc import Iterator, Sequence

from backhaul_connector.launch import cluster, options
from backhaul_connector.launch.cluster import Engines
from backhaul_router.config import RouterConfig
from backhaul_router.errors import ConfigError
from backhaul_router.serve.options import engine_api_key
from backhaul_router.serve.tenants import Tenants

from .serve import server_module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] [-- vLLM flags for every engine]"
    options.add_arguments(parser)
    router = parser.add_argument_group("router")
    router.add_argument("--no-router", dest="router", action="store_false", help="start the engines only")
    router.add_argument("--host", default="127.0.0.1", help="where the router listens (default: %(default)s)")
    router.add_argument("--port", type=int, help="(default: 8000, or a free one where that is in use)")


def run(args: argparse.Namespace, passed_on: Sequence[str]) -> int:
    """Until something ends it. Raises `LaunchError`, `ConfigError`, `CommandError`."""
    config = options.config_from(args, passed_on)
    if args.dry_run or not args.router:
        return cluster.up(config, dry_run=args.dry_run)
    tenants = Tenants.from_options(None)
    engine_api_key()  # before engines take minutes to start
    with _listener(args.host, args.port) as listener:
        return cluster.up(config, run=lambda engines: _route(engines, listener, tenants))


@contextlib.contextmanager
def _listener(host: str, port: int | None) -> Iterator[socket.socket]:
    """The router's address, taken before anything is started."""
    server = server_module("--no-router starts the engines alone")
    if port is None:
        try:
            listener = server.listen(host, server.DEFAULT_PORT)
        except ConfigError:
            listener = server.listen(host, 0)
    else:
        listener = server.listen(host, port)
    with listener:
        yield listener


def _route(engines: Engines, listener: socket.socket, tenants: Tenants) -> None:
    """Runs the router for as long as the engines run. Raises `LaunchError` when one has ended."""

    def started(url: str) -> None:
        print(cluster.how_to_reach(engines, url), flush=True)

    server_module().serve_on(listener, _config_for(engines), started=started, check=engines.check, tenants=tenants)


def _config_for(engines: Engines) -> RouterConfig:
    ttl = engines.config.decoder_kv_blocks_ttl
    return RouterConfig(
        prefill=tuple(engine.url for engine in engines.prefill),
        decode=tuple(engine.url for engine in engines.decode),
        decoder_kv_blocks_ttl=ttl,
        lease_margin_s=min(10.0, ttl / 4),
        kv_recompute_threshold=engines.config.kv_recompute_threshold,
        api_key=engine_api_key(),
    )
