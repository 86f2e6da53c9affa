"""Typed keyword arguments of Backhaul's clients beside openai's, for type checkers; at run time `RouterConfig` is the list."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from backhaul_router.config import RouterConfig
from backhaul_router.errors import ConfigError
from backhaul_router.report import Route

if TYPE_CHECKING:
    import httpx2
    import openai
    from openai._data_residency import DataResidency
    from openai._provider import _Provider
    from openai._types import NotGiven
    from openai.auth import WorkloadIdentity, X509WorkloadIdentity

ENGINE_FIELDS = ("prefill", "decode", "api_key")
SETTINGS = frozenset(f.name for f in dataclasses.fields(RouterConfig) if f.name not in ENGINE_FIELDS)


class RouterSettings(TypedDict, total=False):
    """`RouterConfig`'s settings, documented there."""

    reuse: bool
    match_history: bool
    exact_histories: bool
    route: Route | str | None
    decoder_kv_blocks_ttl: float
    lease_margin_s: float
    kv_recompute_threshold: int
    local_max_tokens: int
    place_by_cost: bool
    load_interval_s: float
    prefill_timeout_s: float
    check_pairs: bool
    retained_tokens_budget: int | None
    one_shot_s: float
    decode_timeout_s: float
    connect_timeout_s: float
    engine_ca_file: str | None
    max_body_bytes: int
    max_conversations: int
    max_conversations_per_tenant: int
    max_branches: int
    max_idle_s: float
    redis_url: str | None
    redis_prefix: str
    redis_timeout_s: float


class _SharedOptions(RouterSettings, total=False):
    admin_api_key: str | None
    workload_identity: WorkloadIdentity | X509WorkloadIdentity | None
    organization: str | None
    project: str | None
    webhook_secret: str | None
    provider: _Provider | None
    base_url: str | httpx2.URL | NotGiven | None
    data_residency: DataResidency | None
    websocket_base_url: str | httpx2.URL | None
    timeout: float | openai.Timeout | NotGiven | None
    max_retries: int
    default_headers: Mapping[str, str] | None
    default_query: Mapping[str, object] | None
    _strict_response_validation: bool
    _enforce_credentials: bool


class ClientOptions(_SharedOptions, total=False):
    api_key: str | Callable[[], str] | None
    http_client: httpx2.Client | None


class AsyncClientOptions(_SharedOptions, total=False):
    api_key: str | Callable[[], Awaitable[str]] | None
    http_client: httpx2.AsyncClient | None


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The router's settings, and everything else."""
    return (
        {name: value for name, value in options.items() if name in SETTINGS},
        {name: value for name, value in options.items() if name not in SETTINGS},
    )


def router_config(
    who: str,
    prefill: Sequence[str] | None,
    decode: Sequence[str] | None,
    engine_api_key: str | None,
    settings: Mapping[str, Any],
) -> RouterConfig:
    """Raises `ConfigError`, which names the field at fault."""
    for given, missing, value in (("decode", "prefill", prefill), ("prefill", "decode", decode)):
        if value is None:
            raise ConfigError(f"{who}: {given}= without {missing}=: the embedded router needs engines of both kinds")
    return RouterConfig(prefill=prefill, decode=decode, api_key=engine_api_key, **settings)  # type: ignore[arg-type]
