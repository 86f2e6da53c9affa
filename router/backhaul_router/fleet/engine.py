"""Value object of an engine, as it described itself: asked once and frozen. Which engines fit together, and who holds leases."""

from __future__ import annotations

import enum
import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import ConfigError, Leg
from ..wire import process_of
from ..wire.endpoint import Api

SUPPORTED = ((0, 32), (0, 33))
"""vLLM versions (major, minor) whose wire protocol is known and run in the tests."""


class Role(enum.StrEnum):
    """Role of an engine."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def leg(self) -> Leg:
        """The step of a turn that such an engine is there for."""
        return Leg.PREFILL if self is Role.PREFILL else Leg.DECODE


@dataclass(frozen=True, slots=True)
class Engine:
    """Engine, as it described itself."""

    url: str
    role: Role
    version: str
    models: tuple[str, ...]
    """Names under which it serves its base model."""
    adapters: frozenset[str]
    """LoRA adapters: their weights can be re-pointed unseen, so token ids prove nothing about their KV."""
    block_size: int | None
    """Tokens of a KV block; `None` when the engine does not say, and then nothing can be cut or proven."""
    max_model_len: int | None
    renders: bool
    """Answers `/v1/chat/completions/render` (`--enable-scale-out`)."""
    streams_handles: bool
    """All of its streams carry the handle, and the generated ids: our plugin is loaded."""
    connector: int | None = None
    """Version of our connector, where it runs and the version is known here."""
    at_start: Mapping[str, int] = field(default_factory=dict, compare=False)
    """The connector's token counters when the engine was asked (`connector_counters`)."""
    started_at: float | None = field(default=None, compare=False)
    """When the process that answered began (`start_of`); `None` where it does not say."""
    ranks: frozenset[str] = frozenset()
    """Its data-parallel ranks, where one address stands for several."""
    kv_tokens: int | None = None
    """Tokens that its KV cache has room for, over all ranks; `None` when the engine does not say."""

    @property
    def hides_handles(self) -> bool:
        """A streamed turn pins blocks there that nobody can release. One of ours retains nothing unless it is asked to."""
        return not self.streams_handles and self.connector is None

    def shows_handle(self, api: Api) -> bool:
        """Whether a streamed answer carries the handle, by our plugin or by vLLM itself."""
        since = api.streams_handles_since
        return self.streams_handles or (since is not None and release(self.version) >= since)

    @property
    def silent_streams(self) -> str:
        """Which streams hide the handle without our plugin."""
        return "its streams of /v1/messages" if release(self.version) >= (0, 33) else "its streams"

    def __str__(self) -> str:
        return f"{self.role} engine {self.url}"


class Holder(NamedTuple):
    """A process that holds leases."""

    decode: str
    """The decode engine's URL."""
    rank: str | None = None
    """Its data-parallel rank, where it has several: each knows its own leases only."""

    @classmethod
    def of(cls, decode: str, engine_id: str) -> Holder:
        """The process that made a handle, by the engine id in it."""
        process = process_of(engine_id)
        return cls(decode, engine_id[len(process) + len("_dp") :] or None)


@functools.cache
def release(version: str) -> tuple[int, int]:
    """Major and minor number of a vLLM version; zeros where it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found is not None else (0, 0)


def check_version(url: str, version: str) -> None:
    """Raises `ConfigError` for a vLLM whose wire protocol is not known."""
    if release(version) not in SUPPORTED:
        known = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise ConfigError(f"{url} runs vLLM {version}; this Backhaul knows the KV transfer protocol of vLLM {known}")


def check_fit(engines: Iterable[Engine]) -> None:
    """Raises `ConfigError` when two engines cannot exchange KV."""
    for first, other in itertools.combinations(engines, 2):
        if not set(first.models) & set(other.models):
            raise ConfigError(
                f"{first} serves {', '.join(first.models)} and {other} serves {', '.join(other.models)}: "
                "prefill and decode engines must serve the same model"
            )
        if first.version != other.version:
            raise ConfigError(
                f"{first} runs vLLM {first.version} and {other} runs {other.version}: "
                "engines exchange KV only between equal builds"
            )
        if first.block_size and other.block_size and first.block_size != other.block_size:
            raise ConfigError(
                f"{first} has KV blocks of {first.block_size} tokens and {other} of {other.block_size}: "
                "start them with one --block-size"
            )
