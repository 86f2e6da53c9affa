"""The turn as a finite state machine: what to ask which engine next, and what follows from the answer. No I/O, no clock.

    Taking ──▶ Rendering ──▶ Checking ──▶ Prefilling ──▶ Decoding ──▶ Relaying    (an event stream)
                 │    ▲                                   ▲    └────▶ Collecting  (a whole body)
                 │    └▶ Closing                          │
                 └──────── local ─────────────────────────┘

A turn passes over those of the first three that it has no need of: without a conversation nothing is taken, where engines check
handles by themselves nothing is rendered. After a failure it goes back to `route_turn`, which places it anew.

Each state says what it needs (`ask`). `next` takes the event that came back and the time, and returns the state that follows,
`Done` at last, with the actions to perform before its need. A driver is a loop over these (`drive.run`); so is a simulator.
`abandon` is what remains to be done when the client leaves, `overheard` what follows from the rest of an answer that nobody reads
any more. States are frozen; what changes is their `turn`.

Rules that can be seen here:
- a stock engine's handle is sent to P once; from then on it is in nobody's hands, whatever came of it. A shared one stays in
  the ledger: D confirms what P is about to read, at that moment;
- no render and no ids where P and D check handles by themselves, and what they say they did is the report;
- a request goes out again by `settlement.another` and `settlement.outlives` alone;
- before the client's first byte a failure can become another try; after it, an error event and the end;
- every way out settles (`settlement`), and makes the report (`accounting`).

Longer than most modules, so that every transition stands in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, assert_never

import msgspec
from backhaul_protocol.messages import Ask

from .. import wire
from ..errors import FailureKind, Leg
from ..fleet.engine import Engine, Holder, Role
from ..ledger import digests
from ..ledger.records import Held, Taken
from ..report import Proof, Reason, Route
from ..wire.exact_history import AnswerAccumulator, content_of_answer
from ..wire.handle import keeps_waiting
from ..wire.stream import StreamFilter
from . import accounting, settlement
from .accounting import continued, diverged_at, ids_that_ran, rendered, rewrites_answer
from .effects import (
    Actions,
    Answered,
    Call,
    Check,
    Checked,
    Chunk,
    Done,
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
    Step,
    Take,
    Took,
    UnexpectedEvent,
)
from .placement import NoEngine, Picks, Placement, Prompt, needs_ids, pick_engines, place
from .settlement import given_up, head, pass_on, refuse
from .turn import Turn

_STREAM: Final = "text/event-stream"
_HANDOFF_S: Final = 10.0
"""For so long after P's answer another D may be given P's blocks. P frees them after 30 s (`kv_lease_duration`) unless a D sends
heartbeats for them, and a D that comes later reads what others have put there, status 200."""
_MESSAGE_KEYS_BYTES: Final = len(b'{"role":"user","content":""}')
"""Of a message, what does not become text of the prompt."""

# --- the beginning: what is on record is taken, and the prompt rendered ---------------------------------------------------


def begin(turn: Turn, now: float) -> Step:
    """The first step."""
    if turn.identity is None:
        return _go_on(turn, Taken(reason=Reason.NO_CONVERSATION), now)
    if turn.identity.new:
        return _took(turn, Taken(reason=Reason.FIRST_TURN, flushes=turn.flushes), now)
    return Taking(turn), ()


class Taking(msgspec.Struct, frozen=True):
    """The ledger is asked for the conversation's history."""

    turn: Turn

    def ask(self) -> Take:
        return Take(self.turn.key, self.turn.chain, self.turn.identity.parent if self.turn.identity else None)

    def next(self, event: Event, now: float) -> Step:
        match event:
            case Took(taken):
                return _took(self.turn, taken, now)
            case _:
                raise UnexpectedEvent(self, event)

    def abandon(self, now: float) -> Actions:
        return given_up(self.turn, None, now)


def _took(turn: Turn, taken: Taken, now: float) -> Step:
    """The ledger has answered."""
    turn.draft.turn = taken.turn
    turn.draft.on_record = _on_record(turn, taken)
    diverged_at(turn, taken.diverged_at)
    if not turn.config.reuse:
        taken = msgspec.structs.replace(taken, reason=Reason.REUSE_OFF)
    state, actions = _go_on(turn, taken, now)
    return state, (*settlement.release_held(turn, *taken.drop), *actions)


