"""Policy of a turn's prefill leg: whether the handle that comes with a prompt is read, and how much of it.

The steps are those of vLLM's scheduler. `admit` compares the handle's locators with the prompt. `match`, at every attempt to
schedule the request, claims the lease and waits for the answer over as many attempts as that takes. `start` is when blocks
are allocated, `ended` when the read is over, `finish` when the request is. Whatever goes wrong, the handle is stripped and
the prompt computed, with the reason in the account.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backhaul_protocol import KEY
from backhaul_protocol.account import PrefillAccount
from backhaul_protocol.lease_channel import Answer
from backhaul_protocol.messages import Published, from_prefill, has_token_proof, read_published
from backhaul_protocol.why import DECLINED, Why

from . import handles, locators
from .claims import Claim, Claims, Target
from .handles import Handle
from .shape import Request, Shape

_FROM_PEER = ("remote_port", "tp_size", "dcp_size", "pp_size", "remote_registration_generation")


@dataclass
class Prefill:
    account: PrefillAccount
    offered: bool = False
    target: Target | None = None
    """The lease to read from, while that is the plan."""
    blocks: int = 0
    """How many of its leading blocks hold this prompt."""
    tokens: int = 0
    """And how many of its leading tokens."""
    tail: bytes | None = None
    """For a lease that is read as a whole: the hash of these tokens of the prompt."""
    claim: Claim | None = None
    stale: bool = False
    """The last grant was too old when the request was next looked at."""
    by_tokens: bool = False
    """The handle is a stock engine's, which the router has proven and cut."""
    read_began: float = 0.0


