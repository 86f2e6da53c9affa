"""Where a turn runs: a pure function of the turn, of what the ledger has for it, and of the fleet."""

from __future__ import annotations

import msgspec

from . import digests
from .config import RouterConfig
from .fleet import Engine, Fleet, Role
from .ledger import Branch, Taken
from .report import Proof, Reason, Route


class Prompt(msgspec.Struct, frozen=True):
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
) -> Placement | NoEngine:
    """The route of a turn, by thresholds.

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
    if force is Route.LOCAL and has_history:
        return local
    short = has_history and branch is not None and _uncached(prompt, branch) <= config.local_max_tokens
    if force is None and short and _history_is_safe(taken, offer):
        return Placement(Route.LOCAL, decode, proof=Proof.ENGINE)
    if prefill is None:
        return NoEngine(Role.PREFILL)
    if offer.reason is None and held is not None and prefill.url in fleet.unsafe_for(held.decode):
        offer = _Offer(Reason.UNSAFE_PAIR)
    if offer.reason is None and force is not Route.COLD:
        return Placement(Route.WARM, decode, prefill, proof=offer.proof, blocks=offer.blocks)
    return Placement(Route.COLD, decode, prefill, reason=offer.reason or Reason.REUSE_OFF)


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
    preferred = taken.branch.prefill if taken.branch else None
    if taken.held is None:
        return fleet.pick(Role.PREFILL, preferred, without)
    able = without | fleet.unsafe_for(taken.held.decode)
    verifying = taken.held.handle.digests
    found = fleet.pick(Role.PREFILL, preferred, able, verifying=verifying)
    return found if found is not None and fleet.available(found) else fleet.pick(Role.PREFILL, preferred, without)


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
