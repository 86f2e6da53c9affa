"""Fast and exact multi-turn agents on vLLM prefill/decode clusters: OpenAI clients, conversations, reuse reports."""

from importlib.metadata import version as _version

from backhaul_router.errors import BackhaulError, ConfigError
from backhaul_router.report import Proof, Reason, ReuseReport, Route

from ._client import AsyncOpenAI, OpenAI
from ._conversation import Conversation, Reuse, ReuseTotal, conversation
from ._http import async_http_client, http_client

__version__ = _version("backhaul")

__all__ = [
    "AsyncOpenAI",
    "BackhaulError",
    "ConfigError",
    "Conversation",
    "OpenAI",
    "Proof",
    "Reason",
    "Reuse",
    "ReuseReport",
    "ReuseTotal",
    "Route",
    "__version__",
    "async_http_client",
    "conversation",
    "http_client",
]
