"""Conversations: a scope that names the calls inside it, collects their reports, and releases what they left behind."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextvars import Token
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

import anyio
from backhaul_router.drive import background_loop
from backhaul_router.drive.pauses import Paused
from backhaul_router.errors import BackhaulError
from backhaul_router.identity import hints
from backhaul_router.identity.ids import MAX_ID_BYTES
from backhaul_router.identity.scope import ConversationScope, current
from backhaul_router.report import ReuseReport

from ._collapse import COLLAPSE_FLOOR, Collapse, Detector
from ._keepalive import keeper
from ._listeners import Listeners
from ._totals import ReuseTotal, Tally, collapse_listeners

_log = logging.getLogger("backhaul")

_T = TypeVar("_T")
OnTurn = Callable[[ReuseReport], object]
OnCollapse = Callable[[Collapse], object]


class _Router(Protocol):
    def end_conversation(self, conversation: str) -> Coroutine[Any, Any, None]: ...

    def renewable(self, conversation: str) -> bool: ...

    def renew(self, conversation: str) -> Coroutine[Any, Any, float | None]: ...

    def pause(self, conversation: str, seconds: float) -> Coroutine[Any, Any, Paused]: ...


class Reuse:
    """What the turns of one conversation reused. Safe to read from any thread while turns run.

    A turn is counted when its answer has ended: a streamed one when the stream has been read to its end or closed."""

    def __init__(self, collapse_floor: int = COLLAPSE_FLOOR) -> None:
        self._lock = threading.Lock()
        self._turns: list[ReuseReport] = []
        self._tally = Tally()
        self._detector = Detector(collapse_floor)
        self._children: list[Reuse] = []

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
        """This conversation's own turns."""
        return self._tally.total

    @property
    def total_with_children(self) -> ReuseTotal:
        """Its own turns, and those of its children, their children and so on."""
        return Tally(self._all_turns()).total

    @property
    def collapse(self) -> Collapse | None:
        """The collapse that the conversation is in: since a turn that reused materially less than was on record for it, and
        until one that reuses its history again. Never on a first turn, nor on a fork's."""
        return self._detector.current

    @property
    def collapse_floor(self) -> int:
        """So many tokens must be lost at least."""
        return self._detector.floor

    def __repr__(self) -> str:
        return f"<Reuse of {len(self.turns)} turns, last {self.last}>"

    def _all_turns(self) -> Iterator[ReuseReport]:
        yield from self.turns
        with self._lock:
            children = list(self._children)
        for child in children:
            yield from child._all_turns()

    def _adopt(self, child: Reuse) -> None:
        with self._lock:
            self._children.append(child)

    def _add(self, report: ReuseReport) -> Collapse | None:
        with self._lock:
            self._turns.append(report)
            self._tally.add(report)
            return self._detector.judge(report)


