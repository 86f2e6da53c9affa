"""Cost model: what the steps of a turn take on each engine, in milliseconds by tokens, learned from the turns' own legs.

A step is a straight line: something fixed, and so much per token. It is fitted to the last samples by Tukey's resistant line
(medians of the shortest and of the longest third), which a third of wild samples does not move. Nothing is known of a step
before it was seen `ENOUGH` times; whoever needs a number before that takes the prior.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from statistics import median

from ..report import Route

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
