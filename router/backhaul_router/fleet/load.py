"""Load balancing with affinity: what the engines have to do, and which of them a conversation should go to, stay with or leave.

Three measures, since none is enough alone: the calls and tokens that this router has in flight; the conversations that live
on an engine, which count also while their agents think; and what engines say themselves (`Gauges`), which is old but covers
other routers. A conversation stays where its history is, unless
- D's KV cache is full or requests wait there (`full`, with a wide gap between becoming and ceasing to be), and another D has
  room. Only some leave between two readings: if all did, the next D would be full, and they would come back;
- far more calls of this router run there than elsewhere;
- P's queue costs more than moving the history does, by a margin (`leaves_prefill`).
Having moved, it is at home there, so going back needs the same reasons once more.

Costs are learned from the turns' own legs: what a step takes on an engine, in milliseconds by tokens, as a straight line. It is
fitted to the last samples by Tukey's resistant line (medians of the shortest and of the longest third), which a third of wild
samples does not move. Before a step was seen `ENOUGH` times, whoever needs a number takes the prior.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import msgspec

from ..report import Route
from ..wire.engine_metrics import Gauges
from ..wire.json_members import interned

MARGIN_MS = 20.0
"""What is gained by less is noise."""
MARGIN = 0.25
"""The same as a fraction."""
_HOME_S = 600.0
"""A conversation that was silent for so long is nobody's load: its KV is gone from D by then."""
_MOST_HOMES = 100_000
_CALL_TOKENS = 2048
"""Tokens of a prefill in flight that weigh as much as another call."""
_FULL, _ROOM = 0.95, 0.85
"""KV cache usage at which D is full, and at which it is not any more."""
_ROOMIER = 0.1
"""By so much less must another D's cache be used."""
_CROWD = 8


def _is_full(gauges: Gauges) -> bool:
    return gauges.kv_usage >= _FULL or gauges.waiting > max(_CROWD, gauges.running)


def _has_room(gauges: Gauges) -> bool:
    return gauges.kv_usage <= _ROOM and gauges.waiting <= max(_CROWD / 2, gauges.running / 2)


@dataclass(frozen=True, slots=True)
class _Reading:
    gauges: Gauges
    surplus: float
    """Requests that it counted beyond this router's."""
    foreign: float
    """Requests there that are not this router's."""
    at: float


class _Home(msgspec.Struct, frozen=True, eq=False, gc=False):
    engines: tuple[str, ...]
    at: float


class Homes:
    """LRU map of the engines that each live conversation ran on last. Bounded by time and number; the oldest go first."""

    def __init__(self) -> None:
        self._homes: OrderedDict[tuple[str, str], _Home] = OrderedDict()
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._homes)

    def count(self, engine: str) -> int:
        """Conversations that live there."""
        return self._counts[engine]

    def settle(self, name: tuple[str, str], engines: tuple[str, ...], now: float) -> None:
        before = self._homes.get(name)
        if before is None or before.engines != engines:
            self._leave(before.engines if before else ())
            self._counts.update(engines)
        self._homes[name] = _Home(interned(engines), now)
        self._homes.move_to_end(name)
        if len(self._homes) > _MOST_HOMES:
            self._drop_oldest()

    def end(self, name: tuple[str, str]) -> None:
        if (before := self._homes.pop(name, None)) is not None:
            self._leave(before.engines)

    def expire(self, now: float) -> None:
        while self._homes and now - next(iter(self._homes.values())).at > _HOME_S:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, oldest = self._homes.popitem(last=False)
        self._leave(oldest.engines)

    def _leave(self, engines: Iterable[str]) -> None:
        for engine in engines:
            self._counts[engine] -= 1
            if not self._counts[engine]:
                del self._counts[engine]


