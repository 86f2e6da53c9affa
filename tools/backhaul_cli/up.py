"""`backhaul up`: engines and a router on this machine, which end together."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from backhaul_connector import settings as connector_settings
from backhaul_connector.launch import cluster
from backhaul_connector.launch.cluster import Connector, Device, Engines, EnginesConfig
from backhaul_connector.launch.models import BUILT_IN
from backhaul_router.config import RouterConfig
from backhaul_router.errors import ConfigError
from backhaul_router.serve.admission import Limits
from backhaul_router.serve.options import engine_api_key
from backhaul_router.serve.settings import ServerSettings, Settings
from backhaul_router.serve.tenants import Tenants

from .serve import server_module

_SETTINGS = ", ".join(connector_settings.Settings.__struct_fields__)
_MODEL = f"a directory, a name that vLLM knows, or {' or '.join(BUILT_IN)}, built on first use"


@dataclass(frozen=True, kw_only=True)
class Options:
    model: Annotated[str, "DIR_OR_NAME", _MODEL] = EnginesConfig.model
    prefill_engines: Annotated[int, "how many"] = EnginesConfig.prefill_engines
    decode_engines: Annotated[int, "how many"] = EnginesConfig.decode_engines
    python: Annotated[str | None, "PATH", "the Python that has vLLM (default: this one)"] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], "auto: what the installed vLLM was built for"] = "auto"
    connector: Annotated[Connector, "what moves KV: backhaul's own, which proves every read, or vLLM's"] = (
        EnginesConfig.connector
    )
    connector_option: Annotated[
        list[str] | None,
        "NAME=VALUE",
        f"a setting of backhaul's connector ({_SETTINGS}); may be repeated",
        str,
        {"action": "append"},
    ] = None
    dtype: Annotated[str | None, "TYPE", "such as float32 (default: the model's)"] = None
    max_model_len: Annotated[int | None, "TOKENS", "(default: the model's)"] = None
    no_prefix_caching_on_prefill: Annotated[
        bool, "so that whatever a prefill engine does not compute was read from a decode engine"
    ] = False
    decoder_kv_blocks_ttl: Annotated[float, "SECONDS", "how long a decode engine keeps a finished turn's blocks"] = (
        EnginesConfig.decoder_kv_blocks_ttl
    )
    kv_recompute_threshold: Annotated[
        int, "TOKENS", "fewer reusable tokens than these are computed rather than read"
    ] = EnginesConfig.kv_recompute_threshold
    vllm_args: tuple[str, ...] = ()
    dry_run: Annotated[bool, "print the engines' command lines, and start nothing"] = False
    no_router: Annotated[bool, "start the engines only"] = False
    host: Annotated[str, "where the router listens"] = "127.0.0.1"
    port: Annotated[int | None, "the router's (default: 8000, or a free one where that is in use)"] = None

    def engines(self) -> EnginesConfig:
        """Raises `LaunchError`."""
        words = {field.name: getattr(self, field.name) for field in fields(EnginesConfig) if field.name in vars(self)}
        words["device"] = None if self.device == "auto" else Device(self.device)
        words["connector_options"] = tuple(self.connector_option or ())
        words["prefill_prefix_caching"] = not self.no_prefix_caching_on_prefill
        return EnginesConfig(**words)


def main(options: Options) -> int:
    """Until something ends it. Raises `LaunchError`, `ConfigError`, `CommandError`."""
    config = options.engines()
    if options.dry_run or options.no_router:
        return cluster.up(config, dry_run=options.dry_run)
    tenants = Tenants.from_options(None)
    engine_api_key()  # before engines take minutes to start
    with _listener(options.host, options.port) as listener:
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

    settings = Settings(router=_config_for(engines), server=ServerSettings(), limits=Limits(), tenants=tenants)
    server_module().serve_settings(listener, settings, started=started, check=engines.check)


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