class PrefillSide:
    def __init__(self, shape: Shape, claims: Claims, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._shape = shape
        self._claims = claims
        self._clock = clock
        self._margin_s = min(2.0, claims.hold_s / 5)
        """A read must end this long before its hold, for what it takes to tell the workers."""
        self.counts: Counter[tuple[str, str]] = Counter()

    def admit(self, request: Request, params: dict[str, Any]) -> Prefill:
        prefill = Prefill(PrefillAccount(prompt=request.num_prompt_tokens))
        if handles.has_handle(params):
            prefill.offered = True
            why = self._locate(request, params, prefill)
            if why is not None:
                self._decline(params, prefill, why)
        return prefill

    def _locate(self, request: Request, params: dict[str, Any], prefill: Prefill) -> Why | None:
        """Finds how much of the handle is this prompt; why nothing of it can be read, if so."""
        shape = self._shape
        if not shape.bidirectional:
            return Why.BIDIRECTIONAL_OFF
        handle = handles.read_handle(params)
        if handle is None:
            return Why.MALFORMED
        if shape.unsupported or request.skip_reading_prefix_cache:
            return Why.UNSUPPORTED
        most = (request.num_prompt_tokens - 1) // shape.block_size
        offer = read_published(params)
        if offer is Why.NO_DIGESTS and has_token_proof(params):
            return self._take_proven(params, prefill, handle, most)
        if isinstance(offer, Why):
            return offer
        published = locators.read(offer.digests or "")
        if published is None:
            return Why.MALFORMED
        prefill.account.offered = len(published) // locators.LOCATOR_BYTES * offer.block_size
        if offer.block_size != shape.block_size or offer.whole != shape.whole:
            return Why.UNSUPPORTED
        mine = shape.hashes(request, min(most, shape.hashed_blocks(request)))
        blocks = locators.common(published, mine)
        if offer.whole:
            found = self._find_whole(request, prefill, offer, len(published) // locators.LOCATOR_BYTES, blocks)
            if found is not None:
                return found
        else:
            prefill.blocks, prefill.tokens = blocks, blocks * shape.block_size
        prefill.account.verified = prefill.tokens
        prefill.target = Target(
            host=handle.remote_host,
            port=offer.lease.port,
            lease=handle.remote_request_id,
            engine=handle.remote_engine_id,
            epoch=offer.epoch,
            shared=offer.lease.shared,
        )
        return None if prefill.blocks else Why.DIVERGED

    def _find_whole(
        self, request: Request, prefill: Prefill, offer: Published, offered: int, common: int
    ) -> Why | None:
        """Takes an offer that is good as a whole only, if the prompt goes on where it ends; why not, if it is no such offer."""
        tokens = offer.tokens
        if tokens is None or tokens // self._shape.block_size != offered:
            return Why.MALFORMED
        prefill.account.offered = tokens
        if common == offered and tokens < request.num_prompt_tokens:
            prefill.tail = self._shape.tail_hash(request, tokens)
            if prefill.tail is not None:
                prefill.blocks, prefill.tokens = common, tokens
        return None

    def _take_proven(self, params: dict[str, Any], prefill: Prefill, handle: Handle, most: int) -> Why | None:
        size = self._shape.block_size
        held = handle.remote_num_tokens or 0
        blocks = min(held // size, most)
        if self._shape.whole:
            return Why.UNSUPPORTED
        cut = self._shape.cut(handle, blocks * size)
        if cut is None:
            return Why.MALFORMED
        prefill.account.offered = held // size * size
        prefill.account.verified = blocks * size
        prefill.blocks, prefill.tokens = blocks, blocks * size
        prefill.by_tokens = True
        params["remote_block_ids"] = cut
        params["remote_num_tokens"] = blocks * size
        return None

    def _decline(self, params: dict[str, Any], prefill: Prefill, why: Why) -> None:
        prefill.account.why = why
        handles.strip(params)
        claim, prefill.claim = prefill.claim, None
        target, prefill.target = prefill.target, None
        if claim is not None:
            self._claims.done(claim, read=False)
        if target is not None and why in DECLINED:
            self._claims.decline(target)

    def match(self, request: Request, prefill: Prefill, local: int) -> tuple[int | None, bool]:
        """vLLM's get_num_new_matched_tokens: how many tokens will be read beyond the `local` ones, `None` for ask again."""
        params = request.kv_transfer_params
        account = prefill.account
        if params.get("_remote_blocks_processed"):
            # Asked again after a failed read, or a preemption: there is no second read, and to promise one would park the
            # request forever (0.32, pull_scheduler.py).
            if account.pulled:  # vLLM took the blocks away since: what was read is gone
                account.pulled = account.bytes = 0
                account.why = Why.READ_FAILED
            account.local = local
            return 0, False
        account.local = local
        count = prefill.tokens - local
        why = Why.LOCAL_HIT if count <= 0 else Why.BELOW_THRESHOLD if count < self._shape.recompute_threshold else None
        if prefill.by_tokens:
            if why is None:
                return count, True
            account.why = why  # the handle stays: vLLM then tells D that it will not be read
            return 0, False
        if prefill.target is None:
            return 0, False
        if why is not None:
            self._decline(params, prefill, why)
            return 0, False
        claim = prefill.claim
        if claim is not None and claim.granted and claim.left_s() < self._claims.hold_s / 2:
            if prefill.stale:  # once more would be no fresher
                self._decline(params, prefill, Why.HOLD_ENDED)
                return 0, False
            self._claims.done(claim, read=False)  # the request has waited for blocks since, and the read needs time
            claim, prefill.stale = None, True
        if claim is None:
            last = request.block_hashes[prefill.blocks * self._shape.hashes_per_block - 1]
            prefill.claim = self._claims.claim(prefill.target, prefill.blocks, bytes(last), prefill.tail)
            return None, False
        return self._use_answer(params, prefill, claim, count)

    def _use_answer(
        self, params: dict[str, Any], prefill: Prefill, claim: Claim, count: int
    ) -> tuple[int | None, bool]:
        answer = claim.answer
        if answer is None:
            if not self._claims.is_overdue(claim):
                return None, False
            answer = Answer(ok=False, why=Why.UNREACHABLE)
        else:
            prefill.account.claim_ms = round(claim.took_ms, 3)
        tokens = prefill.tokens
        if not answer.ok:
            self._decline(params, prefill, answer.why or Why.MALFORMED)
            return 0, False
        if answer.tokens != tokens or not self._shape.is_exactly(answer.block_ids, tokens):
            self._decline(params, prefill, Why.MALFORMED)
            return 0, False
        prefill.stale = False
        # From here on nothing of the handle is used but the host: the rest is the holder's own word.
        params["remote_block_ids"] = answer.block_ids
        params["remote_num_tokens"] = tokens
        params["remote_blocks_expiry_time"] = None
        params.update({key: answer.peer[key] for key in _FROM_PEER if key in answer.peer})
        return count, True

    def start(self, request: Request, prefill: Prefill, tokens: int) -> float | None:
        """Blocks are allocated, and `tokens` of them are about to be read; until when the read must have ended, on the
        monotonic clock, if there is a limit."""
        if tokens > 0:
            prefill.account.pulled = tokens
            prefill.account.bytes = self._shape.bytes_between(prefill.account.local, prefill.account.local + tokens)
            prefill.read_began = self._clock()
            return prefill.claim.ends - self._margin_s if prefill.claim is not None else None
        if prefill.target is not None:
            self._decline(request.kv_transfer_params, prefill, prefill.account.why or Why.UNSUPPORTED)
        return None

    def ended(self, prefill: Prefill, *, failed: bool) -> None:
        """The read is over."""
        prefill.account.read_ms = round((self._clock() - prefill.read_began) * 1e3, 3)
        claim, prefill.claim = prefill.claim, None
        if failed:
            late = claim is not None and claim.left_s() < self._margin_s
            prefill.account.why = Why.HOLD_ENDED if late else Why.READ_FAILED
            prefill.account.pulled = prefill.account.bytes = 0
        if claim is not None:
            self._claims.done(claim, read=not failed)

    def abandon(self, prefill: Prefill) -> None:
        """The request has ended and no read is under way."""
        claim, prefill.claim = prefill.claim, None
        if claim is not None:
            self._claims.done(claim, read=False)

    def answer(self, request: Request, prefill: Prefill) -> dict[str, Any]:
        """What is added to P's parameters for D; counts the turn."""
        account = prefill.account
        if prefill.offered:
            self.counts["backhaul_verifications", "verified" if account.pulled else account.why or "verified"] += 1
        for metric, value in (
            ("backhaul_offered_tokens", account.offered),
            ("backhaul_verified_tokens", account.verified),
            ("backhaul_pulled_tokens", account.pulled),
            ("backhaul_pulled_bytes", account.bytes),
            ("backhaul_local_tokens", account.local),
        ):
            if value:
                self.counts[metric, ""] += value
        tail = self._shape.tail_hash(request, request.num_prompt_tokens)
        tokens = request.num_prompt_tokens
        return {KEY: from_prefill(account, tokens, self._shape.hash_at(request, tokens), tail)}
