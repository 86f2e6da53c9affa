"""Where a turn runs: a pure function of the turn, of what the ledger has for it, and of the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from ..config import RouterConfig
from ..fleet.engine import Engine, Role
from ..fleet.fleet import Fleet
from ..fleet.load import MARGIN, MARGIN_MS
from ..ledger import digests
from ..ledger.records import Branch, Taken
from ..report import Basis, Proof, Reason, Route

LOCAL_REACH = 16
"""By so much may measured rates exceed `local_max_tokens`."""


class Prompt(msgspec.Struct, frozen=True):
    """What is known of a turn's prompt when it is placed."""

    message_bytes: int
    """Of the messages, about what becomes text."""
    tokens: int | None = None
    """Exact, where the ids are known."""
    blocks: bytes = b""
    """Digests of its whole blocks, where the ids are known."""
    block_size: int = 0

    @property
    def proven(self) -> bool:
        return self.tokens is not None and self.block_size > 0


class Placement(msgspec.Struct, frozen=True):
    """A route with its engines, and why."""

    route: Route
    decode: Engine
    prefill: Engine | None = None
    """`None` when the turn is `local`."""
    reason: Reason | None = None
    proof: Proof | None = None
    blocks: int = 0
    """Leading blocks of the handle to read, when the turn is `warm`."""
    computes: int = 0
    """Estimate of the tokens that the first engine will compute."""
    basis: Basis | None = None
    estimates: Mapping[Route, float] | None = None
    """Milliseconds to the first byte."""
    instead_of: Route | None = None
    """What the thresholds say, where the estimates say otherwise."""

    def gone_cold(self, reason: Reason) -> Placement:
        """The same engines, where nothing is read, or was."""
        return msgspec.structs.replace(self, route=Route.COLD, proof=None, blocks=0, reason=reason)


class NoEngine(msgspec.Struct, frozen=True):
    """Every engine of a role is excluded."""

    role: Role


def reusable_blocks(prompt: Prompt, branch: Branch, held_tokens: int) -> int:
    """Whole blocks that the prompt shares with what D ran, that D holds, and that leave P at least one token to compute."""
    if not prompt.proven or prompt.block_size != branch.block_size or prompt.tokens is None:
        return 0
    limit = min(held_tokens, prompt.tokens - 1) // prompt.block_size
    return min(digests.common(prompt.blocks, branch.blocks), limit)


class _Offer(msgspec.Struct, frozen=True):
    """What P may read, or the reason why nothing."""

    reason: Reason | None = None
    proof: Proof | None = None
    blocks: int = 0


def place(
    prompt: Prompt,
    taken: Taken,
    fleet: Fleet,
    config: RouterConfig,
    *,
    no_proof: bool = False,
    force: Route | None = None,
    without: frozenset[str] = frozenset(),
    picks: Picks | None = None,
) -> Placement | NoEngine:
    """The route of a turn: by thresholds, unless what was measured says that another one is clearly faster.

    `warm` where the ledger has a usable handle that P can check by its digests, or whose leading blocks are proven to be the
    prompt's, of at least `kv_recompute_threshold` tokens. `local` where D has the history and the suffix that it lacks is at
    most `local_max_tokens`. Else `cold`, with the reason. `without` names engines that this turn has already failed on. `picks`
    is what `pick_engines` says of the same.
    """
    branch, held = taken.branch, taken.held
    decode, prefill = picks or pick_engines(taken, fleet, without)
    if decode is None:
        return NoEngine(Role.DECODE)
    offer = _offer(prompt, taken, prefill, fleet, config, no_proof)
    has_history = branch is not None and branch.decode == decode.url
    lacking = _uncached(prompt, branch) if branch is not None and has_history else 0
    if force is Route.LOCAL and has_history:
        return Placement(Route.LOCAL, decode, None, offer.reason, Proof.ENGINE, computes=lacking, basis=Basis.FORCED)
    may_be_local = force is None and has_history and _history_is_safe(taken, offer)
    short = may_be_local and lacking <= config.local_max_tokens
    if prefill is None:
        if not short:
            return NoEngine(Role.PREFILL)
        return Placement(Route.LOCAL, decode, proof=Proof.ENGINE, computes=lacking, basis=Basis.THRESHOLDS)
    if offer.reason is None and held is not None and prefill.url in fleet.pairs.unsafe_for(held.decode):
        offer = _Offer(Reason.UNSAFE_PAIR)
    total = _length(prompt, branch)
    computes = {Route.COLD: total}
    if offer.reason is None:
        read = offer.blocks * prompt.block_size if offer.proof is Proof.TOKENS or held is None else held.tokens
        computes[Route.WARM] = max(1, total - read)
    if may_be_local and (short or lacking <= _local_limit(decode, fleet, config)):
        computes[Route.LOCAL] = lacking
    by_rule = Route.WARM if offer.reason is None and force is not Route.COLD else Route.COLD
    if force is not None:
        choice = _Choice(by_rule, Basis.FORCED)
    else:
        choice = _choose(Route.LOCAL if short else by_rule, computes, decode, prefill, fleet, config.place_by_cost)
    basis, estimates, instead_of = choice.basis, choice.estimates, choice.instead_of
    match choice.route:
        case Route.LOCAL:
            return Placement(Route.LOCAL, decode, None, None, Proof.ENGINE, 0, lacking, basis, estimates, instead_of)
        case Route.WARM:
            new = computes[Route.WARM]
            return Placement(
                Route.WARM, decode, prefill, None, offer.proof, offer.blocks, new, basis, estimates, instead_of
            )
    reason = offer.reason or (Reason.SLOWER if choice.basis is Basis.ESTIMATES else Reason.REUSE_OFF)
    # most of it is in its own cache, where P had the last turn and has a cache
    new = total if branch is None or branch.prefill != prefill.url else max(1, total - branch.tokens)
    return Placement(Route.COLD, decode, prefill, reason, None, 0, new, basis, estimates, instead_of)


