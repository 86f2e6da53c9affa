"""What a router shows to Prometheus. Needs the extra `server` (prometheus_client); nothing else here imports this module at once.

Two kinds of series: what turns add up to is fed by their reports (`RouterMetrics.record`), and what the fleet, the ledger and
the last audit say by themselves is read when somebody asks. `docs/metrics.md` lists them all.

Labels are bounded: engines as configured, routes and reasons from closed lists, and of models those that the engines serve; what
clients make up is `other`. There are no ids, no keys and no prompts.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..config import RouterConfig
from ..engines.audit import AuditLine
from ..errors import Leg
from ..fleet.breakers import BreakerState
from ..fleet.engine import Role
from ..fleet.fleet import Fleet
from ..fleet.retention import Retention
from ..ledger.records import Held
from ..report import ReuseReport, Route
from ..wire.engine_metrics import AUDITED

PREFIX = "backhaul_router"
OTHER_MODEL = "other"
"""Stands for every name that no engine serves, and for requests that name none."""
_NONE = "none"
SOURCES = ("computed", "pulled", "prefill_cache", "decode_cache", "cached", "unknown")
"""Where a prompt's tokens came from; they add up to the prompt. `cached`: found or read by a stock engine, which does not say
which. `decode_cache`: of turns that the decode engine ran alone."""
STEPS = ("render", "prefill", "claim", "read", "decode_first_byte")
_LEG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TURN_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Ledger(Protocol):
    """Of a router's ledger, what is counted here."""

    @property
    def available(self) -> bool: ...
    def __len__(self) -> int: ...
    def handles(self) -> tuple[Held, ...]: ...


class Observed(Protocol):
    """A router, as it is looked at here."""

    @property
    def config(self) -> RouterConfig: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def fleet(self) -> Fleet: ...
    @property
    def retention(self) -> Retention: ...


class RouterMetrics:
    """The series of one router, in a registry of their own unless another is given. Give `record` every report of the router:
    `Router(config, on_report=metrics.record)` with `metrics.watch(router)` after it. May be fed from several threads."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._router: Observed | None = None
        self._turns = TurnCollector(self._serves)
        self.registry.register(self._turns)
        self.record = self._turns.record

    def __repr__(self) -> str:
        return f"<RouterMetrics of {self._router or 'no router'}>"

    def watch(self, router: Observed) -> RouterCollector:
        """Shows the state of `router` as well; once. Returns what is to be told of its audits."""
        if self._router is not None:
            raise ValueError(f"these metrics are those of {self._router} already: make others for {router}")
        self._router = router
        collector = RouterCollector(router)
        self.registry.register(collector)
        return collector

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """The series as text, in the format that an `Accept` header asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _serves(self, model: str) -> bool:
        if self._router is None:
            return False
        return any(model in engine.models or model in engine.adapters for engine in self._router.fleet.engines)


class _Times:
    """A histogram. `prometheus_client`'s own takes a lock and several calls for each value, which a turn has seven of."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add_ms(self, ms: float) -> None:
        seconds = ms / 1e3
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        names = (*(str(bound) for bound in self._bounds), "+Inf")
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(labels, buckets, self._sum)


class _OfModel:
    """What the turns of one model and route add up to."""

    __slots__ = ("decode_cached", "first_byte", "generated", "reasons", "sources", "whole")

    def __init__(self) -> None:
        self.reasons: Tally[str] = Tally()
        self.sources = dict.fromkeys(SOURCES, 0)
        self.generated = 0
        self.decode_cached = 0
        self.first_byte = _Times(_LEG_S)
        self.whole = _Times(_TURN_S)

    def add(self, report: ReuseReport) -> None:
        self.reasons[report.reason or _NONE] += 1
        self.whole.add_ms(report.total_ms)
        if report.error is None and report.first_byte_ms is not None:
            self.first_byte.add_ms(report.first_byte_ms)
        self.generated += report.generated or 0
        self.decode_cached += report.decode_cached or 0
        if report.prompt:
            self._add_prompt(report, report.prompt, report.cached)

    def _add_prompt(self, report: ReuseReport, prompt: int, cached: int | None) -> None:
        sources = self.sources
        if cached is None:
            sources["unknown"] += prompt
            return
        sources["computed"] += max(0, prompt - cached)
        if report.route is Route.LOCAL:
            sources["decode_cache"] += cached
        elif report.pulled is None and report.local is None:
            sources["cached"] += cached
        else:
            pulled = report.pulled or 0
            sources["pulled"] += pulled
            sources["prefill_cache"] += max(0, cached - pulled)


class _OfRoute:
    """Times of the steps of one route's turns."""

    __slots__ = STEPS

    def __init__(self) -> None:
        self.render, self.prefill, self.claim, self.read, self.decode_first_byte = (_Times(_LEG_S) for _ in STEPS)

    def add(self, report: ReuseReport) -> None:
        render_ms, prefill_ms = report.render_ms, report.prefill_ms
        if render_ms is not None:
            self.render.add_ms(render_ms)
        if prefill_ms is not None:
            self.prefill.add_ms(prefill_ms)
        if report.claim_ms is not None:
            self.claim.add_ms(report.claim_ms)
        if report.read_ms is not None:
            self.read.add_ms(report.read_ms)
        if report.first_byte_ms is not None:
            self.decode_first_byte.add_ms(max(0.0, report.first_byte_ms - (render_ms or 0.0) - (prefill_ms or 0.0)))


