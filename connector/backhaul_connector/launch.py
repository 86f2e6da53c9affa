"""`backhaul up`: prefill and decode engines on this machine, with the right flags, for as long as the command runs."""

from __future__ import annotations

from .command import Device, EngineCommand, EnginesConfig, LaunchError, Role
from .engines import Engine, Engines

__all__ = ["Device", "Engine", "EngineCommand", "Engines", "EnginesConfig", "LaunchError", "Role"]