def _local_limit(decode: Engine, fleet: Fleet, config: RouterConfig) -> int:
    """Tokens up to which a turn may run on D alone, if that is measured to be faster. A stock D leaves no handle behind such a
    turn, so what it computes is lost to the turns that follow: there the configured threshold stays."""
    if decode.connector is None or not config.place_by_cost:
        return config.local_max_tokens
    measured = min(LOCAL_REACH * config.local_max_tokens, fleet.costs.local_reach(decode.url))
    return max(config.local_max_tokens, measured)


class _Choice(NamedTuple):
    route: Route
    basis: Basis | None
    estimates: Mapping[Route, float] | None = None
    instead_of: Route | None = None


def _choose(
    by_rule: Route, computes: Mapping[Route, int], decode: Engine, prefill: Engine, fleet: Fleet, by_cost: bool
) -> _Choice:
    """The rule's route, or one that is estimated to be clearly faster. `computes` has the routes that are possible, with the
    tokens that are computed there."""
    if len(computes) == 1:
        return _Choice(by_rule, None)
    estimates = _estimates(computes, decode, prefill, fleet)
    usual = estimates.get(by_rule)
    if usual is None or len(estimates) == 1 or not by_cost:
        return _Choice(by_rule, Basis.THRESHOLDS, estimates)
    best = min(estimates, key=estimates.__getitem__)
    if not usual > estimates[best] * (1 + MARGIN) + MARGIN_MS:
        return _Choice(by_rule, Basis.THRESHOLDS, estimates)
    first = decode if by_rule is Route.LOCAL else prefill
    if fleet.costs.overdue(first.url, by_rule):
        return _Choice(by_rule, Basis.MEASURING, estimates)
    return _Choice(best, Basis.ESTIMATES, estimates, by_rule)


def _estimates(computes: Mapping[Route, int], decode: Engine, prefill: Engine, fleet: Fleet) -> dict[Route, float]:
    """Milliseconds to the first byte, of the routes of which every step has been measured."""
    costs, found = fleet.costs, dict[Route, float]()
    lacking = computes.get(Route.LOCAL)
    if lacking is not None and (ms := costs.local(decode.url, lacking)) is not None:
        found[Route.LOCAL] = ms
    total, new = computes[Route.COLD], computes.get(Route.WARM)
    if (computing := costs.compute(prefill.url, total)) is None:
        return found
    queue_ms = fleet.queue_ms(prefill)
    found[Route.COLD] = queue_ms + computing + costs.handoff(decode.url, total)
    if new is not None:
        computing, reading = costs.compute(prefill.url, new), costs.read(prefill.url, total - new)
        if computing is not None and reading is not None:
            found[Route.WARM] = queue_ms + reading + computing + costs.handoff(decode.url, new)
    return found


def first_engine(placement: Placement) -> Engine:
    """The one that computes the prompt's new tokens."""
    return placement.prefill or placement.decode


def why_moved(placement: Placement, branch: Branch | None, fleet: Fleet, failed_on: frozenset[str]) -> dict[str, str]:
    """The engines of the turn before that this one leaves, by URL, with the reason (`ReuseReport.moved`)."""
    if branch is None:
        return {}
    moved = {}
    for before, now in ((branch.prefill, placement.prefill), (branch.decode, placement.decode)):
        if before is None or now is None or before == now.url:
            continue
        if before in failed_on:
            why = "failed"
        elif (engine := fleet.get(before)) is None:
            why = "gone"
        elif not fleet.available(engine):
            why = "unavailable"
        else:
            why = "full" if fleet.load.is_full(before) else "busy"
        moved[before] = f"{now.role}:{why}"
    return moved


class Picks(NamedTuple):
    """The engines that a turn would run on; `None` where every one of a role is excluded."""

    decode: Engine | None
    prefill: Engine | None