def _on_record(turn: Turn, taken: Taken) -> int:
    """Tokens of the history that the request goes on from. One that shares nothing with it can still be an edit, of its first
    message, if it is longer; else it is another agent's."""
    if taken.branch is None:
        return 0
    before = digests.count(taken.branch.chain)
    return taken.branch.tokens if taken.common or digests.count(turn.chain) > before else 0


def _go_on(turn: Turn, taken: Taken, now: float) -> Step:
    """Renders the prompt where its ids are needed, or has it run."""
    turn.taken, turn.spare = taken, taken.held
    if taken.held is not None:
        turn.restarts = turn.fleet.restarts.count(taken.held.decode)
    messages = turn.facts.messages
    turn.prompt = Prompt(max(sum(map(len, messages)) - len(messages) * _MESSAGE_KEYS_BYTES, len(messages)))
    if turn.facts.multiple:
        return _leave_to_decode(turn, Reason.MULTIPLE_CHOICES, now)
    if turn.facts.alone is not None:
        return _leave_to_decode(turn, Reason.NO_PROOF, now)
    if not turn.reuses:
        return route_turn(turn, now)
    return _render(turn, now)


def _render(turn: Turn, now: float) -> Step:
    facts, fleet, branch = turn.facts, turn.fleet, turn.taken.branch
    picks = pick_engines(turn.taken, fleet)
    if not needs_ids(turn.taken, fleet, picks):
        turn.by_connector = True
        if not turn.keeps_exact:
            return route_turn(turn, now, picks)
    asked = (fleet.pick(Role.PREFILL, branch.prefill if branch else None), fleet.pick(Role.DECODE))
    engines = [engine for engine in asked if engine is not None and engine.block_size]
    engines.sort(key=fleet.renders_well, reverse=True)
    is_base = not facts.model or all(facts.model in engine.models for engine in engines)
    if facts.unproven or fleet.capabilities.ignores_ids or not is_base:  # an adapter's weights can be re-pointed unseen
        engines = []
    if engines and facts.prompt_ids is not None:
        rendered(turn, facts.prompt_ids, engines[0])
        return route_turn(turn, now)
    by_tokenize = None if all(engine.renders for engine in engines) else wire.tokenize_body(facts)
    engines = [engine for engine in engines if engine.renders or by_tokenize is not None]
    if not engines:
        turn.no_proof = True
        return route_turn(turn, now)
    return Rendering(turn, tuple(engines), by_tokenize or b"", now), ()


class Rendering(msgspec.Struct, frozen=True):
    """An engine's own renderer turns the messages into token ids, so that they can be compared before anything runs."""

    turn: Turn
    engines: tuple[Engine, ...]
    """The one that is asked, and those that could be."""
    by_tokenize: bytes
    since: float

    def ask(self) -> Call:
        engine, facts = self.engines[0], self.turn.facts
        timeout_s = self.turn.config.prefill_timeout_s
        if engine.renders:
            return Call(Leg.RENDER, engine, f"{facts.endpoint}/render", wire.join(facts.members), timeout_s)
        return Call(Leg.RENDER, engine, "/tokenize", self.by_tokenize, timeout_s)

    def next(self, event: Event, now: float) -> Step:
        turn, engine = self.turn, self.engines[0]
        match event:
            case Answered(200, _, body):
                turn.draft.render_ms = (now - self.since) * 1e3
                token_ids = wire.read_rendered(body)
                if token_ids is None:
                    turn.no_proof = True
                elif engine.renders and rewrites_answer(turn, token_ids):
                    return Closing(turn, engine, token_ids, now), ()
                else:
                    rendered(turn, token_ids, engine)
                return route_turn(turn, now)
            case Answered(400 | 413 | 422):
                return _leave_to_decode(turn, Reason.NO_PROOF, now)
            case Failed(FailureKind.BROKEN, message) if not settlement.outlives(turn):
                return refuse(turn, None, 502, message, Leg.RENDER, now)
            case Answered() | Failed():
                if len(self.engines) > 1:
                    turn.draft.retries += 1
                    return msgspec.structs.replace(self, engines=self.engines[1:], since=now), ()
                turn.no_proof = True
                return route_turn(turn, now)
            case Took() | Checked() | Opened() | Chunk() | Ended():
                raise UnexpectedEvent(self, event)
            case _:
                assert_never(event)

    def abandon(self, now: float) -> Actions:
        return given_up(self.turn, None, now)


