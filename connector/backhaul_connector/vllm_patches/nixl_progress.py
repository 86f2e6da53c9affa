"""Patch of NIXL's polling: its progress thread sleeps between polls, so that an idle engine on a CPU leaves its core free.

NIXL's Python API fixes the thread's delay at 0 (nixl 1.5, `nixl_agent.__init__`): it polls without pause, and an engine's
worker, busy or not, takes a whole core. With a delay it waits on UCX's event descriptor, which wakes it when data comes.
`backhaul up` asks for this on CPUs, through an environment variable that reaches the workers.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from .on_import import change_on_import

DELAY_VARIABLE = "BACKHAUL_NIXL_PROGRESS_DELAY_US"
API_MODULES = ("nixl_cu12._api", "nixl_cu13._api")
"""Wherever the installed wheel has its Python API; `nixl` itself only re-exports one of them."""


def register() -> None:
    """Does what the environment asks for, when NIXL is imported."""
    delay_us = os.environ.get(DELAY_VARIABLE)
    if delay_us is not None:
        for name in API_MODULES:
            change_on_import(name, functools.partial(set_delay, delay_us=int(delay_us)))


def set_delay(api: ModuleType, *, delay_us: int) -> None:
    """Makes agents that are created later wait this long, at most, between polls; NIXL rounds up to milliseconds."""
    base: Any = api.nixlBind.nixlAgentConfig

    class Config(base):  # type: ignore[misc]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" and value == 0 else value)

    api.nixlBind.nixlAgentConfig = Config
