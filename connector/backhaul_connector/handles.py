"""Input validation: vLLM's own fields in `kv_transfer_params`, checked before anything in the engine relies on them.

vLLM takes any JSON object there, and a wrong one can hang a request or end the engine core. Whatever comes in is read into
the values of this module or refused; nothing here raises for what a client can write. Our own object is `backhaul_protocol`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Annotated, Any, Final

import msgspec
from backhaul_protocol.fields import Count, Name, Port, Size
from backhaul_protocol.messages import convert
from msgspec import Meta

_REMOTE_KEYS: Final = (
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "remote_registration_generation",
    "remote_block_size",
    "tp_size",
    "dcp_size",
    "pp_size",
)
_INTERNAL_KEYS: Final = ("_remote_blocks_processed", "_p_side_truncated")
"""Marks that vLLM keeps in the request's own object, and that a client must not set."""

BlockId = Annotated[int, Meta(ge=0, lt=2**31)]


class Handle(msgspec.Struct, frozen=True):
    """Where another engine keeps KV blocks: the fields of vLLM's own that a read needs."""

    remote_block_ids: Annotated[list[list[BlockId]], Meta(min_length=1, max_length=256)]
    remote_engine_id: Name
    remote_request_id: Name
    remote_host: Annotated[str, Meta(min_length=1, max_length=255)]
    remote_port: Port
    remote_num_tokens: Count | None = None
    tp_size: Size = 1
    dcp_size: Size = 1
    pp_size: Size = 1
    remote_blocks_expiry_time: float | None = None
    remote_registration_generation: Count | None = None

    def cut(self, block_size: int, tokens: int) -> list[list[int]] | None:
        """The lists without blocks behind the first `tokens` tokens. `None` if they hold fewer, or if how many they are
        does not agree with `remote_num_tokens`: vLLM pairs remote blocks with its own from the end, so that a list of
        another length gives KV of other positions."""
        held = self.remote_num_tokens
        if held is None or held < tokens:
            return None
        if any(len(group) != -(-held // block_size) for group in self.remote_block_ids):
            return None
        return [group[: -(-tokens // block_size)] for group in self.remote_block_ids]


class Sender(msgspec.Struct, frozen=True):
    """Whom to tell that blocks are not wanted: enough of a handle for that."""

    remote_engine_id: Name
    remote_request_id: Name
    remote_host: Annotated[str, Meta(min_length=1, max_length=255)]
    remote_port: Port
    tp_size: Size = 1
    dcp_size: Size = 1
    pp_size: Size = 1


def read_handle(params: Mapping[str, Any]) -> Handle | None:
    """The handle among a request's parameters, or `None` where a field is missing or no such thing."""
    return convert(dict(params), Handle)


def keep_sender(params: MutableMapping[str, Any], groups: int) -> bool:
    """Leaves of a handle that is none only whom to tell so, with empty block lists; false where not even that is there."""
    sender = convert(dict(params), Sender)
    strip(params)
    if sender is None:
        return False
    params.update(msgspec.structs.asdict(sender), remote_block_ids=[[] for _ in range(groups)])
    return True


def has_handle(params: Mapping[str, Any]) -> bool:
    """Whether a request means to bring a handle: the fields that a first turn may send as null do not count."""
    return any(params.get(key) not in (None, [], "") for key in _REMOTE_KEYS[:5])


def strip(params: MutableMapping[str, Any]) -> None:
    """Takes the handle out, so that vLLM computes the prompt."""
    for key in _REMOTE_KEYS:
        params.pop(key, None)


def normalize(params: MutableMapping[str, Any]) -> None:
    """Makes the two flags booleans of which at most one is set, and removes vLLM's internal marks."""
    for key in _INTERNAL_KEYS:
        params.pop(key, None)
    for key in ("do_remote_prefill", "do_remote_decode"):
        if key in params:
            params[key] = params[key] is True
    if params.get("do_remote_decode"):
        params["do_remote_prefill"] = False
