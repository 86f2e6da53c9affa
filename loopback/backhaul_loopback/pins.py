"""Pinned blocks with deadlines: what stays held after a request ended, until a peer has read it or time is up (stock vLLM)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .blocks import Block


@dataclass(eq=False)
class Pin:
    blocks: Sequence[Block]
    deadline: float | None
    """On the engine's own clock; `None` never ends: the leak of parameters without a flag, on D."""


class Pins:
    """Pins by the request that left them. A pin ends once: read, released, expired or forgotten."""

    def __init__(self) -> None:
        self._pins: dict[str, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pins

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._pins))

    @property
    def block_ids(self) -> set[int]:
        return {block.id for pin in self._pins.values() for block in pin.blocks}

    def add(self, request_id: str, blocks: Sequence[Block], deadline: float | None) -> None:
        self._pins[request_id] = Pin(blocks, deadline)

    def end(self, request_id: str) -> Sequence[Block] | None:
        """The blocks to release; `None` when there is no such pin (any more)."""
        pin = self._pins.get(request_id)
        if pin is None or pin.deadline is None:
            return None
        del self._pins[request_id]
        return pin.blocks

    def extend(self, request_id: str, deadline: float) -> None:
        pin = self._pins.get(request_id)
        if pin is not None and pin.deadline is not None:
            pin.deadline = max(pin.deadline, deadline)

    def remaining(self, request_id: str, now: float) -> float:
        """Seconds until the pin ends; 0 for one that has."""
        pin = self._pins.get(request_id)
        if pin is None:
            return 0.0
        return math.inf if pin.deadline is None else max(0.0, pin.deadline - now)

    def expired(self, now: float) -> list[str]:
        return [
            request_id for request_id, pin in self._pins.items() if pin.deadline is not None and pin.deadline <= now
        ]

    def next_deadline(self) -> float | None:
        return min((pin.deadline for pin in self._pins.values() if pin.deadline is not None), default=None)
