"""Settlement: how turns end, and what becomes of the handle that a turn took and of the one that it leaves. Every way out of a
turn settles: the handle taken is given back, used up or released, and what the engines hold for us is filed or released.

A stock engine's handle is sent to P once; from then on it is in nobody's hands (`spend`), whatever came of it. A shared one
stays in the ledger. A request that failed goes out again where it was refused before it was read, where reading the handle may
be what failed, where an engine answered with an error, or where a prefill took too long; after a broken connection once, since
the request may be what broke the engine (`another`, `outlives`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from backhaul_protocol.messages import Ask

from .. import wire
from ..errors import FailureKind, Leg
from ..fleet.breakers import MAX_DEATHS
from ..fleet.engine import Engine, Holder, Role
from ..identity.hints import longest_pause_s, why_not_kept
from ..ledger import digests
from ..ledger.records import Branch, Held
from ..report import Reason, Route
from ..wire.exact_history import TokenHistory
from .accounting import record
from .effects import (
    Actions,
    Done,
    DropEngine,
    EndLease,
    GiveBack,
    Headers,
    Lost,
    NoteResponse,
    Release,
    Respond,
    Send,
    Settle,
    Step,
)
from .placement import Placement
from .turn import Turn

_VLLM_TTL_S: Final = 480.0
"""vLLM's own `decoder_kv_blocks_ttl`."""
_RIDING: Final = 256
"""So many leases at most are released along with one turn."""

# --- the handle taken ----------------------------------------------------------------------------------------------------


def give_back(turn: Turn) -> Actions:
    """The handle taken goes back, where no engine was sent it; one that is void is noted so."""
    if turn.spare is None:
        return ()
    void = Reason.ENGINE_CHANGED if is_outlived(turn) else turn.void
    given = GiveBack(turn.key, turn.taken) if void is None else Lost(turn.key, turn.taken, void)
    _lets_go(turn)
    return (given,)


def spend(turn: Turn) -> Held | None:
    """An engine was sent the handle. Returns it, for whoever knows that it was not read; a shared one is not used up."""
    spare = turn.spare
    if spare is None or spare.shared:
        return None
    turn.spare = None
    turn.fleet.retention.read(spare)
    return spare


def unfinished(turn: Turn) -> Actions:
    """The turn ends without an answer: the handle taken goes back, or is noted as used up or void."""
    if turn.taken.held is None or turn.spare is not None:
        return give_back(turn)
    lost = Lost(turn.key, turn.taken, turn.void or turn.failure or Reason.NO_HANDLE)
    _lets_go(turn)
    return (lost,)


def doubted(turn: Turn) -> Actions:
    """Nobody knows whose the handle taken is: this turn does not read it, nor does another. It is released, since D may be
    what it was."""
    spare = turn.spare
    turn.void = turn.failure = Reason.ENGINE_CHANGED
    released = () if spare is None or spare.shared else release_held(turn, spare)  # the ledger releases a shared one
    return (*released, *unfinished(turn))


def is_outlived(turn: Turn) -> bool:
    """Whether the process that made the handle taken has been replaced since."""
    return turn.spare is not None and turn.restarts != turn.fleet.restarts.count(turn.spare.decode)


def _lets_go(turn: Turn) -> None:
    turn.taken, turn.spare = msgspec.structs.replace(turn.taken, held=None), None


# --- blocks that nobody needs --------------------------------------------------------------------------------------------


def release(turn: Turn, handle: wire.Handle | None, decode: Engine) -> Actions:
    """Has the blocks of D's handle freed."""
    return _release(turn, handle, decode.url) if handle is not None else ()


def release_held(turn: Turn, *held: Held | None) -> Actions:
    """The same of handles that were taken, or that the ledger has dropped."""
    return tuple(action for one in held if one is not None for action in _release(turn, one.handle, one.decode))


def _release(turn: Turn, handle: wire.Handle, decode: str) -> Actions:
    if handle.lease is not None:
        return (EndLease(Holder.of(decode, handle.engine_id), handle.request_id),)
    via = turn.fleet.pick(Role.PREFILL)
    return (Release(handle.params, via),) if via is not None else ()


