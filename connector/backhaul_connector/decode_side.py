"""Policy of a turn's decode leg: what D takes from P, and what it keeps for the next turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backhaul_protocol import KEY, VERSION
from backhaul_protocol.account import DecodeAccount
from backhaul_protocol.leases import Lease
from backhaul_protocol.messages import Asked, Published, from_decode, read_asked
from backhaul_protocol.why import Why

from . import handles, locators
from .lease_table import LeaseTable, Whole
from .shape import NULL_BLOCK, Request, Shape


@dataclass
class Decode:
    account: DecodeAccount
    asked: Asked | None
    retain: bool
    notify_only: bool = False
    """P's blocks are not wanted, and P is told so."""

    @property
    def shared(self) -> bool:
        return self.asked is not None and self.asked.shared


class DecodeSide:
    def __init__(
        self, shape: Shape, leases: LeaseTable, *, ttl_s: float, port: int, prompt_from_p: Callable[[int], int]
    ) -> None:
        """`port` is that of the lease channel; `prompt_from_p` says how many tokens of a prompt of a length P computes."""
        self._shape = shape
        self._leases = leases
        self._ttl_s = ttl_s
        self._port = port
        self._prompt_from_p = prompt_from_p

    def lease_operations(self, params: dict[str, Any]) -> dict[str, object] | None:
        """Does what a request asks of the leases, if it is one for them and not for the model; its answer."""
        asked = read_asked(params)
        if asked is None or asked.leases is None:
            return None
        params.clear()
        params[KEY] = {"version": VERSION}
        return {KEY: from_decode(leases=self._leases.operate(asked.leases, self._ttl_s).to_dict())}

    def admit(self, request: Request, params: dict[str, Any]) -> Decode:
        asked = read_asked(params)
        from_p = bool(params.get("do_remote_prefill"))
        # Without a word of ours, what stock routers send is retained; with neither flag it would leak in vLLM.
        decode = Decode(
            DecodeAccount(prompt=request.num_prompt_tokens), asked, asked.retain if asked is not None else from_p
        )
        if asked is None and params.get(KEY) is not None:
            decode.account.why = Why.MALFORMED
        if from_p:
            self._check_from_p(request, params, decode)
        else:
            handles.strip(params)
        if asked is not None and asked.release:
            self._leases.release(asked.release)
        return decode

    def _check_from_p(self, request: Request, params: dict[str, Any], decode: Decode) -> None:
        """Lets D read from P only what is P's prefill of the same prompt, in a form that cannot end the worker."""
        shape = self._shape
        handle = handles.read_handle(params)
        if handle is None or len(handle.remote_block_ids) != shape.groups:
            decode.account.why = Why.MALFORMED
            decode.notify_only = handles.keep_sender(params, shape.groups)
            params["do_remote_prefill"] = decode.notify_only
            return
        if request.abort_immediately:
            return  # never scheduled: it only tells the other engine that its blocks are not wanted
        wanted = self._prompt_from_p(request.num_prompt_tokens)
        asked = decode.asked
        if asked is not None and not self._is_prompt(request, asked, wanted):
            decode.notify_only = True
            decode.account.why = Why.PROMPT_DIFFERS
            return
        if shape.unsupported:
            return
        cut = shape.cut(handle, wanted)
        if cut is not None:
            params["remote_block_ids"] = cut
        else:  # vLLM would pair the lists from their ends, and read other positions
            decode.notify_only = True
            decode.account.why = Why.MALFORMED

    def _is_prompt(self, request: Request, asked: Asked, tokens: int) -> bool:
        """Whether P computed these tokens of this prompt, by all that it says of them."""
        if asked.prompt_tokens not in (None, tokens):
            return False
        tail = self._shape.tail_hash(request, tokens)
        pairs = (
            (asked.prompt_hash, self._shape.hash_at(request, tokens)),
            (asked.prompt_tail, None if tail is None else tail.hex()),
        )
        return all(theirs is None or mine is None or theirs == mine for theirs, mine in pairs)

    def kept_tokens(self, request: Request, decode: Decode) -> int | None:
        """How many tokens are kept when a request has finished: those of its whole blocks, or all that it ran where KV cannot
        be cut. `None` for nothing at all; where blocks cannot be compared the handle is vLLM's own, and this is 0."""
        if not decode.retain or not self._shape.bidirectional:
            return None
        if self._shape.unsupported:
            return 0
        # The last token was sampled, not run; what is in flight may yet be written.
        ran = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)
        blocks = min(ran // self._shape.block_size, self._shape.hashed_blocks(request))
        if not blocks:
            return None
        if self._shape.whole:
            return ran if blocks == ran // self._shape.block_size else None
        return blocks * self._shape.block_size

    def account(self, request: Request, decode: Decode) -> dict[str, Any]:
        return {KEY: from_decode(decode.account.to_dict(request.num_output_tokens))}

    def keep(self, request: Request, decode: Decode, tokens: int, pinned: Any, out: dict[str, Any]) -> dict[str, Any]:
        """Enters a lease for a finished request, whose handle vLLM made as `out`; the handle with ours in it, or no handle where
        it turns out that nobody could read it."""
        ttl_s = (decode.asked.retain_s if decode.asked is not None else None) or self._ttl_s
        handle = {**out, "remote_blocks_expiry_time": time.perf_counter() + ttl_s}
        kept: list[bytes] = []
        lists, whole = self._lists(request, tokens, out)
        if lists is not None:
            kept = self._shape.hashes(request, tokens // self._shape.block_size)
            handle["remote_block_ids"], handle["remote_num_tokens"] = lists, tokens
        self._leases.add(
            request.request_id,
            kept,
            handle["remote_block_ids"],
            [block for group in pinned for block in group if block != NULL_BLOCK],
            block_size=self._shape.block_size,
            ttl_s=ttl_s,
            shared=decode.shared,
            whole=whole,
        )
        if self._shape.whole and lists is None:
            # vLLM went on by more tokens than the answer has, and has freed what the next one would need.
            self._leases.release([request.request_id])
            return self.account(request, decode)
        published = Published(
            version=VERSION,
            digests=None if lists is None else locators.publish(kept),
            block_size=self._shape.block_size,
            epoch=self._leases.epoch,
            lease=Lease(port=self._port, ttl_s=ttl_s, shared=decode.shared),
            whole=whole is not None,
            tokens=None if whole is None else tokens,
        )
        return {**handle, KEY: from_decode(decode.account.to_dict(request.num_output_tokens), published)}

    def _lists(self, request: Request, tokens: int, out: dict[str, Any]) -> tuple[list[list[int]] | None, Whole | None]:
        """The blocks of exactly the tokens that are kept, if they can be published, and what else a reader must have."""
        if self._shape.unsupported:
            return None, None
        if not self._shape.whole:
            blocks = tokens // self._shape.block_size
            return [list(group[:blocks]) for group in out["remote_block_ids"]], None
        tail = self._shape.tail_hash(request, tokens)
        found = handles.read_handle(out)
        lists = None if tail is None or found is None else self._shape.cut(found, tokens)
        return (None, None) if tail is None or lists is None else (lists, Whole(tokens, tail))
