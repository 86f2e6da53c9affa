"""HTTP clients that run on an embedded router, for any framework that takes one."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Unpack

import openai
from backhaul_router.config import RouterConfig
from backhaul_router.drive.embedded import make_async_transport, make_transport
from backhaul_router.drive.router import Router
from backhaul_router.drive.tracer_provider import tracing_of

from . import _totals
from ._options import RouterSettings, router_config

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

EMBEDDED_URL = "http://embedded.backhaul.invalid/v1"
"""Where embedded clients seem to send their requests: a name that cannot resolve, should one ever reach the network."""


def http_client(
    *,
    prefill: Sequence[str],
    decode: Sequence[str],
    module: ModuleType | None = None,
    engine_api_key: str | None = None,
    tracer_provider: TracerProvider | None = None,
    **settings: Unpack[RouterSettings],
) -> Any:
    """A `Client` of `module` (`httpx2` or `httpx`; by default the one that the installed openai is built on) whose
    requests an embedded router answers, whatever their host. Closing it releases what the engines hold.

    `settings` are those of `RouterConfig`. Turns are traced over `tracer_provider`, or over the one that the program has set for
    OpenTelemetry by now. Raises `ConfigError`."""
    config = router_config("http_client", prefill, decode, engine_api_key, settings)
    return embedded_client(config, module or openais_http_module(), tracer_provider)


def async_http_client(
    *,
    prefill: Sequence[str],
    decode: Sequence[str],
    module: ModuleType | None = None,
    engine_api_key: str | None = None,
    tracer_provider: TracerProvider | None = None,
    **settings: Unpack[RouterSettings],
) -> Any:
    """The same as an `AsyncClient`."""
    config = router_config("async_http_client", prefill, decode, engine_api_key, settings)
    return embedded_async_client(config, module or openais_http_module(), tracer_provider)


def embedded_client(config: RouterConfig, module: ModuleType, provider: TracerProvider | None = None) -> Any:
    return _marked(module.Client(transport=make_transport(_router(config, provider), module), **_defaults(module)))


def embedded_async_client(config: RouterConfig, module: ModuleType, provider: TracerProvider | None = None) -> Any:
    transport = make_async_transport(_router(config, provider), module)
    return _marked(module.AsyncClient(transport=transport, **_defaults(module)))


def _router(config: RouterConfig, provider: TracerProvider | None) -> Router:
    return Router(config, on_report=_totals.note, tracing=tracing_of(provider))


def is_embedded(client: Any) -> bool:
    """Whether an HTTP client was made here: its router puts reports on record by itself."""
    return client in _embedded


def _marked(client: Any) -> Any:
    _embedded.add(client)
    return client


_embedded: weakref.WeakSet[Any] = weakref.WeakSet()


def openais_http_module() -> ModuleType:
    """`httpx2` for openai 3, `httpx` for openai 2."""
    return importlib.import_module(openai.DefaultHttpxClient.mro()[1].__module__.partition(".")[0])


def _defaults(module: ModuleType) -> dict[str, Any]:
    """What openai sets for its own clients; and nothing from the environment, such as proxies and netrc."""
    return {
        "base_url": EMBEDDED_URL,
        "timeout": module.Timeout(timeout=600.0, connect=5.0),
        "follow_redirects": True,
        "trust_env": False,
    }