class TurnCollector(Collector):
    """Adds up reports: numbers in place, so that a turn costs microseconds; they become series when somebody asks."""

    def __init__(self, serves: Callable[[str], bool]) -> None:
        self._serves = serves
        self._of_model: dict[tuple[str, Route], _OfModel] = {}
        self._of_route = {route: _OfRoute() for route in Route}
        self._errors: Tally[str] = Tally()
        self._read_bytes = 0
        self._lock = threading.Lock()

    def record(self, report: ReuseReport) -> None:
        """Adds a turn."""
        with self._lock:
            self._model_of(report).add(report)
            self._of_route[report.route].add(report)
            if report.error is not None:
                self._errors[report.error] += 1
            if report.read_bytes:
                self._read_bytes += report.read_bytes

    def _model_of(self, report: ReuseReport) -> _OfModel:
        """Nothing is kept of the names that clients make up."""
        found = self._of_model.get((report.model or "", report.route))
        if found is not None:
            return found
        model = report.model if report.model and self._serves(report.model) else OTHER_MODEL
        return self._of_model.setdefault((model, report.route), _OfModel())

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            metrics = [*self._of_models(), *self._of_all()]
        yield from metrics

    def _of_models(self) -> Sequence[Metric]:
        names = ("model", "route")
        turns = _total("turns", "Turns that ended.", *names, "reason")
        prompt = _total("prompt_tokens", "Tokens of prompts, by where their KV came from.", *names, "source")
        generated = _total("generated_tokens", "Tokens of answers.", *names)
        decode_cached = _total("decode_cached_tokens", "Prompt tokens that D found in its own cache.", *names)
        first_byte = _times("first_byte_seconds", "From the request to the first byte of the answer's body.", *names)
        whole = _times("turn_seconds", "Whole turns.", *names)
        for (model, route), of_model in self._of_model.items():
            labels = (model, str(route))
            for reason, number in of_model.reasons.items():
                turns.add_metric((*labels, str(reason)), number)
            for source, tokens in of_model.sources.items():
                prompt.add_metric((*labels, source), tokens)
            generated.add_metric(labels, of_model.generated)
            decode_cached.add_metric(labels, of_model.decode_cached)
            of_model.first_byte.add_to(first_byte, labels)
            of_model.whole.add_to(whole, labels)
        return turns, prompt, generated, decode_cached, first_byte, whole

    def _of_all(self) -> Sequence[Metric]:
        errors = _total("turn_errors", "Turns that ended early, by what ended them.", "leg", "error")
        for error, number in self._errors.items():
            leg = next((leg for leg in Leg if error.startswith(f"{leg}_")), _NONE)
            errors.add_metric((str(leg), error), number)
        steps = _times("leg_seconds", "Steps of turns.", "leg", "route")
        for route, of_route in self._of_route.items():
            for step in STEPS:
                getattr(of_route, step).add_to(steps, (step, str(route)))
        return errors, steps, _total("read_bytes", "Bytes of KV that P read from D.", value=self._read_bytes)


