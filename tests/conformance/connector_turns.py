"""Turns of a router that knows the connector, and what it asks of D and P, for the checks of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .engines import Answer, Engines, Json

KEEP = {"version": 1, "retain": True, "shared": True}
"""What the router asks of D: keep the blocks, for many readers."""

FIRST_TOKENS = 300
GENERATED = 24


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return [40 + (i * (7 + 2 * seed) + i * i * seed) % 80 for i in range(length)]


FIRST = prompt_of(FIRST_TOKENS)


def offered(handle: Json, **changed: Json) -> Json:
    """D's handle as the router sends it to P; `changed` replaces fields of its `backhaul` object."""
    ours = {name: value for name, value in handle["backhaul"].items() if name not in ("account", "token_ids")}
    return handle | {"backhaul": ours | changed}


def asking(handle: Json, **wishes: Json) -> Json:
    """P's handle as the router sends it to D, with what it wants kept."""
    return handle | {"backhaul": handle["backhaul"] | KEEP | wishes}


def account(answer: Answer) -> Json:
    return answer.handle["backhaul"]["account"]


async def kept_turn(engines: Engines, prompt: Sequence[int], handle: Json = None, **wishes: Json) -> Answer:
    """A turn whose blocks D keeps: D's answer."""
    p = await engines.prefill(prompt, handle and offered(handle))
    return await engines.decode(prompt, asking(p.handle, **wishes), max_tokens=GENERATED)


async def grown(engines: Engines, **wishes: Json) -> tuple[Json, list[int]]:
    """D's handle of a first turn, and the prompt of the second, which extends it."""
    one = await kept_turn(engines, FIRST, **wishes)
    return one.handle, [*FIRST, *one.choice["token_ids"], *prompt_of(50, seed=2)]


async def read(engines: Engines, prompt: Sequence[int], handle: Json) -> Json:
    """Prefill with a handle as given, then decode, keeping nothing: P's account, once the answer was found right."""
    p = await engines.prefill(prompt, handle)
    answer = await engines.decode(prompt, asking(p.handle, retain=False), max_tokens=GENERATED)
    assert answer.choice["token_ids"] == await engines.reference(prompt, max_tokens=GENERATED)
    return account(p)


async def refused(engines: Engines, prompt: Sequence[int], handle: Json) -> str:
    """Why nothing was read; the answer is right all the same."""
    told = await read(engines, prompt, handle)
    assert (told["pulled"], told["local"], told["computed"]) == (0, 0, len(prompt)), told
    return told["why"]


async def operate(engines: Engines, **orders: Json) -> Json:
    """A lease operation: D's word on it."""
    params = {"backhaul": {"version": 1, "leases": orders}}
    answer = await engines.complete(
        engines.decode_url, [1], max_tokens=1, cache_salt=None, temperature=None, kv_transfer_params=params
    )
    assert answer.status == 200, answer.text
    assert answer.handle.keys() == {"backhaul"}, answer.text
    return answer.handle["backhaul"]["leases"]


async def release(engines: Engines, *handles: Mapping[str, Json]) -> None:
    ids = [handle["remote_request_id"] for handle in handles]
    assert (await operate(engines, release=ids))["released"] == ids


def without_time(told: Json) -> Json:
    """An account's numbers that do not depend on how fast things went."""
    return {name: value for name, value in told.items() if name not in ("bytes", "read_ms", "claim_ms")}