class Closing(msgspec.Struct, frozen=True):
    """Where does the last answer end in the prompt? The renderer is asked for the history up to there."""

    turn: Turn
    engine: Engine
    token_ids: tuple[int, ...]
    """The whole prompt's."""
    since: float

    def ask(self) -> Call:
        facts = self.turn.facts
        body = wire.closed_body(facts, self.turn.taken.common + 1)
        return Call(Leg.RENDER, self.engine, f"{facts.endpoint}/render", body, self.turn.config.prefill_timeout_s)

    def next(self, event: Event, now: float) -> Step:
        turn = self.turn
        match event:
            case Answered(status, _, body):
                turn.draft.render_ms = (turn.draft.render_ms or 0.0) + (now - self.since) * 1e3
                closed = wire.read_rendered(body) if status == 200 else None
                continued(turn, self.token_ids, closed or (), self.engine)
                return route_turn(turn, now)
            case Failed(FailureKind.BROKEN, message) if not settlement.outlives(turn):
                return refuse(turn, None, 502, message, Leg.RENDER, now)
            case Failed():
                continued(turn, self.token_ids, (), self.engine)
                return route_turn(turn, now)
            case Took() | Checked() | Opened() | Chunk() | Ended():
                raise UnexpectedEvent(self, event)
            case _:
                assert_never(event)

    def abandon(self, now: float) -> Actions:
        return given_up(self.turn, None, now)


# --- where it runs --------------------------------------------------------------------------------------------------------


def route_turn(turn: Turn, now: float, picks: Picks | None = None) -> Step:
    """Decides where the turn runs, and goes there. `picks` are the engines that were just picked for what was taken."""
    spare, taken = turn.spare, turn.taken
    if spare is not None and turn.fleet.is_down(spare.decode):
        turn.failure = turn.failure or Reason.DECODE_FAILED
    if settlement.is_outlived(turn):
        turn.void = turn.failure = Reason.ENGINE_CHANGED
    readable = spare is not None and spare.decode not in turn.failed_on and turn.failure is None
    if taken.held is not None and not readable:
        taken, picks = msgspec.structs.replace(taken, held=None), None
    placement = place(
        turn.prompt,
        taken,
        turn.fleet,
        turn.config,
        no_proof=turn.no_proof,
        force=turn.route or turn.config.route,
        without=turn.failed_on,
        picks=picks,
    )
    if isinstance(placement, NoEngine):
        leg = Leg.PREFILL if placement.role is Role.PREFILL else Leg.DECODE
        return refuse(turn, None, 503, f"no {placement.role} engine is left to try", leg, now)
    if turn.failure is not None:
        placement = msgspec.structs.replace(placement, reason=turn.failure)
    prefill = placement.prefill
    if prefill is None:
        accounting.note_placed(turn, placement, now)
        return _decode(turn, placement, None), ()
    if placement.decode.connector is None:  # what is in its way is released while P computes
        accounting.reserve(turn, placement, sent=False)
    if placement.route is Route.WARM and spare is not None:
        if (checking := _check(turn, placement, prefill, spare)) is not None:
            return checking, ()
        by_connector = placement.proof is Proof.CONNECTOR
        turn.draft.offered = spare.tokens if by_connector else placement.blocks * turn.prompt.block_size
    else:
        turn.draft.offered = 0
    accounting.note_placed(turn, placement, now)
    return Prefilling(turn, placement, prefill, now), ()


def _check(turn: Turn, placement: Placement, prefill: Engine, spare: Held) -> Checking | None:
    """What stands in doubt before P reads from that D, once in a turn."""
    pair = (prefill.url, spare.decode)
    unknown = turn.config.check_pairs and not turn.fleet.pairs.is_checked(*pair)
    # One of ours fences its leases against an earlier process's by itself.
    engine_id = "" if placement.proof is Proof.CONNECTOR else spare.handle.engine_id
    in_doubt = bool(engine_id) and turn.fleet.restarts.in_doubt(spare.decode, engine_id)
    if pair in turn.checked or not (unknown or in_doubt):
        return None
    turn.checked |= {pair}
    return Checking(turn, placement, prefill, spare.decode, engine_id)


