"""Accounting: what is known of a turn's prompt and of what it costs. The fleet hears of it for its load and its estimates, the
client and the operator by the report, which is drafted on the way (`Turn.draft`) and made once, at the end. Where token ids
are the proof, they are noted here: which tokens the prompt is, by the engine's own renderer, and where they leave the
history on record.
"""

from __future__ import annotations

from typing import Final

import msgspec
from backhaul_protocol.account import Account
from backhaul_protocol.why import Why

from .. import wire
from ..fleet.engine import Engine, Role
from ..ledger import digests
from ..report import Reason, ReuseReport, Route
from ..wire.exact_history import content_of, splice
from ..wire.handle import VOID, Misunderstood, reason_of
from .effects import Record
from .placement import Placement, Prompt, first_engine, why_moved
from .turn import Turn

_MAX_MODEL: Final = 1024
"""Characters of a model's name in a report. Engines' names are shorter; a client may send one of any length."""

# --- the fleet's load and its estimates ----------------------------------------------------------------------------------


def note_placed(turn: Turn, placement: Placement, now: float) -> None:
    """The placement is final: it is part of the engines' load, and of the report."""
    fleet, draft, first = turn.fleet, turn.draft, first_engine(placement)
    turn.computes, turn.alone, turn.decode_began = placement.computes, not fleet.load.in_flight[first.url], now
    name = (turn.tenant, turn.identity.conversation) if turn.identity else None
    fleet.load.placed(name, placement.decode.url, placement.prefill.url if placement.prefill else None, now)
    draft.estimates = None
    if placement.estimates:
        fleet.costs.took(first.url, placement.route)
        if (usual := placement.instead_of) is not None:
            fleet.costs.passed_over((placement.decode if usual is Route.LOCAL else first).url, usual)
        draft.estimates = {str(route): round(ms, 1) for route, ms in placement.estimates.items()}
    draft.decided_by = placement.basis
    moved = why_moved(placement, turn.taken.branch, fleet, turn.failed_on)
    draft.moved = ",".join(moved.values()) or None
    for url in moved:
        fleet.load.left(url)


def reserve(turn: Turn, placement: Placement, *, sent: bool = True) -> None:
    """Room on D for the prompt, less what is kept there for it, and for the answer."""
    _unreserve(turn)
    decode, held, branch = placement.decode, turn.spare, turn.taken.branch
    prompt = len(turn.token_ids or ()) or turn.draft.prompt or 0
    if not prompt:
        counted = branch is not None and branch.prompt_tokens and branch.message_bytes
        per_token = branch.message_bytes / branch.prompt_tokens if branch is not None and counted else 4.0
        prompt = round(turn.prompt.message_bytes / per_token)
    if held is not None and held.decode == decode.url and placement.route is not Route.COLD:
        prompt = max(0, prompt - held.tokens)
    answer = turn.fleet.retention.answer_of(turn.facts.answer_limit)
    turn.reserved = turn.fleet.reserve(decode, prompt, answer, sent=sent)


def _unreserve(turn: Turn) -> None:
    if turn.reserved is not None:
        turn.fleet.retention.unreserve(turn.reserved)
        turn.reserved = None


def learn_prefill(turn: Turn, engine: Engine, elapsed_ms: float, *, warm: bool) -> None:
    """What P took to compute the prompt, or to read a part of it and compute the rest."""
    draft, read = turn.draft, turn.draft.pulled
    if draft.computed is None or draft.retries:
        return
    if not warm:
        turn.fleet.costs.learn_compute(engine.url, elapsed_ms, draft.computed, alone=turn.alone)
        return
    if read is None:  # a stock engine tells only the sum of what it read and what it had
        read = draft.cached or 0
    turn.fleet.costs.learn_read(engine.url, elapsed_ms, draft.computed, read, alone=turn.alone)


def learn_first_byte(turn: Turn, placement: Placement) -> None:
    """What D took to the first event of a stream, where it was the first to be asked."""
    computed = turn.draft.computed
    if turn.first_byte is None or turn.left_to_decode or turn.draft.retries or not computed:
        return
    ms = (turn.first_byte - turn.decode_began) * 1e3
    turn.fleet.costs.learn_first_byte(placement.decode.url, ms, computed, local=placement.prefill is None)


# --- token counts --------------------------------------------------------------------------------------------------------


def count_prefill(turn: Turn, usage: wire.Usage) -> None:
    """Token counts of the engine that prefilled."""
    if turn.accounted:
        return
    draft = turn.draft
    draft.prompt, draft.cached = usage.prompt_tokens, usage.cached
    draft.computed = None if usage.cached is None else usage.prompt_tokens - usage.cached


