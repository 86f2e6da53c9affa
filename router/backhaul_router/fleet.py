"""The engines: what each of them is, what the router has learned of it, and what it is doing now.

What an engine *is* (`Engine`) is asked once and frozen; what changes (`Fleet`) is kept here and nowhere else.
"""

from __future__ import annotations

import enum
import itertools
import re
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from .errors import ConfigError
from .report import ReuseReport
from .wire import process_of

SUPPORTED = ((0, 32), (0, 33))
"""vLLM versions (major, minor) whose wire protocol is known: 0.32 is run in the tests, 0.33 was read."""


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine, as it described itself."""

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
    """Its streams carry the handle: our plugin is loaded, or vLLM does it by itself."""

    def __str__(self) -> str:
        return f"{self.role} engine {self.url}"


_BLOCK_SIZE = re.compile(r'^vllm:cache_config_info\{[^}]*\bblock_size="(\d+)"', re.MULTILINE)


def block_size_of(metrics: str) -> int | None:
    """The block size that an engine's `/metrics` page names."""
    found = _BLOCK_SIZE.search(metrics)
    return int(found[1]) if found else None


def has_plugin(metrics: str) -> bool:
    """Whether the engine's `/metrics` page says that our stream plugin is loaded."""
    return re.search(r'^backhaul_plugin_info\{version="1"\} 1', metrics, re.MULTILINE) is not None


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def read_models(body: bytes) -> tuple[tuple[str, ...], frozenset[str], int | None]:
    """Base model names, adapter names and context length from `/v1/models`. Raises `msgspec.DecodeError`."""
    cards = msgspec.json.decode(body, type=_Cards).data
    bases = [card for card in cards if not card.parent]
    lengths = [card.max_model_len for card in bases if card.max_model_len]
    names = tuple(card.id for card in bases)
    return names, frozenset(card.id for card in cards if card.parent), min(lengths, default=None)


def check_version(url: str, version: str) -> None:
    """Raises `ConfigError` for a vLLM whose wire protocol is not known."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) not in SUPPORTED:
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


@dataclass
class _Rate:
    """Milliseconds per token, smoothed."""

    ms_per_token: float = 0.0
    turns: int = 0

    def add(self, ms: float, tokens: int) -> None:
        self.turns += 1
        weight = max(1 / self.turns, 0.2)
        self.ms_per_token += weight * (ms / tokens - self.ms_per_token)


@dataclass
class Counters:
    """What the router counts; each has its line in the docs on operation."""

    turns: Counter[str] = field(default_factory=Counter)
    """By route."""
    reasons: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    releases: int = 0
    failed_releases: int = 0
    unreachable_pins: int = 0
    """Streamed turns whose handle the engine kept to itself: D pins their blocks until the TTL."""
    proof_faults: int = 0
    """An engine ran other ids than those it was sent; nothing of such a turn is kept."""


class Fleet:
    """The engines, and what changes about them. Methods hold a lock and never await."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._by_url: dict[str, Engine] = {engine.url: engine for engine in engines}
        self.counters = Counters()
        self._in_flight: Counter[str] = Counter()
        self._engine_ids: dict[str, str] = {}
        self._rates: dict[str, _Rate] = {}
        self.ignores_ids = False
        """An engine ran other ids than it was sent: token ids prove nothing in this fleet."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        busy = ", ".join(f"{url}: {n}" for url, n in sorted(self._in_flight.items()) if n)
        return f"<Fleet {len(self.prefill)} prefill, {len(self.decode)} decode; in flight {{{busy}}}>"

    @property
    def prefill(self) -> tuple[Engine, ...]:
        return tuple(engine for engine in self._by_url.values() if engine.role is Role.PREFILL)

    @property
    def decode(self) -> tuple[Engine, ...]:
        return tuple(engine for engine in self._by_url.values() if engine.role is Role.DECODE)

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(self._by_url.values())

    def add(self, engine: Engine) -> None:
        """An engine that could not be reached before. Raises `ConfigError` when it does not fit the others."""
        check_fit([*self.engines, engine])
        with self._lock:
            self._by_url = {**self._by_url, engine.url: engine}

    def get(self, url: str | None) -> Engine | None:
        return self._by_url.get(url) if url else None

    def pick(self, role: Role, preferred: str | None = None, without: Iterable[str] = ()) -> Engine | None:
        """The preferred engine where it may be used, else the least busy; `None` when all are excluded."""
        excluded = set(without)
        engines = [e for e in (self.prefill if role is Role.PREFILL else self.decode) if e.url not in excluded]
        for engine in engines:
            if engine.url == preferred:
                return engine
        with self._lock:
            return min(engines, key=lambda engine: self._in_flight[engine.url], default=None)

    def begin(self, engine: Engine) -> None:
        with self._lock:
            self._in_flight[engine.url] += 1

    def end(self, engine: Engine) -> None:
        with self._lock:
            self._in_flight[engine.url] -= 1

    def saw_engine_id(self, engine: Engine, engine_id: str) -> str | None:
        """Notes the id in an engine's newest handle. Returns the id before, when the engine has restarted since: its
        blocks are gone. Data-parallel ranks differ by a suffix and are no restart."""
        base = process_of(engine_id)
        with self._lock:
            before = self._engine_ids.get(engine.url)
            self._engine_ids[engine.url] = base
        return before if before is not None and before != base else None

    def made_by_current(self, decode: str, engine_id: str) -> bool:
        """Whether a handle's engine is configured and, as far as is known, still the same process."""
        known = self._engine_ids.get(decode)
        return decode in self._by_url and (known is None or known == process_of(engine_id))

    def learn_prefill(self, engine: Engine, ms: float, computed: int) -> None:
        """Notes what a cold prefill cost."""
        if computed >= 32:
            with self._lock:
                self._rates.setdefault(engine.url, _Rate()).add(ms, computed)

    def prefill_rate(self, engine: Engine | None) -> tuple[float, int] | None:
        """Milliseconds per computed token on an engine (of all prefill engines where none is named), and from how many
        cold turns; `None` before the first."""
        rates = [self._rates[engine.url]] if engine and engine.url in self._rates else list(self._rates.values())
        turns = sum(rate.turns for rate in rates)
        if not turns:
            return None
        return sum(rate.ms_per_token * rate.turns for rate in rates) / turns, turns

    def note_ids_ignored(self) -> None:
        """From now on no turn is proven by token ids."""
        with self._lock:
            self.ignores_ids = True
            self.counters.proof_faults += 1

    def count(self, report: ReuseReport) -> None:
        with self._lock:
            self.counters.turns[report.route] += 1
            if report.reason:
                self.counters.reasons[report.reason] += 1
            self.counters.retries += report.retries

    def count_unreachable_pin(self) -> None:
        with self._lock:
            self.counters.unreachable_pins += 1

    def count_release(self, *, failed: bool) -> None:
        with self._lock:
            self.counters.releases += 1
            self.counters.failed_releases += failed