class Load:
    """Load of every engine, by its URL. Thread-safe: what changes something holds a lock."""

    def __init__(self, seed: int = 0) -> None:
        self.in_flight: Counter[str] = Counter()
        self.homes = Homes()
        self._tokens: Counter[str] = Counter()
        self._readings: dict[str, _Reading] = {}
        self._full: dict[str, int] = {}
        """Full engines, with how many conversations may leave before the next reading."""
        self._chosen: dict[str, int] = {}
        self._choices = 0
        self._seed = seed
        self._lots: dict[str, float] = {}
        self._lock = threading.Lock()

    # --- what happens

    def begin(self, engine: str, tokens: int = 0) -> None:
        """A call goes there; with the tokens that it has a prefill engine compute."""
        with self._lock:
            self.in_flight[engine] += 1
            if tokens:
                self._tokens[engine] += tokens

    def end(self, engine: str, tokens: int = 0) -> None:
        """The call is over; `tokens` as when it began."""
        with self._lock:
            self.in_flight[engine] -= 1
            if tokens:
                self._tokens[engine] -= tokens

    def placed(self, name: tuple[str, str] | None, decode: str, prefill: str | None, now: float) -> None:
        """A turn goes there, of the conversation of that tenant and id, if it has one."""
        engines = (decode,) if prefill is None else (decode, prefill)
        with self._lock:
            self._choices += 1
            for engine in engines:
                self._chosen[engine] = self._choices
            if name is not None:
                self.homes.settle(name, engines, now)

    def end_conversation(self, conversation: str, tenant: str = "") -> None:
        """It is nobody's load any more."""
        with self._lock:
            self.homes.end((tenant, conversation))

    def left(self, engine: str) -> None:
        """A conversation moved away from an engine for its load."""
        with self._lock:
            if engine in self._full:
                self._full[engine] -= 1

    def read(self, engine: str, gauges: Gauges, now: float, own: int = 0) -> None:
        """`own` is what ran there when the engine was asked. An engine counts at a moment in between: what it counted beyond
        both numbers is others', and only as far as it was so the last time too."""
        with self._lock:
            surplus = max(0.0, gauges.running + gauges.waiting - max(own, self.in_flight[engine]))
            before = self._readings.get(engine)
            foreign = surplus if before is None else min(surplus, before.surplus)
            self._readings[engine] = _Reading(gauges, surplus, foreign, now)
            if _is_full(gauges) or (engine in self._full and not _has_room(gauges)):
                self._full[engine] = max(1, self.homes.count(engine) // 8)
            else:
                self._full.pop(engine, None)

    def expire(self, before: float, now: float) -> None:
        """Forgets what engines said earlier than that, and conversations that are silent."""
        with self._lock:
            for engine in [engine for engine, reading in self._readings.items() if reading.at < before]:
                self._readings.pop(engine, None)
                self._full.pop(engine, None)
            self.homes.expire(now)

    def forget(self, engine: str) -> None:
        """It is gone, or another process."""
        with self._lock:
            self._readings.pop(engine, None)
            self._full.pop(engine, None)

    # --- what follows

    def gauges(self, engine: str) -> Gauges | None:
        """The last reading, where it is not stale."""
        reading = self._readings.get(engine)
        return reading.gauges if reading is not None else None

    def is_full(self, engine: str) -> bool:
        return engine in self._full

    def tokens(self, engine: str) -> int:
        """That prefills of this router compute there now."""
        return self._tokens[engine]

    def foreign(self, engine: str) -> float:
        """Requests of others there."""
        reading = self._readings.get(engine)
        return reading.foreign if reading is not None else 0.0

    def calls(self, engine: str) -> float:
        """Running or waiting there, whoever's."""
        return self.in_flight[engine] + self.foreign(engine)

    def burden(self, engine: str) -> tuple[bool, float, int, float]:
        """Orders engines by how little a new conversation would find there: those that are full come last, of equal ones the
        one that was chosen least recently first, and lots are drawn at last, lest all routers begin with the same one."""
        weight = self.homes.count(engine) + self.calls(engine) + self._tokens[engine] / _CALL_TOKENS
        return engine in self._full, weight, self._chosen.get(engine, 0), self._lot(engine)

    def _lot(self, engine: str) -> float:
        if not self._seed:
            return 0.0
        if engine not in self._lots:
            self._lots[engine] = random.Random(f"{self._seed} {engine}").random()
        return self._lots[engine]

    def is_pressed(self, engine: str) -> bool:
        """Whether it is worth asking if a conversation should leave."""
        return (
            engine in self._full
            or self._tokens[engine] > 0
            or self.foreign(engine) > 0
            or self.in_flight[engine] > _CROWD
        )

    def leaves_decode(self, home: str, other: str) -> bool:
        if (may_leave := self._full.get(home)) is not None:
            if may_leave <= 0 or other in self._full:
                return False
            here, there = self.gauges(home), self.gauges(other)
            return here is None or there is None or _has_more_room(there, here)
        return self.in_flight[home] > 2 * self.calls(other) + _CROWD

    @staticmethod
    def leaves_prefill(home_ms: float, other_ms: float, moving_ms: float) -> bool:
        """Whether waiting at home costs clearly more than waiting elsewhere and moving."""
        there = other_ms + moving_ms
        return home_ms > there * (1 + MARGIN) + MARGIN_MS


def _has_more_room(there: Gauges, here: Gauges) -> bool:
    return there.kv_usage <= here.kv_usage - _ROOMIER or (_has_room(there) and here.kv_usage < _FULL)


ENOUGH = 6
"""Samples before a line is believed."""
_KEPT = 24
"""Samples that a line is fitted to: the last ones, so that an engine which changes is learned anew."""
_MEASURE_AGAIN = 16
"""A route that was passed over so often in a row is taken once: what nobody takes, nobody measures."""
_LEAST_TOKENS = 32
"""Fewer say nothing about what a token costs."""

PRIOR_COMPUTE_MS = 0.1
"""Per token on P, before it is known."""
_PRIOR_READ_MS = 0.02
_PRIOR_READ_FIXED_MS = 5.0
_PRIOR_PREFILL_TOKENS = 1024.0


class Line:
    """Robust line fit of milliseconds by tokens: `fixed_ms + per_token_ms * tokens`."""

    __slots__ = ("_samples", "_seen", "fixed_ms", "per_token_ms", "reach")

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._seen = 0
        self.fixed_ms = 0.0
        self.per_token_ms = 0.0
        self.reach = 0
        """Tokens of the longest sample: beyond, the line is a guess."""

    def __repr__(self) -> str:
        return f"<Line {self.fixed_ms:.1f} ms + {self.per_token_ms:.4f} ms per token, {len(self._samples)} samples>"

    @property
    def known(self) -> bool:
        return self._seen >= ENOUGH

    def add(self, tokens: int, ms: float) -> None:
        self._samples.append((tokens, max(ms, 0.0)))
        self._seen += 1
        if self._seen <= _KEPT // 3 or self._seen % 8 == 0:
            self._fit()

    def ms(self, tokens: int) -> float | None:
        """`None` before enough was seen."""
        return self.fixed_ms + self.per_token_ms * tokens if self.known else None

    def _fit(self) -> None:
        samples = sorted(self._samples)
        third = max(1, len(samples) // 3)
        low, high = samples[:third], samples[-third:]
        near, far = median(tokens for tokens, _ in low), median(tokens for tokens, _ in high)
        self.reach = samples[-1][0]
        if far >= 2 * near and far - near >= _LEAST_TOKENS:
            rise = (median(ms for _, ms in high) - median(ms for _, ms in low)) / (far - near)
            self.per_token_ms = max(rise, 0.0)
            self.fixed_ms = max(0.0, median(ms - self.per_token_ms * tokens for tokens, ms in samples))
        else:  # all of one length, which cannot tell the two apart
            self.per_token_ms = median(ms / max(tokens, 1) for tokens, ms in samples)
            self.fixed_ms = 0.0


@dataclass
class _Rate:
    """Moving average of milliseconds per token."""

    ms_per_token: float = 0.0
    turns: int = 0

    def add(self, ms: float, tokens: int) -> None:
        self.turns += 1
        weight = max(1 / self.turns, 0.2)
        self.ms_per_token += weight * (ms / tokens - self.ms_per_token)


class Costs:
    """Cost model: the lines of every engine, by its URL. Thread-safe: what changes something holds a lock."""

    def __init__(self) -> None:
        self._compute: dict[str, Line] = {}
        self._read: dict[str, Line] = {}
        self._local: dict[str, Line] = {}
        self._handoff: dict[str, Line] = {}
        self._rates: dict[str, _Rate] = {}
        self._passed: Counter[tuple[str, Route]] = Counter()
        self.prefill_tokens = _PRIOR_PREFILL_TOKENS
        """Of a typical prefill: what one that another client has sent may be."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Costs compute {self._compute}, read {self._read}, local {self._local}, handoff {self._handoff}>"

    def forget(self, engine: str) -> None:
        """It is another process now, or gone."""
        with self._lock:
            for learned in (self._compute, self._read, self._local, self._handoff, self._rates):
                learned.pop(engine, None)
            self._passed = Counter({at: times for at, times in self._passed.items() if at[0] != engine})

    # --- learning

    def learn_compute(self, prefill: str, ms: float, computed: int, *, alone: bool = True) -> None:
        """A prefill that read nothing. One that may have waited for others teaches only where nothing is known."""
        with self._lock:
            self.prefill_tokens += 0.1 * (computed - self.prefill_tokens)
            if computed >= _LEAST_TOKENS:
                self._rates.setdefault(prefill, _Rate()).add(ms, computed)
                _learn(self._compute, prefill, computed, ms, alone)

    def learn_read(self, prefill: str, ms: float, computed: int, read: int, *, alone: bool) -> None:
        """A prefill that read: what is over once the computing is taken off."""
        with self._lock:
            self.prefill_tokens += 0.1 * (computed - self.prefill_tokens)
            line = self._compute.get(prefill)
            computing = line.ms(computed) if line is not None else None
            if computing is not None and read >= _LEAST_TOKENS:
                _learn(self._read, prefill, read, ms - computing, alone)

    def learn_first_byte(self, decode: str, ms: float, computed: int, *, local: bool) -> None:
        """From D's being asked to the first byte of a turn that it ran alone (`local`), or where P had prefilled: then D reads
        what P computed. D runs several at a time: no waiting."""
        with self._lock:
            _learn(self._local if local else self._handoff, decode, computed, ms, alone=True)

    # --- estimates in milliseconds, `None` where nothing is known

    def compute(self, prefill: str, tokens: int) -> float | None:
        return _ms(self._compute, prefill, tokens)

    def read(self, prefill: str, tokens: int) -> float | None:
        return _ms(self._read, prefill, tokens)

    def local(self, decode: str, tokens: int) -> float | None:
        return _ms(self._local, decode, tokens)

    def handoff(self, decode: str, tokens: int) -> float:
        """0 where nobody streams: then it cannot be seen, and a local turn's time is not known either."""
        return _ms(self._handoff, decode, tokens) or 0.0

    def local_reach(self, decode: str) -> int:
        """Tokens up to which D's line can be believed: four times what was tried."""
        line = self._local.get(decode)
        return 4 * line.reach if line is not None and line.known else 0

    def per_token(self, prefill: str) -> float:
        """Milliseconds of computing one token, the prior before it is known."""
        line = self._compute.get(prefill)
        return line.per_token_ms if line is not None and line.known else PRIOR_COMPUTE_MS

    def prefill_rate(self, prefill: str | None) -> tuple[float, int] | None:
        """Milliseconds per computed token on an engine (of all prefill engines where none is named), and from how many cold
        turns; `None` before the first."""
        if prefill is not None and (one := self._rates.get(prefill)) is not None:
            return one.ms_per_token, one.turns
        rates = tuple(self._rates.values())
        turns = sum(rate.turns for rate in rates)
        return (sum(rate.ms_per_token * rate.turns for rate in rates) / turns, turns) if turns else None

    def moving_ms(self, prefill: str, tokens: int, *, readable: bool) -> float:
        """What it costs that `tokens` in one P's prefix cache are wanted on another: reading or computing them."""
        computing = self.compute(prefill, tokens)
        computing = PRIOR_COMPUTE_MS * tokens if computing is None else computing
        if not readable:
            return computing
        reading = self.read(prefill, tokens)
        reading = _PRIOR_READ_FIXED_MS + _PRIOR_READ_MS * tokens if reading is None else reading
        return min(reading, computing)

    # --- measuring again

    def overdue(self, engine: str, route: Route) -> bool:
        """Whether the route was passed over for so long that its estimate may be of other days."""
        return self._passed[engine, route] >= _MEASURE_AGAIN

    def passed_over(self, engine: str, route: Route) -> None:
        with self._lock:
            self._passed[engine, route] += 1

    def took(self, engine: str, route: Route) -> None:
        if self._passed:
            with self._lock:
                self._passed.pop((engine, route), None)


def _learn(lines: dict[str, Line], engine: str, tokens: int, ms: float, alone: bool) -> None:
    line = lines.get(engine)
    if line is None:
        line = lines[engine] = Line()
    if alone or not line.known:
        line.add(tokens, ms)


def _ms(lines: dict[str, Line], engine: str, tokens: int) -> float | None:
    line = lines.get(engine)
    return None if line is None else line.ms(tokens)