def count_account(turn: Turn, engine: Engine, account: Account | None, given: wire.Handle | None = None) -> None:
    """What an engine of ours says it did with its leg; it goes before what was planned. D was `given` P's handle."""
    if account is None:
        return
    fleet, draft, is_prefill = turn.fleet, turn.draft, engine.role is Role.PREFILL
    if account.unknown_why is not None:
        fleet.capabilities.note_misunderstood(engine, f"it says why={account.unknown_why!r}")
    elif account.why is Why.MALFORMED:
        fleet.capabilities.note_misunderstood(engine, "it cannot read what it was sent")
    if is_prefill:
        fleet.accounts.add(engine.url, account)
        draft.offered, draft.verified = account.offered or 0, account.verified
        draft.local, draft.pulled, draft.read_bytes = account.local, account.pulled, account.bytes
        draft.read_ms, draft.claim_ms = account.read_ms, account.claim_ms
    else:
        draft.decode_cached = account.local
        if account.why is Why.PROMPT_DIFFERS:
            fleet.counters.add("prompts_differed")
        elif given is not None and account.received == 0 and (account.computed or 0) >= (engine.block_size or 1):
            fleet.capabilities.note_computed_twice(engine)
    if account.prompt is not None and (is_prefill or not turn.accounted):
        draft.prompt, draft.cached = account.prompt, (account.local or 0) + (account.pulled or 0)
        draft.computed = draft.prompt - draft.cached
        turn.accounted = True


def note_misread(turn: Turn, engine: Engine, error: Exception) -> None:
    """What an engine sent cannot be read."""
    if isinstance(error, Misunderstood):
        turn.fleet.capabilities.note_misunderstood(engine, str(error))


def as_it_ran(turn: Turn, placement: Placement, account: Account | None) -> Placement:
    """The placement by what P did with the handle: cold, with the reason, where it neither read nor had it all."""
    if placement.route is not Route.WARM:
        return placement
    if account is None:
        return placement if _may_have_read(turn) else placement.gone_cold(Reason.READ_FAILED)
    if account.pulled or account.why is Why.LOCAL_HIT or (account.why is None and account.unknown_why is None):
        return placement
    if account.why is Why.BELOW_THRESHOLD and account.verified and account.local:
        return placement  # its own cache had all but a few tokens
    reason = reason_of(account)
    if reason in VOID:
        turn.void = reason
    return placement.gone_cold(reason)


def _may_have_read(turn: Turn) -> bool:
    """By the sum of what a stock P found in its own cache and read. What it does not read is little, or it read nothing."""
    cached, offered = turn.draft.cached, turn.draft.offered
    return cached is None or cached + max(turn.config.kv_recompute_threshold, turn.prompt.block_size) >= offered


def count_answer(turn: Turn, placement: Placement, usage: wire.Usage | None) -> None:
    """D's token counts."""
    if usage is not None:
        turn.draft.generated = usage.completion_tokens
        turn.fleet.retention.note_answer(usage.completion_tokens or 0)
        if placement.prefill is None:
            count_prefill(turn, usage)


# --- the report ----------------------------------------------------------------------------------------------------------


def usage_note(turn: Turn, report: ReuseReport) -> bytes | None:
    """What the answer itself says of the turn as `usage.backhaul`, as JSON: to clients that named a conversation."""
    return None if turn.identity is None or turn.identity.by_history else turn.view.of(report)


def record(
    turn: Turn, placement: Placement | None, now: float, *, status: int = 200, error: str | None = None
) -> Record:
    """The report, complete. The turn needs nothing any more."""
    _unreserve(turn)
    draft, identity = turn.draft, turn.identity
    saved = _saved(turn, placement) if error is None else None
    report = ReuseReport(
        conversation=identity.conversation if identity else None,
        tenant=turn.tenant,
        turn=draft.turn or 1,
        model=turn.facts.model[:_MAX_MODEL] or None,
        route=placement.route if placement else Route.COLD,
        proof=placement.proof if placement else None,
        reason=placement.reason if placement else turn.taken.reason,
        identity_source=identity.source if identity else None,
        decided_by=draft.decided_by,
        estimates=draft.estimates,
        moved=draft.moved,
        parent=identity.parent if identity else None,
        diverged_at=draft.diverged_at,
        on_record=draft.on_record,
        exact_history=draft.exact_history,
        prompt=draft.prompt,
        offered=draft.offered,
        verified=draft.verified,
        cached=draft.cached,
        local=draft.local,
        pulled=draft.pulled,
        read_bytes=draft.read_bytes,
        decode_cached=draft.decode_cached,
        computed=draft.computed,
        generated=draft.generated,
        render_ms=draft.render_ms,
        prefill_ms=draft.prefill_ms,
        claim_ms=draft.claim_ms,
        read_ms=draft.read_ms,
        first_byte_ms=None if turn.first_byte is None else (turn.first_byte - turn.started) * 1e3,
        total_ms=(now - turn.started) * 1e3,
        prefill_engine=placement.prefill.url if placement and placement.prefill else None,
        decode_engine=placement.decode.url if placement else None,
        handle_remaining_s=draft.handle_remaining_s,
        saved_ms=saved[0] if saved else None,
        saved_basis=saved[1] if saved else None,
        retries=draft.retries,
        status=status,
        error=error,
    )
    return Record(report)


