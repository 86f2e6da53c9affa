"""The asynchronous driver: performs what a turn's state machine asks for, over real engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from .config import RouterConfig
from .engine_client import EngineClient
from .report import Route
from .scope import ConversationScope


@dataclass(frozen=True)
class Request:
    """What a client sent, whatever HTTP library or server it came through."""

    method: str
    path: str
    """Path below the host with its query, such as `/v1/chat/completions`."""
    headers: Sequence[tuple[str, str]]
    body: bytes = b""
    scope: ConversationScope | None = None
    """The conversation that the calling code is in; explicit ids in the request go before it."""
    route: Route | None = None
    """Overrides the configured route for this turn."""


class Reply(Protocol):
    """What the client gets. `body` must be iterated to its end or closed: closing early aborts the engines."""

    status: int
    headers: Sequence[tuple[str, str]]

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    async def aclose(self) -> None: ...


class Router:
    """Runs turns. One instance holds a ledger and a fleet, and may be used from several event loops and threads."""

    def __init__(self, config: RouterConfig, *, client: EngineClient | None = None) -> None:
        raise NotImplementedError

    async def connect(self) -> None:
        """Asks every engine what it is and checks that they fit together; done once, before the first turn.

        Raises `ConfigError`."""
        raise NotImplementedError

    async def handle(self, request: Request) -> Reply:
        """Runs one request. Returns when the reply's head is known. Errors that a client should see are replies;
        `ConfigError` is raised."""
        raise NotImplementedError

    async def end_conversation(self, conversation: str) -> None:
        """Forgets the conversation and releases what the engines hold for it. Unknown ids are fine."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Releases every handle and closes the connections."""
        raise NotImplementedError
