"""Engines: what each said of itself when it was asked (`Engine`, frozen), and the registers of what is noted of it afterwards,
each with its own lock and told engines by URL. `Fleet` holds one of each.
"""

from __future__ import annotations

import enum
import functools
import itertools
import logging
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from backhaul_protocol import VERSION
from backhaul_protocol.account import Account

from ..errors import ConfigError, Leg
from ..report import ReuseReport
from ..wire import process_of
from ..wire.endpoint import Api
from ..wire.engine_metrics import AUDITED

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


@dataclass(frozen=True)
class Baseline:
    """Baseline of an audit: from where on a router's accounts and an engine's counters are compared."""

    accounted: Mapping[str, int]
    counted: Mapping[str, int]
    seen: Mapping[str, int]
    """The counters when they were last read."""
    started_at: float | None


class Accounts:
    """Running totals by engine. Thread-safe, and no method awaits."""

    def __init__(self) -> None:
        self._totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._missing: Counter[str] = Counter()
        self._baselines: dict[str, Baseline] = {}
        self._lock = threading.Lock()

    def add(self, url: str, account: Account) -> None:
        """What a prefill engine says it did."""
        with self._lock:
            totals = self._totals[url]
            for name in AUDITED:
                if said := getattr(account, name):
                    totals[name] += said

    def total(self, url: str) -> Mapping[str, int]:
        """What the engine's accounts add up to, in tokens by counter."""
        with self._lock:
            return dict(self._totals.get(url, {}))

    def note_missing(self, url: str) -> None:
        """A prefill of ours ended there without an account."""
        with self._lock:
            self._missing[url] += 1

    def missing(self, url: str) -> int:
        """Prefills that ended there without an account."""
        return self._missing[url]

    def baseline(self, engine: Engine) -> Baseline:
        """Where the engine's audit begins: when the router connected, or when a restart was noticed (`rebase`)."""
        first = Baseline({}, engine.at_start, engine.at_start, engine.started_at)
        with self._lock:
            return self._baselines.get(engine.url, first)

    def rebase(self, url: str, baseline: Baseline) -> None:
        """From now on the audit begins there."""
        with self._lock:
            self._baselines[url] = baseline


Event: TypeAlias = Literal[
    "withheld",
    "unreachable_pins",
    "proof_faults",
    "prompts_computed_twice",
    "prompts_differed",
    "failed_polls",
    "audit_alarms",
]
"""What is counted one at a time: a field of `Counters`."""


@dataclass
class Counters:
    """Monotonic counters. Thread-safe where they are changed by a method."""

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
    """An engine ran other ids than those it was sent, did not check a handle, or said what the protocol has not."""
    prompts_computed_twice: int = 0
    """A decode engine of ours computed a prompt that P had computed, because it could not read P's blocks."""
    prompts_differed: int = 0
    """A decode engine of ours computed a prompt by itself, because P's was another one."""
    failed_polls: int = 0
    """Times that an engine did not show its load."""
    audit_alarms: int = 0
    """What the router counted as reused is not what the engines counted."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, event: Event) -> None:
        """One more."""
        with self._lock:
            setattr(self, event, getattr(self, event) + 1)

    def count(self, report: ReuseReport) -> None:
        """A turn has ended."""
        with self._lock:
            self.turns[report.route] += 1
            if report.reason:
                self.reasons[report.reason] += 1
            self.retries += report.retries

    def count_release(self, number: int = 1, *, failed: bool) -> None:
        """So many handles were released, or could not be."""
        with self._lock:
            self.releases += number
            self.failed_releases += number * failed


log = logging.getLogger("backhaul")


class Capabilities:
    """Capability flags: what engines turned out not to do. Thread-safe, and no method awaits."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.ignores_ids = False
        """An engine ran other ids than it was sent: token ids prove nothing in this fleet."""
        self._undigested: frozenset[str] = frozenset()
        self._cannot_read: set[str] = set()
        self._misunderstood: set[str] = set()
        self._lock = threading.Lock()

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
        self.note_no_digests(prefill)
        self._counters.add("proof_faults")

    def note_ids_ignored(self) -> None:
        """From now on no turn is proven by token ids."""
        self.ignores_ids = True
        self._counters.add("proof_faults")

    def note_misunderstood(self, engine: Engine, what: str) -> None:
        """The engine's connector and this router do not understand each other. Told once of each engine."""
        self._counters.add("proof_faults")
        with self._lock:
            first = engine.url not in self._misunderstood
            self._misunderstood.add(engine.url)
        if first:
            log.error(
                "%s speaks version %d of the connector's protocol, but not as this router does: %s. Run router and engines with "
                "the same release of Backhaul.",
                engine,
                VERSION,
                what,
            )

    def note_computed_twice(self, decode: Engine) -> None:
        """The engine read nothing of what P had computed for it. Told once of each engine."""
        self._counters.add("prompts_computed_twice")
        with self._lock:
            first = decode.url not in self._cannot_read
            self._cannot_read.add(decode.url)
        if first:
            log.warning(
                "%s computed a prompt again instead of reading it from the prefill engine: it must reach the side channel there "
                "(VLLM_NIXL_SIDE_CHANNEL_HOST and port). `backhaul doctor` tries each pair.",
                decode,
            )


class PairTable:
    """Safe and unsafe pairs of URLs, P first. Thread-safe, and no method awaits."""

    def __init__(self, get: Callable[[str], Engine | None]) -> None:
        """`get` finds an engine by its URL."""
        self._get = get
        self._checked: set[tuple[str, str]] = set()
        self._unsafe: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()

    def is_checked(self, prefill: str, decode: str) -> bool:
        """Whether it is known if P can read from D. A P of ours needs no check: it answers where a stock one hangs."""
        engine = self._get(prefill)
        ours = engine is not None and engine.connector is not None
        return ours or (prefill, decode) in self._checked

    def unsafe_for(self, decode: str) -> frozenset[str]:
        """Prefill engines that cannot read from this decode engine."""
        return frozenset(p for p, d in tuple(self._unsafe) if d == decode)

    def note(self, prefill: str, decode: str, why_unsafe: str | None) -> None:
        """What an exchange between the two has shown."""
        with self._lock:
            self._checked.add((prefill, decode))
            if why_unsafe is None:
                self._unsafe.pop((prefill, decode), None)
            else:
                self._unsafe[prefill, decode] = why_unsafe

    @property
    def unsafe(self) -> dict[tuple[str, str], str]:
        """(P, D) and why."""
        with self._lock:
            return dict(self._unsafe)

    def forget(self, url: str) -> None:
        """The engine is removed."""
        with self._lock:
            self._checked = {pair for pair in self._checked if url not in pair}
            self._unsafe = {pair: why for pair, why in self._unsafe.items() if url not in pair}


class ReleaseQueue:
    """Lease ids in the order in which they fell due. Thread-safe, and no method awaits."""

    def __init__(self) -> None:
        self._due: dict[Holder, list[str]] = {}
        self._lock = threading.Lock()

    def add(self, holder: Holder, leases: Iterable[str]) -> None:
        """Leases on a decode engine of ours that nobody needs any more."""
        with self._lock:
            self._due.setdefault(holder, []).extend(leases)

    def take(self, holder: Holder, at_most: int = 10_000) -> tuple[str, ...]:
        """Leases that are due; they are then in the caller's hands, to be sent or put back."""
        if not self._due:
            return ()
        with self._lock:
            due = self._due.pop(holder, [])
            if due[at_most:]:
                self._due[holder] = due[at_most:]
            return tuple(due[:at_most])

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Who holds leases that are due."""
        with self._lock:
            return tuple(self._due)