def pick_engines(taken: Taken, fleet: Fleet, without: frozenset[str] = frozenset()) -> Picks:
    """The D that ran the last turn and the P that computed it, unless something speaks against them."""
    decode = fleet.pick(Role.DECODE, taken.branch.decode if taken.branch else None, without)
    return Picks(decode, _prefill(taken, fleet, without) if decode is not None else None)


def needs_ids(taken: Taken, fleet: Fleet, picks: Picks) -> bool:
    """Whether this turn, or the one that reads what it leaves, has to be proven by token ids: unless P and D check handles
    by themselves, and the one at hand can be checked."""
    if taken.held is not None and not taken.held.handle.digests:
        return True
    decode, prefill = picks
    verifies = fleet.capabilities.verifies
    return prefill is None or decode is None or not (verifies(prefill) and verifies(decode))


def _prefill(taken: Taken, fleet: Fleet, without: frozenset[str]) -> Engine | None:
    """The P that computed the last turn, unless it cannot read what D holds; else, of those that can, one that checks the
    handle by itself."""
    branch, held = taken.branch, taken.held
    if branch is None:
        return fleet.pick(Role.PREFILL, None, without)
    able = without if held is None else without | fleet.pairs.unsafe_for(held.decode)
    if (home := fleet.at_home(Role.PREFILL, branch.prefill, able)) is not None:
        return home
    moving_ms = fleet.costs.moving_ms(branch.prefill or "", branch.tokens, readable=held is not None)
    if held is None:
        return fleet.pick(Role.PREFILL, branch.prefill, without, moving_ms=moving_ms)
    found = fleet.pick(Role.PREFILL, branch.prefill, able, verifying=held.handle.digests, moving_ms=moving_ms)
    if found is not None and fleet.available(found):
        return found
    return fleet.pick(Role.PREFILL, branch.prefill, without, moving_ms=moving_ms)


def _offer(
    prompt: Prompt, taken: Taken, prefill: Engine | None, fleet: Fleet, config: RouterConfig, no_proof: bool
) -> _Offer:
    if taken.branch is None or taken.held is None:
        return _Offer(taken.reason or Reason.NO_HANDLE)
    if taken.held.handle.digests and (prefill is None or fleet.capabilities.verifies(prefill)):
        if taken.held.tokens < max(config.kv_recompute_threshold, 1):
            return _Offer(Reason.BELOW_THRESHOLD)
        return _Offer(proof=Proof.CONNECTOR)
    if no_proof or not prompt.proven or not taken.branch.blocks:
        return _Offer(Reason.NO_PROOF)
    if taken.held.shared:
        # It may be of a turn before the branch's last, and without a claim nothing keeps its blocks while they are read.
        return _Offer(Reason.NO_PROOF)
    if taken.held.handle.groups > 1 or taken.held.handle.whole:
        # Sliding-window and state-space groups hold only the end of the sequence: a cut handle would read nothing of use.
        return _Offer(Reason.NO_PROOF)
    blocks = reusable_blocks(prompt, taken.branch, taken.held.tokens)
    if blocks == 0:
        return _Offer(Reason.DIVERGED)
    if blocks * prompt.block_size < config.kv_recompute_threshold:
        kept = min(taken.held.tokens, taken.branch.tokens) // prompt.block_size
        whole = blocks == kept or taken.diverged_at is None
        return _Offer(Reason.BELOW_THRESHOLD if whole else Reason.DIVERGED)
    return _Offer(proof=Proof.TOKENS, blocks=blocks)


def _length(prompt: Prompt, branch: Branch | None) -> int:
    """Tokens of the prompt: exact where they are known, else estimated from its bytes, and those per token of the history."""
    if prompt.tokens is not None:
        return prompt.tokens
    if branch is None or not branch.prompt_tokens:
        return max(1, round(prompt.message_bytes / 4.0))
    per_token = branch.message_bytes / branch.prompt_tokens
    grown = (prompt.message_bytes - branch.message_bytes) / max(per_token, 0.1)
    return max(1, branch.prompt_tokens + round(grown))


def _uncached(prompt: Prompt, branch: Branch) -> int:
    """Tokens that D lacks, at least the last: exact where both sequences are known, else estimated from the bytes that the
    history has grown by."""
    if prompt.tokens is not None and branch.blocks and prompt.block_size == branch.block_size:
        return max(1, prompt.tokens - digests.common(prompt.blocks, branch.blocks) * branch.block_size)
    per_token = branch.message_bytes / branch.prompt_tokens if branch.prompt_tokens else 4.0
    grown = (prompt.message_bytes - branch.message_bytes) / max(per_token, 0.1)
    cached = branch.held.tokens if branch.held is not None else branch.tokens
    return max(1, branch.prompt_tokens + round(grown) - cached)


def _history_is_safe(taken: Taken, offer: _Offer) -> bool:
    """Whether D surely still has the history: pinned by a handle that covers it, so that `local` cannot turn into a whole
    prefill on the decode engine."""
    if offer.proof is Proof.CONNECTOR:
        return taken.diverged_at is None
    return offer.proof is Proof.TOKENS