# --- what the turn leaves ------------------------------------------------------------------------------------------------


def lease_order(turn: Turn, decode: Engine) -> Ask:
    """What a D that runs our connector is asked to keep of the turn, and the leases due there that ride along."""
    return Ask(
        retain=turn.reuses and _leaves_something(turn) and turn.shows_handle(decode),
        shared=turn.by_connector,
        retain_s=_retain_s(turn),
        release=turn.fleet.releases.take(Holder(decode.url), _RIDING),
    )


def settle(
    turn: Turn,
    placement: Placement,
    handle: wire.Handle | None,
    generated: tuple[int, ...] | None,
    ran: tuple[int, ...] | None,
    now: float,
) -> Actions:
    """Files what D left, or has it freed. `generated` and `ran` are the ids that D says it made and was given."""
    decode, fleet = placement.decode, turn.fleet
    actions: Actions = ()
    outlived = handle is not None and fleet.restarts.is_outlived(decode.url, handle.engine_id, turn.asked)
    if handle is not None and not outlived:
        before = fleet.restarts.saw_engine_id(decode.url, handle.engine_id, turn.asked)
        if before is not None:
            actions = (DropEngine(decode.url, before),)
    if is_outlived(turn):
        turn.void = Reason.ENGINE_CHANGED
    _check_ids(turn, ran)
    if not turn.reuses or turn.left_to_decode:
        return (*actions, *release(turn, handle, decode), *give_back(turn))
    held = _held(turn, handle, decode, generated, now)
    missing = None
    keeps = _leaves_something(turn)
    if held is None:
        missing = Reason.NO_PROOF if handle else turn.void or turn.failure or Reason.NO_HANDLE
    elif outlived or _is_never_sure(turn, held):
        held, missing = None, Reason.ENGINE_CHANGED
    elif _is_unwanted(turn, held, now):
        held, missing, keeps = None, Reason.EXPIRED, False
    if held is None:
        actions += release(turn, handle, decode)
    if held is None and keeps and turn.void is None and (kept := _kept(turn, placement)):
        held, missing = kept, None
    elif turn.void is not None:
        actions += unfinished(turn)
    elif turn.spare is not None and not turn.spare.shared:  # the ledger knows when a shared one has no more takers
        superseded = turn.taken.supersedes
        actions += release_held(turn, turn.spare) if superseded else (GiveBack(turn.key, turn.taken),)
    turn.spare = None
    turn.draft.handle_remaining_s = held.deadline - now if held else None
    earlier = turn.taken.branch.prefill if turn.taken.branch else None
    branch = Branch(
        chain=turn.chain,
        blocks=_blocks(turn, generated or ()),
        block_size=turn.prompt.block_size,
        tokens=_tokens_that_ran(turn, generated or ()),
        message_bytes=turn.prompt.message_bytes,
        decode=decode.url,
        prefill=placement.prefill.url if placement.prefill else earlier,
        held=held,
        missing=missing,
        prompt_tokens=turn.draft.prompt or 0,
        by_history=turn.identity is not None and turn.identity.by_history,
        exact=_exact(turn, generated),
    )
    return (*actions, Settle(turn.key, turn.taken, branch))


def named(turn: Turn, answer: str | None) -> Actions:
    """Notes the id of the answer, where later requests may name it."""
    if answer is None or not turn.facts.api.refers_to_answers:
        return ()
    if turn.identity is None:  # a tenant may go on from its own answers only, whatever they belong to
        return (NoteResponse(answer, "", turn.tenant),) if turn.tenant else ()
    return (NoteResponse(answer, turn.identity.conversation, turn.tenant),)


def _check_ids(turn: Turn, ran: tuple[int, ...] | None) -> None:
    """Ids that D did not run prove nothing of what it left."""
    if ran is not None and turn.token_ids is not None and ran is not turn.token_ids and ran != turn.token_ids:
        turn.fleet.capabilities.note_ids_ignored()
        turn.token_ids = None
    if ran is None and turn.facts.api.shows_ids:  # it was asked, and may have rendered the messages by itself
        turn.token_ids = None


