"""The state of a turn while P computes its prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import msgspec

from .. import wire
from ..errors import FailureKind, Leg
from ..fleet.engine import Engine
from ..report import Proof, Reason, Route
from ..wire.connector_object import VOID, Account, keeps_waiting, reason_of
from .effects import (
    Answered,
    Call,
    Checked,
    Chunk,
    Ended,
    Event,
    Failed,
    Opened,
    Release,
    Took,
)
from .placement import Placement, Prompt
from .steps import Actions, Step, UnexpectedEvent

if TYPE_CHECKING:
    from .turn import Turn


class Prefilling(msgspec.Struct, frozen=True):
    """P computes the prompt, reading what it may, and keeps the blocks for D."""

    turn: Turn
    placement: Placement
    engine: Engine
    since: float

    @property
    def need(self) -> Call:
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

    @property
    def warm(self) -> bool:
        return self.placement.route is Route.WARM

    def next(self, event: Event, now: float) -> Step:
        turn = self.turn
        match event:
            case Answered(200, _, body):
                return self._answered(body, now)
            case Answered(404, _, body) if turn.is_misplaced(self.engine, body, now):
                return self._failed(FailureKind.REFUSED, f"{self.engine}: {wire.error_message(body)}", now)
            case Answered(400 | 404 | 413 | 422):
                # Rejected before admission, so the handle was not read. What the client gets is D's word on its own body.
                return turn.leave_to_decode(Reason.NO_PROOF, now)
            case Answered(401 | 403 | 429, headers, body):
                return turn.pass_on(self.placement, event.status, headers, body, now)
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
        sent = turn.sent() if self.warm else None
        try:
            params, usage = wire.read_left(turn.facts.endpoint, body)
        except (wire.MalformedBody, msgspec.DecodeError) as error:
            message = f"{self.engine} sent an answer that cannot be read: {error}"
            return turn.refuse(self.placement, 502, message, Leg.PREFILL, now)
        handle = params.handle
        if handle is None:
            message = (
                f"{self.engine} returned {wire.no_handle_in(body)}: start it with the NIXL connector "
                "(NixlConnector, which pulls) as kv_producer (`backhaul up --dry-run` prints the flags)"
            )
            return turn.refuse(self.placement, 502, message, Leg.PREFILL, now, turn.release_held(sent))
        elapsed_ms = (now - self.since) * 1e3
        turn.draft["prefill_ms"] = elapsed_ms
        if usage is not None:
            turn.count_prefill(usage)
            if turn.token_ids is not None and usage.prompt_tokens != len(turn.token_ids):
                return self._ran_other_ids(handle, now)
        if self.placement.proof is Proof.CONNECTOR and params.account is None:
            return self._checked_nothing(handle, now)
        turn.count_account(self.engine, params.account)
        left_alone = sent if params.account is not None and keeps_waiting(params.account) else None
        turn.decode_began = now
        self._learn(elapsed_ms)
        return turn.decoding(self._as_it_ran(params.account), handle), turn.release_held(left_alone)

    def _learn(self, elapsed_ms: float) -> None:
        turn = self.turn
        computed, read = turn.draft.get("computed"), turn.draft.get("pulled")
        if computed is None or turn.draft.get("retries"):
            return
        if not self.warm:
            turn.fleet.costs.learn_compute(self.engine.url, elapsed_ms, computed, alone=turn.alone)
            return
        if read is None:  # a stock engine tells only the sum of what it read and what it had
            read = turn.draft.get("cached") or 0
        turn.fleet.costs.learn_read(self.engine.url, elapsed_ms, computed, read, alone=turn.alone)

    def _as_it_ran(self, account: Account | None) -> Placement:
        """The placement by what P did with the handle: cold, with the reason, where it neither read nor had it all."""
        if not self.warm:
            return self.placement
        if account is None:
            return self.placement if self._may_have_read() else self._cold(Reason.READ_FAILED)
        if account.pulled or account.why in (None, "local_hit"):
            return self.placement
        if account.why == "below_threshold" and account.verified and account.local:
            return self.placement  # its own cache had all but a few tokens
        reason = reason_of(account.why)
        if reason in VOID:
            self.turn.void = reason
        return self._cold(reason)

    def _cold(self, reason: Reason) -> Placement:
        return msgspec.structs.replace(self.placement, route=Route.COLD, proof=None, blocks=0, reason=reason)

    def _may_have_read(self) -> bool:
        """By the sum of what a stock P found in its own cache and read. What it does not read is little, or it read nothing."""
        cached: int | None = self.turn.draft.get("cached")
        little = max(self.turn.config.kv_recompute_threshold, self.turn.prompt.block_size)
        return cached is None or cached + little >= self.turn.draft["offered"]

    def _checked_nothing(self, handle: wire.Handle, now: float) -> Step:
        """P says nothing of a handle that it was to check: it was restarted without our connector. D answers by itself."""
        turn = self.turn
        turn.fleet.capabilities.note_unverified(self.engine)
        turn.retry()
        turn.draft |= {"offered": 0, "cached": None, "computed": None}
        state, actions = turn.leave_to_decode(Reason.NO_PROOF, now)
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
        turn.retry()
        state, actions = turn.placed(now)
        return state, (Release(handle.params, self.placement.decode), *actions)

    def _failed(self, kind: FailureKind, message: str, now: float) -> Step:
        turn = self.turn
        self._unaccounted()
        rest: Actions = ()
        if self.warm and kind is not FailureKind.REFUSED:
            rest = turn.release_held(turn.sent())
            turn.failure = Reason.READ_FAILED
            turn.draft["offered"] = 0
            if kind is not FailureKind.BROKEN:
                turn.retry()
                return Prefilling(turn, self._cold(Reason.READ_FAILED), self.engine, now), rest
        if (other := turn.another(self.engine, kind)) is not None:
            turn.failed_on |= {self.engine.url}
            turn.retry()
            if self.warm:  # the other may not check handles, or not be able to read this one
                state, actions = turn.placed(now)
                return state, (*rest, *actions)
            return Prefilling(turn, msgspec.structs.replace(self.placement, prefill=other), other, now), rest
        status = 504 if kind is FailureKind.TIMEOUT else 502
        return turn.refuse(self.placement, status, message, Leg.PREFILL, now, rest, unread=kind is FailureKind.REFUSED)

    def abandon(self, now: float) -> Actions:
        self._unaccounted()
        release = self.turn.release_held(self.turn.sent() if self.warm else None)
        return (*release, *self.turn.given_up(self.placement, now))

    def overheard(self, status: int, content_type: str, data: bytes, *, whole: bool) -> Actions:
        if status != 200 or not whole:
            return ()
        handle = wire.read_left(self.turn.facts.endpoint, data)[0].handle
        return (Release(handle.params, self.placement.decode),) if handle is not None else ()
