"""Discovery: engines are asked what they are, before the first turn runs on them."""

from __future__ import annotations

import asyncio

import msgspec

from ..errors import ConfigError
from ..fleet.engine import Engine, Role, check_version
from ..wire.engine_metrics import (
    block_size_of,
    connector_counters,
    connector_of,
    has_plugin,
    kv_tokens_of,
    page_of,
    ranks_of,
    start_of,
)
from .client import EngineAnswer, EngineCall, EngineClient, EngineFailure


class Unreachable(Exception):
    """Error: an engine does not answer; the message says how."""


async def describe(client: EngineClient, url: str, role: Role, timeout_s: float = 30.0) -> Engine:
    """Asks one engine. Raises `Unreachable`, or `ConfigError` for one that answers and cannot be used."""
    try:
        version, models, metrics = await asyncio.gather(
            *(
                client.call(EngineCall(url + path, timeout_s=timeout_s))
                for path in ("/version", "/v1/models", "/metrics")
            )
        )
    except EngineFailure as failure:
        raise Unreachable(failure.message) from None
    for answer, path in ((version, "/version"), (models, "/v1/models")):
        _check(url + path, answer)
    try:
        number = msgspec.json.decode(version.body, type=dict[str, str])["version"]
        names, adapters, max_model_len = _read_models(models.body)
    except (msgspec.DecodeError, KeyError) as error:
        raise ConfigError(f"{url} does not answer like a vLLM engine: {error}") from None
    check_version(url, number)
    if not names:
        raise ConfigError(f"{url} serves no model")
    page = page_of(metrics.body, url) if metrics.status == 200 else ""
    return Engine(
        url=url,
        role=role,
        version=number,
        models=names,
        adapters=adapters,
        block_size=block_size_of(page),
        max_model_len=max_model_len,
        renders=await _renders(client, url, names[0], timeout_s),
        streams_handles=has_plugin(page),
        connector=connector_of(page),
        at_start=connector_counters(page) if connector_of(page) else {},
        started_at=start_of(page),
        ranks=ranks_of(page),
        kv_tokens=kv_tokens_of(page),
    )


async def process_began(client: EngineClient, url: str, timeout_s: float = 2.0) -> float | None:
    """When the process that answers there began (`start_of`); `None` where that is not to be known."""
    try:
        answer = await client.call(EngineCall(url + "/metrics", timeout_s=timeout_s))
    except EngineFailure:
        return None
    return start_of(page_of(answer.body, url)) if answer.status == 200 else None


def _check(url: str, answer: EngineAnswer) -> None:
    if answer.status in (401, 403):
        raise ConfigError(f"{url} answers {answer.status}: the engines want an API key (engine_api_key=)")
    if answer.status >= 500:
        raise Unreachable(f"{url} answers {answer.status}")
    if answer.status != 200:
        raise ConfigError(f"{url} answers {answer.status}: is this the base URL of a vLLM engine?")


async def _renders(client: EngineClient, url: str, model: str, timeout_s: float) -> bool:
    """Whether the engine renders for others: 403 or 404 without `--enable-scale-out`."""
    body = msgspec.json.encode({"model": model, "prompt": "a", "max_tokens": 1})
    try:
        answer = await client.call(EngineCall(url + "/v1/completions/render", body, timeout_s=timeout_s))
    except EngineFailure as failure:
        raise Unreachable(failure.message) from None
    return answer.status == 200


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def _read_models(body: bytes) -> tuple[tuple[str, ...], frozenset[str], int | None]:
    """Base model names, adapter names and context length from `/v1/models`. Raises `msgspec.DecodeError`."""
    cards = msgspec.json.decode(body, type=_Cards).data
    bases = [card for card in cards if not card.parent]
    lengths = [card.max_model_len for card in bases if card.max_model_len]
    names = tuple(card.id for card in bases)
    return names, frozenset(card.id for card in cards if card.parent), min(lengths, default=None)
