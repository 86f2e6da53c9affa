"""Driver of a sans-I/O state machine: a turn's calls are made, its actions performed, and what its client gets handed on. What
happens is told to the turn's spans (`Tracing`), without OpenTelemetry, which only `tracing` imports.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Final, Protocol, assert_never

from ..engines.client import Detached, EngineCall, EngineFailure, EngineStream
from ..errors import FailureKind, Leg
from ..fleet.breakers import FailedRequest
from ..fleet.engine import Engine
from ..identity.ids import ConversationScope
from ..ledger.records import Taken
from ..report import ReuseReport
from ..turn.effects import (
    Action,
    Answered,
    Call,
    Check,
    Checked,
    Chunk,
    Done,
    Ended,
    Event,
    Failed,
    Headers,
    Need,
    Open,
    Opened,
    Read,
    Record,
    Respond,
    Send,
    State,
    Take,
    Took,
)
from ..turn.states import Collecting, Decoding, Prefilling, Relaying, begin
from ..turn.turn import Turn
from .request import Reply
from .services import Services, read_late_answer


class Spans:
    """Spans of one turn; these are the null object, of a turn that nobody traces. Its calls to engines follow each other: each
    ends when the next begins, or the turn ends."""

    def begin(self, leg: Leg, engine: Engine, headers: dict[str, str]) -> None:
        """An engine is about to be called. The client's trace context in `headers` is replaced by that of the call's span."""

    def answered(self, status: int) -> None:
        """It has; for the decode leg, its head is there."""

    def failed(self, failure: EngineFailure) -> None:
        """It has not, or broke off."""

    def end(self, report: ReuseReport) -> None:
        """The turn is over."""


class Tracing(Protocol):
    """Tracer: begins spans."""

    def begin(self, turn: Turn, headers: Mapping[str, str]) -> Spans:
        """A turn begins. `headers` are the client's, names in lower case."""

    def shutdown(self) -> None:
        """Hands on what is left, which can take seconds. Only where the spans' way out belongs to the router."""


NO_SPANS: Final = Spans()


log = logging.getLogger("backhaul")

_FORWARDED_HEADERS = ("traceparent", "tracestate", "x-request-id")
_LAST_LOOK_S = 0.01


def engine_headers(headers: Mapping[str, str], conversation: str | None) -> dict[str, str]:
    """What the engines are told besides the body. Credentials and everything else of the client's stay here."""
    out = {}
    for name in _FORWARDED_HEADERS:
        if (value := headers.get(name)) is not None and value.isascii() and value.isprintable():
            out[name] = value
    request_id = out.get("x-request-id", "")
    out["x-request-id"] = request_id if 0 < len(request_id) <= 128 else os.urandom(16).hex()
    if conversation and conversation.isascii():
        out["x-session-id"] = conversation
    return out


