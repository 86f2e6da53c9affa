"""Fast and exact multi-turn agents on vLLM prefill/decode clusters: OpenAI clients, conversations, reuse reports."""

from importlib.metadata import version as _version

from backhaul_router.drive.pauses import Paused
from backhaul_router.errors import BackhaulError, ConfigError
from backhaul_router.report import Proof, Reason, ReuseReport, Route

from ._client import AsyncOpenAI, OpenAI
from ._collapse import Collapse
from ._conversation import Conversation, Reuse, conversation
from ._http import async_http_client, http_client
from ._totals import ReuseTotal, on_collapse, on_turn, totals

__version__ = _version("backhaul")

__all__ = [
    "AsyncOpenAI",
    "BackhaulError",
    "Collapse",
    "ConfigError",
    "Conversation",
    "OpenAI",
    "Paused",
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
    "on_collapse",
    "on_turn",
    "totals",
]