class Checking(msgspec.Struct, frozen=True):
    """Nobody has read from this D by way of this P yet, and a P without bi-directional mode would hang; or D may be another
    process than the one that made the handle."""

    turn: Turn
    placement: Placement
    prefill: Engine
    decode: str
    engine_id: str

    def ask(self) -> Check:
        return Check(self.prefill, self.decode, self.engine_id)

    def next(self, event: Event, now: float) -> Step:
        match event:
            case Checked(sure):
                doubted = () if sure else settlement.doubted(self.turn)
                state, actions = route_turn(self.turn, now)
                return state, (*doubted, *actions)
            case Took() | Answered() | Opened() | Chunk() | Ended() | Failed():
                raise UnexpectedEvent(self, event)
            case _:
                assert_never(event)

    def abandon(self, now: float) -> Actions:
        return given_up(self.turn, self.placement, now)


# --- P computes its prompt ------------------------------------------------------------------------------------------------


class Prefilling(msgspec.Struct, frozen=True):
    """P computes the prompt, reading what it may, and keeps the blocks for D."""

    turn: Turn
    placement: Placement
    engine: Engine
    since: float

    @property
    def warm(self) -> bool:
        return self.placement.route is Route.WARM

    def ask(self) -> Call:
        turn = self.turn
        handle = None
        if self.warm and turn.spare is not None:
            held, to_ours = turn.spare.handle, self.engine.connector is not None
            if self.placement.proof is Proof.CONNECTOR:
                handle = wire.whole_handle(held)
            else:
                handle = wire.cut_handle(held, self.placement.blocks, turn.prompt.block_size, to_ours=to_ours)
        body = wire.prefill_body(turn.facts, turn.ids_to_send, handle)
        return Call(Leg.PREFILL, self.engine, turn.facts.endpoint, body, turn.config.prefill_timeout_s)

    def next(self, event: Event, now: float) -> Step:
        turn = self.turn
        match event:
            case Answered(200, _, body):
                return self._answered(body, now)
            case Answered(404, _, body) if settlement.is_misplaced(turn, self.engine, body, now):
                return self._failed(FailureKind.REFUSED, f"{self.engine}: {wire.error_message(body)}", now)
            case Answered(400 | 404 | 413 | 422):
                # Rejected before admission, so the handle was not read. What the client gets is D's word on its own body.
                return _leave_to_decode(turn, Reason.NO_PROOF, now)
            case Answered(401 | 403 | 429, headers, body):
                return pass_on(turn, self.placement, event.status, headers, body, now)
            case Answered(status, _, body):
                message = f"{self.engine} answered {status}: {wire.error_message(body)}"
                return self._failed(FailureKind.ERROR, message, now)
            case Failed(kind, message):
                return self._failed(kind, message, now)
            case Took() | Checked() | Opened() | Chunk() | Ended():
                raise UnexpectedEvent(self, event)
            case _:
                assert_never(event)

    def _answered(self, body: bytes, now: float) -> Step:
        turn = self.turn
        sent = settlement.spend(turn) if self.warm else None
        try:
            params, usage = wire.read_left(turn.facts.api, body)
        except (wire.MalformedBody, msgspec.DecodeError) as error:
            accounting.note_misread(turn, self.engine, error)
            message = f"{self.engine} sent an answer that cannot be read: {error}"
            return refuse(turn, self.placement, 502, message, Leg.PREFILL, now)
        handle = params.handle
        if handle is None:
            message = (
                f"{self.engine} returned {wire.no_handle_in(body)}: start it with the NIXL connector "
                "(NixlConnector, which pulls) as kv_producer (`backhaul up --dry-run` prints the flags)"
            )
            return refuse(turn, self.placement, 502, message, Leg.PREFILL, now, settlement.release_held(turn, sent))
        turn.draft.prefill_ms = elapsed_ms = (now - self.since) * 1e3
        if usage is not None:
            accounting.count_prefill(turn, usage)
            if turn.token_ids is not None and usage.prompt_tokens != len(turn.token_ids):
                return self._ran_other_ids(handle, now)
        if self.placement.proof is Proof.CONNECTOR and params.account is None:
            return self._checked_nothing(handle, now)
        accounting.count_account(turn, self.engine, params.account)
        left_alone = sent if params.account is not None and keeps_waiting(params.account) else None
        turn.decode_began = now
        accounting.learn_prefill(turn, self.engine, elapsed_ms, warm=self.warm)
        ran = accounting.as_it_ran(turn, self.placement, params.account)
        return _decode(turn, ran, handle), settlement.release_held(turn, left_alone)

    def _checked_nothing(self, handle: wire.Handle, now: float) -> Step:
        """P says nothing of a handle that it was to check: it was restarted without our connector. D answers by itself."""
        turn, draft = self.turn, self.turn.draft
        turn.fleet.capabilities.note_unverified(self.engine)
        draft.retries += 1
        draft.offered, draft.cached, draft.computed = 0, None, None
        state, actions = _leave_to_decode(turn, Reason.NO_PROOF, now)
        return state, (Release(handle.params, self.placement.decode), *actions)

    def _unaccounted(self) -> None:
        if self.warm and self.engine.connector is not None:
            self.turn.fleet.accounts.note_missing(self.engine.url)

    def _ran_other_ids(self, handle: wire.Handle, now: float) -> Step:
        """The engine rendered the messages in spite of the ids: what was proven is not what ran. From now on nothing is."""
        turn = self.turn
        turn.fleet.capabilities.note_ids_ignored()
        turn.token_ids, turn.prompt, turn.no_proof = None, Prompt(turn.prompt.message_bytes), True
        if self.warm:
            turn.failure = Reason.NO_PROOF
        turn.draft.retries += 1
        state, actions = route_turn(turn, now)
        return state, (Release(handle.params, self.placement.decode), *actions)

    def _failed(self, kind: FailureKind, message: str, now: float) -> Step:
        turn = self.turn
        self._unaccounted()
        rest: Actions = ()
        if self.warm and kind is not FailureKind.REFUSED:
            rest = settlement.release_held(turn, settlement.spend(turn))
            turn.failure = Reason.READ_FAILED
            turn.draft.offered = 0
            if kind is not FailureKind.BROKEN:
                turn.draft.retries += 1
                return Prefilling(turn, self.placement.gone_cold(Reason.READ_FAILED), self.engine, now), rest
        if (other := settlement.another(turn, self.engine, kind)) is not None:
            turn.failed_on |= {self.engine.url}
            turn.draft.retries += 1
            if self.warm:  # the other may not check handles, or not be able to read this one
                state, actions = route_turn(turn, now)
                return state, (*rest, *actions)
            return Prefilling(turn, msgspec.structs.replace(self.placement, prefill=other), other, now), rest
        status = 504 if kind is FailureKind.TIMEOUT else 502
        unread = kind is FailureKind.REFUSED
        return refuse(turn, self.placement, status, message, Leg.PREFILL, now, rest, unread=unread)

    def abandon(self, now: float) -> Actions:
        self._unaccounted()
        released = settlement.release_held(self.turn, settlement.spend(self.turn) if self.warm else None)
        return (*released, *given_up(self.turn, self.placement, now))

    def overheard(self, status: int, content_type: str, data: bytes, *, whole: bool) -> Actions:
        if status != 200 or not whole:
            return ()
        handle = wire.read_left(self.turn.facts.api, data)[0].handle
        return (Release(handle.params, self.placement.decode),) if handle is not None else ()