def _held(
    turn: Turn, handle: wire.Handle | None, decode: Engine, generated: tuple[int, ...] | None, now: float
) -> Held | None:
    """The handle with what it is good for; `None` when no later turn could prove anything of it."""
    if handle is None:
        return None
    ttl_s, margin_s = turn.config.decoder_kv_blocks_ttl, turn.config.lease_margin_s
    if handle.lease is not None:
        ttl_s = handle.lease.ttl_s
        margin_s = min(margin_s, ttl_s / 4)
    deadline = now + min(ttl_s - margin_s, _longest_kept_s(turn))
    if handle.digests:
        return Held(handle, decode.url, deadline, handle.tokens)
    if decode.connector is not None:
        turn.fleet.capabilities.note_no_digests(decode)
    if turn.token_ids is None or handle.groups > 1 or handle.whole:
        return None
    # The KV of the last token is computed only when another follows, and under asynchronous scheduling an engine counts
    # a position that is still in flight (`remote_num_tokens`, PS:276): never more than what surely ran.
    tokens = min(handle.tokens, _tokens_that_ran(turn, generated or ()))
    if handle.blocks * turn.prompt.block_size < tokens:
        return None  # a sliding window: its list does not begin at the first token, and cannot be cut
    return Held(handle, decode.url, deadline, tokens)


def _kept(turn: Turn, placement: Placement) -> Held | None:
    """The handle taken, where the turn left none and the one before holds a prefix of the new record.

    A stock engine leaves no handle for a turn that it ran alone. One of ours does, but not for a turn that a `stop` string
    ended; reading did not use a shared handle up."""
    branch, spare = turn.taken.branch, turn.spare
    if branch is None or spare is None:
        return None
    if spare.shared:
        usable = turn.taken.supersedes and turn.void is None and turn.failure is None
        return spare if usable and spare.decode == placement.decode.url else None
    if placement.route is not Route.LOCAL or turn.token_ids is None or branch.block_size != turn.prompt.block_size:
        return None
    shared = digests.common(turn.prompt.blocks, branch.blocks) * branch.block_size
    return msgspec.structs.replace(spare, tokens=min(spare.tokens, shared)) if shared else None


def _is_never_sure(turn: Turn, held: Held) -> bool:
    if held.leased:
        return False
    restarts, engine_id = turn.fleet.restarts, held.handle.engine_id
    restarts.warn_of_fixed(held.decode, engine_id)
    return restarts.is_never_sure(held.decode, engine_id)


def _is_unwanted(turn: Turn, held: Held, now: float) -> bool:
    """Whether nothing will come that could read the handle in its time."""
    pause_s, left_s = turn.hints.pause_s, held.deadline - now
    if pause_s is not None and why_not_kept(pause_s, turn.config, renewable=held.leased, remaining_s=left_s):
        return True
    return turn.hints.last_turn


def _leaves_something(turn: Turn) -> bool:
    pause_s = turn.hints.pause_s
    return not turn.hints.last_turn and (pause_s is None or pause_s <= longest_pause_s(turn.config))


def _retain_s(turn: Turn) -> float | None:
    """For how long a D that runs our connector keeps what the turn leaves; `None` leaves it to the engine."""
    ttl_s, margin_s = turn.config.decoder_kv_blocks_ttl, turn.config.lease_margin_s
    if turn.hints.pause_s is not None and turn.hints.pause_s + margin_s > ttl_s:
        return turn.hints.pause_s + margin_s
    ttl_s = min(ttl_s, _longest_kept_s(turn))
    return ttl_s if ttl_s < _VLLM_TTL_S else None


def _longest_kept_s(turn: Turn) -> float:
    """Nobody has said that there will be a next turn where a request names no conversation and continues none."""
    return turn.config.one_shot_s if turn.identity is not None and turn.identity.new else math.inf


