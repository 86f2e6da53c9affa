"""Conversations: a scope that names the calls inside it, collects their reports, and releases what they left behind."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from contextvars import Token
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

import anyio
from backhaul_router import portal
from backhaul_router.identity import MAX_ID_BYTES
from backhaul_router.report import Reason, ReuseReport, Route
from backhaul_router.scope import ConversationScope, current


class _Router(Protocol):
    def end_conversation(self, conversation: str) -> Coroutine[Any, Any, None]: ...


@dataclass(frozen=True, kw_only=True)
class ReuseTotal:
    """A conversation so far. Token counts add up what the turns' reports know."""

    turns: int
    prompt: int
    reused: int
    """Prompt tokens that were found cached or read, and so not computed."""
    computed: int
    offered: int
    generated: int
    hit_rate: float | None
    """`reused / prompt` over the turns that know both; `None` when none does."""
    saved_ms: float | None
    """Estimated time to first token saved; `None` when no turn has an estimate."""
    routes: Mapping[Route, int]
    reasons: Mapping[Reason, int]


class Reuse:
    """What the turns of one conversation reused. Safe to read from any thread while turns run.

    A turn is counted when its answer has ended: a streamed one when the stream has been read to its end or closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: list[ReuseReport] = []

    @property
    def last(self) -> ReuseReport | None:
        """The turn that ended last."""
        with self._lock:
            return self._turns[-1] if self._turns else None

    @property
    def turns(self) -> list[ReuseReport]:
        """Every turn, in the order in which they ended."""
        with self._lock:
            return list(self._turns)

    @property
    def total(self) -> ReuseTotal:
        turns = self.turns
        known = [(turn.prompt, turn.cached) for turn in turns if turn.prompt and turn.cached is not None]
        saved = [turn.saved_ms for turn in turns if turn.saved_ms is not None]
        return ReuseTotal(
            turns=len(turns),
            prompt=sum(turn.prompt or 0 for turn in turns),
            reused=sum(turn.reused for turn in turns),
            computed=sum(turn.computed or 0 for turn in turns),
            offered=sum(turn.offered for turn in turns),
            generated=sum(turn.generated or 0 for turn in turns),
            hit_rate=sum(cached for _, cached in known) / sum(prompt for prompt, _ in known) if known else None,
            saved_ms=sum(saved) if saved else None,
            routes=MappingProxyType(Counter(turn.route for turn in turns)),
            reasons=MappingProxyType(Counter(turn.reason for turn in turns if turn.reason is not None)),
        )

    def __repr__(self) -> str:
        return f"<Reuse of {len(self.turns)} turns, last {self.last}>"

    def _add(self, report: ReuseReport) -> None:
        with self._lock:
            self._turns.append(report)


class Conversation:
    """The turns of one agent, for `with` and `async with`; `conversation()` makes one.

    Every call of a Backhaul client inside belongs to it, whatever framework makes the call, in child tasks and
    `asyncio.to_thread` too (a bare `ThreadPoolExecutor.submit` does not carry context). Leaving it releases what the
    engines hold for it. It can be entered once, so that two histories never share an id by accident.
    """

    def __init__(self, id: str | None = None) -> None:
        self.id = f"conv-{uuid.uuid4().hex}" if id is None else _checked(id)
        self.reuse = Reuse()
        self._routers: dict[int, _Router] = {}
        self._token: Token[ConversationScope | None] | None = None
        self._entered = False
        self._ended = False

    def __repr__(self) -> str:
        return f"<Conversation {self.id!r}, {len(self.reuse.turns)} turns>"

    def __enter__(self) -> Conversation:
        if self._entered:
            raise RuntimeError(f"{self!r} was entered before: make another, with its id= if it is to continue this one")
        self._entered = True
        self._token = current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Inside a running event loop this does not wait for the release, which `async with` does."""
        self._leave()
        self.end()

    async def __aenter__(self) -> Conversation:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._leave()
        await self.aend()

    def _leave(self) -> None:
        if self._token is not None:
            # Another context than the one that entered, as with an async generator: there is nothing to restore here.
            with contextlib.suppress(ValueError):
                current.reset(self._token)
            self._token = None

    def attach(self, router: _Router) -> None:
        """Takes note of a router that runs a turn of this conversation."""
        self._routers[id(router)] = router

    def record(self, report: ReuseReport) -> None:
        self.reuse._add(report)
        if self._ended and self._routers and not portal.exiting():
            portal.shared().submit(self._release())

    def end(self) -> None:
        """Releases what the engines hold for the conversation. Failures are logged, never raised: the work is done."""
        self._ended = True
        if not self._routers or portal.exiting():
            return
        release = portal.shared().submit(self._release())
        if not portal.running():
            release.result()

    async def aend(self) -> None:
        """The same from asynchronous code. Runs to its end when the calling task is cancelled meanwhile."""
        self._ended = True
        with anyio.CancelScope(shield=True):
            await self._release()

    async def _release(self) -> None:
        await portal.all_within_limit(
            (f"ending conversation {self.id!r} on {router!r}", router.end_conversation(self.id))
            for router in list(self._routers.values())
        )


def conversation(id: str | None = None) -> Conversation:
    """A conversation to enter with `with` or `async with`; without an id it gets a fresh one.

    Raises `ValueError` for an id that cannot be sent: empty, over 256 bytes, or not printable ASCII."""
    return Conversation(id)


@contextlib.contextmanager
def entered(bound: Conversation | None) -> Iterator[None]:
    """Runs calls of a client that is bound to a conversation in it, whatever scope they are in."""
    if bound is None:
        yield
        return
    token = current.set(bound)
    try:
        yield
    finally:
        current.reset(token)


def _checked(id: str) -> str:
    if not isinstance(id, str):
        raise TypeError(f"a conversation's id is a string, not {type(id).__name__}")
    if not id or len(id) > MAX_ID_BYTES or not id.isascii() or not id.isprintable() or id != id.strip():
        raise ValueError(
            f"conversation id {id[:80]!r}: it travels in a header, so use 1 to {MAX_ID_BYTES} printable ASCII "
            "characters, without spaces at the ends"
        )
    return id