# --- D answers ------------------------------------------------------------------------------------------------------------


def _decode(turn: Turn, placement: Placement, prefilled: wire.Handle | None) -> Decoding:
    """D is next. One that runs our connector takes along the leases that are due there."""
    decode = placement.decode
    turn.asked = turn.fleet.restarts.fence(decode.url)
    accounting.reserve(turn, placement)
    leases = None if decode.connector is None else settlement.lease_order(turn, decode)
    return Decoding(turn, placement, prefilled, leases=leases)


def _leave_to_decode(turn: Turn, reason: Reason, now: float) -> Step:
    """Gives D the client's own body, without ids and transfer parameters: it answers, or says what is wrong with it."""
    turn.token_ids = None
    turn.left_to_decode = True
    given_back = settlement.give_back(turn)
    before = turn.taken.branch.decode if turn.taken.branch else None  # what a request refers to may be kept there
    engine = turn.fleet.pick(Role.DECODE, before if turn.facts.alone else None, turn.failed_on)
    if engine is None:
        return refuse(turn, None, 503, "no decode engine is left to try", Leg.DECODE, now, given_back)
    placement = Placement(Route.LOCAL, engine, reason=reason, proof=Proof.ENGINE)
    turn.asked = turn.fleet.restarts.fence(engine.url)
    accounting.reserve(turn, placement)
    return Decoding(turn, placement, None, as_it_is=True), given_back


