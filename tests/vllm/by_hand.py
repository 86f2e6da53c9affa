"""Turns driven by hand, engine by engine, as a router would: what the connector's tests share."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from real_engines import EngineSet, client, direct, metrics, post
from real_engines import release as forget

COMPLETIONS = "/v1/completions"
BLOCK = 32
BYTES_PER_TOKEN = 4 * 2 * 64 * 2 * 4
"""The tiny model: 4 layers, 2 KV heads of 64 values, keys and values, in float32."""
FIRST_TURN: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}


def body(engines: EngineSet | Pair, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> dict[str, Any]:
    """A greedy request for exactly `max_tokens` tokens."""
    return {
        "model": engines.model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


@dataclass(frozen=True)
class Pair:
    """Engines of two sets, to be used like one set."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    model: str


@dataclass(frozen=True)
class Turn:
    """What P and D said."""

    prompt: list[int]
    generated: list[int]
    p: dict[str, Any]
    """P's `kv_transfer_params.backhaul.account`."""
    d: dict[str, Any]
    handle: dict[str, Any]
    """D's whole `kv_transfer_params`."""

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.generated]

    @property
    def for_p(self) -> dict[str, Any]:
        """The handle as a router sends it back."""
        ours = self.handle.get("backhaul", {})
        return {**self.handle, "backhaul": {k: v for k, v in ours.items() if k not in ("account", "token_ids")}}

    @property
    def lease(self) -> str:
        return str(self.handle["remote_request_id"])


async def ask_p(
    engines: EngineSet | Pair, prompt: Sequence[int], handle: Mapping[str, Any] | None = None, **more: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The prefill leg: P's account, and its parameters for D."""
    asked = body(engines, prompt, kv_transfer_params=dict(handle or FIRST_TURN), **more)
    answer = await post(engines.prefill[0], COMPLETIONS, asked)
    params: dict[str, Any] = answer["kv_transfer_params"]
    return (params.get("backhaul") or {}).get("account", {}), params


async def ask_p_only(
    engines: EngineSet | Pair, prompt: Sequence[int], handle: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """P's account of a turn that goes no further. P hears that nobody will read its blocks, as when D's front end refuses
    a request: it would keep them for 30 seconds."""
    account, params = await ask_p(engines, prompt, handle, **more)
    await forget(engines.decode[0], params)
    return account


async def ask_d(
    engines: EngineSet | Pair,
    prompt: Sequence[int],
    params: Mapping[str, Any] | None,
    max_tokens: int,
    wishes: Mapping[str, Any] | None = None,
    **more: Any,
) -> tuple[list[int], dict[str, Any]]:
    """The decode leg: the generated ids, and D's `kv_transfer_params`."""
    ours = {**((params or {}).get("backhaul") or {}), "version": 1, **(wishes or {})}
    sent = {**(params or {}), "backhaul": ours}
    answer = await post(
        engines.decode[0], COMPLETIONS, body(engines, prompt, max_tokens, kv_transfer_params=sent, **more)
    )
    returned: dict[str, Any] = answer["kv_transfer_params"]
    return list(answer["choices"][0]["token_ids"]), returned


async def turn(
    engines: EngineSet | Pair,
    prompt: Sequence[int],
    handle: Mapping[str, Any] | None = None,
    max_tokens: int = 40,
    *,
    wishes: Mapping[str, Any] | None = None,
    check: bool = True,
    **more: Any,
) -> Turn:
    """Both legs. The answer must be what the prompt alone gives, on an engine that has nothing of it."""
    p_account, params = await ask_p(engines, prompt, handle, **more)
    generated, returned = await ask_d(engines, prompt, params, max_tokens, wishes, **more)
    if check:
        assert generated == await expected(engines, prompt, max_tokens)
    d_account = (returned.get("backhaul") or {}).get("account", {})
    return Turn(list(prompt), generated, p_account, d_account, returned)


async def expected(engines: EngineSet | Pair, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the prompt gives without any help."""
    answer = await direct(engines.decode[0], COMPLETIONS, body(engines, prompt, max_tokens))
    return list(answer["choices"][0]["token_ids"])


async def lease_ops(url: str, model: str, **ops: Any) -> dict[str, Any]:
    """A request for the leases of an engine."""
    asked = {"backhaul": {"version": 1, "leases": ops}}
    answer = await post(url, COMPLETIONS, {"model": model, "prompt": [1], "max_tokens": 1, "kv_transfer_params": asked})
    result: dict[str, Any] = answer["kv_transfer_params"]["backhaul"]["leases"]
    return result


async def release(engines: EngineSet | Pair, *leases: str) -> None:
    answer = await lease_ops(engines.decode[0], engines.model, release=list(leases))
    assert answer["released"] == list(leases)


def fresh(length: int) -> list[int]:
    """Token ids of which no prompt before had the first three."""
    unique = uuid.uuid4().int
    return [*(100 + unique // 1000**i % 1000 for i in range(3)), *(100 + i % 500 for i in range(3, length))]


async def alarms(engines: EngineSet | Pair) -> float:
    """vLLM's own count of reads that may have seen blocks of someone else."""
    return sum(
        [
            (await metrics(url)).total("vllm:nixl_num_notifications_after_expiry_total")
            for url in (*engines.prefill, *engines.decode)
        ]
    )


async def raw(url: str, asked: Mapping[str, Any], timeout_s: float = 60.0) -> tuple[int, dict[str, Any]]:
    """A request that may be refused: its status, and the answer's JSON."""
    async with client() as http:
        answer = await http.post(f"{url}{COMPLETIONS}", json=asked, timeout=timeout_s)
    return answer.status_code, answer.json()
