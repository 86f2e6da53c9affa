"""The versioned object in `kv_transfer_params`, by who says it to whom, and how an engine reads it.

    D publishes     with a handle: digests of the blocks that it retains, its epoch, the lease
    P says          a hash of the prompt, by which D checks that both computed the same one
    the router asks D to retain or not, for how long, to be read once or often; leases to end
    the router says to P, of a handle without digests, that it was proven by token ids

Beside them P and D give an account of the request (`account`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from . import KEY, VERSION
from .account import PrefillAccount
from .fields import Count, Epoch, Hash, Seconds, Size
from .leases import LeaseAddress, LeaseOperation
from .why import Why


class Published(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What D adds to a handle."""

    version: Literal[1]
    digests: str | None = None
    """One per whole block, as base64 (`locators`); `None` where its blocks cannot be compared."""
    block_size: Size
    epoch: Epoch
    lease: LeaseAddress
    """A `Lease`, where D says it."""
    whole: bool = False
    """Its KV is good for a prompt that goes on where `tokens` end, and for no other: nobody can cut it (a sliding window)."""
    tokens: Annotated[int, Meta(ge=1)] | None = None
    """With `whole`: how many tokens that is, those behind the last whole block included."""


class Proof(msgspec.Struct, frozen=True):
    """What a router adds to a handle of a stock D that it has compared, token by token, and cut."""

    version: Literal[1]
    proof: Literal["tokens"]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a router asks of D."""

    retain: bool = True
    shared: bool = False
    retain_s: Seconds | None = None
    """`None` leaves it to D's `decoder_kv_blocks_ttl`."""
    release: Annotated[Sequence[str], Meta(max_length=10_000)] = ()
    """Leases of earlier turns that nobody needs any more: ended when D admits the request."""


class Asked(Ask, frozen=True, kw_only=True):
    """The same as D reads it: beside what P said of the prompt that it computed, or as a request for the leases alone."""

    version: Literal[1]
    leases: LeaseOperation | None = None
    prompt_hash: Hash | None = None
    prompt_tail: Hash | None = None
    prompt_tokens: Count | None = None


T = TypeVar("T")


def convert(value: object, kind: type[T]) -> T | None:
    """`None` for what is no such thing: nothing that a client can write raises."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter for half a surrogate pair, which JSON can spell
        return None


def read_published(params: Mapping[str, Any]) -> Published | Why:
    """What D published with its handle, or what is wrong with it."""
    ours = params.get(KEY)
    if not isinstance(ours, Mapping) or ours.get("digests") is None:
        return Why.NO_DIGESTS
    return convert(dict(ours), Published) or Why.MALFORMED


def has_token_proof(params: Mapping[str, Any]) -> bool:
    return convert(params.get(KEY), Proof) is not None


def read_asked(params: Mapping[str, Any]) -> Asked | None:
    """`None` where there is nothing of ours, or nothing that can be read."""
    return convert(params.get(KEY), Asked)


def from_prefill(account: PrefillAccount, tokens: int, hash_: str | None, tail: bytes | None) -> dict[str, Any]:
    """P's object: `tokens` it has computed, with the hash of their last whole block and one of them all."""
    return {
        "version": VERSION,
        "account": account.to_dict(),
        "prompt_hash": hash_,
        "prompt_tail": None if tail is None else tail.hex(),
        "prompt_tokens": tokens,
    }


def from_decode(
    account: Mapping[str, object] | None = None,
    published: Published | None = None,
    leases: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """D's object."""
    said: dict[str, Any] = {"version": VERSION} if published is None else msgspec.to_builtins(published)
    if account is not None:
        said["account"] = account
    if leases is not None:
        said["leases"] = leases
    return said
