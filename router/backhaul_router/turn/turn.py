"""One turn as a state machine: what to ask which engine next, and what follows from the answer. No I/O, no clock. Here is what
is known of a turn and decided for it; its states are in `preparing`, `prefilling` and `decoding`.

    Taking ──▶ Rendering ──▶ Checking ──▶ Prefilling ──▶ Decoding ──▶ Relaying    (an event stream)
                   │                                        ▲  └────▶ Collecting  (a whole body)
                   └──────── local ─────────────────────────┘

Each state says what it needs (`need`). `next` takes the event that came back and the time, and returns the state that
follows, `Done` at last, with the actions to perform before its need. A driver is a loop over these (`router.py`); so is a
simulator. `abandon` is what remains to be done when the client leaves.

Rules that can be seen here:
- a stock engine's handle is sent to P once; from then on it is in nobody's hands, whatever came of it. A shared one stays in
  the ledger: D confirms what P is about to read, at that moment;
- no render and no ids where P and D check handles by themselves, and what they say they did is the report;
- a request is sent again only when it was refused before it was read, when reading the handle may be what failed, when an
  engine answered with an error, or when a prefill took too long; after a broken connection once, since the request may be
  what broke the engine (`suspects`);
- before the client's first byte a failure can become another try; after it, an error event and the end;
- every way out settles: the handle taken is given back, used up or released, and what the engines hold for us is filed
  or released.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .. import wire
from ..config import RouterConfig
from ..errors import FailureKind, Leg
from ..fleet import poison
from ..fleet.fleet import Engine, Fleet, Holder, Role
from ..fleet.restarts import Asked
from ..fleet.retention import Reserved
from ..identity.hints import NO_HINTS, Hints, longest_pause_s, why_not_kept
from ..identity.identify import Identity
from ..ledger import digests
from ..ledger.records import Branch, Held, Key, Taken
from ..report import Proof, Reason, ReuseReport, Route
from ..wire.connector_object import Account, Ask
from ..wire.exact_history import Kept, Said, said, splice
from .decoding import Decoding
from .effects import (
    DropEngine,
    EndLease,
    GiveBack,
    Headers,
    Lost,
    NoteResponse,
    Record,
    Release,
    Respond,
    Send,
    Settle,
)
from .placement import NoEngine, Picks, Placement, Prompt, first_engine, needs_ids, pick_engines, place, why_moved
from .prefilling import Prefilling
from .preparing import Checking, Rendering, Taking
from .steps import Actions, Done, Step

_MESSAGE_KEYS_BYTES = len(b'{"role":"user","content":""}')
"""Of a message, what does not become text of the prompt."""

_ENDS_OTHERWISE = frozenset({"continue_final_message", "add_generation_prompt"})
"""With these a prompt does not end where an answer begins."""
_VLLM_TTL_S = 480.0
"""vLLM's own `decoder_kv_blocks_ttl`."""
_RIDING = 256
"""So many leases at most are released along with one turn."""
_MAX_MODEL = 1024
"""Characters of a model's name in a report. Engines' names are shorter; a client may send one of any length."""


_NOTHING_TAKEN = Taken()
_NOT_ASKED = Asked()
_NO_IDS = msgspec.Raw(b"null")
_NO_PROMPT = Prompt(0)


