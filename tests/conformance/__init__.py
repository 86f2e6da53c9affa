"""Facts about the wire protocol of vLLM 0.32 and 0.33 that Backhaul builds on: checks that real and loopback engines pass."""

from .cases import CASES, CONNECTOR_CASES, Case
from .engines import Engines

__all__ = ["CASES", "CONNECTOR_CASES", "Case", "Engines"]