class Run:
    """Driver of one turn; also the reply that its client reads."""

    def __init__(
        self,
        services: Services,
        turn: Turn,
        scope: ConversationScope | None,
        headers: Mapping[str, str],
        spans: Spans = NO_SPANS,
    ) -> None:
        self._spans = spans
        self.status = 0
        self.headers: Headers = ()
        self._services = services
        self._turn = turn
        self._scope = scope
        self._engine_headers = headers
        self._state: State | Done
        self._out: deque[bytes] = deque()
        self._stream: EngineStream | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._decoding: Engine | None = None
        self._detached = Detached()
        self._calls = 0
        self._reading = False
        self._closing = False

    async def start(self) -> Reply:
        """Drives the turn until its reply has a head."""
        self._state, actions = begin(self._turn, self._services.clock())
        try:
            self._perform(actions)
            while not self.status:
                await self._advance()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while True:
                while self._out:
                    yield self._out.popleft()
                if isinstance(self._state, Done):
                    return
                await self._advance()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Ends the turn wherever it is; the engines notice at once."""
        if self._closing:
            return  # twice at a time, as when an iterator is collected that was left behind
        self._closing = True
        try:
            await self._look_once_more()
        finally:  # a cancelled scope of anyio's cancels at every await
            state = self._state
            self._state = Done()
            if not isinstance(state, Done):
                self._perform(state.abandon(self._services.clock()))
                self._leave(state)
            await self._close_stream(drain=isinstance(state, Done))

    async def _look_once_more(self) -> None:
        """Reads what an engine has sent already. A client that leaves at the last token would leave its handle unread in
        there, pinned until the TTL."""
        until = self._services.clock() + _LAST_LOOK_S
        while isinstance(self._state, Relaying) and self._chunks is not None and not self._reading:
            if self._services.clock() > until:
                return
            try:
                event = Chunk(await asyncio.wait_for(anext(self._chunks), _LAST_LOOK_S / 4))
            except (TimeoutError, StopAsyncIteration, EngineFailure):
                return
            state, actions = self._state.next(event, self._services.clock())
            if not isinstance(state, Done | Relaying):
                return
            self._state = state
            self._perform(actions)

    def _leave(self, state: State) -> None:
        """What the engine has sent, or sends at this moment, may have a handle that nobody else reads."""
        stream = self._detached.stream
        if stream is None or self._reading or not isinstance(state, Prefilling | Decoding | Collecting | Relaying):
            return
        stream.leave()
        self._stream = None
        self._services.spawn(read_late_answer(state, stream, self._services.perform))

    async def _advance(self) -> None:
        state = self._state
        if isinstance(state, Done):
            raise AssertionError("a turn ended without an answer")  # noqa: TRY004
        event = await self._meet(state.ask())
        if self._state is not state:
            return
        self._state, actions = state.next(event, self._services.clock())
        self._perform(actions)

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Respond(status, headers):
                    self.status, self.headers = status, headers
                case Send(data):
                    self._out.append(data)
                case Record(report):
                    self._services.perform(action, self._scope)
                    self._end_after(report)
                    self._spans.end(report)
                case _:
                    self._services.perform(action, self._scope, self._turn.hints.pause_s)

    def _end_after(self, report: ReuseReport) -> None:
        """A last turn ends its conversation; one that failed may be tried again first."""
        if report.error is None and self._decoding is not None:
            self._note(self._decoding, Leg.DECODE, None)
        answered = report.status == 200 and report.error in (None, "client_gone")
        if self._turn.hints.last_turn and answered and report.conversation is not None:
            self._services.forget(report.conversation, report.tenant)

    async def _meet(self, need: Need) -> Event:
        handles = self._services.handles
        if handles.retention.due:
            handles.give_up_retained()
        match need:
            case Take(key, chain, parent):
                services = self._services
                found = handles.ledger.take(key, chain, services.clock(), services.usable, parent)
                taken = found if isinstance(found, Taken) else await found
                handles.retention.took(taken)
                return Took(taken)
            case Check(prefill, decode, engine_id):
                return Checked(await self._services.check(prefill, decode, engine_id))
            case Call(leg, engine, path, body, timeout_s):
                detached = self._detach() if leg is not Leg.RENDER else None  # nothing stays of what is rendered
                call = EngineCall(engine.url + path, body, self._next_headers(leg, engine), timeout_s, detached)
                tokens = self._turn.computes if leg is Leg.PREFILL else 0
                self._services.fleet.load.begin(engine.url, tokens)
                try:
                    answer = await self._services.client.call(call)
                except EngineFailure as failure:
                    return self._failed(engine, leg, failure)
                finally:
                    self._services.fleet.load.end(engine.url, tokens)
                self._spans.answered(answer.status)
                self._note(engine, leg, FailureKind.ERROR if answer.status >= 500 else None)
                return Answered(answer.status, answer.headers, answer.body)
            case Open(engine, path, body, timeout_s):
                await self._close_stream(drain=False)
                headers = self._next_headers(Leg.DECODE, engine)
                call = EngineCall(engine.url + path, body, headers, timeout_s, self._detach())
                self._services.fleet.load.begin(engine.url)
                self._decoding = engine
                try:
                    self._stream = await self._services.client.open(call)
                except EngineFailure as failure:
                    return self._failed(engine, Leg.DECODE, failure)
                self._chunks = aiter(self._stream)
                self._spans.answered(self._stream.status)
                if self._stream.status >= 500:
                    self._note(engine, Leg.DECODE, FailureKind.ERROR)
                return Opened(self._stream.status, self._stream.headers)
            case Read():
                return await self._read()
            case _:
                assert_never(need)

    async def _read(self) -> Event:
        if self._chunks is None:
            raise AssertionError("read before open")
        self._reading = True
        try:
            return Chunk(await anext(self._chunks))
        except StopAsyncIteration:
            self._chunks = None
            return Ended()
        except EngineFailure as failure:
            return self._failed(self._decoding, Leg.DECODE, failure)
        finally:
            self._reading = False

    def _failed(self, engine: Engine | None, leg: Leg, failure: EngineFailure) -> Failed:
        self._spans.failed(failure)
        if engine is not None:
            self._note(engine, leg, failure.kind)
        return Failed(failure.kind, f"{engine}: {failure.message}")

    def _detach(self) -> Detached:
        self._detached = Detached()
        return self._detached

    def _note(self, engine: Engine, leg: Leg, failed: FailureKind | None) -> None:
        """Tells the breakers how a call ended."""
        services, turn = self._services, self._turn
        if failed is None:
            services.fleet.note_answer(engine, leg)
            return
        named = turn.identity is not None and not turn.identity.by_history
        conversation = f"{turn.tenant}/{turn.identity.conversation}" if turn.identity and named else ""
        who = FailedRequest(conversation, turn.chain)
        services.fleet.note_failure(engine, leg, failed, who, services.clock())
        if failed is FailureKind.BROKEN:
            services.poison_list.broke(turn.chain, engine.url, services.clock())
        if services.fleet.breakers.any_open:
            services.recovery.start()

    def _next_headers(self, leg: Leg, engine: Engine) -> dict[str, str]:
        """Each call of a turn has a request id of its own: engines name requests, and their blocks, by it."""
        self._calls += 1
        headers = dict(self._engine_headers)
        headers["x-request-id"] += f"-{self._calls}"
        self._spans.begin(leg, engine, headers)
        return headers

    async def _close_stream(self, *, drain: bool) -> None:
        stream, self._stream = self._stream, None
        engine, self._decoding = self._decoding, None
        if engine is not None:
            self._services.fleet.load.end(engine.url)
        if stream is None:
            return
        try:
            if drain and self._chunks is not None:
                # Only the framing's end is left; with it read, the connection can serve the next turn.
                await _read_to_end(self._chunks)
        finally:
            await stream.aclose()


async def _read_to_end(chunks: AsyncIterator[bytes], wait_s: float = 0.05) -> None:
    try:
        async with asyncio.timeout(wait_s):
            async for _ in chunks:
                pass
    except (TimeoutError, EngineFailure):
        log.debug("an engine kept its stream open after the end of its answer")
