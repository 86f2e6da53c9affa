"""Encoder of the request bodies of a turn's legs: what P and D are sent in place of the client's request, and how a handle is
released."""

from __future__ import annotations

from collections.abc import Sequence

from backhaul_protocol import KEY
from backhaul_protocol.messages import Ask
from msgspec import Raw

from . import connector_object
from .json_members import FALSE, HANDLE, ONE, TRUE, Members, decode_members, encode, join
from .request import Facts


def prefill_body(facts: Facts, token_ids: Sequence[int] | Raw | None, handle: Members | None) -> bytes:
    """P's leg: one token, not streamed, blocks kept for D. `handle` is what `cut_handle` or `whole_handle` made of D's. Here
    and in `decode_body` the ids may have been encoded before (`encode_ids`)."""
    api = facts.api
    members = {key: value for key, value in facts.members.items() if key not in api.not_for_prefill}
    members |= {"stream": FALSE, api.limit: ONE, **api.for_prefill(members)}
    params = {**(handle or {}), "do_remote_decode": TRUE, "do_remote_prefill": FALSE}
    _put_ids(facts, members, params, token_ids)
    members[HANDLE] = Raw(join(params))
    return join(members)


def decode_body(
    facts: Facts,
    token_ids: Sequence[int] | Raw | None,
    handle: bytes | None,
    *,
    ids_back: bool,
    ask: Ask | None = None,
    passed_on: bytes | None = None,
) -> bytes:
    """D's leg. `handle` is P's, sent verbatim; without one D runs the turn alone, and an empty object still tells our
    plugin that a router asks. `ids_back` asks for the generated ids (not streamed: a stream has them in its last event).
    `ask` is for a D that runs our connector, as is what P's says to it (`passed_on`)."""
    api, members = facts.api, dict(facts.members)
    if facts.stream and not facts.wants_usage:
        members |= api.for_usage(members)
    if ids_back and api.asks_for_ids is not None and (api.shows_ids or not facts.stream):
        members[api.asks_for_ids] = TRUE
    params = decode_members(handle) if handle else {}
    if handle:
        params["do_remote_prefill"] = TRUE
        params["do_remote_decode"] = FALSE
    _put_ids(facts, members, params, token_ids)
    if ask is not None:
        params[KEY] = connector_object.asking(ask, passed_on)
    if params or ids_back:
        members[HANDLE] = Raw(join(params))
    return join(members)


def encode_ids(token_ids: Sequence[int]) -> Raw:
    """Token ids as JSON."""
    return Raw(encode(token_ids))


def _put_ids(facts: Facts, members: Members, params: Members, token_ids: Sequence[int] | Raw | None) -> None:
    if token_ids is None:
        return
    facts.api.put_ids(members, params, token_ids if isinstance(token_ids, Raw) else encode_ids(token_ids))


def release_body(handle: bytes) -> bytes:
    """A request that an engine of the other role rejects before admission (no such model), which makes it tell the holder
    to free the handle's blocks at once: nothing is computed, nothing pinned (vLLM PR 41269)."""
    params = decode_members(handle)
    params["do_remote_prefill"] = TRUE
    params["do_remote_decode"] = FALSE
    return encode(
        {"model": "backhaul-release", "prompt": [0], "max_tokens": 1, "stream": False, HANDLE: params},
    )