class Conversation:
    """The turns of one agent, for `with` and `async with`; `conversation()` makes one.

    Every call of a Backhaul client inside belongs to it, whatever framework makes the call, in child tasks and
    `asyncio.to_thread` too (a bare `ThreadPoolExecutor.submit` does not carry context). Leaving it releases what the
    engines hold for it. It can be entered once, so that two histories never share an id by accident.
    """

    def __init__(
        self,
        id: str | None = None,
        *,
        parent: Conversation | str | Literal[False] | None = None,
        on_turn: OnTurn | None = None,
        on_collapse: OnCollapse | None = None,
        collapse_floor: int | None = None,
        keep_alive: bool | None = None,
    ) -> None:
        self.id = f"conv-{uuid.uuid4().hex}" if id is None else _checked(id)
        enclosing = current.get() if parent is None else None
        self.parent: Conversation | None = _conversation(enclosing) if parent is None else _conversation(parent)
        """The conversation that this one is a child of."""
        self.parent_id: str | None = _parent_id(enclosing if parent is None else parent, self.id)
        """Its id, also of a parent that is not in this process."""
        if self.parent_id is None:
            self.parent = None
        inherited_floor, inherited_keep = self.parent.inherited if self.parent is not None else (COLLAPSE_FLOOR, True)
        self.reuse: Reuse = Reuse(inherited_floor if collapse_floor is None else collapse_floor)
        self.keep_alive: bool = inherited_keep if keep_alive is None else keep_alive
        self.renewals = 0
        """How often its leases were renewed."""
        self.failed_renewals = 0
        self._on_turn = Listeners("on_turn", on_turn)
        self._on_collapse = Listeners("on_collapse", on_collapse)
        self._children: list[Conversation] = []
        self._routers: dict[int, _Router] = {}
        self._token: Token[ConversationScope | None] | None = None
        self._entered = False
        self._ended = False
        if self.parent is not None:
            self.parent._children.append(self)
            self.parent.reuse._adopt(self.reuse)

    def __repr__(self) -> str:
        return f"<Conversation {self.id!r}, {len(self.reuse.turns)} turns>"

    @property
    def inherited(self) -> tuple[int, bool]:
        """What children begin with: `collapse_floor` and `keep_alive`."""
        return self.reuse.collapse_floor, self.keep_alive

    @property
    def children(self) -> Sequence[Conversation]:
        """The conversations that were begun inside this one or forked from it, in that order."""
        return tuple(self._children)

    def fork(self, id: str | None = None, *, on_turn: OnTurn | None = None) -> Conversation:
        """A child that goes on from this conversation's history: where its first request begins with it, that turn reuses what
        this conversation's last turns left. Engines that run our connector let any number of forks and this conversation itself
        read at once; on stock engines the first turn to come gets it."""
        return Conversation(id, parent=self, on_turn=on_turn)

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
        """Takes the report of a turn that has ended."""
        collapse = self.reuse._add(report)
        if self._ended and self._routers and not background_loop.exiting():
            background_loop.shared().submit(self._release())
        else:
            self._keep(report.handle_remaining_s)
        self._on_turn.tell(report)
        if collapse is not None:
            self._on_collapse.tell(collapse)
            collapse_listeners.tell(collapse)

    # --- what is ahead

    @contextlib.contextmanager
    def last_turn(self) -> Iterator[None]:
        """Calls of this conversation inside are its last: they leave nothing on the engines, and what is held for it is released
        when they end. On the wire it is the header `X-Backhaul-Last-Turn: true`, which calls can carry by themselves."""
        token = hints.current.set((self.id, hints.Hints(last_turn=True)))
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # as in `_leave`
                hints.current.reset(token)

    def pause(self, seconds: float) -> Paused:
        """Says that the next turn comes in about `seconds` (at most 86,400). What the engines hold is kept until then, or
        released now where it cannot be kept for so long; the answer says which, and why.

        A call can say so as well, in the header `X-Backhaul-Pause: SECONDS`: it is then about what that turn leaves.
        Raises `ValueError` for what is no pause, `RuntimeError` inside an event loop, where `apause` is for."""
        if background_loop.running():
            raise RuntimeError("pause() waits for the engines, and would block this event loop: await apause()")
        return background_loop.shared().run(self.apause(hints.checked_pause(seconds)))

    async def apause(self, seconds: float) -> Paused:
        """The same from asynchronous code. Raises `BackhaulError` when a router elsewhere could not be asked."""
        pause_s = hints.checked_pause(seconds)
        answers, failure = await self._of_each(lambda router: router.pause(self.id, pause_s))
        if failure is not None:
            raise failure
        if not answers:
            return Paused(kept_s=None, why="no turn of this conversation has run")
        kept = [answer.kept_s for answer in answers if answer.kept_s is not None]
        keeper.forget(self)
        if kept:
            self._keep(min(kept))
        return Paused(
            kept_s=min(kept, default=None),
            released=sum(answer.released for answer in answers),
            why="; ".join(dict.fromkeys(answer.why for answer in answers if answer.why)) or None,
        )

    # --- keeping leases while the scope is open

    def _keep(self, remaining_s: float | None) -> None:
        if remaining_s is None or self._ended or not self.keep_alive:
            return
        if any(router.renewable(self.id) for router in list(self._routers.values())):
            keeper.watch(self, remaining_s)

    async def renew(self) -> float | None:
        """Renews its leases for another `decoder_kv_blocks_ttl`; an open conversation's are renewed by themselves. Returns for
        how many seconds they can be used; `None` where there are none, or none that can be renewed, as on stock engines.
        Raises `BackhaulError` when an engine or a router did not do it."""
        answers, failure = await self._of_each(lambda router: router.renew(self.id))
        found = [remaining_s for remaining_s in answers if remaining_s is not None]
        self.renewals += bool(found)
        if failure is not None:
            if not found:
                raise failure
            self.failed_renewals += 1
            _log.warning("some leases of %r could not be renewed: %s", self, failure)
        return None if self._ended else min(found, default=None)

    async def _of_each(
        self, ask: Callable[[_Router], Coroutine[Any, Any, _T]]
    ) -> tuple[list[_T], BackhaulError | RuntimeError | None]:
        """What the routers answer, and the last failure: one that fails does not keep the others from being asked."""
        answers: list[_T] = []
        failure: BackhaulError | RuntimeError | None = None
        for router in list(self._routers.values()):
            try:
                answers.append(await ask(router))
            except (BackhaulError, RuntimeError) as error:  # RuntimeError: it is closed
                failure = error
        return answers, failure

    def renewal_failed(self) -> bool:
        """Counts it; `keeper` logs why. Returns whether to try again."""
        self.failed_renewals += 1
        return not self._ended

    # --- its end

    def end(self) -> None:
        """Releases what the engines hold for the conversation. Failures are logged, never raised: the work is done. A turn that
        ends later is counted still, and what it leaves is released then."""
        self._close()
        if not self._routers or background_loop.exiting():
            return
        release = background_loop.shared().submit(self._release())
        if not background_loop.running():
            release.result()

    async def aend(self) -> None:
        """The same from asynchronous code. Runs to its end when the calling task is cancelled meanwhile."""
        self._close()
        with anyio.CancelScope(shield=True):
            await self._release()

    def _close(self) -> None:
        self._ended = True
        keeper.forget(self)

    async def _release(self) -> None:
        await background_loop.all_within_limit(
            (f"ending conversation {self.id!r} on {router!r}", router.end_conversation(self.id))
            for router in list(self._routers.values())
        )


