"""Where a turn runs: a pure function of the turn, of what the ledger has for it, and of the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from . import digests
from .config import RouterConfig
from .fleet import Engine, Fleet, Role
from .ledger import Branch, Taken
from .load import MARGIN, MARGIN_MS
from .report import Basis, Proof, Reason, Route

LOCAL_REACH = 16
"""By so much may measured rates exceed `local_max_tokens`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a turn's prompt when it is placed."""

    message_bytes: int
    """Of the messages, about what becomes text."""
    tokens: int | None = None
    """Exact, where the ids are known."""
    blocks: bytes = b""
    """Digests of its whole blocks, where the ids are known."""
    block_size: int = 0
    spans: bytes = b""
    """Digests of its whole spans, likewise."""

    @property
    def proven(self) -> bool:
        return self.tokens is not None and self.block_size > 0


@dataclass(frozen=True, slots=True)
class Placement:
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
    estimates: Mapping[Route, float] = field(default_factory=dict)
    """Milliseconds to the first byte."""
    instead_of: Route | None = None
    """What the thresholds say, where the estimates say otherwise."""


@dataclass(frozen=True, slots=True)
class NoEngine:
    """Every engine of a role is excluded."""

    role: Role


def reusable_blocks(prompt: Prompt, branch: Branch, held_tokens: int) -> int:
    """Whole blocks that the prompt shares with what D ran, that D holds, and that leave P at least one token to compute."""
    if not prompt.proven or prompt.block_size != branch.block_size or prompt.tokens is None:
        return 0
    limit = min(held_tokens, prompt.tokens - 1) // prompt.block_size
    return min(digests.common(prompt.blocks, branch.blocks), limit)


@dataclass(frozen=True, slots=True)
class _Offer:
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
) -> Placement | NoEngine:
    """The route of a turn: by thresholds, unless what was measured says that another one is clearly faster.

    `warm` where the ledger has a usable handle that P can check by its digests, or whose leading blocks are proven to be the
    prompt's, of at least `kv_recompute_threshold` tokens. `local` where D has the history and the suffix that it lacks is at
    most `local_max_tokens`. Else `cold`, with the reason. `without` names engines that this turn has already failed on.
    """
    branch, held = taken.branch, taken.held
    decode = fleet.pick(Role.DECODE, branch.decode if branch else None, without)
    if decode is None:
        return NoEngine(Role.DECODE)
    prefill = _prefill(taken, fleet, without)
    offer = _offer(prompt, taken, prefill, fleet, config, no_proof)
    has_history = branch is not None and branch.decode == decode.url
    local = Placement(Route.LOCAL, decode, reason=offer.reason, proof=Proof.ENGINE)
    if branch is not None and has_history:
        local = replace(local, computes=_uncached(prompt, branch))
    if force is Route.LOCAL and has_history:
        return replace(local, basis=Basis.FORCED)
    is_safe = has_history and _history_is_safe(taken, offer)
    local = replace(local, reason=None)
    if prefill is None:
        fits = force is None and is_safe and local.computes <= config.local_max_tokens
        return replace(local, basis=Basis.THRESHOLDS) if fits else NoEngine(Role.PREFILL)
    if offer.reason is None and held is not None and prefill.url in fleet.unsafe_for(held.decode):
        offer = _Offer(Reason.UNSAFE_PAIR)
    total = _length(prompt, branch)
    cold = Placement(Route.COLD, decode, prefill, reason=offer.reason or Reason.REUSE_OFF, computes=total)
    if branch is not None and branch.prefill == prefill.url:
        cold = replace(cold, computes=max(1, total - branch.tokens))  # most of it is in its own cache, if it has one
    legal = [cold]
    if offer.reason is None:
        read = offer.blocks * prompt.block_size if offer.proof is Proof.TOKENS or held is None else held.tokens
        computes = max(1, total - read)
        legal.append(Placement(Route.WARM, decode, prefill, proof=offer.proof, blocks=offer.blocks, computes=computes))
    if force is not None:
        wanted = legal[0] if force is Route.COLD else legal[-1]
        return replace(wanted, basis=Basis.FORCED)
    if is_safe and local.computes <= _local_limit(decode, fleet, config):
        legal.append(local)
    by_rule = legal[-1]
    if by_rule is local and local.computes > config.local_max_tokens:
        by_rule = legal[-2]
    return _cheapest(by_rule, legal, total, fleet, may_overrule=config.place_by_cost)