def _tokens_that_ran(turn: Turn, generated: tuple[int, ...]) -> int:
    """Tokens that D ran and has KV of: by their ids or, where those are not known, by its own count."""
    if turn.token_ids is not None:
        return len(turn.token_ids) + max(0, len(generated) - 1)
    if not turn.by_connector:
        return max(0, len(generated) - 1)
    return (turn.draft.prompt or 0) + max(0, (turn.draft.generated or 0) - 1)


def _blocks(turn: Turn, generated: tuple[int, ...]) -> bytes:
    """Of what D ran: the prompt, and the answer but for its last token."""
    if turn.token_ids is None:
        return b""
    return digests.extended(turn.prompt.blocks, turn.token_ids, generated[:-1], turn.prompt.block_size)


def _exact(turn: Turn, generated: tuple[int, ...] | None) -> TokenHistory | None:
    if turn.said is None or turn.token_ids is None or not generated:
        return None
    return TokenHistory.of(turn.token_ids, generated, turn.said, wire.rendering(turn.facts))


_PASSED_HEADERS: Final = ("content-type", "retry-after", "retry-after-ms", "x-request-id", "cache-control")


def given_up(turn: Turn, placement: Placement | None, now: float) -> Actions:
    """The client has left without an answer: what is on record is put right, and the report."""
    return (*unfinished(turn), record(turn, placement, now, error="client_gone"))


def refuse(
    turn: Turn,
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
    body = turn.facts.api.error(message, type_="server_error", code=code)
    headers = (("content-type", "application/json"), ("x-should-retry", "true" if unread else "false"))
    report = record(turn, placement, now, status=status, error=code)
    return Done(), (*rest, *unfinished(turn), report, Respond(status, headers), Send(body))


def pass_on(
    turn: Turn,
    placement: Placement,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    now: float,
    rest: Actions = (),
) -> Step:
    """An engine's own error, as it is; unless it quotes a handle."""
    if wire.quotes_handle(body):
        message = "the engine rejected the request"
        body = turn.facts.api.error(message, type_="invalid_request_error", code="rejected")
    report = record(turn, placement, now, status=status, error=f"status_{status}")
    return Done(), (*rest, *unfinished(turn), report, Respond(status, head(turn, placement, headers)), Send(body))


def head(turn: Turn, placement: Placement, upstream: Mapping[str, str]) -> Headers:
    """The head of the answer: what of the engine's concerns the client, and the route."""
    headers = [(name, upstream[name]) for name in _PASSED_HEADERS if name in upstream]
    if turn.identity is not None:
        headers += [("x-backhaul-route", str(placement.route)), ("x-backhaul-turn", str(turn.draft.turn))]
        if placement.reason:
            headers.append(("x-backhaul-reason", str(placement.reason)))
    return headers


def another(turn: Turn, failed: Engine, kind: FailureKind) -> Engine | None:
    """The engine to try after one that failed: where nobody read it, or, once, after an error, a broken connection or a
    prefill that took too long."""
    again = kind is FailureKind.ERROR or (kind is FailureKind.TIMEOUT and failed.role is Role.PREFILL)
    if (again or (kind is FailureKind.BROKEN and outlives(turn))) and failed.role not in turn.erred:
        turn.erred |= {failed.role}
    elif kind is not FailureKind.REFUSED:
        return None
    return turn.fleet.pick(failed.role, None, turn.failed_on | {failed.url})


def outlives(turn: Turn) -> bool:
    """Whether the request may go out again after a connection broke: one engine may have died of it, and no second one."""
    turn.deaths += 1
    return turn.deaths < MAX_DEATHS


def is_misplaced(turn: Turn, engine: Engine, body: bytes, now: float) -> bool:
    """Whether an engine's 404 is about a model that it served when it was asked what it is."""
    misplaced = turn.facts.model in engine.models and wire.disowns_model(body)
    if misplaced:
        turn.fleet.note_other_model(engine, turn.facts.model, now)
    return misplaced
