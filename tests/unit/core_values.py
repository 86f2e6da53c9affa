"""Ready-made values of the router's core, small and alike, for the tests of its parts."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from backhaul_router import wire
from backhaul_router.config import RouterConfig
from backhaul_router.fleet.engine import Engine, Role
from backhaul_router.fleet.fleet import Fleet
from backhaul_router.ledger import digests
from backhaul_router.ledger.records import Branch, Held, Taken
from backhaul_router.wire import Endpoint, Facts, Handle

BLOCK = 16
P1, P2 = "http://p1:1", "http://p2:1"
D1, D2 = "http://d1:1", "http://d2:1"


def engine(url: str, **fields: Any) -> Engine:
    """`http://p...` prefills, `http://d...` decodes."""
    role = Role.PREFILL if url.startswith("http://p") else Role.DECODE
    given: dict[str, Any] = {
        "version": "0.32.0",
        "models": ("m",),
        "adapters": frozenset(),
        "block_size": BLOCK,
        "max_model_len": 4096,
        "renders": True,
        "streams_handles": True,
    }
    return Engine(url=url, role=role, **given | fields)


def fleet(*urls: str, **fields: Any) -> Fleet:
    return Fleet(engine(url, **fields) for url in urls or (P1, D1))


def config(**fields: Any) -> RouterConfig:
    return RouterConfig(**{"prefill": (P1,), "decode": (D1,), **fields})


ENGINE_ID = "3f0c9c1e-6d57-4f6b-9a55-0c5a4a9d2b11"
"""As vLLM makes one at every start."""


def params(request_id: str = "r", *, tokens: int = 128, engine_id: str = ENGINE_ID, **fields: Any) -> dict[str, Any]:
    """An engine's `kv_transfer_params`, as vLLM 0.32 writes them."""
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(1, 1 + -(-tokens // BLOCK)))],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 12345.678901234567,
        "transfer_mode": "pull",
    } | fields


def encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def handle(request_id: str = "r", *, tokens: int = 128, **fields: Any) -> Handle:
    found = wire.read_params(encoded(params(request_id, tokens=tokens, **fields))).handle
    assert found is not None
    return found


def says(*, tokens: int = 128, ttl_s: float = 480.0, shared: bool = True, **fields: Any) -> dict[str, Any]:
    """What a D of ours says beside its handle."""
    return {
        "version": 1,
        "digests": base64.b64encode(bytes(4 * (tokens // BLOCK))).decode(),
        "block_size": BLOCK,
        "epoch": "e0",
        "lease": {"port": 40123, "ttl_s": ttl_s, "shared": shared},
    } | fields


def leased(
    request_id: str = "r", *, tokens: int = 128, decode: str = D1, deadline: float = 1000.0, **says_more: Any
) -> Held:
    """A handle of a D that runs our connector."""
    return held(request_id, tokens=tokens, decode=decode, deadline=deadline, backhaul=says(tokens=tokens, **says_more))


def held(
    request_id: str = "r", *, tokens: int = 128, decode: str = D1, deadline: float = 1000.0, **fields: Any
) -> Held:
    return Held(handle(request_id, tokens=tokens, **fields), decode, deadline, tokens)


def branch(
    messages: Sequence[bytes] = (b"a",),
    ids: Sequence[int] = range(128),
    *,
    held: Held | None = None,
    decode: str = D1,
    prefill: str | None = P1,
    **fields: Any,
) -> Branch:
    given: dict[str, Any] = {
        "chain": digests.chain(messages),
        "blocks": digests.block_chain(ids, BLOCK),
        "block_size": BLOCK,
        "tokens": len(ids),
        "message_bytes": sum(map(len, messages)),
        "decode": decode,
        "prefill": prefill,
        "held": held,
    }
    return Branch(**given | fields)


def taken(of: Branch | None = None, *, common: int = 1, **fields: Any) -> Taken:
    """What the ledger hands out for a branch, its handle included."""
    return Taken(branch=of, held=of.held if of else None, common=common, **fields)


def facts(body: dict[str, Any] | None = None, endpoint: Endpoint = Endpoint.CHAT, **fields: Any) -> Facts:
    """A request, read: one user message, unless `body` says more."""
    given = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} if endpoint is Endpoint.CHAT else {}
    return wire.read_request(endpoint, encoded(given | (body or {}) | fields))