class RouterCollector(Collector):
    """What a router's parts count or hold by themselves, read when it is asked for."""

    def __init__(self, router: Observed) -> None:
        self._router = router
        self._audit: tuple[AuditLine, ...] = ()
        self._audits = 0

    def audited(self, lines: tuple[AuditLine, ...]) -> None:
        """Notes the newest `Router.audit`."""
        self._audit = lines
        self._audits += 1

    def collect(self) -> Iterator[Metric]:
        config = self._router.config
        configured = _gauge("engines_configured", "Engines that the router was told of.", "role")
        configured.add_metric([Role.PREFILL], len(config.prefill))
        configured.add_metric([Role.DECODE], len(config.decode))
        yield configured
        yield from self._held()
        try:
            fleet = self._router.fleet
        except RuntimeError:  # not connected yet
            return
        yield from _of_engines(fleet)
        yield from _counted(fleet)
        yield from self._audited()
        yield from _breakers(fleet)

    def _held(self) -> Iterator[Metric]:
        ledger = self._router.ledger
        held = ledger.handles()
        handles = Tally([one.decode for one in held])
        retention = self._router.retention
        yield _gauge("ledger_available", "1 while the ledger answers.", value=int(ledger.available))
        yield _gauge("ledger_conversations", "Conversations on record.", value=len(ledger))
        on_file = _gauge("ledger_handles", "Handles on file, by the engine that holds their blocks.", "engine")
        retained = _gauge("retained_tokens", "Tokens that an engine keeps for conversations that may go on.", "engine")
        budget = _gauge("retained_tokens_budget", "Of those, what it should keep at most.", "engine")
        released = _total("handles_ended", "Handles that are not kept any more, by cause.", "cause")
        for cause, number in retention.released.items():
            released.add_metric([cause], number)
        for url in dict.fromkeys((*self._router.config.decode, *handles)):
            on_file.add_metric([url], handles[url])
            retained.add_metric([url], retention.retained(url))
            if (most := retention.budget(url)) is not None:
                budget.add_metric([url], most)
        yield on_file
        yield retained
        yield budget
        yield released

    def _audited(self) -> Iterator[Metric]:
        names = ("engine", "counter")
        told = _gauge(
            "audit_reported_tokens", "Last audit: what the engine's accounts to this router add up to.", *names
        )
        counted = _gauge("audit_counted_tokens", "Last audit: what the engine says it counted.", *names)
        for line in self._audit:
            told.add_metric([line.engine, line.counter], line.router)
            counted.add_metric([line.engine, line.counter], line.counted)
        yield told
        yield counted
        yield _total("audits", "Audits that were made.", value=self._audits)


def _of_engines(fleet: Fleet) -> Iterator[Metric]:
    connected = _gauge("engines_connected", "Engines that have answered and are used.", "role")
    connected.add_metric([Role.PREFILL], len(fleet.prefill))
    connected.add_metric([Role.DECODE], len(fleet.decode))
    yield connected
    in_flight = _gauge("engine_in_flight", "Calls of this router that run on an engine.", "engine", "role")
    accounted = _total("engine_tokens", "Tokens by the accounts of a prefill engine.", "engine", "counter")
    unaccounted = _total("unaccounted_prefills", "Prefills that ended without an account.", "engine")
    for engine in fleet.engines:
        in_flight.add_metric([engine.url, engine.role], fleet.load.in_flight[engine.url])
        if engine.role is Role.PREFILL and engine.connector is not None:
            by_name = fleet.accounts.total(engine.url)
            for name in AUDITED:
                accounted.add_metric([engine.url, name], by_name.get(name, 0))
            unaccounted.add_metric([engine.url], fleet.accounts.missing(engine.url))
    yield in_flight
    yield accounted
    yield unaccounted
    yield _gauge("unsafe_pairs", "Pairs of engines of which P cannot read from D.", value=len(fleet.pairs.unsafe))


def _breakers(fleet: Fleet) -> Iterator[Metric]:
    states = _gauge("breaker_state", "1 for the state that a circuit breaker is in.", "engine", "leg", "state")
    for at, state in fleet.breaker_states().items():
        for one in BreakerState:
            states.add_metric([at.url, at.leg, one], int(one is state))
    yield states
    yield _total("breakers_opened", "Circuit breakers that opened.", value=fleet.breakers.opened)


def _counted(fleet: Fleet) -> Iterator[Metric]:
    counters = fleet.counters
    yield _total("retries", "Engine calls that were repeated.", value=counters.retries)
    yield _total("withheld", "Requests that may have broken two engines, and got no third.", value=counters.withheld)
    yield _total("releases", "Releases that were sent to engines.", value=counters.releases)
    yield _total(
        "failed_releases", "Releases that failed: blocks stay pinned until the TTL.", value=counters.failed_releases
    )
    yield _total("unreachable_pins", "Streams whose handle the engine hid.", value=counters.unreachable_pins)
    yield _total(
        "proof_faults", "Engines ran other ids than were sent, or checked nothing.", value=counters.proof_faults
    )
    yield _total(
        "prompts_computed_twice", "Prompts that D could not read from P.", value=counters.prompts_computed_twice
    )
    yield _total("prompts_differed", "Prompts of P's and D's that differed.", value=counters.prompts_differed)
    yield _total("failed_polls", "Times that an engine did not show its load.", value=counters.failed_polls)
    yield _total("audit_alarms", "Differences that audits have found.", value=counters.audit_alarms)


def _gauge(name: str, text: str, *labels: str, value: float | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value, labels=None if value is not None else labels)


def _total(name: str, text: str, *labels: str, value: float | None = None) -> CounterMetricFamily:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=value, labels=None if value is not None else labels)


def _times(name: str, text: str, *labels: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
