"""The states of a turn while D answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from .. import wire
from ..errors import FailureKind, Leg
from ..fleet.engine import Holder
from ..report import Reason
from ..wire.connector_object import Ask
from ..wire.exact_history import AnswerAccumulator, content_of_answer
from ..wire.stream import StreamFilter, stream_filter
from .effects import (
    Answered,
    Call,
    Checked,
    Chunk,
    Ended,
    EndLease,
    Event,
    Failed,
    Open,
    Opened,
    Read,
    Release,
    Respond,
    Send,
    Took,
)
from .placement import Placement
from .steps import Actions, Done, Step, UnexpectedEvent

if TYPE_CHECKING:
    from .turn import Turn

_HANDOFF_S = 10.0
"""For so long after P's answer another D may be given P's blocks. P frees them after 30 s (`kv_lease_duration`) unless a D sends
heartbeats for them, and a D that comes later reads what others have put there, status 200."""

_STREAM: Final = "text/event-stream"


class Decoding(msgspec.Struct, frozen=True):
    """D is asked; its head has not come yet."""

    turn: Turn
    placement: Placement
    prefilled: wire.Handle | None
    """P's handle; `None` when D runs the turn alone."""
    as_it_is: bool = False
    """The client's own body, without ids and without transfer parameters."""
    ask: Ask | None = None
    """What a D that runs our connector is asked beside."""

    @property
    def ids_back(self) -> bool:
        """Whether D is asked for the ids that it ran and made."""
        turn = self.turn
        return turn.reuses and not self.as_it_is and (turn.keeps_exact or not turn.by_connector)

    @property
    def need(self) -> Open | Call:
        turn, decode, timeout_s = self.turn, self.placement.decode, self.turn.config.decode_timeout_s
        body = wire.decode_body(
            turn.facts,
            turn.ids_to_send,
            self.prefilled.params if self.prefilled else None,
            ids_back=self.ids_back,
            ask=self.ask,
            passed_on=self.prefilled.passed_on if self.prefilled else None,
        )
        if turn.facts.stream or self.as_it_is:  # an engine takes more for true than the router does
            return Open(decode, turn.facts.endpoint, body, timeout_s)
        return Call(Leg.DECODE, decode, turn.facts.endpoint, body, timeout_s)

    def next(self, event: Event, now: float) -> Step:
        turn, placement = self.turn, self.placement
        match event:
            case Opened(200, headers) if headers.get("content-type", "").startswith(_STREAM):
                stream = stream_filter(
                    turn.facts,
                    note=lambda usage: turn.count_answer(placement, usage),
                    account=lambda account: turn.count_account(placement.decode, account, self.prefilled),
                    accumulator=AnswerAccumulator(wire.stop_tokens(turn.facts)) if turn.keeps_exact else None,
                )
                return Relaying(self, headers, stream), ()
            case Opened(status, headers):
                return Collecting(self, status, headers), ()
            case Answered(status, headers, body):
                return Collecting(self, status, headers).ended(body, now)
            case Failed(kind, message):
                return self.failed(kind, message, now)
            case Took() | Checked() | Chunk() | Ended():
                raise UnexpectedEvent(self, event)
            case _:
                assert_never(event)

    def failed(self, kind: FailureKind, message: str, now: float) -> Step:
        """D did not answer, or with an error, and the client has seen nothing yet."""
        turn, placement = self.turn, self.placement
        other = turn.another(placement.decode, kind)
        if other is None:
            status = 504 if kind is FailureKind.TIMEOUT else 502
            unread = kind is FailureKind.REFUSED
            return turn.refuse(placement, status, message, Leg.DECODE, now, self.release(), unread=unread)
        turn.failed_on |= {placement.decode.url}
        turn.retry()
        if self.as_it_is:
            return turn.leave_to_decode(placement.reason or Reason.NO_PROOF, now)
        if kind is FailureKind.REFUSED and self.prefilled is not None and now - turn.decode_began < _HANDOFF_S:
            return turn.decoding(msgspec.structs.replace(placement, decode=other), self.prefilled), self.not_admitted()
        turn.failure = Reason.DECODE_FAILED
        state, actions = turn.placed(now)
        return state, (*self.release(), *actions)

    def release(self) -> Actions:
        """D may not have run the request: has P's blocks freed, and the leases that it was to end."""
        freed = (Release(self.prefilled.params, self.placement.decode),) if self.prefilled else ()
        return (*freed, *self.not_admitted())

    def not_admitted(self) -> Actions:
        """The leases that D was told to end with this request."""
        holder = Holder(self.placement.decode.url)
        return tuple(EndLease(holder, lease) for lease in self.ask.release) if self.ask else ()

    def abandon(self, now: float) -> Actions:
        return (*self.release(), *self.turn.given_up(self.placement, now))

    def overheard(self, status: int, content_type: str, data: bytes, *, whole: bool) -> Actions:
        if status != 200:
            return ()
        if content_type.startswith(_STREAM):
            return overheard_events(self, stream_filter(self.turn.facts, note=lambda _: None), data)
        if not whole:
            return ()
        answer = wire.read_answer(self.turn.facts.endpoint, data, ids=False)
        return self.turn.release(answer.params.handle, self.placement.decode)


