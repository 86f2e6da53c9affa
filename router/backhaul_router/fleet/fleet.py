"""The engines: what each of them is, what the router has learned of it, and what it is doing now.

What an engine *is* (`Engine`) is asked once and frozen; what changes (`Fleet`) is kept here and nowhere else.
"""

from __future__ import annotations

import enum
import functools
import itertools
import logging
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ..errors import ConfigError, FailureKind, Leg
from ..report import ReuseReport, Route
from ..wire import process_of
from ..wire.connector_object import Account
from ..wire.endpoint import Api
from .breakers import Breakers, BreakerState, Where, Who
from .costs import Costs
from .load import Gauges, Load
from .restarts import Asked, Processes, is_fixed
from .retention import Reserved, Retention

log = logging.getLogger("backhaul")

SUPPORTED = ((0, 32), (0, 33))
"""vLLM versions (major, minor) whose wire protocol is known and run in the tests."""


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def leg(self) -> Leg:
        """The step of a turn that such an engine is there for."""
        return Leg.PREFILL if self is Role.PREFILL else Leg.DECODE


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


_RANK = re.compile(r"_dp(\d+)$")


class Holder(NamedTuple):
    """A process that holds leases."""

    decode: str
    """The decode engine's URL."""
    rank: str | None = None
    """Its data-parallel rank, where it has several: each knows its own leases only."""

    @classmethod
    def of(cls, decode: str, engine_id: str) -> Holder:
        """The process that made a handle, by the engine id in it."""
        found = _RANK.search(engine_id) if "_dp" in engine_id else None
        return cls(decode, found[1] if found else None)


_BLOCK_SIZE = re.compile(r'^vllm:cache_config_info\{[^}]*\bblock_size="(\d+)"', re.MULTILINE)


def block_size_of(metrics: str) -> int | None:
    """The block size that an engine's `/metrics` page names."""
    found = _BLOCK_SIZE.search(metrics)
    return int(found[1]) if found else None


def kv_tokens_of(metrics: str) -> int | None:
    """How many tokens fit into the engine's KV cache, by its `/metrics` page. With data parallelism vLLM 0.32 writes the sum of
    `num_gpu_blocks` beside every rank, and what one rank has as `kv_cache_size_tokens` (v1/engine/core_client.py)."""
    lines = re.findall(r"^vllm:cache_config_info\{([^}]*)\}", metrics, re.MULTILINE)
    found = dict(re.findall(r'\b(block_size|num_gpu_blocks|kv_cache_size_tokens)="(\d+)"', lines[0] if lines else ""))
    if size := int(found.get("kv_cache_size_tokens", 0)):
        return size * len(lines)
    blocks = int(found.get("num_gpu_blocks", 0)) - len(lines)  # less the null block of each
    return blocks * int(found["block_size"]) if blocks > 0 and "block_size" in found else None


def ranks_of(metrics: str) -> frozenset[str]:
    """The data-parallel ranks that the engine's `/metrics` page shows; none for a single process."""
    ranks = frozenset(re.findall(r'^vllm:cache_config_info\{[^}]*\bengine="(\d+)"', metrics, re.MULTILINE))
    return ranks if len(ranks) > 1 else frozenset()


def has_plugin(metrics: str) -> bool:
    """Whether the engine's `/metrics` page says that our stream plugin is loaded."""
    return re.search(r'^backhaul_plugin_info\{version="1"\} 1', metrics, re.MULTILINE) is not None


def connector_of(metrics: str) -> int | None:
    """The version of our connector that the engine's `/metrics` page names, where it is one that this router speaks."""
    return 1 if re.search(r'^backhaul_connector_info\{version="1"\} 1', metrics, re.MULTILINE) else None


AUDITED = ("offered", "verified", "pulled")
"""Token counts that both a router and its prefill engines keep."""
_COUNTED = re.compile(
    rf"^backhaul_({'|'.join(AUDITED)})_tokens_total(?:\{{[^}}]*\}})? ([0-9.e+]+)$", re.MULTILINE | re.IGNORECASE
)


def connector_counters(metrics: str) -> dict[str, int]:
    """What the connector on this engine has counted since it started, over all data-parallel ranks."""
    counted: Counter[str] = Counter(dict.fromkeys(AUDITED, 0))
    for name, value in _COUNTED.findall(metrics):
        counted[name] += int(float(value))
    return dict(counted)