def _local_limit(decode: Engine, fleet: Fleet, config: RouterConfig) -> int:
    """Tokens up to which a turn may run on D alone, if that is measured to be faster. A stock D leaves no handle behind such a
    turn, so what it computes is lost to the turns that follow: there the configured threshold stays."""
    if decode.connector is None or not config.place_by_cost:
        return config.local_max_tokens
    measured = min(LOCAL_REACH * config.local_max_tokens, fleet.costs.local_reach(decode.url))
    return max(config.local_max_tokens, measured)


def _cheapest(by_rule: Placement, legal: list[Placement], total: int, fleet: Fleet, *, may_overrule: bool) -> Placement:
    """The rule's placement, or one that is estimated to be clearly faster."""
    if len(legal) == 1:
        return by_rule
    estimates = {one.route: ms for one in legal if (ms := _estimate(one, total, fleet)) is not None}
    found = replace(by_rule, basis=Basis.THRESHOLDS, estimates=estimates)
    usual = estimates.get(by_rule.route)
    if usual is None or len(estimates) == 1 or not may_overrule:
        return found
    best = min(legal, key=lambda one: estimates.get(one.route, usual))
    if not usual > estimates.get(best.route, usual) * (1 + MARGIN) + MARGIN_MS:
        return found
    if fleet.costs.overdue(first_engine(by_rule).url, by_rule.route):
        return replace(found, basis=Basis.MEASURING)
    reason = Reason.SLOWER if best.route is Route.COLD else None
    return replace(best, reason=reason, basis=Basis.ESTIMATES, estimates=estimates, instead_of=by_rule.route)


def first_engine(placement: Placement) -> Engine:
    """The one that computes the prompt's new tokens."""
    return placement.prefill or placement.decode


def _estimate(placement: Placement, total: int, fleet: Fleet) -> float | None:
    """Milliseconds from here to the first byte; `None` where a step has not been measured."""
    costs, new = fleet.costs, placement.computes
    if placement.prefill is None:
        return costs.local(placement.decode.url, new)
    computed = new if placement.route is Route.WARM else total
    computing = costs.compute(placement.prefill.url, computed)
    reading = costs.read(placement.prefill.url, total - new) if placement.route is Route.WARM else 0.0
    if computing is None or reading is None:
        return None
    return fleet.queue_ms(placement.prefill) + reading + computing + costs.handoff(placement.decode.url, computed)


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


def needs_ids(taken: Taken, fleet: Fleet) -> bool:
    """Whether this turn, or the one that reads what it leaves, has to be proven by token ids: unless P and D check handles
    by themselves, and the one at hand can be checked."""
    if taken.held is not None and not taken.held.handle.digests:
        return True
    prefill = _prefill(taken, fleet, frozenset())
    decode = fleet.pick(Role.DECODE, taken.branch.decode if taken.branch else None)
    return prefill is None or decode is None or not (fleet.verifies(prefill) and fleet.verifies(decode))


def _prefill(taken: Taken, fleet: Fleet, without: frozenset[str]) -> Engine | None:
    """The P that computed the last turn, unless it cannot read what D holds; else, of those that can, one that checks the
    handle by itself."""
    branch, held = taken.branch, taken.held
    if branch is None:
        return fleet.pick(Role.PREFILL, None, without)
    moving_ms = fleet.costs.moving_ms(branch.prefill or "", branch.tokens, readable=held is not None)
    if held is None:
        return fleet.pick(Role.PREFILL, branch.prefill, without, moving_ms=moving_ms)
    able = without | fleet.unsafe_for(held.decode)
    found = fleet.pick(Role.PREFILL, branch.prefill, able, verifying=held.handle.digests, moving_ms=moving_ms)
    if found is not None and fleet.available(found):
        return found
    return fleet.pick(Role.PREFILL, branch.prefill, without, moving_ms=moving_ms)


def _offer(
    prompt: Prompt, taken: Taken, prefill: Engine | None, fleet: Fleet, config: RouterConfig, no_proof: bool
) -> _Offer:
    if taken.branch is None or taken.held is None:
        return _Offer(taken.reason or Reason.NO_HANDLE)
    if taken.held.handle.digests and (prefill is None or fleet.verifies(prefill)):
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
