"""Facts about vLLM 0.32's wire protocol that Backhaul builds on, as checks that real and loopback engines both pass."""

from .cases import CASES, CONNECTOR_CASES, Case
from .engines import Engines

__all__ = ["CASES", "CONNECTOR_CASES", "Case", "Engines"]
