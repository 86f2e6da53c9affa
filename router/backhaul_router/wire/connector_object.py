"""Our versioned object inside vLLM's `kv_transfer_params`: what engines that run our connector say, and what they are asked.

    D says, with a handle    digests of the blocks it retains, its epoch, the lease, an account of the request
    P says                   its account, and a hash of the prompt, by which D checks that both computed the same one
    the router asks of D     retain or not, for how long, to be read once or often; leases to end
    the router says to P     D's object as it came; or that a handle without digests was proven by token ids

Version 1; an object of another version is treated as if it were not there. Times are relative seconds: no clock of another
machine is compared with ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw

from ..report import Reason
from .json_members import without

KEY: Final = "backhaul"
VERSION: Final = 1

PROVEN_BY_TOKENS: Final = Raw(b'{"version":1,"proof":"tokens"}')
"""Tells P that the router compared token ids and cut the handle: it then reads one that carries no digests."""

_encode = msgspec.json.encode


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says it did with one request. Counts are tokens; P and D each fill in their own part."""

    prompt: int | None = None
    offered: int | None = None
    """P: what the handle's digests cover."""
    verified: int | None = None
    """P: the leading part that is this prompt's."""
    local: int | None = None
    """Found in the engine's own prefix cache."""
    pulled: int | None = None
    """P: read from D."""
    computed: int | None = None
    bytes: int | None = None
    """P: bytes read from D."""
    read_ms: float | None = None
    claim_ms: float | None = None
    """P: how long D took to confirm that the blocks are there and the right ones."""
    received: int | None = None
    """D: read from P."""
    generated: int | None = None
    why: str | None = None
    """Why nothing was read: P's word in the wire's list, which `reason_of` translates."""