def overheard_events(before: Decoding, stream: StreamFilter, data: bytes) -> Actions:
    stream.feed(data)
    return before.turn.release(stream.handle, before.placement.decode)


class Collecting(msgspec.Struct, frozen=True):
    """D answers with a whole body where a stream was asked for, or could have been."""

    before: Decoding
    status: int
    headers: Mapping[str, str]
    parts: tuple[bytes, ...] = ()

    @property
    def need(self) -> Read:
        return Read()

    def next(self, event: Event, now: float) -> Step:
        match event:
            case Chunk(data):
                return msgspec.structs.replace(self, parts=(*self.parts, data)), ()
            case Ended():
                return self.ended(b"".join(self.parts), now)
            case Failed(kind, message):
                return self.before.failed(kind, message, now)
            case Took() | Checked() | Answered() | Opened():
                raise UnexpectedEvent(self, event)
            case _:
                assert_never(event)

    def ended(self, body: bytes, now: float) -> Step:
        """The whole of it is there."""
        return self._answer(body, now) if self.status == 200 else self._error(body, now)

    def _answer(self, body: bytes, now: float) -> Step:
        turn, placement = self.before.turn, self.before.placement
        turn.first_byte = now
        try:
            answer = wire.read_answer(turn.facts.endpoint, body, ids=self.before.ids_back or turn.facts.wants_token_ids)
            turn.count_account(placement.decode, answer.params.account, self.before.prefilled)
            ran = turn.ran(answer.ran)
            note = turn.count_answer(placement, answer.usage)
            turn.said = content_of_answer(answer.members, wire.stop_tokens(turn.facts)) if turn.keeps_exact else None
            shown = wire.client_answer(turn.facts, answer.members, note)
        except (wire.MalformedBody, msgspec.DecodeError) as error:
            message = f"{placement.decode} sent an answer that cannot be read: {error}"
            return turn.refuse(placement, 502, message, Leg.DECODE, now)
        settled = turn.settle(placement, answer.params.handle, answer.generated, ran, now)
        settled += turn.named(answer.id)
        head = Respond(200, turn.headers(placement, self.headers))
        return Done(), (*settled, turn.report(placement, now), head, Send(shown))

    def _error(self, body: bytes, now: float) -> Step:
        before = self.before
        misplaced = self.status == 404 and before.turn.is_misplaced(before.placement.decode, body, now)
        if self.status in (429, 503) or (self.status < 500 and not misplaced):
            return before.turn.pass_on(before.placement, self.status, self.headers, body, now, before.release())
        message = f"{before.placement.decode} answered {self.status}: {wire.error_message(body)}"
        return before.failed(FailureKind.ERROR, message, now)

    def abandon(self, now: float) -> Actions:
        turn = self.before.turn
        release = () if self.status == 200 else self.before.release()
        return (*release, *turn.given_up(self.before.placement, now))

    def overheard(self, status: int, content_type: str, data: bytes, *, whole: bool) -> Actions:
        return self.before.overheard(status, content_type, b"".join((*self.parts, data)), whole=whole)


