"""What `kv_transfer_params` say to an engine that runs the connector: read with suspicion, since anyone may have written it.

Nothing here raises on hostile input: what cannot be understood is a `why`.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

WIRE_VERSION = 1
LOCATOR_BYTES = 4
"""Of each whole block's digest, as D publishes it: enough to find the common part, which D then proves in full."""

Id = Annotated[str, Meta(min_length=1, max_length=1024)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=0, le=2**31)]
Seconds = Annotated[float, Meta(gt=0)]


class LeaseOffer(msgspec.Struct, frozen=True):
    """Where D can be asked for the lease whose id is the handle's `remote_request_id`."""

    port: Port
    shared: bool = False


class LeaseOrders(msgspec.Struct, frozen=True):
    """What the router wants done to leases of this engine."""

    release: list[Id] = []
    renew: list[Id] = []
    ttl_s: Seconds | None = None
    listed: bool = msgspec.field(name="list", default=False)
    flush: bool = False


class Asked(msgspec.Struct, frozen=True):
    """The `backhaul` object: of D's handle, of P's, or the router's own wishes, as the leg has it."""

    version: int = WIRE_VERSION
    digests: str | None = None
    block_size: Count | None = None
    epoch: Id | None = None
    lease: LeaseOffer | None = None
    whole: bool = False
    proof: str | None = None
    retain: bool = True
    retain_s: Seconds | None = None
    shared: bool = False
    release: list[Id] = []
    leases: LeaseOrders | None = None
    prompt_hash: str | None = None
    prompt_tail: str | None = None
    prompt_tokens: Count | None = None

    @property
    def locators(self) -> list[bytes] | None:
        """`None` for digests that are not what D publishes."""
        try:
            joined = base64.b64decode(self.digests or "", validate=True)
        except (binascii.Error, ValueError):
            return None
        if not joined or len(joined) % LOCATOR_BYTES:
            return None
        return [joined[i : i + LOCATOR_BYTES] for i in range(0, len(joined), LOCATOR_BYTES)]


class HandleFields(msgspec.Struct, frozen=True):
    """The fields without which nothing can be read."""

    remote_block_ids: Annotated[list[list[Count]], Meta(min_length=1, max_length=1)]
    remote_engine_id: Id
    remote_request_id: Id
    remote_host: Id
    remote_port: Port
    remote_num_tokens: Count
    remote_blocks_expiry_time: float | None = None


class SenderFields(msgspec.Struct, frozen=True):
    """Enough of a handle to tell whoever sent it that nobody will read."""

    remote_engine_id: Id
    remote_request_id: Id
    remote_host: Id
    remote_port: Port


def read_asked(given: Any) -> tuple[Asked | None, str | None]:
    """The request's `backhaul` object, if there is one to understand, and what is wrong with it, if something is."""
    if given is None:
        return None, None
    try:
        asked = msgspec.convert(given, Asked)
    except msgspec.ValidationError:
        return None, "malformed"
    if asked.version != WIRE_VERSION:
        return None, "unsupported"
    times = (asked.retain_s, asked.leases.ttl_s if asked.leases is not None else None)
    if not all(math.isfinite(seconds) for seconds in times if seconds is not None):
        return None, "malformed"
    return asked, None


def read_handle(params: dict[str, Any]) -> HandleFields | None:
    """`None` for fields that are missing or of another shape."""
    try:
        return msgspec.convert(params, HandleFields)
    except msgspec.ValidationError:
        return None


def sender_of(params: dict[str, Any]) -> dict[str, Any] | None:
    """What it takes to notify the sender of a handle that is none."""
    try:
        sender = msgspec.convert(params, SenderFields)
    except msgspec.ValidationError:
        return None
    return {"do_remote_prefill": True, "remote_block_ids": [[]], **msgspec.structs.asdict(sender)}


def names_blocks(params: dict[str, Any]) -> bool:
    """Whether the parameters mean to be a handle at all; a cold turn's may carry the keys with null in them."""
    return any(params.get(key) for key in ("remote_block_ids", "remote_request_id", "remote_engine_id"))


def normalize(params: dict[str, Any]) -> None:
    """A prefill leg is no decode leg, whatever else it says."""
    if params.get("do_remote_decode"):
        params["do_remote_prefill"] = False


def cut(handle: HandleFields, block_size: int, num_tokens: int) -> list[list[int]] | None:
    """The block lists up to so many tokens; `None` if they hold fewer, or not what `remote_num_tokens` says.

    What is read is paired with the own blocks from the end, so that a list of another length gives other positions."""
    held = handle.remote_num_tokens
    if held < num_tokens or any(len(ids) != -(-held // block_size) for ids in handle.remote_block_ids):
        return None
    return [ids[: -(-num_tokens // block_size)] for ids in handle.remote_block_ids]


def strip(params: dict[str, Any]) -> None:
    """Leaves nothing to be read; whether the request is P's leg stays."""
    for key in [key for key in params if key.startswith("remote_") and key != "remote_prefill_cached_tokens"]:
        del params[key]
    params["do_remote_prefill"] = False


def publish(digests: Sequence[bytes]) -> bytes:
    return b"".join(digest[:LOCATOR_BYTES] for digest in digests)
