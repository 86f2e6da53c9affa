"""Capability flags of engines that only turns show: whether they check handles, run the token ids that they are sent, read what P
computed. An engine is taken at its word until a turn says otherwise."""

from __future__ import annotations

import logging
import threading

from backhaul_protocol import VERSION

from .counters import Counters
from .engine import Engine

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
