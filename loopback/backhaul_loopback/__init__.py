"""Test double of a vLLM 0.32 engine, without a model: its wire protocol, KV transfers and failure modes over real sockets.

The answer is a function of the KV that a request used, so a wrong reuse changes the text.
"""

from .clock import Clock, CostModel, RealClock, VirtualClock
from .config import EngineConfig, Faults, Received
from .engine import LoopbackEngine, LoopbackPair, loopback_pair

__all__ = [
    "Clock",
    "CostModel",
    "EngineConfig",
    "Faults",
    "LoopbackEngine",
    "LoopbackPair",
    "RealClock",
    "Received",
    "VirtualClock",
    "loopback_pair",
]
