"""Public face: What a router needs of an HTTP client, for programs that bring their own."""

from .engines.client import EngineAnswer, EngineCall, EngineClient, EngineFailure, EngineStream

__all__ = ["EngineAnswer", "EngineCall", "EngineClient", "EngineFailure", "EngineStream"]