def conversation(
    id: str | None = None,
    *,
    parent: Conversation | str | Literal[False] | None = None,
    on_turn: OnTurn | None = None,
    on_collapse: OnCollapse | None = None,
    collapse_floor: int | None = None,
    keep_alive: bool | None = None,
) -> Conversation:
    """A conversation to enter with `with` or `async with`; without an id it gets a fresh one.

    `parent`: a conversation, or the id of one elsewhere; by default the one that the calling code is in, and `False` for none.
    `on_turn` is called with each turn's report when it has ended, `on_collapse` with each `Collapse`, in whatever thread that
    is; what they raise is logged. `collapse_floor`: so many tokens (256) must be lost at least. `keep_alive=False` lets its
    leases end with their TTL though it is open. The last two are inherited from the parent.

    Raises `ValueError` for an id that cannot be sent: empty, over 256 bytes, or not printable ASCII."""
    return Conversation(
        id,
        parent=parent,
        on_turn=on_turn,
        on_collapse=on_collapse,
        collapse_floor=collapse_floor,
        keep_alive=keep_alive,
    )


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


def _conversation(scope: object) -> Conversation | None:
    return scope if isinstance(scope, Conversation) else None


def _parent_id(parent: ConversationScope | Conversation | str | Literal[False] | None, own: str) -> str | None:
    """A conversation that is begun anew inside itself has no parent."""
    if parent is None or parent is False:
        return None
    found = _checked(parent) if isinstance(parent, str) else parent.id
    return None if found == own else found


def _checked(id: str) -> str:
    if not isinstance(id, str):
        raise TypeError(f"a conversation's id is a string, not {type(id).__name__}")
    if not id or len(id) > MAX_ID_BYTES or not id.isascii() or not id.isprintable() or id != id.strip():
        raise ValueError(
            f"conversation id {id[:80]!r}: it travels in a header, so use 1 to {MAX_ID_BYTES} printable ASCII "
            "characters, without spaces at the ends"
        )
    return id
