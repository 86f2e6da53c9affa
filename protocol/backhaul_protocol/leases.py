"""Lease management messages: what the router has done to the leases of one D, and what D says came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from . import KEY, VERSION
from .fields import Port, Seconds


class LeaseAddress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a lease can be claimed: what P needs of it. Its id is the handle's `remote_request_id`."""

    port: Port
    """Of D's lease channel."""
    shared: bool = False
    """Reading does not end it: it can be read by several, until it is released or expires."""


class Lease(LeaseAddress, frozen=True, kw_only=True, gc=False):
    """D's promise to keep a handle's blocks."""

    ttl_s: float


class LeaseOperation(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to the leases of one D. Any of these together."""

    release: Annotated[Sequence[str], Meta(max_length=100_000)] = ()
    renew: Annotated[Sequence[str], Meta(max_length=100_000)] = ()
    ttl_s: Seconds | None = None
    """With `renew`: seconds from now; `None` leaves it to D's `decoder_kv_blocks_ttl`."""
    list: bool = False
    flush: bool = False
    """Ends every lease and moves the epoch, which voids every handle made before."""

    def body(self, model: str) -> bytes:
        """A request that carries it; D retains nothing for it."""
        wanted = {name: value for name in self.__struct_fields__ if (value := getattr(self, name))}
        params = {KEY: {"version": VERSION, "leases": wanted}}
        return msgspec.json.encode(
            {"model": model, "prompt": [1], "max_tokens": 1, "stream": False, "kv_transfer_params": params},
        )


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One lease, as D lists it."""

    id: str
    blocks: int
    tokens: int
    age_s: float
    remaining_s: float
    holds: int = 0
    """Readers at this moment."""
    shared: bool = False


class LeaseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """D's answer to a lease operation."""

    released: Sequence[str] = ()
    renewed: Mapping[str, float] = {}
    """Remaining seconds by id."""
    unknown: Sequence[str] = ()
    flushed: int | None = None
    epoch: str | None = None
    count: int | None = None
    blocks: int | None = None
    leases: tuple[LeaseRow, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As it travels: without what was not asked for."""
        return {name: value for name, value in msgspec.to_builtins(self).items() if value is not None}


class _Leases(msgspec.Struct):
    leases: LeaseAnswer | None = None


class _Params(msgspec.Struct):
    backhaul: _Leases | None = None


class _Response(msgspec.Struct):
    kv_transfer_params: _Params | None = None


_decode_response = msgspec.json.Decoder(_Response).decode


def read_lease_answer(body: bytes) -> LeaseAnswer | None:
    """D's answer in a response's body; `None` where the engine did not understand the operation. Raises `msgspec.DecodeError`."""
    params = _decode_response(body).kv_transfer_params
    return params.backhaul.leases if params and params.backhaul else None