def _saved(turn: Turn, placement: Placement | None) -> tuple[float, str] | None:
    """The whole cold prefill that did not happen, less what the turn spent on the way to its first token instead."""
    draft = turn.draft
    if placement is None or placement.route is Route.COLD or not draft.prompt or draft.computed is None:
        return None
    rate = turn.fleet.costs.prefill_rate(placement.prefill.url if placement.prefill else None)
    if rate is None or turn.first_byte is None:
        return None
    spent = draft.prefill_ms
    if spent is None:
        spent = (turn.first_byte - turn.started) * 1e3 - (draft.render_ms or 0.0)
    per_token, turns = rate
    return per_token * draft.prompt - spent, f"cold prefill at {per_token:.3f} ms per token, from {turns} turns"


def rewrites_answer(turn: Turn, token_ids: tuple[int, ...]) -> bool:
    """Whether the request goes on from the last answer, which has become other tokens on the way."""
    branch, common = turn.taken.branch, turn.taken.common
    if not turn.keeps_exact or branch is None or branch.exact is None:
        return False
    if wire.rendering(turn.facts) != branch.exact.rendering:
        return False
    messages = turn.facts.messages
    if common < digests.count(branch.chain) or len(messages) <= common:
        return False
    sent = content_of(messages[common])
    if sent is None or not sent.repeats(branch.exact.said):
        return False
    return token_ids[: len(branch.exact.ran)] != tuple(branch.exact.ran)


def continued(turn: Turn, token_ids: tuple[int, ...], closed: tuple[int, ...], engine: Engine) -> None:
    """The prompt's ids are known, and those of the history up to the last answer."""
    record = turn.taken.branch.exact if turn.taken.branch is not None else None
    exact = splice(record.ran, token_ids, closed) if record is not None else None
    turn.draft.exact_history = exact is not None
    rendered(turn, exact or token_ids, engine)


def rendered(turn: Turn, token_ids: tuple[int, ...], engine: Engine) -> None:
    """The prompt's ids are known."""
    block_size, branch = engine.block_size or 0, turn.taken.branch
    known = branch.blocks if branch is not None and branch.block_size == block_size else b""
    try:
        blocks = digests.block_chain(token_ids, block_size, known)
    except OverflowError:
        turn.no_proof = True
        return
    turn.token_ids, turn.encoded_ids = token_ids, wire.encode_ids(token_ids)
    turn.prompt = Prompt(turn.prompt.message_bytes, len(token_ids), blocks, block_size)
    turn.draft.prompt = len(token_ids)
    _note_divergence(turn, blocks)


def _note_divergence(turn: Turn, blocks: bytes) -> None:
    """Messages that all match, but tokens that do not: it is the engine's own answer that comes back changed."""
    branch, common = turn.taken.branch, turn.taken.common
    if branch is None or common < digests.count(branch.chain) or len(turn.facts.parts) <= common:
        return
    if digests.common(blocks, branch.blocks) < min(digests.count(blocks), digests.count(branch.blocks)):
        diverged_at(turn, common)


def diverged_at(turn: Turn, part: int | None) -> None:
    """Notes the message that differs. A completion's prompt is compared in pieces, and is one message."""
    turn.draft.diverged_at = part if part is None or turn.facts.api.numbered else 0


def ids_that_ran(turn: Turn, ids: msgspec.Raw) -> tuple[int, ...] | None:
    """The ids that D says it was given. The same JSON is the same ids, without reading them. Raises `msgspec.DecodeError`."""
    return turn.token_ids if bytes(ids) == bytes(turn.encoded_ids) else wire.read_ids(ids)