class Relaying(msgspec.Struct, frozen=True):
    """D streams. Until its first event the client has seen nothing, and the turn can still be tried again."""

    before: Decoding
    headers: Mapping[str, str]
    stream: StreamFilter
    started: bool = False

    @property
    def need(self) -> Read:
        return Read()

    def next(self, event: Event, now: float) -> Step:
        match event:
            case Chunk(data):
                return self._chunk(data, now)
            case Ended():
                message = f"{self.before.placement.decode} ended the stream before it was complete"
                return self._broke(FailureKind.BROKEN, message, now)
            case Failed(kind, message):
                return self._broke(kind, message, now)
            case Took() | Checked() | Answered() | Opened():
                raise UnexpectedEvent(self, event)
            case _:
                assert_never(event)

    def _chunk(self, data: bytes, now: float) -> Step:
        turn, placement, stream = self.before.turn, self.before.placement, self.stream
        try:
            passed = stream.feed(data)
        except (wire.MalformedBody, msgspec.DecodeError) as error:
            message = f"{placement.decode} sent an event that cannot be read: {error}"
            return self._broke(FailureKind.BROKEN, message, now)
        if not stream.events:
            return self, ()
        if stream.error is not None and not self.started:
            message = f"{placement.decode} failed: {wire.error_message(stream.error)}"
            return self.before.failed(FailureKind.ERROR, message, now)
        actions: Actions = ()
        if not self.started:
            turn.first_byte = now
            actions = (Respond(200, turn.headers(placement, self.headers)),)
        if passed:
            actions += (Send(passed),)
        if not stream.finished:
            return (self if self.started else msgspec.structs.replace(self, started=True)), actions
        last = Send(stream.last)
        if stream.error is not None:
            ended = (
                *turn.release(stream.handle, placement.decode),
                *turn.unfinished(),
                turn.report(placement, now, error="decode_failed"),
            )
            return Done(), (*actions, *ended, last)
        if stream.handle is None and self.before.prefilled is not None and turn.hides_handle(placement.decode):
            turn.fleet.counters.add("unreachable_pins")
        turn.said = stream.said
        turn.learn_first_byte(placement)
        settled = turn.settle(placement, stream.handle, stream.generated, turn.ran(stream.ran), now)
        settled += turn.named(stream.answer_id)
        return Done(), (*actions, *settled, turn.report(placement, now), last)

    def _broke(self, kind: FailureKind, message: str, now: float) -> Step:
        if not self.started:
            return self.before.failed(kind, message, now)
        turn, placement = self.before.turn, self.before.placement
        event = turn.facts.api.error_event(
            message, type_="server_error", code="decode_failed", events=self.stream.events
        )
        last = Send(event)
        release = turn.release(self.stream.handle, placement.decode)
        return Done(), (*release, *turn.unfinished(), turn.report(placement, now, error="decode_failed"), last)

    def abandon(self, now: float) -> Actions:
        turn, placement, stream = self.before.turn, self.before.placement, self.stream
        if stream.handle is not None:
            settled = turn.settle(placement, stream.handle, stream.generated, turn.ran(stream.ran), now)
            return (*settled, turn.report(placement, now, error="client_gone"))
        release = () if self.started else self.before.release()
        return (*release, *turn.given_up(placement, now))

    def overheard(self, status: int, content_type: str, data: bytes, *, whole: bool) -> Actions:
        if self.stream.handle is not None:  # settled when the client left
            return ()
        return overheard_events(self.before, self.stream, data)