_START = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


def start_of(metrics: str) -> float | None:
    """When the process behind an engine's `/metrics` page began, in seconds since 1970 by its own clock."""
    found = _START.search(metrics)
    return float(found[1]) if found else None


@dataclass(frozen=True)
class Baseline:
    """From where on a router's accounts and an engine's counters are compared."""

    accounted: Mapping[str, int]
    counted: Mapping[str, int]
    seen: Mapping[str, int]
    """The counters when they were last read."""
    started_at: float | None


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
    withheld: int = 0
    """Requests that were sent to no engine, since two had broken with them."""
    releases: int = 0
    failed_releases: int = 0
    unreachable_pins: int = 0
    """Streamed turns whose handle the engine kept to itself: D pins their blocks until the TTL."""
    proof_faults: int = 0
    """An engine ran other ids than those it was sent, or did not check a handle; nothing of such a turn is kept."""
    prompts_computed_twice: int = 0
    """A decode engine of ours computed a prompt that P had computed, because it could not read P's blocks."""
    prompts_differed: int = 0
    """A decode engine of ours computed a prompt by itself, because P's was another one."""
    failed_polls: int = 0
    """Times that an engine did not show its load."""
    audit_alarms: int = 0
    """What the router counted as reused is not what the engines counted."""


class Fleet:
    """The engines, and what changes about them. Methods hold a lock and never await."""

    def __init__(self, engines: Iterable[Engine], seed: int = 0, retention: Retention | None = None) -> None:
        """Lots are drawn between engines that are equal, by `seed`; with 0 the first one is taken."""
        self._by_url: dict[str, Engine] = {engine.url: engine for engine in engines}
        self.retention = Retention() if retention is None else retention
        for engine in self.decode:
            self.retention.know(engine.url, engine.kv_tokens, engine.block_size)
        self.counters = Counters()
        self.load = Load(seed)
        self.costs = Costs()
        self._engine_ids: dict[str, str] = {}
        self._rates: dict[str, _Rate] = {}
        self.ignores_ids = False
        """An engine ran other ids than it was sent: token ids prove nothing in this fleet."""
        self._undigested: frozenset[str] = frozenset()
        self._unsafe: dict[tuple[str, str], str] = {}
        self._safe: set[tuple[str, str]] = set()
        self._to_release: dict[Holder, list[str]] = {}
        self._ranks: dict[str, set[str]] = {}
        self._accounts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._baselines: dict[str, Baseline] = {}
        self._unaccounted: Counter[str] = Counter()
        self._cannot_read: set[str] = set()
        self._breakers = Breakers()
        self.processes = Processes()
        for engine in self.decode:
            self.processes.know(engine.url, engine.started_at)
        self._draining: frozenset[str] = frozenset()
        self._closed: frozenset[str] = frozenset()
        """About to be removed."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        busy = ", ".join(f"{url}: {n}" for url, n in sorted(self.load.in_flight.items()) if n)
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
        """An engine that could not be reached before, or is new. Raises `ConfigError` when it does not fit the others."""
        check_fit([*(one for one in self.engines if one.url != engine.url), engine])
        with self._lock:
            self._by_url = {**self._by_url, engine.url: engine}
            self._draining -= {engine.url}
            self._closed -= {engine.url}
        self._breakers.forget(engine.url)
        if engine.role is Role.DECODE:
            self.retention.know(engine.url, engine.kv_tokens, engine.block_size)
            self.processes.know(engine.url, engine.started_at)

    def get(self, url: str | None) -> Engine | None:
        return self._by_url.get(url) if url else None

    def pick(
        self,
        role: Role,
        preferred: str | None = None,
        without: Collection[str] = (),
        *,
        verifying: bool = False,
        moving_ms: float = 0.0,
    ) -> Engine | None:
        """The preferred engine where it may be used and its load does not say otherwise, else the one with the least to do;
        `None` when all are excluded. With `verifying`, engines that check a handle by its digests go before others, after the
        preferred one. Engines that drain or whose breaker is open are used where no other is left. `moving_ms` is what it
        costs that another prefill engine does not have the history."""
        home = self._home(role, preferred, without)
        if home is not None and not self.load.is_pressed(home.url):
            return home
        excluded = {*without, *self._closed}
        engines = [e for e in (self.prefill if role is Role.PREFILL else self.decode) if e.url not in excluded]
        if len(engines) <= 1:
            return engines[0] if engines else None
        with self._lock:

            def burden(engine: Engine) -> tuple[int, bool, tuple[bool, float, int, float]]:
                return (
                    self._rank(engine),
                    verifying and not self.verifies(engine),
                    self.load.burden(engine.url),
                )

            if home is None:
                return min(engines, key=burden)
            other = min((engine for engine in engines if engine is not home), key=burden)
            return other if self._leaves(home, other, moving_ms) else home

    def at_home(self, role: Role, url: str | None, without: Collection[str] = ()) -> Engine | None:
        """The engine that `pick` would prefer, where nothing speaks against it."""
        home = self._home(role, url, without)
        return home if home is not None and not self.load.is_pressed(home.url) else None

    def _home(self, role: Role, url: str | None, without: Collection[str]) -> Engine | None:
        engine = self._by_url.get(url) if url is not None else None
        if engine is None or engine.role is not role or url in without or url in self._closed:
            return None
        return engine if self._may_stay(engine) else None

    def _leaves(self, home: Engine, other: Engine, moving_ms: float) -> bool:
        if self._rank(other) > self._rank(home) or (self.verifies(home) and not self.verifies(other)):
            return False
        if home.role is Role.DECODE:
            return self.load.leaves_decode(home.url, other.url)
        return self.load.leaves_prefill(self.queue_ms(home), self.queue_ms(other), moving_ms)

    def queue_ms(self, prefill: Engine) -> float:
        """Estimate of what a prefill waits there: for this router's by their tokens, for others' by their number."""
        load, costs = self.load, self.costs
        tokens = load.tokens(prefill.url) + load.foreign(prefill.url) * costs.prefill_tokens
        return tokens * costs.per_token(prefill.url)

    # --- which engines fail, drain or go

    def available(self, engine: Engine) -> bool:
        """Whether new conversations may run there: it takes part, does not drain, and its breaker is closed. A half-open one is
        not: its slot is the probe's."""
        return self.takes_part(engine) and self._rank(engine) == 0

    def takes_part(self, engine: Engine) -> bool:
        """Whether it is one of the engines, and not about to be removed."""
        return engine.url in self._by_url and engine.url not in self._closed

    def _rank(self, engine: Engine) -> int:
        """0 for an available engine; what is higher is used where nothing lower is left."""
        rank = self._breakers.rank(engine.url, engine.role.leg)
        return rank + 1 if rank else int(engine.url in self._draining)

    def _may_stay(self, engine: Engine) -> bool:
        """Whether a conversation that ran there before may go on there: its history is on the decode engine."""
        return self._rank(engine) <= (engine.role is Role.DECODE and engine.url in self._draining)

    def is_down(self, url: str) -> bool:
        """Whether nobody listened at an engine when it was last tried."""
        engine = self._by_url.get(url)
        return engine is not None and self._breakers.rank(url, engine.role.leg) == 2

    def renders_well(self, engine: Engine) -> bool:
        return self._breakers.rank(engine.url, Leg.RENDER) == 0

    def breakers(self) -> Mapping[Where, BreakerState]:
        """Of every engine and leg."""
        closed = {Where(e.url, leg): BreakerState.CLOSED for e in self.engines for leg in (Leg.RENDER, e.role.leg)}
        return closed | {at: state for at, state in self._breakers.states().items() if at in closed}

    @property
    def breakers_opened(self) -> int:
        """How often a breaker has opened."""
        return self._breakers.opened

    @property
    def breaker(self) -> Breakers:
        """For whoever probes."""
        return self._breakers

    def note_failure(self, engine: Engine, leg: Leg | None, kind: FailureKind, who: Who, now: float) -> None:
        """A call on a leg failed; `None` is the engine's own. A refused connection is told of the whole engine."""
        if engine.url not in self._by_url:
            return
        if kind is FailureKind.REFUSED:
            self.processes.doubt(engine.url)
        legs = (Leg.RENDER, engine.role.leg) if kind is FailureKind.REFUSED else (leg or engine.role.leg,)
        opened = [at for at in legs if self._breakers.failed(Where(engine.url, at), kind, who, now)]
        if opened:
            log.warning("%s is shut out for now (%s: %s)", engine, ", ".join(opened), kind)

    def note_other_model(self, engine: Engine, model: str, now: float) -> None:
        """Something else was started at the engine's address. It counts as one where nobody listens, until a probe finds the
        model there again."""
        log.error("%s does not serve %s any more: was it started again with another model?", engine, model)
        self.note_failure(engine, None, FailureKind.REFUSED, Who("", b""), now)

    def note_answer(self, engine: Engine, leg: Leg | None = None) -> None:
        """A real answer came on a leg."""
        if not self._breakers.all_well and self._breakers.answered(Where(engine.url, leg or engine.role.leg)):
            log.info("%s answers again", engine)

    @property
    def draining(self) -> frozenset[str]:
        return self._draining

    def drain(self, url: str) -> None:
        """From now on no new conversation goes there; what has its history there may go on."""
        with self._lock:
            self._draining |= {url}

    def close(self, url: str) -> None:
        """From now on no turn begins there, whatever else is left."""
        with self._lock:
            self._closed |= {url}

    def reopen(self, url: str) -> None:
        """Undoes `close`."""
        with self._lock:
            self._closed -= {url}

    def remove(self, url: str) -> None:
        with self._lock:
            self._by_url = {at: engine for at, engine in self._by_url.items() if at != url}
            self._draining -= {url}
            self._closed -= {url}
            self._engine_ids.pop(url, None)
            self._rates.pop(url, None)
            self.load.forget(url)
            self.costs.forget(url)
            self._safe = {pair for pair in self._safe if url not in pair}
            self._unsafe = {pair: why for pair, why in self._unsafe.items() if url not in pair}
        self.processes.forget(url)
        self._breakers.forget(url)
        self.retention.remove(url)

    def engine_id(self, url: str) -> str | None:
        """The id of the process that last made a handle there, as `process_of` has it."""
        return self._engine_ids.get(url)

    # --- engines that run our connector

    def verifies(self, engine: Engine) -> bool:
        """Whether the engine's connector compares digests: P those of its prompt, D those that it publishes."""
        return engine.connector is not None and engine.url not in self._undigested

    def note_no_digests(self, engine: Engine) -> None:
        """The engine runs our connector and publishes no digests: its model's or its configuration's KV has none."""
        with self._lock:
            self._undigested |= {engine.url}

    def note_unverified(self, prefill: Engine) -> None:
        """The engine says nothing of a handle that it was to check: it does not run our connector any more."""
        log.error(
            "%s gave no account of a handle: it was restarted without our connector, and found nothing in it to read. The turn "
            "was given to the decode engine; what comes is proven by token ids. Restart it with our connector, and then the "
            "router.",
            prefill,
        )
        with self._lock:
            self._undigested |= {prefill.url}
            self.counters.proof_faults += 1

    def release_later(self, holder: Holder, leases: Iterable[str]) -> None:
        """Leases on a decode engine of ours that nobody needs any more. What is sent to it next takes them along."""
        with self._lock:
            self._to_release.setdefault(holder, []).extend(leases)

    def to_release(self, holder: Holder, at_most: int = 10_000) -> tuple[str, ...]:
        """Takes leases that are due; they are then in the caller's hands, to be sent or put back."""
        if not self._to_release:
            return ()
        with self._lock:
            due = self._to_release.pop(holder, [])
            if due[at_most:]:
                self._to_release[holder] = due[at_most:]
            return tuple(due[:at_most])

    def reserve(self, decode: Engine, prompt: int, answer: int, *, sent: bool) -> Reserved:
        """A turn runs there, now (`sent`) or soon. Leases that are in its way are released at once, so that it takes them along;
        all that is given up is `retention`'s to tell."""
        reserved, victims = self.retention.reserve(decode.url, prompt, answer, sent=sent)
        for victim in victims:
            if victim.with_turn:
                holder = Holder.of(victim.held.decode, victim.held.handle.engine_id)
                self.release_later(holder, [victim.held.handle.request_id])
        return reserved

    @property
    def releasing(self) -> tuple[Holder, ...]:
        """Who holds leases that are due."""
        with self._lock:
            return tuple(self._to_release)

    def holders(self, decode: Engine) -> tuple[Holder, ...]:
        """The processes of a decode engine that hold leases: its data-parallel ranks, where it has several."""
        with self._lock:
            ranks = decode.ranks | self._ranks.get(decode.url, set())
        return tuple(Holder(decode.url, rank) for rank in sorted(ranks)) or (Holder(decode.url),)

    def note_account(self, engine: Engine, account: Account) -> None:
        """Adds up what a prefill engine says it did, for `Router.audit`."""
        with self._lock:
            counted = self._accounts[engine.url]
            for name in AUDITED:
                if said := getattr(account, name):
                    counted[name] += said

    def note_unaccounted(self, engine: Engine) -> None:
        """A prefill of ours ended without an account."""
        with self._lock:
            self._unaccounted[engine.url] += 1

    def unaccounted(self, engine: Engine) -> int:
        return self._unaccounted[engine.url]

    def accounted(self, engine: Engine) -> Mapping[str, int]:
        """What the engine's accounts add up to."""
        with self._lock:
            return dict(self._accounts.get(engine.url, {}))

    def baseline(self, engine: Engine) -> Baseline:
        """Where the engine's audit begins: when the router connected, or when a restart was noticed (`rebase`)."""
        first = Baseline({}, engine.at_start, engine.at_start, engine.started_at)
        with self._lock:
            return self._baselines.get(engine.url, first)

    def rebase(self, engine: Engine, baseline: Baseline) -> None:
        with self._lock:
            self._baselines[engine.url] = baseline

    def busy(self, engine: Engine) -> int:
        """Calls in flight."""
        return self.load.in_flight[engine.url]

    def note_computed_twice(self, decode: Engine) -> None:
        """The engine read nothing of what P had computed for it. Told once of each engine."""
        with self._lock:
            self.counters.prompts_computed_twice += 1
            first = decode.url not in self._cannot_read
            self._cannot_read.add(decode.url)
        if first:
            log.warning(
                "%s computed a prompt again instead of reading it from the prefill engine: it must reach the side channel there "
                "(VLLM_NIXL_SIDE_CHANNEL_HOST and port). `backhaul doctor` tries each pair.",
                decode,
            )

    def count_prompt_differed(self) -> None:
        with self._lock:
            self.counters.prompts_differed += 1

    def count_alarm(self) -> None:
        with self._lock:
            self.counters.audit_alarms += 1

    # --- which P can read from which D

    def is_checked(self, prefill: str, decode: str) -> bool:
        """Whether it is known if P can read from D. A P of ours needs no check: it answers where a stock one hangs."""
        engine = self._by_url.get(prefill)
        ours = engine is not None and engine.connector is not None
        return ours or (prefill, decode) in self._safe or (prefill, decode) in self._unsafe

    def unsafe_for(self, decode: str) -> frozenset[str]:
        """Prefill engines that cannot read from this decode engine."""
        return frozenset(p for p, d in tuple(self._unsafe) if d == decode)

    def note_pair(self, prefill: str, decode: str, why_unsafe: str | None) -> None:
        """What an exchange between the two has shown."""
        with self._lock:
            if why_unsafe is None:
                self._unsafe.pop((prefill, decode), None)
                self._safe.add((prefill, decode))
            else:
                self._safe.discard((prefill, decode))
                self._unsafe[prefill, decode] = why_unsafe

    @property
    def unsafe_pairs(self) -> dict[tuple[str, str], str]:
        """(P, D) and why."""
        with self._lock:
            return dict(self._unsafe)

    # --- load and what is learned

    def begin(self, engine: Engine, tokens: int = 0) -> None:
        """A call goes there; with the tokens that it has a prefill engine compute."""
        with self._lock:
            self.load.begin(engine.url, tokens)

    def end(self, engine: Engine, tokens: int = 0) -> None:
        """The call is over; `tokens` as when it began."""
        with self._lock:
            self.load.end(engine.url, tokens)

    def note_placed(self, name: tuple[str, str] | None, decode: Engine, prefill: Engine | None, now: float) -> None:
        """A turn goes there, of the conversation of that tenant and id, if it has one."""
        urls = (decode.url,) if prefill is None else (decode.url, prefill.url)
        with self._lock:
            self.load.chose(*urls)
            if name is not None:
                self.load.homes.settle(name, urls, now)

    def note_route(self, engine: Engine, route: Route, instead_of: tuple[Engine, Route] | None) -> None:
        """The route that a turn took, and the one that its estimates spoke against."""
        with self._lock:
            self.costs.took(engine.url, route)
            if instead_of is not None:
                self.costs.passed_over(instead_of[0].url, instead_of[1])

    def note_left(self, url: str) -> None:
        """A conversation has left an engine for its load."""
        with self._lock:
            self.load.left(url)

    def note_gauges(self, engine: Engine, gauges: Gauges, now: float, own: int = 0) -> None:
        """What an engine says of its load; `own` calls of this router ran there when it was asked."""
        with self._lock:
            self.load.read(engine.url, gauges, now, own)

    def expire_load(self, before: float, now: float) -> None:
        """Forgets what engines said of their load earlier than that."""
        with self._lock:
            self.load.expire(before, now)

    def count_failed_poll(self) -> None:
        with self._lock:
            self.counters.failed_polls += 1

    def end_conversation(self, conversation: str, tenant: str = "") -> None:
        """It is nobody's load any more."""
        with self._lock:
            self.load.homes.end((tenant, conversation))

    def saw_engine_id(self, engine: Engine, engine_id: str, asked: Asked | None = None) -> str | None:
        """Notes the id in an engine's newest handle, which was `asked` for when so much was known. Returns the id before, when
        the engine has restarted since: its blocks are gone. Data-parallel ranks differ by a suffix and are no restart."""
        base = process_of(engine_id)
        with self._lock:
            before = self._engine_ids.get(engine.url)
            self._engine_ids[engine.url] = base
            if base is not engine_id and (rank := Holder.of(engine.url, engine_id).rank) is not None:
                self._ranks.setdefault(engine.url, set()).add(rank)
        changed = before is not None and before != base
        if changed:
            self.processes.void(engine.url)
        if asked is not None:
            self.processes.made_handle(engine.url, engine_id, asked)
        return before if changed else None

    def is_outlived(self, decode: str, engine_id: str, asked: Asked) -> bool:
        """Whether a handle that was `asked` for then may be of a process that has been replaced since."""
        if asked.restarts == self.processes.restarts(decode):
            return False
        return is_fixed(engine_id) or self._engine_ids.get(decode) != process_of(engine_id)

    def replaced(self, decode: str, began: float) -> None:
        """Another process is there, whose id is not known yet."""
        with self._lock:
            self._engine_ids.pop(decode, None)
        self.processes.replaced(decode, began)

    def made_by_current(self, decode: str, engine_id: str) -> bool:
        """Whether a handle's engine is configured and, as far as is known, still the same process."""
        known = self._engine_ids.get(decode)
        return decode in self._by_url and (known is None or known == process_of(engine_id))

    def learn_prefill(self, engine: Engine, ms: float, computed: int, *, alone: bool = True) -> None:
        """Notes what a cold prefill cost. One that was not `alone` may have waited."""
        with self._lock:
            if computed >= 32:
                self._rates.setdefault(engine.url, _Rate()).add(ms, computed)
            self.costs.learn_compute(engine.url, ms, computed, alone=alone)

    def learn_read(self, engine: Engine, ms: float, computed: int, read: int, *, alone: bool) -> None:
        """Notes what a prefill cost that read."""
        with self._lock:
            self.costs.learn_read(engine.url, ms, computed, read, alone=alone)

    def learn_first_byte(self, engine: Engine, ms: float, computed: int, *, local: bool) -> None:
        """Notes how long a decode engine took to its first byte, alone or with what a prefill engine had computed."""
        with self._lock:
            (self.costs.learn_local if local else self.costs.learn_handoff)(engine.url, ms, computed)

    def prefill_rate(self, engine: Engine | None) -> tuple[float, int] | None:
        """Milliseconds per computed token on an engine (of all prefill engines where none is named), and from how many
        cold turns; `None` before the first."""
        if engine is not None and (one := self._rates.get(engine.url)) is not None:
            return (one.ms_per_token, one.turns) if one.turns else None
        rates = list(self._rates.values())
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

    def count_release(self, number: int = 1, *, failed: bool) -> None:
        with self._lock:
            self.counters.releases += number
            self.counters.failed_releases += number * failed
