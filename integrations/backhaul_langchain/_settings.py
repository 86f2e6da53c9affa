"""Settings of the embedded router as fields of a pydantic model."""

from __future__ import annotations

from typing import Any

from backhaul._options import SETTINGS
from backhaul_router.report import Route
from langchain_core.utils import secret_from_env
from pydantic import BaseModel, Field, SecretStr


class RouterFields(BaseModel):
    """The engines of an embedded router, and the settings of `RouterConfig`; `None` stands for its default."""

    prefill: list[str] | None = None
    """Base URLs of the prefill engines. With `decode`, they make an embedded router: no server to run."""
    decode: list[str] | None = None
    engine_api_key: SecretStr | None = Field(
        default_factory=secret_from_env("BACKHAUL_ENGINE_API_KEY", default=None), repr=False
    )
    """What the engines see as a bearer token; from `BACKHAUL_ENGINE_API_KEY` where it is not given."""
    reuse: bool | None = None
    match_history: bool | None = None
    exact_histories: bool | None = None
    route: Route | str | None = None
    decoder_kv_blocks_ttl: float | None = None
    lease_margin_s: float | None = None
    kv_recompute_threshold: int | None = None
    local_max_tokens: int | None = None
    place_by_cost: bool | None = None
    load_interval_s: float | None = None
    prefill_timeout_s: float | None = None
    check_pairs: bool | None = None
    decode_timeout_s: float | None = None
    connect_timeout_s: float | None = None
    max_body_bytes: int | None = None
    max_conversations: int | None = None
    max_conversations_per_tenant: int | None = None
    max_branches: int | None = None
    max_idle_s: float | None = None
    retained_tokens_budget: int | None = None
    one_shot_s: float | None = None
    redis_url: str | None = Field(default=None, repr=False)
    redis_prefix: str | None = None
    redis_timeout_s: float | None = None
    engine_ca_file: str | None = None

    def _router_settings(self) -> dict[str, Any]:
        """Those that were given."""
        given = {name: getattr(self, name) for name in sorted(SETTINGS & set(type(self).model_fields))}
        return {name: value for name, value in given.items() if value is not None}
