"""Compatibility checks of pairs: which prefill engine can read from which decode engine, probed before a conversation needs it.

Only for stock prefill engines: without bi-directional mode one hangs on a handle instead of refusing it, and does not show
the mode. An engine of ours answers, so there is nothing to find out. The probe runs while the agent works on the first
answer that such a pair gave it: a first turn is never read back, and so never waits; the second waits at most for what is left
of the probe.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable

from ..config import RouterConfig
from ..fleet.engine import Engine
from ..fleet.fleet import Fleet
from .client import EngineClient
from .leases import Spawn
from .pair_probe import probe_pair

log = logging.getLogger("backhaul")

_TIMEOUT_S = 10.0
_LAST_S = 1.0
_AGAIN_S = 300.0
"""A pair that was found unsafe is tried again after so long."""


class PairChecks:
    """Single-flight checks: probes each pair once. May be used from several event loops, each of which then runs its own."""

    def __init__(
        self,
        client: EngineClient,
        fleet: Fleet,
        config: RouterConfig,
        clock: Callable[[], float],
        spawn: Spawn,
    ) -> None:
        self._client = client
        self._fleet = fleet
        self.config = config
        self._clock = clock
        self._spawn = spawn
        self._running: dict[tuple[asyncio.AbstractEventLoop, str, str], asyncio.Task[None]] = {}
        self._checked = clock()
        self._closed = False

    def wanted(self, prefill: str, decode: str) -> bool:
        """Whether it is to be found out."""
        return self.config.check_pairs and not self._fleet.pairs.is_checked(prefill, decode)

    def due(self, now: float) -> bool:
        """Whether to try again what was unsafe."""
        if now - self._checked < _AGAIN_S or not self._fleet.pairs.unsafe:
            return False
        self._checked = now
        return True

    async def check(self, prefill: Engine, decode: str) -> None:
        """Returns when the fleet knows whether P can read from D."""
        key = (asyncio.get_running_loop(), prefill.url, decode)
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = self._spawn(self._check(prefill, decode))
            task.add_done_callback(lambda _: self._running.pop(key, None))
        await asyncio.wait([task])  # a client that leaves takes nobody else's answer along
        if not task.cancelled():
            task.result()

    def close(self) -> None:
        """Gives up. What this event loop has begun ends after its request under way, `_LAST_S` from now at the latest, and what
        engines keep for it is released."""
        self._closed = True
        loop = asyncio.get_running_loop()
        for (where, _, _), task in tuple(self._running.items()):
            if where is loop:
                giving_up = loop.call_later(_LAST_S, task.cancel)
                task.add_done_callback(functools.partial(_call_off, giving_up))

    async def check_unsafe_again(self) -> None:
        for prefill, decode in self._fleet.pairs.unsafe:
            if (engine := self._fleet.get(prefill)) is not None:
                await self.check(engine, decode)

    async def _check(self, prefill: Engine, decode: str) -> None:
        holder = self._fleet.get(decode)
        if holder is None or self._closed:
            return
        timeout_s = min(_TIMEOUT_S, self.config.prefill_timeout_s)
        threshold = self.config.kv_recompute_threshold
        found = await probe_pair(
            self._client, prefill, holder, threshold=threshold, timeout_s=timeout_s, given_up=lambda: self._closed
        )
        self._checked = self._clock()
        if found.verdict.unsafe:
            why = f"{found.verdict}: {found.detail}"
            log.warning(
                "%s cannot read from %s, so its turns are cold there (%s). `backhaul doctor` says what to change.",
                prefill,
                holder,
                why,
            )
            self._fleet.pairs.note(prefill.url, decode, why)
        else:
            self._fleet.pairs.note(prefill.url, decode, None)


def _call_off(timer: asyncio.TimerHandle, _: object) -> None:
    timer.cancel()