class Decoding(msgspec.Struct, frozen=True):
    """D is asked; its head has not come yet."""

    turn: Turn
    placement: Placement
    prefilled: wire.Handle | None
    """P's handle; `None` when D runs the turn alone."""
    as_it_is: bool = False
    """The client's own body, without ids and without transfer parameters."""
    leases: Ask | None = None
    """What a D that runs our connector is to keep and to end."""

    @property
    def ids_back(self) -> bool:
        """Whether D is asked for the ids that it ran and made."""
        turn = self.turn
        return turn.reuses and not self.as_it_is and (turn.keeps_exact or not turn.by_connector)

    def ask(self) -> Open | Call:
        turn, decode, timeout_s = self.turn, self.placement.decode, self.turn.config.decode_timeout_s
        body = wire.decode_body(
            turn.facts,
            turn.ids_to_send,
            self.prefilled.params if self.prefilled else None,
            ids_back=self.ids_back,
            ask=self.leases,
            passed_on=self.prefilled.passed_on if self.prefilled else None,
        )
        if turn.facts.stream or self.as_it_is:  # an engine takes more for true than the router does
            return Open(decode, turn.facts.endpoint, body, timeout_s)
        return Call(Leg.DECODE, decode, turn.facts.endpoint, body, timeout_s)

    def next(self, event: Event, now: float) -> Step:
        turn, placement = self.turn, self.placement
        match event:
            case Opened(200, headers) if headers.get("content-type", "").startswith(_STREAM):
                stream = turn.facts.stream_filter(
                    count=lambda usage: accounting.count_answer(turn, placement, usage),
                    account=lambda account: accounting.count_account(turn, placement.decode, account, self.prefilled),
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
        other = settlement.another(turn, placement.decode, kind)
        if other is None:
            status = 504 if kind is FailureKind.TIMEOUT else 502
            unread = kind is FailureKind.REFUSED
            return refuse(turn, placement, status, message, Leg.DECODE, now, self.release(), unread=unread)
        turn.failed_on |= {placement.decode.url}
        turn.draft.retries += 1
        if self.as_it_is:
            return _leave_to_decode(turn, placement.reason or Reason.NO_PROOF, now)
        if kind is FailureKind.REFUSED and self.prefilled is not None and now - turn.decode_began < _HANDOFF_S:
            moved = msgspec.structs.replace(placement, decode=other)
            return _decode(turn, moved, self.prefilled), self._not_admitted()
        turn.failure = Reason.DECODE_FAILED
        state, actions = route_turn(turn, now)
        return state, (*self.release(), *actions)

    def release(self) -> Actions:
        """D may not have run the request: has P's blocks freed, and the leases that it was to end."""
        freed = (Release(self.prefilled.params, self.placement.decode),) if self.prefilled else ()
        return (*freed, *self._not_admitted())

    def _not_admitted(self) -> Actions:
        """The leases that D was told to end with this request."""
        holder = Holder(self.placement.decode.url)
        return tuple(EndLease(holder, lease) for lease in self.leases.release) if self.leases else ()

    def abandon(self, now: float) -> Actions:
        return (*self.release(), *given_up(self.turn, self.placement, now))

    def overheard(self, status: int, content_type: str, data: bytes, *, whole: bool) -> Actions:
        if status != 200:
            return ()
        if content_type.startswith(_STREAM):
            return self.overheard_events(self.turn.facts.stream_filter(count=lambda _: None), data)
        if not whole:
            return ()
        answer = wire.read_answer(self.turn.facts.api, data, ids=False)
        return settlement.release(self.turn, answer.params.handle, self.placement.decode)

    def overheard_events(self, stream: StreamFilter, data: bytes) -> Actions:
        stream.feed(data)
        return settlement.release(self.turn, stream.handle, self.placement.decode)


class Collecting(msgspec.Struct, frozen=True):
    """D answers with a whole body where a stream was asked for, or could have been."""

    before: Decoding
    status: int
    headers: Mapping[str, str]
    parts: tuple[bytes, ...] = ()

    def ask(self) -> Read:
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
            answer = wire.read_answer(turn.facts.api, body, ids=self.before.ids_back or turn.facts.wants_token_ids)
            accounting.count_account(turn, placement.decode, answer.params.account, self.before.prefilled)
            ran = ids_that_ran(turn, answer.ran)
            accounting.count_answer(turn, placement, answer.usage)
            turn.said = content_of_answer(answer.members, wire.stop_tokens(turn.facts)) if turn.keeps_exact else None
            shown = wire.client_answer(turn.facts.api, answer.members, shows_ids=turn.facts.wants_token_ids)
        except (wire.MalformedBody, msgspec.DecodeError) as error:
            accounting.note_misread(turn, placement.decode, error)
            message = f"{placement.decode} sent an answer that cannot be read: {error}"
            return refuse(turn, placement, 502, message, Leg.DECODE, now)
        settled = settlement.settle(turn, placement, answer.params.handle, answer.generated, ran, now)
        settled += settlement.named(turn, answer.id)
        answer_head = Respond(200, head(turn, placement, self.headers))
        record = accounting.record(turn, placement, now)
        note = accounting.usage_note(turn, record.report)
        return Done(), (*settled, record, answer_head, Send(wire.join(wire.noted(shown, note))))

    def _error(self, body: bytes, now: float) -> Step:
        before = self.before
        turn, placement = before.turn, before.placement
        misplaced = self.status == 404 and settlement.is_misplaced(turn, placement.decode, body, now)
        if self.status in (429, 503) or (self.status < 500 and not misplaced):
            return pass_on(turn, placement, self.status, self.headers, body, now, before.release())
        message = f"{placement.decode} answered {self.status}: {wire.error_message(body)}"
        return before.failed(FailureKind.ERROR, message, now)

    def abandon(self, now: float) -> Actions:
        released = () if self.status == 200 else self.before.release()
        return (*released, *given_up(self.before.turn, self.before.placement, now))

    def overheard(self, status: int, content_type: str, data: bytes, *, whole: bool) -> Actions:
        return self.before.overheard(status, content_type, b"".join((*self.parts, data)), whole=whole)


class Relaying(msgspec.Struct, frozen=True):
    """D streams. Until its first event the client has seen nothing, and the turn can still be tried again."""

    before: Decoding
    headers: Mapping[str, str]
    stream: StreamFilter
    started: bool = False

    def ask(self) -> Read:
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
            accounting.note_misread(turn, placement.decode, error)
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
            actions = (Respond(200, head(turn, placement, self.headers)),)
        if passed:
            actions += (Send(passed),)
        if not stream.finished:
            return (self if self.started else msgspec.structs.replace(self, started=True)), actions
        if stream.error is not None:
            return Done(), (*actions, *self._cut_off(now), Send(stream.ended()))
        if stream.handle is None and self.before.prefilled is not None and turn.hides_handle(placement.decode):
            turn.fleet.counters.add("unreachable_pins")
        turn.said = stream.said
        accounting.learn_first_byte(turn, placement)
        settled = (*self._settled(now), *settlement.named(turn, stream.answer_id))
        record = accounting.record(turn, placement, now)
        last = stream.ended(accounting.usage_note(turn, record.report), comment=turn.comments)
        return Done(), (*actions, *settled, record, Send(last))

    def _settled(self, now: float) -> Actions:
        turn, stream = self.before.turn, self.stream
        ran = ids_that_ran(turn, stream.ran)
        return settlement.settle(turn, self.before.placement, stream.handle, stream.generated, ran, now)

    def _broke(self, kind: FailureKind, message: str, now: float) -> Step:
        if not self.started:
            return self.before.failed(kind, message, now)
        event = self.before.turn.facts.api.error_event(
            message, type_="server_error", code="decode_failed", events=self.stream.events
        )
        return Done(), (*self._cut_off(now), Send(event))

    def _cut_off(self, now: float) -> Actions:
        """The answer ends in an error, of which the client has seen the beginning."""
        turn, placement = self.before.turn, self.before.placement
        released = settlement.release(turn, self.stream.handle, placement.decode)
        return (*released, *settlement.unfinished(turn), accounting.record(turn, placement, now, error="decode_failed"))

    def abandon(self, now: float) -> Actions:
        turn, placement = self.before.turn, self.before.placement
        if self.stream.handle is not None:
            return (*self._settled(now), accounting.record(turn, placement, now, error="client_gone"))
        released = () if self.started else self.before.release()
        return (*released, *given_up(turn, placement, now))

    def overheard(self, status: int, content_type: str, data: bytes, *, whole: bool) -> Actions:
        if self.stream.handle is not None:  # settled when the client left
            return ()
        return self.before.overheard_events(self.stream, data)
