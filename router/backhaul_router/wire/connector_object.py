"""Codec of our connector's object in `kv_transfer_params`, for the router: what is read of it, and the bytes passed on.

D's object goes on to P as it came, and P's to D with what is asked of D; what is meant for the router is taken out. The
messages and their words are `backhaul_protocol`'s; what their version does not allow is an error; another version says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from backhaul_protocol import KEY, VERSION
from backhaul_protocol.account import Account
from backhaul_protocol.leases import Lease
from backhaul_protocol.messages import Ask, Proof
from backhaul_protocol.why import DECLINED, Why
from msgspec import Raw

from ..report import Reason
from .json_members import NULL, decode_members, join, without

_encode = msgspec.json.encode

PROVEN_BY_TOKENS: Final = Raw(_encode(Proof(version=VERSION, proof="tokens")))
"""Tells P that the router compared token ids and cut the handle: it then reads one that carries no digests."""


class Misunderstood(msgspec.DecodeError):
    """An object of our version that has another shape: the engine's connector is of another release, or broken."""


class _Said(msgspec.Struct):
    account: Raw | msgspec.UnsetType = msgspec.UNSET
    token_ids: Raw | msgspec.UnsetType = msgspec.UNSET
    digests: str | None = None
    whole: bool = False
    lease: Lease | None = None


class _Version(msgspec.Struct):
    version: Raw = Raw(b"null")


_VERSION: Final = b"%d" % VERSION
_FIRST: Final = b'{"version":%b,' % _VERSION
"""How our connector begins an object."""
_decode_version = msgspec.json.Decoder(_Version).decode
_decode_said = msgspec.json.Decoder(_Said).decode
_decode_account = msgspec.json.Decoder(Account | None).decode
_decode_rest = msgspec.json.Decoder(Account).decode
_decode_word = msgspec.json.Decoder(str).decode
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
    """Raises `Misunderstood`."""
    if raw is None or (kept := bytes(raw)) == b"null":
        return NOTHING
    try:
        return _read(kept)
    except msgspec.DecodeError as error:
        raise Misunderstood(f"{KEY}: {error}") from None


def _read(kept: bytes) -> Said:
    if not kept.startswith(_FIRST) and bytes(_decode_version(kept).version) != _VERSION:
        return NOTHING
    said = _decode_said(kept)
    account = token_ids = None
    if said.account is not msgspec.UNSET:
        account = _read_account(said.account)
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


def _read_account(raw: Raw) -> Account | None:
    try:
        return _decode_account(raw)
    except msgspec.ValidationError:
        members = decode_members(raw)
        word = members.pop("why", NULL)
        return msgspec.structs.replace(_decode_rest(join(members)), unknown_why=_decode_word(word))


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


# --- reasons ---------------------------------------------------------------------------------------------------------------

_REASONS: Final[Mapping[Why, Reason]] = {
    Why.DIVERGED: Reason.DIVERGED,
    Why.DIFFERS: Reason.DIVERGED,
    Why.BELOW_THRESHOLD: Reason.BELOW_THRESHOLD,
    Why.LOCAL_HIT: Reason.BELOW_THRESHOLD,
    Why.EXPIRED: Reason.EXPIRED,
    Why.RELEASED: Reason.EXPIRED,
    Why.UNKNOWN_LEASE: Reason.EXPIRED,
    Why.EVICTED: Reason.EXPIRED,
    Why.OTHER_ENGINE: Reason.ENGINE_CHANGED,
    Why.EPOCH: Reason.ENGINE_CHANGED,
    Why.NO_DIGESTS: Reason.NO_PROOF,
    Why.MALFORMED: Reason.NO_PROOF,
    Why.UNSUPPORTED: Reason.NO_PROOF,
    Why.PROMPT_DIFFERS: Reason.NO_PROOF,
    Why.UNREACHABLE: Reason.READ_FAILED,
    Why.READ_FAILED: Reason.READ_FAILED,
    Why.HOLD_ENDED: Reason.READ_FAILED,
    Why.BIDIRECTIONAL_OFF: Reason.UNSAFE_PAIR,
}

VOID: Final = frozenset({Reason.EXPIRED, Reason.ENGINE_CHANGED})
"""Reasons after which the handle is of no use to anybody."""


def reason_of(account: Account) -> Reason:
    """The report's word for why a P read nothing. One that gives a reason of another release has at any rate not read."""
    return Reason.READ_FAILED if account.why is None else _REASONS[account.why]


def keeps_waiting(account: Account) -> bool:
    """Whether D still keeps a handle for one read that P has not done: of a prompt that differs, or is there already, P has
    told D."""
    if account.pulled or account.why in DECLINED:
        return False
    return account.why is not None or account.unknown_why is not None
