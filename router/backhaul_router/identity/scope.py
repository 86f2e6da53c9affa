"""Context variable of the conversation that the calling code is in, so that it reaches every framework's calls.

The SDK's `Conversation` is put here; the transport reads it in the caller's own context, and hands it each report.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from ..report import ReuseReport


class ConversationScope(Protocol):
    """What the router needs of a conversation: its name, and somewhere to put the reports."""

    @property
    def id(self) -> str: ...

    def record(self, report: ReuseReport) -> None:
        """Takes the report of a turn that has just ended. May be called from another thread."""


def parent_of(scope: ConversationScope | None) -> str | None:
    """The id of the conversation that a scope's is a child of, which it may say as `parent_id`."""
    parent: str | None = getattr(scope, "parent_id", None)
    return parent


current: ContextVar[ConversationScope | None] = ContextVar("backhaul_conversation", default=None)
