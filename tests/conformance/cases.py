"""All checks, by name."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

from . import errors, prompts, shapes, streams, transfers
from .engines import Engines

Case = Callable[[Engines], Awaitable[None]]

CASES: dict[str, Case] = {
    name: check
    for module in (shapes, streams, prompts, errors, transfers)
    for name, check in inspect.getmembers(module, inspect.iscoroutinefunction)
    if check.__module__ == module.__name__ and not name.startswith("_")
}