@dataclass
class Turn:
    """What is known of one turn, with the report in the making. States are frozen; this is what changes."""

    facts: wire.Facts
    identity: Identity | None
    config: RouterConfig
    fleet: Fleet
    started: float
    route: Route | None = None
    """Forces a route wherever it is possible and exact."""
    hints: Hints = NO_HINTS
    tenant: str = ""
    chain: bytes = b""
    """Digests of the history's messages; made here where they are not given."""
    flushes: int = 0
    """The ledger's count when the turn began."""
    taken: Taken = _NOTHING_TAKEN
    spare: Held | None = None
    """The handle taken, as long as no engine has been sent it; a shared one until the turn's end."""
    by_connector: bool = False
    """P and D check handles by themselves: no ids are asked for."""
    accounted: bool = False
    """The engine that prefilled has given an account, which goes before its `usage`."""
    void: Reason | None = None
    """Why nobody can use the shared handle any more."""
    restarts: int = 0
    """Of the decode engine that holds what was taken, as they were known when it was taken."""
    asked: Asked = _NOT_ASKED
    """What was known of D when it was asked."""
    checked: frozenset[tuple[str, str]] = frozenset()
    """Pairs of P and D that this turn had checked."""
    token_ids: tuple[int, ...] | None = None
    """The prompt's ids, where they are what the engines are sent."""
    encoded_ids: msgspec.Raw = field(default_factory=lambda: _NO_IDS)
    """The same as JSON."""
    prompt: Prompt = _NO_PROMPT
    no_proof: bool = False
    left_to_decode: bool = False
    """D has the client's own body, and the turn leaves nothing."""
    failed_on: frozenset[str] = frozenset()
    erred: frozenset[Role] = frozenset()
    """Roles of which an engine answered with an error: one other is tried, not every one."""
    deaths: int = 0
    """Engines that may have died of this request, in earlier turns with it too."""
    failure: Reason | None = None
    """Why the turn, warm at first, is run again cold."""
    said: Said | None = None
    """What the answer says, where histories are kept exact."""
    draft: dict[str, Any] = field(default_factory=dict)
    first_byte: float | None = None
    reserved: Reserved | None = None
    """Room on the decode engine."""
    computes: int = 0
    """Estimate of the tokens that the engine which prefills computes."""
    alone: bool = True
    """Nothing of this router's ran there when it was asked."""
    decode_began: float = 0.0

    def __post_init__(self) -> None:
        self.chain = self.chain or digests.chain(self.facts.parts)
        conversation = self.identity.conversation if self.identity else ""
        self.key = Key(self.tenant, self.facts.model, self.facts.cache_salt, conversation)

    @property
    def reuses(self) -> bool:
        """Whether this turn reads from and writes to the ledger."""
        return self.identity is not None and self.config.reuse

    def begin(self, now: float) -> Step:
        """The first step."""
        if self.identity is None:
            return self._taken(Taken(reason=Reason.NO_CONVERSATION), now)
        if self.identity.new:
            return self.took(Taken(reason=Reason.FIRST_TURN, flushes=self.flushes), now)
        return Taking(self), ()

    def took(self, taken: Taken, now: float) -> Step:
        """The ledger has answered."""
        self.draft["turn"] = taken.turn
        self.draft["on_record"] = self._on_record(taken)
        self._diverged_at(taken.diverged_at)
        if not self.config.reuse:
            taken = msgspec.structs.replace(taken, reason=Reason.REUSE_OFF)
        state, actions = self._taken(taken, now)
        return state, (*self.release_held(*taken.drop), *actions)

    def _on_record(self, taken: Taken) -> int:
        """Tokens of the history that the request goes on from. One that shares nothing with it can still be an edit, of its
        first message, if it is longer; else it is another agent's."""
        if taken.branch is None:
            return 0
        before = digests.count(taken.branch.chain)
        return taken.branch.tokens if taken.common or digests.count(self.chain) > before else 0

    def _taken(self, taken: Taken, now: float) -> Step:
        self.taken, self.spare = taken, taken.held
        if taken.held is not None:
            self.restarts = self.fleet.processes.restarts(taken.held.decode)
        messages = self.facts.messages
        self.prompt = Prompt(max(sum(map(len, messages)) - len(messages) * _MESSAGE_KEYS_BYTES, len(messages)))
        if self.facts.multiple:
            return self.leave_to_decode(Reason.MULTIPLE_CHOICES, now)
        if self.facts.alone is not None:
            return self.leave_to_decode(Reason.NO_PROOF, now)
        if not self.reuses:
            return self.placed(now)
        return self._to_render(now)

    def _to_render(self, now: float) -> Step:
        facts, branch = self.facts, self.taken.branch
        picks = pick_engines(self.taken, self.fleet)
        if not needs_ids(self.taken, self.fleet, picks):
            self.by_connector = True
            if not self.keeps_exact:
                return self.placed(now, picks)
        asked = (self.fleet.pick(Role.PREFILL, branch.prefill if branch else None), self.fleet.pick(Role.DECODE))
        engines = [engine for engine in asked if engine is not None and engine.block_size]
        engines.sort(key=self.fleet.renders_well, reverse=True)
        is_base = not facts.model or all(facts.model in engine.models for engine in engines)
        if facts.unproven or self.fleet.ignores_ids or not is_base:  # an adapter's weights can be re-pointed unseen
            engines = []
        if engines and facts.prompt_ids is not None:
            self.rendered(facts.prompt_ids, engines[0])
            return self.placed(now)
        by_tokenize = None if all(engine.renders for engine in engines) else wire.tokenize_body(facts)
        engines = [engine for engine in engines if engine.renders or by_tokenize is not None]
        if not engines:
            self.no_proof = True
            return self.placed(now)
        return Rendering(self, tuple(engines), by_tokenize or b"", now), ()

    @property
    def keeps_exact(self) -> bool:
        """Whether the next prompt may continue the very tokens of this turn (`exact_histories`)."""
        if not self.config.exact_histories or not self.reuses:
            return False
        return self.facts.endpoint is wire.Endpoint.CHAT and not self.facts.members.keys() & _ENDS_OTHERWISE

    def rewrites_answer(self, token_ids: tuple[int, ...]) -> bool:
        """Whether the request goes on from the last answer, which has become other tokens on the way."""
        branch, common = self.taken.branch, self.taken.common
        if not self.keeps_exact or branch is None or branch.exact is None:
            return False
        if wire.rendering(self.facts) != branch.exact.rendering:
            return False
        messages = self.facts.messages
        if common < digests.count(branch.chain) or len(messages) <= common:
            return False
        sent = said(messages[common])
        if sent is None or not sent.repeats(branch.exact.said):
            return False
        return token_ids[: len(branch.exact.ran)] != tuple(branch.exact.ran)

    def continued(self, token_ids: tuple[int, ...], closed: tuple[int, ...], engine: Engine) -> None:
        """The prompt's ids are known, and those of the history up to the last answer."""
        record = self.taken.branch.exact if self.taken.branch is not None else None
        exact = splice(record.ran, token_ids, closed) if record is not None else None
        self.draft["exact_history"] = exact is not None
        self.rendered(exact or token_ids, engine)

    def rendered(self, token_ids: tuple[int, ...], engine: Engine) -> None:
        """The prompt's ids are known."""
        block_size, branch = engine.block_size or 0, self.taken.branch
        known = branch.blocks if branch is not None and branch.block_size == block_size else b""
        try:
            blocks = digests.block_chain(token_ids, block_size, known)
        except OverflowError:
            self.no_proof = True
            return
        self.token_ids, self.encoded_ids = token_ids, wire.encode_ids(token_ids)
        self.prompt = Prompt(self.prompt.message_bytes, len(token_ids), blocks, block_size)
        self.draft["prompt"] = len(token_ids)
        self._note_divergence(blocks)

    def _note_divergence(self, blocks: bytes) -> None:
        """Messages that all match, but tokens that do not: it is the engine's own answer that comes back changed."""
        branch, common = self.taken.branch, self.taken.common
        if branch is None or common < digests.count(branch.chain) or len(self.facts.parts) <= common:
            return
        if digests.common(blocks, branch.blocks) < min(digests.count(blocks), digests.count(branch.blocks)):
            self._diverged_at(common)

    def _diverged_at(self, part: int | None) -> None:
        """Notes the message that differs. A completion's prompt is compared in pieces, and is one message."""
        self.draft["diverged_at"] = part if part is None or self.facts.api.numbered else 0

    def placed(self, now: float, picks: Picks | None = None) -> Step:
        """Decides where the turn runs, and goes there. `picks` are the engines that were just picked for what was taken."""
        if self.spare is not None and self.fleet.is_down(self.spare.decode):
            self.failure = self.failure or Reason.DECODE_FAILED
        if self._is_outlived():
            self.void = self.failure = Reason.ENGINE_CHANGED
        readable = self.spare is not None and self.spare.decode not in self.failed_on and self.failure is None
        taken = self.taken
        if taken.held is not None and not readable:
            taken, picks = msgspec.structs.replace(taken, held=None), None
        placement = place(
            self.prompt,
            taken,
            self.fleet,
            self.config,
            no_proof=self.no_proof,
            force=self.route or self.config.route,
            without=self.failed_on,
            picks=picks,
        )
        if isinstance(placement, NoEngine):
            leg = Leg.PREFILL if placement.role is Role.PREFILL else Leg.DECODE
            return self.refuse(None, 503, f"no {placement.role} engine is left to try", leg, now)
        if self.failure is not None:
            placement = msgspec.structs.replace(placement, reason=self.failure)
        if placement.prefill is None:
            self._goes(placement, now)
            return self.decoding(placement, None), ()
        if placement.decode.connector is None:  # what is in its way is released while P computes
            self.reserve(placement, sent=False)
        offered = placement.blocks * self.prompt.block_size
        if placement.route is Route.WARM and self.spare is not None:
            pair = (placement.prefill.url, self.spare.decode)
            unknown = self.config.check_pairs and not self.fleet.is_checked(*pair)
            # One of ours fences its leases against an earlier process's by itself.
            engine_id = "" if placement.proof is Proof.CONNECTOR else self.spare.handle.engine_id
            in_doubt = bool(engine_id) and self.fleet.processes.in_doubt(self.spare.decode, engine_id)
            if pair not in self.checked and (unknown or in_doubt):
                self.checked |= {pair}
                return Checking(self, placement, placement.prefill, self.spare.decode, engine_id), ()
            if placement.proof is Proof.CONNECTOR:
                offered = self.spare.tokens
        self.draft["offered"] = offered
        self._goes(placement, now)
        return Prefilling(self, placement, placement.prefill, now), ()

    def _goes(self, placement: Placement, now: float) -> None:
        """The placement is final: it is part of the engines' load, and of the report."""
        fleet, first = self.fleet, first_engine(placement)
        self.computes, self.alone, self.decode_began = placement.computes, not fleet.busy(first), now
        name = (self.tenant, self.identity.conversation) if self.identity else None
        fleet.note_placed(name, placement.decode, placement.prefill, now)
        self.draft["estimates"] = None
        if placement.estimates:
            usual = placement.instead_of
            passed_over = None
            if usual is not None:
                passed_over = (placement.decode if usual is Route.LOCAL else placement.prefill or first, usual)
            fleet.note_route(first, placement.route, passed_over)
            self.draft["estimates"] = {str(route): round(ms, 1) for route, ms in placement.estimates.items()}
        self.draft["decided_by"] = placement.basis
        moved = why_moved(placement, self.taken.branch, fleet, self.failed_on)
        self.draft["moved"] = ",".join(moved.values()) or None
        for url in moved:
            fleet.note_left(url)

    def learn_first_byte(self, placement: Placement) -> None:
        """What D took to the first event of a stream, where it was the first to be asked."""
        computed = self.draft.get("computed")
        if self.first_byte is None or self.left_to_decode or self.draft.get("retries") or not computed:
            return
        ms = (self.first_byte - self.decode_began) * 1e3
        self.fleet.learn_first_byte(placement.decode, ms, computed, local=placement.prefill is None)

    def decoding(self, placement: Placement, prefilled: wire.Handle | None) -> Decoding:
        """D is next. One that runs our connector takes along the leases that are due there."""
        decode = placement.decode
        self.asked = self.fleet.processes.asked(decode.url)
        self.reserve(placement)
        if decode.connector is None:
            return Decoding(self, placement, prefilled)
        ask = Ask(
            retain=self.reuses and self._leaves_something and self.shows_handle(decode),
            shared=self.by_connector,
            retain_s=self._retain_s(),
            release=self.fleet.to_release(Holder(decode.url), _RIDING),
        )
        return Decoding(self, placement, prefilled, ask=ask)

    @property
    def _leaves_something(self) -> bool:
        pause_s = self.hints.pause_s
        return not self.hints.last_turn and (pause_s is None or pause_s <= longest_pause_s(self.config))

    def _retain_s(self) -> float | None:
        """For how long a D that runs our connector keeps what the turn leaves; `None` leaves it to the engine."""
        ttl_s, margin_s = self.config.decoder_kv_blocks_ttl, self.config.lease_margin_s
        if self.hints.pause_s is not None and self.hints.pause_s + margin_s > ttl_s:
            return self.hints.pause_s + margin_s
        ttl_s = min(ttl_s, self._longest_kept_s)
        return ttl_s if ttl_s < _VLLM_TTL_S else None

    @property
    def _longest_kept_s(self) -> float:
        """Nobody has said that there will be a next turn where a request names no conversation and continues none."""
        return self.config.one_shot_s if self.identity is not None and self.identity.new else math.inf

    def shows_handle(self, decode: Engine) -> bool:
        """Whether D's answer will carry the handle."""
        return not self.facts.stream or decode.shows_handle(self.facts.api)

    def hides_handle(self, decode: Engine) -> bool:
        """Whether the turn pins blocks there that nobody can release."""
        return decode.hides_handles and not self.shows_handle(decode)

    def leave_to_decode(self, reason: Reason, now: float) -> Step:
        """Gives D the client's own body, without ids and transfer parameters: it answers, or says what is wrong with it."""
        self.token_ids = None
        self.left_to_decode = True
        give_back = self.give_back()
        before = self.taken.branch.decode if self.taken.branch else None  # what a request refers to may be kept there
        engine = self.fleet.pick(Role.DECODE, before if self.facts.alone else None, self.failed_on)
        if engine is None:
            return self.refuse(None, 503, "no decode engine is left to try", Leg.DECODE, now, give_back)
        placement = Placement(Route.LOCAL, engine, reason=reason, proof=Proof.ENGINE)
        self.asked = self.fleet.processes.asked(engine.url)
        self.reserve(placement)
        return Decoding(self, placement, None, as_it_is=True), give_back

    def reserve(self, placement: Placement, *, sent: bool = True) -> None:
        """Room on D for the prompt, less what is kept there for it, and for the answer."""
        self._unreserve()
        decode, held, branch = placement.decode, self.spare, self.taken.branch
        prompt = len(self.token_ids or ()) or self.draft.get("prompt") or 0
        if not prompt:
            counted = branch is not None and branch.prompt_tokens and branch.message_bytes
            per_token = branch.message_bytes / branch.prompt_tokens if branch is not None and counted else 4.0
            prompt = round(self.prompt.message_bytes / per_token)
        if held is not None and held.decode == decode.url and placement.route is not Route.COLD:
            prompt = max(0, prompt - held.tokens)
        answer = self.fleet.retention.answer_of(self.facts.answer_limit)
        self.reserved = self.fleet.reserve(decode, prompt, answer, sent=sent)

    def _unreserve(self) -> None:
        if self.reserved is not None:
            self.fleet.retention.unreserve(self.reserved)
            self.reserved = None

    @property
    def ids_to_send(self) -> msgspec.Raw | None:
        return None if self.token_ids is None else self.encoded_ids

    def ran(self, ids: msgspec.Raw) -> tuple[int, ...] | None:
        """The ids that D says it was given. The same JSON is the same ids, without reading them. Raises `msgspec.DecodeError`."""
        return self.token_ids if bytes(ids) == bytes(self.encoded_ids) else wire.read_ids(ids)

    # --- handles

    def give_back(self) -> Actions:
        """The handle taken goes back, where no engine was sent it; one that is void is noted so."""
        if self.spare is None:
            return ()
        void = Reason.ENGINE_CHANGED if self._is_outlived() else self.void
        given = GiveBack(self.key, self.taken) if void is None else Lost(self.key, self.taken, void)
        self.taken, self.spare = msgspec.structs.replace(self.taken, held=None), None
        return (given,)

    def sent(self) -> Held | None:
        """An engine was sent the handle. Returns it, for whoever knows that it was not read; a shared one is not used up."""
        spare = self.spare
        if spare is None or spare.shared:
            return None
        self.spare = None
        self.fleet.retention.read(spare)
        return spare

    def unfinished(self) -> Actions:
        """The turn ends without an answer: the handle taken goes back, or is noted as used up or void."""
        if self.taken.held is None or self.spare is not None:
            return self.give_back()
        lost = Lost(self.key, self.taken, self.void or self.failure or Reason.NO_HANDLE)
        self.taken, self.spare = msgspec.structs.replace(self.taken, held=None), None
        return (lost,)

    def given_up(self, placement: Placement | None, now: float) -> Actions:
        """The client has left without an answer: what is on record is put right, and the report."""
        return (*self.unfinished(), self.report(placement, now, error="client_gone"))

    def _is_outlived(self) -> bool:
        """Whether the process that made the handle taken has been replaced since."""
        return self.spare is not None and self.restarts != self.fleet.processes.restarts(self.spare.decode)

    def doubted(self) -> Actions:
        """Nobody knows whose the handle taken is: this turn does not read it, nor does another. It is released, since D may be
        what it was."""
        spare = self.spare
        self.void = self.failure = Reason.ENGINE_CHANGED
        released = () if spare is None or spare.shared else self.release_held(spare)  # the ledger releases a shared one
        return (*released, *self.unfinished())

    def release(self, handle: wire.Handle | None, decode: Engine) -> Actions:
        """Has the blocks of D's handle freed."""
        return self._release(handle, decode.url) if handle is not None else ()

    def release_held(self, *held: Held | None) -> Actions:
        """The same of handles that were taken, or that the ledger has dropped."""
        return tuple(action for one in held if one is not None for action in self._release(one.handle, one.decode))

    def _release(self, handle: wire.Handle, decode: str) -> Actions:
        if handle.lease is not None:
            return (EndLease(Holder.of(decode, handle.engine_id), handle.request_id),)
        via = self.fleet.pick(Role.PREFILL)
        return (Release(handle.params, via),) if via is not None else ()

    def is_misplaced(self, engine: Engine, body: bytes, now: float) -> bool:
        """Whether an engine's 404 is about a model that it served when it was asked what it is."""
        misplaced = self.facts.model in engine.models and wire.disowns_model(body)
        if misplaced:
            self.fleet.note_other_model(engine, self.facts.model, now)
        return misplaced

    def another(self, failed: Engine, kind: FailureKind) -> Engine | None:
        """The engine to try after one that failed: where nobody read it, or, once, after an error, a broken connection or a
        prefill that took too long."""
        again = kind is FailureKind.ERROR or (kind is FailureKind.TIMEOUT and failed.role is Role.PREFILL)
        if (again or (kind is FailureKind.BROKEN and self.outlives())) and failed.role not in self.erred:
            self.erred |= {failed.role}
        elif kind is not FailureKind.REFUSED:
            return None
        return self.fleet.pick(failed.role, None, self.failed_on | {failed.url})

    def outlives(self) -> bool:
        """Whether the request may go out again after a connection broke: one engine may have died of it, and no second one."""
        self.deaths += 1
        return self.deaths < poison.MOST

    def retry(self) -> None:
        self.draft["retries"] = self.draft.get("retries", 0) + 1

    # --- the end

    def settle(
        self,
        placement: Placement,
        handle: wire.Handle | None,
        generated: tuple[int, ...] | None,
        ran: tuple[int, ...] | None,
        now: float,
    ) -> Actions:
        """Files what D left, or has it freed. `generated` and `ran` are the ids that D says it made and was given."""
        decode = placement.decode
        actions: Actions = ()
        outlived = handle is not None and self.fleet.is_outlived(decode.url, handle.engine_id, self.asked)
        if handle is not None and not outlived:
            before = self.fleet.saw_engine_id(decode, handle.engine_id, self.asked)
            if before is not None:
                actions = (DropEngine(decode.url, before),)
        if self._is_outlived():
            self.void = Reason.ENGINE_CHANGED
        if ran is not None and self.token_ids is not None and ran is not self.token_ids and ran != self.token_ids:
            self.fleet.note_ids_ignored()
            self.token_ids = None
        if ran is None and self.facts.api.shows_ids:  # it was asked, and may have rendered the messages by itself
            self.token_ids = None
        if not self.reuses or self.left_to_decode:
            return (*actions, *self.release(handle, decode), *self.give_back())
        held = self._held(handle, decode, generated, now)
        missing = None
        keeps = self._leaves_something
        if held is not None and (outlived or self._is_never_sure(held)):
            actions += self.release(handle, decode)
            held, missing = None, Reason.ENGINE_CHANGED
        elif held is not None and self._unwanted(held, now):
            actions += self.release(handle, decode)
            held, missing, keeps = None, Reason.EXPIRED, False
        elif held is None:
            actions += self.release(handle, decode)
            missing = Reason.NO_PROOF if handle else self.void or self.failure or Reason.NO_HANDLE
        if held is None and keeps and self.void is None and (kept := self._kept(placement)):
            held, missing = kept, None
        elif self.void is not None:
            actions += self.unfinished()
        elif self.spare is not None and not self.spare.shared:  # the ledger knows when a shared one has no more takers
            actions += self.release_held(self.spare) if self.taken.supersedes else (GiveBack(self.key, self.taken),)
        self.spare = None
        self.draft["handle_remaining_s"] = held.deadline - now if held else None
        earlier = self.taken.branch.prefill if self.taken.branch else None
        branch = Branch(
            chain=self.chain,
            blocks=self._blocks(generated or ()),
            block_size=self.prompt.block_size,
            tokens=self._ran_tokens(generated),
            message_bytes=self.prompt.message_bytes,
            decode=decode.url,
            prefill=placement.prefill.url if placement.prefill else earlier,
            held=held,
            missing=missing,
            prompt_tokens=self.draft.get("prompt") or 0,
            by_history=self.identity is not None and self.identity.by_history,
            exact=self._exact(generated),
        )
        return (*actions, Settle(self.key, self.taken, branch))

    def _exact(self, generated: tuple[int, ...] | None) -> Kept | None:
        if self.said is None or self.token_ids is None or not generated:
            return None
        return Kept.of(self.token_ids, generated, self.said, wire.rendering(self.facts))

    def _is_never_sure(self, held: Held) -> bool:
        if held.leased:
            return False
        processes, engine_id = self.fleet.processes, held.handle.engine_id
        processes.warn_of_fixed(held.decode, engine_id)
        return processes.is_never_sure(held.decode, engine_id)

    def _unwanted(self, held: Held, now: float) -> bool:
        """Whether nothing will come that could read the handle in its time."""
        pause_s, left_s = self.hints.pause_s, held.deadline - now
        if pause_s is not None and why_not_kept(pause_s, self.config, renewable=held.leased, remaining_s=left_s):
            return True
        return self.hints.last_turn

    def named(self, answer: str | None) -> Actions:
        """Notes the id of the answer, where later requests may name it."""
        if answer is None or not self.facts.api.refers_to_answers:
            return ()
        if self.identity is None:  # a tenant may go on from its own answers only, whatever they belong to
            return (NoteResponse(answer, "", self.tenant),) if self.tenant else ()
        return (NoteResponse(answer, self.identity.conversation, self.tenant),)

    def _ran_tokens(self, generated: Sequence[int] | None) -> int:
        """Tokens that D ran and has KV of: by their ids or, where those are not known, by its own count."""
        if self.token_ids is not None:
            return len(self.token_ids) + max(0, len(generated or ()) - 1)
        if not self.by_connector:
            return max(0, len(generated or ()) - 1)
        return (self.draft.get("prompt") or 0) + max(0, (self.draft.get("generated") or 0) - 1)

    def _kept(self, placement: Placement) -> Held | None:
        """The handle taken, where the turn left none and the one before holds a prefix of the new record.

        A stock engine leaves no handle for a turn that it ran alone. One of ours does, but not for a turn that a `stop` string
        ended; reading did not use a shared handle up."""
        branch, spare = self.taken.branch, self.spare
        if branch is None or spare is None:
            return None
        if spare.shared:
            usable = self.taken.supersedes and self.void is None and self.failure is None
            return spare if usable and spare.decode == placement.decode.url else None
        if placement.route is not Route.LOCAL or self.token_ids is None or branch.block_size != self.prompt.block_size:
            return None
        shared = digests.common(self.prompt.blocks, branch.blocks) * branch.block_size
        return msgspec.structs.replace(spare, tokens=min(spare.tokens, shared)) if shared else None

    def _held(
        self, handle: wire.Handle | None, decode: Engine, generated: tuple[int, ...] | None, now: float
    ) -> Held | None:
        """The handle with what it is good for; `None` when no later turn could prove anything of it."""
        if handle is None:
            return None
        ttl_s, margin_s = self.config.decoder_kv_blocks_ttl, self.config.lease_margin_s
        if handle.lease is not None:
            ttl_s = handle.lease.ttl_s
            margin_s = min(margin_s, ttl_s / 4)
        deadline = now + min(ttl_s - margin_s, self._longest_kept_s)
        if handle.digests:
            return Held(handle, decode.url, deadline, handle.tokens)
        if decode.connector is not None:
            self.fleet.note_no_digests(decode)
        if self.token_ids is None or handle.groups > 1 or handle.whole:
            return None
        # The KV of the last token is computed only when another follows, and under asynchronous scheduling an engine counts
        # a position that is still in flight (`remote_num_tokens`, PS:276): never more than what surely ran.
        tokens = min(handle.tokens, self._ran_tokens(generated))
        if handle.blocks * self.prompt.block_size < tokens:
            return None  # a sliding window: its list does not begin at the first token, and cannot be cut
        return Held(handle, decode.url, deadline, tokens)

    def _blocks(self, generated: tuple[int, ...]) -> bytes:
        """Of what D ran: the prompt, and the answer but for its last token."""
        if self.token_ids is None:
            return b""
        return digests.extended(self.prompt.blocks, self.token_ids, generated[:-1], self.prompt.block_size)

    def count_prefill(self, usage: wire.Usage) -> None:
        """Token counts of the engine that prefilled."""
        if self.accounted:
            return
        self.draft["prompt"] = usage.prompt_tokens
        self.draft["cached"] = usage.cached
        self.draft["computed"] = None if usage.cached is None else usage.prompt_tokens - usage.cached

    def count_account(self, engine: Engine, account: Account | None, given: wire.Handle | None = None) -> None:
        """What an engine of ours says it did with its leg; it goes before what was planned. D was `given` P's handle."""
        if account is None:
            return
        is_prefill = engine.role is Role.PREFILL
        if is_prefill:
            self.fleet.note_account(engine, account)
            self.draft |= {
                "offered": account.offered or 0,
                "verified": account.verified,
                "local": account.local,
                "pulled": account.pulled,
                "read_bytes": account.bytes,
                "read_ms": account.read_ms,
                "claim_ms": account.claim_ms,
            }
        else:
            self.draft["decode_cached"] = account.local
            if account.why == "prompt_differs":
                self.fleet.count_prompt_differed()
            elif given is not None and account.received == 0 and (account.computed or 0) >= (engine.block_size or 1):
                self.fleet.note_computed_twice(engine)
        if account.prompt is not None and (is_prefill or not self.accounted):
            cached = (account.local or 0) + (account.pulled or 0)
            self.draft |= {"prompt": account.prompt, "cached": cached, "computed": account.prompt - cached}
            self.accounted = True

    def count_answer(self, placement: Placement, usage: wire.Usage | None) -> Mapping[str, object] | None:
        """D's token counts. Returns what the answer's `usage` says of the turn: to clients that named a conversation, and
        nothing of the engines."""
        if usage is not None:
            self.draft["generated"] = usage.completion_tokens
            self.fleet.retention.note_answer(usage.completion_tokens or 0)
            if placement.prefill is None:
                self.count_prefill(usage)
        if self.identity is None or self.identity.by_history:
            return None
        return {
            "conversation": self.identity.conversation,
            "turn": self.draft["turn"],
            "route": placement.route,
            "reason": placement.reason,
            "offered": self.draft.get("offered", 0),
            "cached": self.draft.get("cached"),
            "computed": self.draft.get("computed"),
        }

    def report(self, placement: Placement | None, now: float, *, status: int = 200, error: str | None = None) -> Record:
        """The report, complete. The turn needs nothing any more."""
        self._unreserve()
        saved = self._saved(placement) if error is None else None
        first_byte = self.first_byte
        fields = {
            "turn": 1,
            **self.draft,
            "conversation": self.identity.conversation if self.identity else None,
            "tenant": self.tenant,
            "model": self.facts.model[:_MAX_MODEL] or None,
            "identity_source": self.identity.source if self.identity else None,
            "parent": self.identity.parent if self.identity else None,
            "route": placement.route if placement else Route.COLD,
            "proof": placement.proof if placement else None,
            "reason": placement.reason if placement else self.taken.reason,
            "first_byte_ms": None if first_byte is None else (first_byte - self.started) * 1e3,
            "total_ms": (now - self.started) * 1e3,
            "prefill_engine": placement.prefill.url if placement and placement.prefill else None,
            "decode_engine": placement.decode.url if placement else None,
            "saved_ms": saved[0] if saved else None,
            "saved_basis": saved[1] if saved else None,
            "status": status,
            "error": error,
        }
        return Record(ReuseReport(**fields))

    def _saved(self, placement: Placement | None) -> tuple[float, str] | None:
        """The whole cold prefill that did not happen, less what the turn spent on the way to its first token instead."""
        prompt, computed = self.draft.get("prompt"), self.draft.get("computed")
        if placement is None or placement.route is Route.COLD or not prompt or computed is None:
            return None
        rate = self.fleet.prefill_rate(placement.prefill)
        if rate is None or self.first_byte is None:
            return None
        spent = self.draft.get("prefill_ms")
        if spent is None:
            spent = (self.first_byte - self.started) * 1e3 - self.draft.get("render_ms", 0.0)
        per_token, turns = rate
        return per_token * prompt - spent, f"cold prefill at {per_token:.3f} ms per token, from {turns} turns"

    def refuse(
        self,
        placement: Placement | None,
        status: int,
        message: str,
        leg: Leg,
        now: float,
        rest: Actions = (),
        *,
        unread: bool = False,
    ) -> Step:
        """An error of ours, in OpenAI's shape. The client is told to send the request again only if no engine read it."""
        code = f"{leg}_timeout" if status == 504 else f"{leg}_failed"
        body = self.facts.api.error(message, type_="server_error", code=code)
        headers = (("content-type", "application/json"), ("x-should-retry", "true" if unread else "false"))
        record = self.report(placement, now, status=status, error=code)
        return Done(), (*rest, *self.unfinished(), record, Respond(status, headers), Send(body))

    def pass_on(
        self, placement: Placement, status: int, headers: Mapping[str, str], body: bytes, now: float, rest: Actions = ()
    ) -> Step:
        """An engine's own error, as it is; unless it quotes a handle."""
        if wire.quotes_handle(body):
            message = "the engine rejected the request"
            body = self.facts.api.error(message, type_="invalid_request_error", code="rejected")
        record = self.report(placement, now, status=status, error=f"status_{status}")
        head = Respond(status, self.headers(placement, headers))
        return Done(), (*rest, *self.unfinished(), record, head, Send(body))

    def headers(self, placement: Placement, upstream: Mapping[str, str]) -> Headers:
        """The head of the answer: what of the engine's concerns the client, and the route."""
        headers = [(name, upstream[name]) for name in _PASSED_HEADERS if name in upstream]
        if self.identity is not None:
            headers += [("x-backhaul-route", str(placement.route)), ("x-backhaul-turn", str(self.draft["turn"]))]
            if placement.reason:
                headers.append(("x-backhaul-reason", str(placement.reason)))
        return headers


_PASSED_HEADERS = ("content-type", "retry-after", "retry-after-ms", "x-request-id", "cache-control")
