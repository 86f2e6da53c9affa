"""Where a turn runs: a pure function of the turn, of what the ledger has for it, and of the fleet."""

from __future__ import annotations

from dataclasses import dataclass

from . import digests
from .config import RouterConfig
from .fleet import Engine, Fleet, Role
from .ledger import Branch, Taken
from .report import Proof, Reason, Route


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a turn's prompt when it is placed."""

    message_bytes: int
    tokens: int | None = None
    """Exact, where the ids are known."""
    blocks: bytes = b""
    """Digests of its whole blocks, where the ids are known."""
    block_size: int = 0

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

    `warm` where the ledger has a usable handle whose leading blocks are proven to be the prompt's, and they are at least
    `kv_recompute_threshold` tokens. `local` where D has the history and the suffix that it lacks is at most
    `local_max_tokens`. Else `cold`, with the reason. `without` names engines that this turn has already failed on.
    """
    branch = taken.branch
    decode = fleet.pick(Role.DECODE, branch.decode if branch else None, without)
    if decode is None:
        return NoEngine(Role.DECODE)
    has_history = branch is not None and branch.decode == decode.url
    blocks, reason = _offer(prompt, taken, config, no_proof)
    local = Placement(Route.LOCAL, decode, reason=reason, proof=Proof.ENGINE)
    if force is Route.LOCAL and has_history:
        return local
    short = has_history and branch is not None and _uncached(prompt, branch) <= config.local_max_tokens
    if force is None and short and _history_is_safe(taken, blocks):
        return Placement(Route.LOCAL, decode, proof=Proof.ENGINE)
    prefill = fleet.pick(Role.PREFILL, branch.prefill if branch else None, without)
    if prefill is None:
        return NoEngine(Role.PREFILL)
    if reason is None and force is not Route.COLD:
        return Placement(Route.WARM, decode, prefill, proof=Proof.TOKENS, blocks=blocks)
    return Placement(Route.COLD, decode, prefill, reason=reason or Reason.REUSE_OFF)


def _offer(prompt: Prompt, taken: Taken, config: RouterConfig, no_proof: bool) -> tuple[int, Reason | None]:
    """Blocks that P may read, or the reason why none."""
    if taken.branch is None or taken.held is None:
        return 0, taken.reason or Reason.NO_HANDLE
    if no_proof or not prompt.proven or not taken.branch.blocks:
        return 0, Reason.NO_PROOF
    if taken.held.handle.groups > 1:
        # Sliding-window and state-space groups hold only the end of the sequence: a cut handle would read nothing of use.
        return 0, Reason.NO_PROOF
    blocks = reusable_blocks(prompt, taken.branch, taken.held.tokens)
    if blocks == 0:
        return 0, Reason.DIVERGED
    if blocks * prompt.block_size < config.kv_recompute_threshold:
        kept = min(taken.held.tokens, taken.branch.tokens) // prompt.block_size
        return 0, Reason.BELOW_THRESHOLD if blocks == kept or taken.diverged_at is None else Reason.DIVERGED
    return blocks, None


def _uncached(prompt: Prompt, branch: Branch) -> int:
    """Tokens that D lacks, at least the last: exact where both sequences are known, else estimated by the history's growth
    in bytes."""
    if prompt.tokens is not None and branch.blocks and prompt.block_size == branch.block_size:
        return max(1, prompt.tokens - digests.common(prompt.blocks, branch.blocks) * branch.block_size)
    per_token = branch.message_bytes / branch.tokens if branch.tokens else 4.0
    return max(1, round((prompt.message_bytes - branch.message_bytes) / max(per_token, 0.1)))


def _history_is_safe(taken: Taken, blocks: int) -> bool:
    """Whether D surely still has the history: pinned by a handle that covers it, so that `local` cannot turn into a whole
    prefill on the decode engine."""
    return taken.held is not None and blocks > 0
