"""Configuration: the connector's own keys in `kv_connector_extra_config`, beside those of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta


class BadSetting(ValueError):
    """A key of `kv_connector_extra_config` is no such thing; the message says which and what it must be."""


class Settings(msgspec.Struct, frozen=True):
    lease_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Of the lease channel; 0 takes a free one. With data parallelism each rank adds its index."""
    claim_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 1.0
    """How long P waits for an answer before it computes the prompt."""
    hold_s: Annotated[float, Meta(ge=1, le=600)] = 30.0
    """How long a granted claim keeps blocks for its reader."""
    max_leased_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Of the engine's KV blocks: beyond it the oldest leases end, so that requests find room."""


def read(extra_config: Mapping[str, Any]) -> Settings:
    """Raises `BadSetting`."""
    try:
        return msgspec.convert({k: v for k, v in extra_config.items() if k in Settings.__struct_fields__}, Settings)
    except msgspec.ValidationError as error:
        raise BadSetting(f"kv_connector_extra_config: {error}") from None


def read_options(options: Sequence[str]) -> dict[str, object]:
    """`NAME=VALUE` texts as keys for `kv_connector_extra_config`. Raises `BadSetting`."""
    given: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or name not in Settings.__struct_fields__:
            known = ", ".join(Settings.__struct_fields__)
            raise BadSetting(f"--connector-option {option}: NAME=VALUE, where NAME is one of {known}")
        given[name] = value
    try:
        settings = msgspec.convert(given, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise BadSetting(f"--connector-option: {error}") from None
    return {name: getattr(settings, name) for name in given}
