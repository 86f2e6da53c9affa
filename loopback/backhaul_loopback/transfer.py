"""Model of a KV connector: vLLM 0.32's NIXL pull rules (`nixl/pull_scheduler.py`, `pull_worker.py`), traps included.

Nothing here compares tokens. What a request reads is decided by counts and block numbers alone, so a handle that
does not belong to the prompt gives wrong KV and a correct-looking answer.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .blocks import Block
from .errors import EngineDeadError

Params = dict[str, Any]

EXPIRY_MARGIN_S = 5.0
"""P declines to read blocks whose lease ends within this time (`_KV_BLOCKS_EXPIRY_SAFETY_MARGIN`)."""

_READ_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class Load(enum.Enum):
    """What an admitted request does about its parameters."""

    NONE = "none"
    NOTIFY = "notify"
    """Nothing to read: only tell the holder that its blocks can go."""
    READ = "read"
    PARK = "park"
    """vLLM promised external tokens and never starts the read: the request waits forever."""


@dataclass(frozen=True)
class Source:
    """Where a handle says that blocks lie."""

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...]
    expiry: float | None
    """On the holder's clock."""

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Source:
        try:
            return cls(
                engine_id=str(params["remote_engine_id"]),
                request_id=str(params["remote_request_id"]),
                host=str(params["remote_host"]),
                port=int(params["remote_port"]),
                block_ids=tuple(params["remote_block_ids"][0]),
                expiry=params.get("remote_blocks_expiry_time"),
            )
        except (TypeError, ValueError, IndexError) as error:
            raise EngineDeadError(f"kv_transfer_params of a wrong shape: {error}") from error


def readable(params: Mapping[str, Any]) -> bool:
    return bool(params.get("remote_block_ids")) and all(key in params for key in _READ_KEYS)


def external_tokens(params: Mapping[str, Any], *, num_prompt: int, num_local: int, threshold: int) -> int:
    """Tokens that the scheduler expects from the peer (`get_num_new_matched_tokens`).

    The threshold spares small reads on P only; D reads whatever its prefix cache lacks.
    """
    if params.get("do_remote_prefill"):
        return max(num_prompt - num_local, 0)
    if params.get("do_remote_decode") and readable(params):
        count = min(params.get("remote_num_tokens") or 0, num_prompt) - num_local
        return count if count > 0 and count >= threshold else 0
    return 0


def start_load(params: Params, external: int, *, bidirectional: bool) -> Load:
    """What follows the allocation (`update_state_after_alloc`). Consumes the parameters: one load per request."""
    offered = params.get("do_remote_prefill") or (params.get("do_remote_decode") and bidirectional)
    if not offered:
        return Load.PARK if external else Load.NONE
    load = Load.NONE
    if params.get("remote_block_ids"):
        if readable(params):
            load = Load.READ if external else Load.NOTIFY
        elif external:
            load = Load.PARK
    elif external:
        raise EngineDeadError(
            "do_remote_prefill without remote_block_ids: assertion failed in update_state_after_alloc"
        )
    params["do_remote_prefill"] = False
    return load


def align(local: Sequence[Block], remote: Sequence[int]) -> Sequence[int]:
    """Which remote block fills each local one: the *last* ones, whatever they hold (`_apply_prefix_caching`).

    Right only if the remote list ends where the read ends: a handle that is cut must be cut in both its lists.
    """
    if len(remote) < len(local):
        raise EngineDeadError(
            f"{len(local)} blocks to fill from {len(remote)} remote ones: assertion failed in the worker"
        )
    return remote[len(remote) - len(local) :]


def handle(
    *,
    is_prefill_leg: bool,
    engine_id: str,
    request_id: str,
    host: str,
    port: int,
    block_ids: Sequence[int],
    num_tokens: int,
    expiry: float | None,
    speaks_033: bool,
) -> Params:
    """The parameters that a finished request returns (`request_finished`). `expiry` is set on D only."""
    since_033 = {"remote_registration_generation": 1} if speaks_033 else {}
    return {
        "do_remote_prefill": is_prefill_leg,
        "do_remote_decode": not is_prefill_leg,
        "remote_block_ids": [list(block_ids)],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": expiry,
        **since_033,
        "transfer_mode": "pull",
    }
