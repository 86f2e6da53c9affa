"""All checks, by name."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from types import ModuleType

from . import connector_leases, connector_reads, endpoints, errors, prompts, shapes, streams, transfers
from .engines import Engines

Case = Callable[[Engines], Awaitable[None]]


def _cases(*modules: ModuleType) -> dict[str, Case]:
    return {
        name: check
        for module in modules
        for name, check in inspect.getmembers(module, inspect.iscoroutinefunction)
        if check.__module__ == module.__name__ and not name.startswith("_")
    }


CASES = _cases(shapes, streams, prompts, errors, endpoints, transfers)
"""For engines as vLLM has them."""

CONNECTOR_CASES = _cases(connector_reads, connector_leases)
"""For engines that run Backhaul's connector, P without prefix caching."""
