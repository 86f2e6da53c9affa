"""A turn's decode leg: what D takes from P, and what it keeps for the next turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import handles, locators
from .account import DecodeAccount
from .handles import EXTENSION, VERSION, Wishes
from .lease_table import LeaseTable
from .shape import Request, Shape


@dataclass
class Decode:
    account: DecodeAccount
    wishes: Wishes | None
    retain: bool
    notify_only: bool = False
    """P's blocks are not wanted, and P is told so."""

    @property
    def shared(self) -> bool:
        return self.wishes is not None and self.wishes.shared


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
        wishes = handles.read_wishes(params)
        if wishes is None or wishes.leases is None:
            return None
        params.clear()
        params[EXTENSION] = {"version": VERSION}
        ops = wishes.leases
        released, unknown = self._leases.release(ops.release)
        renewed, unknown_too = self._leases.renew(ops.renew, ops.ttl_s or self._ttl_s)
        answer: dict[str, object] = {
            "released": released,
            "renewed": renewed,
            "unknown": list(dict.fromkeys([*unknown, *unknown_too])),
        }
        if ops.flush:
            answer["flushed"] = self._leases.flush()
        answer["epoch"] = self._leases.epoch
        answer["count"], answer["blocks"] = self._leases.count()
        if ops.listing:
            answer["leases"] = self._leases.listed()
        return {EXTENSION: {"version": VERSION, "leases": answer}}

    def admit(self, request: Request, params: dict[str, Any]) -> Decode:
        wishes = handles.read_wishes(params)
        from_p = bool(params.get("do_remote_prefill"))
        # Without a word of ours, what stock routers send is retained; with neither flag it would leak in vLLM.
        decode = Decode(
            DecodeAccount(prompt=request.num_prompt_tokens), wishes, wishes.retain if wishes is not None else from_p
        )
        if wishes is None and params.get(EXTENSION) is not None:
            decode.account.why = "malformed"
        if from_p:
            self._check_from_p(request, params, decode)
        else:
            handles.strip(params)
        if wishes is not None and wishes.release:
            self._leases.release(wishes.release)
        return decode

    def _check_from_p(self, request: Request, params: dict[str, Any], decode: Decode) -> None:
        """Lets D read from P only what is P's prefill of the same prompt, in a form that cannot end the worker."""
        shape = self._shape
        handle = handles.read_handle(params)
        if handle is None or len(handle.remote_block_ids) != shape.groups:
            params["do_remote_prefill"] = False
            handles.strip(params)
            decode.account.why = "malformed"
            return
        if request.abort_immediately:
            return  # never scheduled: it only tells the other engine that its blocks are not wanted
        wanted = self._prompt_from_p(request.num_prompt_tokens)
        wishes = decode.wishes
        if wishes is not None and wishes.prompt_tokens is not None:
            mine = shape.hash_at(request, wanted)
            both = mine is not None and wishes.prompt_hash is not None
            if wishes.prompt_tokens != wanted or (both and mine != wishes.prompt_hash):
                decode.notify_only = True
                decode.account.why = "prompt_differs"
                return
        if shape.unsupported:
            return
        cut = handle.cut(shape.block_size, wanted)
        if cut is not None:
            params["remote_block_ids"] = cut
        else:  # vLLM would pair the lists from their ends, and read other positions
            decode.notify_only = True
            decode.account.why = "malformed"

    def kept_blocks(self, request: Request, decode: Decode) -> int | None:
        """How many whole blocks are kept when a request has finished. `None` for nothing at all; where blocks cannot be
        compared the handle is vLLM's own, and this is 0."""
        if not decode.retain or not self._shape.bidirectional:
            return None
        if self._shape.unsupported:
            return 0
        # The last token was sampled, not run; what is in flight may yet be written.
        ran = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)
        return min(ran // self._shape.block_size, self._shape.hashed_blocks(request)) or None

    def account(self, request: Request, decode: Decode) -> dict[str, Any]:
        return {EXTENSION: {"version": VERSION, "account": decode.account.fields(request.num_output_tokens)}}

    def keep(self, request: Request, decode: Decode, blocks: int, pinned: Any, out: dict[str, Any]) -> dict[str, Any]:
        """Enters a lease for a finished request, whose handle vLLM made as `out`; the handle with ours in it."""
        ttl_s = (decode.wishes.retain_s if decode.wishes is not None else None) or self._ttl_s
        ours = self.account(request, decode)[EXTENSION]
        handle = {**out, "remote_blocks_expiry_time": time.perf_counter() + ttl_s, EXTENSION: ours}
        kept: list[bytes] = []
        if not self._shape.unsupported:
            kept = self._shape.hashes(request, blocks)
            handle["remote_block_ids"] = [list(group[:blocks]) for group in out["remote_block_ids"]]
            handle["remote_num_tokens"] = blocks * self._shape.block_size
            ours["digests"] = locators.publish(kept)
        self._leases.add(
            request.request_id,
            kept,
            handle["remote_block_ids"],
            [block for group in pinned for block in group],
            block_size=self._shape.block_size,
            ttl_s=ttl_s,
            shared=decode.shared,
        )
        ours["block_size"] = self._shape.block_size
        ours["epoch"] = self._leases.epoch
        ours["lease"] = {"port": self._port, "ttl_s": ttl_s, "shared": decode.shared}
        return handle
