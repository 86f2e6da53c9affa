"""The scope of one model call: which conversation it is made in, and the report that the router gives of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from backhaul import _remote
from backhaul_router.identity.scope import ConversationScope, current, parent_of
from backhaul_router.report import ReuseReport

from . import _threads


class CallScope:
    """Stands in the place of the scope around a call, keeps the call's report, and passes all on to that scope."""

    def __init__(self, id: str | None, *, embedded: bool, metadata: Mapping[str, Any] | None) -> None:
        """`id` is what the caller said explicitly; `metadata` the run's, where LangChain gives it."""
        self.report: ReuseReport | None = None
        """Of the last request, where openai's client made several."""
        self._around: ConversationScope | None = current.get()
        self._configurable = _threads.noted_in(metadata)
        self.id, self.parent_id = self._named(id)
        if not self.id and not embedded:
            with _threads.inside(self._configurable):
                named = _remote.headers_of(None)
            self.id, self.parent_id = named.get("X-Conversation-ID", ""), named.get("X-Backhaul-Parent")
        self._asks = embedded or bool(self.id)
        """A router elsewhere gives its reports by conversation, so without one there is nothing to ask for."""

    def __repr__(self) -> str:
        return f"<CallScope {self.id!r} in {self._around!r}>"

    def _named(self, id: str | None) -> tuple[str, str | None]:
        """The conversation's id and its parent's. No id leaves it to the router, which asks LangChain's context."""
        around = self._around
        if id is None:
            return (around.id, parent_of(around)) if around is not None else ("", None)
        return id, around.id if around is not None and around.id != id else None

    def record(self, report: ReuseReport) -> None:
        self.report = report
        if self._around is not None:
            self._around.record(report)

    def attach(self, router: Any) -> None:
        attach = getattr(self._around, "attach", None)
        if attach is not None:
            attach(router)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with _threads.inside(self._configurable):
            if not self._asks:
                yield
                return
            token = current.set(self)
            try:
                yield
            finally:
                current.reset(token)