class Lease(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """D's promise to keep a handle's blocks."""

    ttl_s: float
    shared: bool = False
    """Reading does not end it: it can be read by several, until it is released or expires."""


class _Said(msgspec.Struct):
    account: Raw | msgspec.UnsetType = msgspec.UNSET
    token_ids: Raw | msgspec.UnsetType = msgspec.UNSET
    digests: str | None = None
    whole: bool = False
    lease: Lease | None = None


class _Version(msgspec.Struct):
    version: Raw = Raw(b"null")


_FIRST: Final = b'{"version":1,'
"""How our connector begins an object."""
_decode_version = msgspec.json.Decoder(_Version).decode
_decode_said = msgspec.json.Decoder(_Said).decode
_decode_account = msgspec.json.Decoder(Account | None).decode
_decode_ids = msgspec.json.Decoder(tuple[int, ...] | None).decode


class Said(msgspec.Struct, frozen=True):
    """An engine's object, read."""

    passed_on: bytes | None = None
    """What of it the next engine is sent: everything but what is meant for the router. `None` for nothing."""
    digests: bool = False
    """It carries digests, so that a P of ours can check the handle by itself."""
    whole: bool = False
    """The handle is good to its very end or not at all: nobody can cut it (a sliding window)."""
    lease: Lease | None = None
    account: Account | None = None
    token_ids: tuple[int, ...] | None = None
    """Generated ids, where our plugin put them beside the handle."""


NOTHING: Final = Said()


def read(raw: Raw | bytes | None) -> Said:
    """Raises `msgspec.DecodeError` for an object of version 1 that has another shape."""
    if raw is None or (kept := bytes(raw)) == b"null":
        return NOTHING
    if not kept.startswith(_FIRST) and bytes(_decode_version(kept).version) != b"1":
        return NOTHING
    said = _decode_said(kept)
    account = token_ids = None
    if said.account is not msgspec.UNSET:
        account = _decode_account(said.account)
        kept = without(kept, "account", said.account)
    if said.token_ids is not msgspec.UNSET:
        token_ids = _decode_ids(said.token_ids)
        kept = without(kept, "token_ids", said.token_ids)
    return Said(
        passed_on=kept if b"," in kept else None,  # a version alone says nothing
        digests=said.digests is not None,
        whole=said.whole,
        lease=said.lease,
        account=account,
        token_ids=token_ids,
    )


class Ask(msgspec.Struct, frozen=True):
    """What a decode leg asks of a D that runs our connector."""

    retain: bool
    shared: bool = False
    retain_s: float | None = None
    """Seconds; `None` leaves it to the engine's `decoder_kv_blocks_ttl`."""
    release: tuple[str, ...] = ()
    """Leases of earlier turns that nobody needs any more: ended when D admits the request."""


def asking(ask: Ask, beside: bytes | None = None) -> Raw:
    """The object that a decode leg carries. `beside` is what P's answer passes on."""
    members: dict[str, object] = {"retain": ask.retain} if beside else {"version": VERSION, "retain": ask.retain}
    if ask.retain:
        members["shared"] = ask.shared
        if ask.retain_s is not None:
            members["retain_s"] = ask.retain_s
    if ask.release:
        members["release"] = ask.release
    asked = _encode(members)
    return Raw(b"%b,%b" % (beside[:-1], asked[1:]) if beside else asked)


# --- lease operations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseOperation:
    """What is done to the leases of one D. Any of these together."""

    release: Sequence[str] = ()
    renew: Sequence[str] = ()
    ttl_s: float | None = None
    """With `renew`: seconds from now."""
    list: bool = False
    flush: bool = False
    """Ends every lease and moves the epoch, which voids every handle made before."""

    def body(self, model: str) -> bytes:
        """A request that carries it; D retains nothing for it."""
        wanted: dict[str, object] = {
            key: value for key in ("release", "renew", "ttl_s", "list", "flush") if (value := getattr(self, key))
        }
        params = {KEY: {"version": VERSION, "leases": wanted}}
        return _encode(
            {"model": model, "prompt": [1], "max_tokens": 1, "stream": False, "kv_transfer_params": params},
        )


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One lease, as D lists it."""

    id: str
    """The handle's `remote_request_id`."""
    blocks: int
    tokens: int
    age_s: float
    remaining_s: float
    holds: int = 0
    """Readers at this moment."""
    shared: bool = False


class LeaseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """D's answer to a lease operation."""

    released: tuple[str, ...] = ()
    renewed: Mapping[str, float] = {}
    """Remaining seconds by id."""
    unknown: tuple[str, ...] = ()
    flushed: int | None = None
    epoch: str | None = None
    count: int | None = None
    blocks: int | None = None
    leases: tuple[LeaseRow, ...] = ()


class _Leases(msgspec.Struct):
    leases: LeaseAnswer | None = None


class _Params(msgspec.Struct):
    backhaul: _Leases | None = None


class _Answer(msgspec.Struct):
    kv_transfer_params: _Params | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


def read_lease_answer(body: bytes) -> LeaseAnswer | None:
    """`None` where the engine did not understand the operation. Raises `msgspec.DecodeError`."""
    params = _decode_answer(body).kv_transfer_params
    return params.backhaul.leases if params and params.backhaul else None


# --- reasons ---------------------------------------------------------------------------------------------------------------

_REASONS: Final[Mapping[str, Reason]] = {
    "diverged": Reason.DIVERGED,
    "differs": Reason.DIVERGED,
    "below_threshold": Reason.BELOW_THRESHOLD,
    "expired": Reason.EXPIRED,
    "released": Reason.EXPIRED,
    "unknown_lease": Reason.EXPIRED,
    "evicted": Reason.EXPIRED,
    "other_engine": Reason.ENGINE_CHANGED,
    "epoch": Reason.ENGINE_CHANGED,
    "no_digests": Reason.NO_PROOF,
    "malformed": Reason.NO_PROOF,
    "unsupported": Reason.NO_PROOF,
    "unreachable": Reason.READ_FAILED,
    "read_failed": Reason.READ_FAILED,
    "hold_ended": Reason.READ_FAILED,
    "bidirectional_off": Reason.UNSAFE_PAIR,
}

VOID: Final = frozenset({Reason.EXPIRED, Reason.ENGINE_CHANGED})
"""Reasons after which the handle is of no use to anybody."""


def reason_of(why: str | None) -> Reason:
    """The report's word for a P's `why`; one that is not known proves nothing."""
    return _REASONS.get(why or "", Reason.NO_PROOF)


def keeps_waiting(account: Account) -> bool:
    """Whether D still keeps a handle for one read that P has not done: of a prompt that differs, or is there already, P has
    told D."""
    return not account.pulled and account.why not in (None, "diverged", "below_threshold", "local_hit")
