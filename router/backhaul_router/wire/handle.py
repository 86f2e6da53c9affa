"""Codec of an engine's `kv_transfer_params`: the handle, read, cut and sent back, and in it our connector's object
(`backhaul_protocol`). Nothing of them is ever shown to a client.

D's object goes on to P as it came, and P's to D with what is asked of D; what is meant for the router is taken out. Field names
and rules are those of vLLM 0.32 and 0.33 (kv_connector/v1/nixl/pull_scheduler.py).
"""

from __future__ import annotations

import re
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
from .json_members import HANDLE, NULL, Members, decode_members, encode, interned, join, without

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


def read_object(raw: Raw | bytes | None) -> Said:
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


_REQUIRED: Final = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_REQUIRED_KEYS: Final = frozenset(_REQUIRED)


class Handle(msgspec.Struct, frozen=True, gc=False):
    """Transfer handle, an engine's `kv_transfer_params`: where one request's blocks lie. Unknown fields are carried verbatim."""

    params: bytes
    engine_id: str
    request_id: str
    tokens: int
    """Tokens whose KV the engine says it holds (`remote_num_tokens`)."""
    blocks: int
    """Blocks pinned, over all KV cache groups."""
    groups: int
    cached: int | None
    """P's answer only: tokens that P found cached or read (`remote_prefill_cached_tokens`)."""
    passed_on: bytes | None = None
    """What our connector says beside the handle to the engine that it is for."""
    digests: bool = False
    """D's: it carries digests of its blocks, so that a P of ours can check it by itself."""
    lease: Lease | None = None
    """D's: what it promises, where it runs our connector. The lease's id is `request_id`."""
    whole: bool = False
    """D's: it cannot be cut, since a sliding window has left blocks behind. Only a P of ours can tell what it is good for."""


_RANK: Final = re.compile(r"_dp\d+$")


def process_of(engine_id: str) -> str:
    """What an engine's restart changes: the id without the data-parallel rank (vLLM's v1/engine/core.py)."""
    return _RANK.sub("", engine_id) if "_dp" in engine_id else engine_id


class _Params(msgspec.Struct):
    remote_block_ids: list[list[int]] | None
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int | str
    remote_num_tokens: int = 0
    remote_prefill_cached_tokens: int | None = None
    transfer_mode: str = "pull"
    backhaul: Raw | msgspec.UnsetType = msgspec.UNSET


class _Beside(msgspec.Struct):
    backhaul: Raw = NULL


_NO_TOKENS: Final = Raw(b"0")
_FREED: Final = 0
"""vLLM's null block: it stands in a list for one that was freed."""
_decode_groups = msgspec.json.Decoder(list[list[int]]).decode
_decode_params = msgspec.json.Decoder(_Params).decode
_decode_beside = msgspec.json.Decoder(_Beside).decode


class Params(msgspec.Struct, frozen=True):
    """Decoded `kv_transfer_params` of an engine: a handle, and what our connector says beside it."""

    handle: Handle | None = None
    token_ids: tuple[int, ...] | None = None
    """Generated ids, which our plugin adds where there is no handle as well."""
    account: Account | None = None


_NO_PARAMS: Final = Params()


def read_params(raw: Raw | bytes | None) -> Params:
    """No handle is found where a required field is missing, where it holds no blocks, or was made for push transfer.

    Raises `msgspec.DecodeError`."""
    if raw is None or (kept := bytes(raw)) == b"null":
        return _NO_PARAMS
    try:
        params = _decode_params(kept)
    except msgspec.ValidationError:
        if decode_members(kept).keys() >= _REQUIRED_KEYS:
            raise
        said = read_object(_decode_beside(kept).backhaul)
        return Params(None, said.token_ids, said.account)
    said = NOTHING
    if params.backhaul is not msgspec.UNSET:
        said = read_object(params.backhaul)
        kept = without(kept, KEY, params.backhaul)
    nothing = Params(None, said.token_ids, said.account)
    groups = params.remote_block_ids or ()
    blocks = sum(map(len, groups))
    if not blocks or params.transfer_mode != "pull":
        return nothing
    handle = Handle(
        params=kept,
        engine_id=interned(params.remote_engine_id),
        request_id=params.remote_request_id,
        tokens=params.remote_num_tokens,
        blocks=blocks,
        groups=len(groups),
        cached=params.remote_prefill_cached_tokens,
        passed_on=said.passed_on,
        digests=said.digests,
        lease=interned(said.lease),
        whole=said.whole or any(_FREED in ids for ids in groups),
    )
    return Params(handle, said.token_ids, said.account)


def no_handle(raw: Raw | bytes | None) -> str:
    """What `kv_transfer_params` are in which `read_params` finds no handle. Says nothing that a client must not see."""
    if raw is None or bytes(raw) == b"null":
        return f"no {HANDLE}"
    members = decode_members(raw)
    if not members:
        return f"no {HANDLE}"
    if not members.keys() >= _REQUIRED_KEYS:
        return f"{HANDLE} of another connector than NIXL's"
    if _decode_params(join(members)).transfer_mode != "pull":
        return f"{HANDLE} for another transfer mode than pull"
    return f"{HANDLE} that hold no blocks"


def whole_handle(handle: Handle) -> Members:
    """The handle for a P of ours, which finds out by itself what of it to claim. Any other P, such as one that was restarted
    without our connector, finds no token in it to read: it could not tell whether they are this prompt's."""
    members = decode_members(handle.params)
    members["remote_num_tokens"] = _NO_TOKENS
    if handle.passed_on is not None:
        members[KEY] = Raw(handle.passed_on)
    return members


def cut_handle(handle: Handle, blocks: int, block_size: int, *, to_ours: bool = False) -> Members:
    """The handle for its `blocks` leading blocks alone, without what our connector says of the whole. P trims block lists
    from their front, so the token count and every list must be cut together: cutting one of them reads KV of other positions.
    A P of ours is told that the router proved what it was cut to."""
    members = decode_members(handle.params)
    groups = _decode_groups(members["remote_block_ids"])
    members["remote_block_ids"] = Raw(encode([group[:blocks] for group in groups]))
    members["remote_num_tokens"] = Raw(encode(blocks * block_size))
    if to_ours:
        members[KEY] = PROVEN_BY_TOKENS
    return members


def quotes_handle(body: bytes) -> bool:
    """Whether an engine's error says where blocks lie."""
    return any(key.encode() in body for key in _REQUIRED)
