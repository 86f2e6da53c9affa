"""Registry of the engines: membership, the choice of an engine for a leg, and what is learned of engines in parts of its own.

What an engine *is* (`Engine`) is asked once and frozen; what changes is kept in a `Fleet` and its parts, and nowhere else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Mapping

from ..errors import FailureKind, Leg
from .breakers import Breakers, BreakerState, EngineLeg, FailedRequest
from .engine import Accounts, Capabilities, Counters, Engine, Holder, PairTable, ReleaseQueue, Role, check_fit
from .load import Costs, Load
from .restarts import Restarts
from .retention import Reserved, Retention

log = logging.getLogger("backhaul")


class Fleet:
    """Registry of the engines, and of what changes about them. Methods, those of the parts too, lock where they change
    something and never await; engines are named to the parts by their URL."""

    def __init__(self, engines: Iterable[Engine], seed: int = 0, retention: Retention | None = None) -> None:
        """Lots are drawn between engines that are equal, by `seed`; with 0 the first one is taken."""
        self._by_url: dict[str, Engine] = {engine.url: engine for engine in engines}
        self.counters = Counters()
        self.capabilities = Capabilities(self.counters)
        self.load = Load(seed)
        self.costs = Costs()
        self.pairs = PairTable(self.get)
        self.releases = ReleaseQueue()
        self.accounts = Accounts()
        self.breakers = Breakers()
        self.restarts = Restarts()
        self.retention = Retention() if retention is None else retention
        for engine in self.decode:
            self._know(engine)
        self._draining: frozenset[str] = frozenset()
        self._closed: frozenset[str] = frozenset()
        """About to be removed."""
        self._lock = threading.Lock()

    def _know(self, decode: Engine) -> None:
        self.retention.know(decode.url, decode.kv_tokens, decode.block_size)
        self.restarts.know(decode.url, decode.started_at)

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

    def add(self, *engines: Engine) -> None:
        """Engines that could not be reached before, or are new. Raises `ConfigError` when they do not fit, and adds none."""
        urls = {engine.url for engine in engines}
        check_fit([*(one for one in self.engines if one.url not in urls), *engines])
        with self._lock:
            self._by_url = {**self._by_url, **{engine.url: engine for engine in engines}}
            self._draining -= urls
            self._closed -= urls
        for engine in engines:
            self.breakers.forget(engine.url)
            if engine.role is Role.DECODE:
                self._know(engine)

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

        def burden(engine: Engine) -> tuple[int, bool, tuple[bool, float, int, float]]:
            unverified = verifying and not self.capabilities.verifies(engine)
            return self._rank(engine), unverified, self.load.burden(engine.url)

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
        verifies = self.capabilities.verifies
        if self._rank(other) > self._rank(home) or (verifies(home) and not verifies(other)):
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
        rank = self.breakers.rank(engine.url, engine.role.leg)
        return rank + 1 if rank else int(engine.url in self._draining)

    def _may_stay(self, engine: Engine) -> bool:
        """Whether a conversation that ran there before may go on there: its history is on the decode engine."""
        return self._rank(engine) <= (engine.role is Role.DECODE and engine.url in self._draining)

    def is_down(self, url: str) -> bool:
        """Whether nobody listened at an engine when it was last tried."""
        engine = self._by_url.get(url)
        return engine is not None and self.breakers.rank(url, engine.role.leg) == 2

    def renders_well(self, engine: Engine) -> bool:
        return self.breakers.rank(engine.url, Leg.RENDER) == 0

    def breaker_states(self) -> Mapping[EngineLeg, BreakerState]:
        """Of every engine and leg."""
        closed = {EngineLeg(e.url, leg): BreakerState.CLOSED for e in self.engines for leg in (Leg.RENDER, e.role.leg)}
        return closed | {at: state for at, state in self.breakers.states().items() if at in closed}

    def note_failure(self, engine: Engine, leg: Leg | None, kind: FailureKind, who: FailedRequest, now: float) -> None:
        """A call on a leg failed; `None` is the engine's own. A refused connection is told of the whole engine."""
        if engine.url not in self._by_url:
            return
        if kind is FailureKind.REFUSED:
            self.restarts.doubt(engine.url)
        legs = (Leg.RENDER, engine.role.leg) if kind is FailureKind.REFUSED else (leg or engine.role.leg,)
        opened = [at for at in legs if self.breakers.failed(EngineLeg(engine.url, at), kind, who, now)]
        if opened:
            log.warning("%s is shut out for now (%s: %s)", engine, ", ".join(opened), kind)

    def note_other_model(self, engine: Engine, model: str, now: float) -> None:
        """Something else was started at the engine's address. It counts as one where nobody listens, until a probe finds the
        model there again."""
        log.error("%s does not serve %s any more: was it started again with another model?", engine, model)
        self.note_failure(engine, None, FailureKind.REFUSED, FailedRequest("", b""), now)

    def note_answer(self, engine: Engine, leg: Leg | None = None) -> None:
        """A real answer came on a leg."""
        if not self.breakers.all_well and self.breakers.answered(EngineLeg(engine.url, leg or engine.role.leg)):
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
        self.load.forget(url)
        self.costs.forget(url)
        self.pairs.forget(url)
        self.restarts.forget(url)
        self.breakers.forget(url)
        self.retention.remove(url)

    def reserve(self, decode: Engine, prompt: int, answer: int, *, sent: bool) -> Reserved:
        """A turn runs there, now (`sent`) or soon. Leases that are in its way are released at once, so that it takes them along;
        all that is given up is `retention`'s to tell."""
        reserved, victims = self.retention.reserve(decode.url, prompt, answer, sent=sent)
        for victim in victims:
            if victim.with_turn:
                holder = Holder.of(victim.held.decode, victim.held.handle.engine_id)
                self.releases.add(holder, [victim.held.handle.request_id])
        return reserved
