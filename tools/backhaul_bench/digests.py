"""`backhaul bench digests`: what proving a long history costs the engines' schedulers per turn, the wire, and the router.

No engine runs: this is the connector's own code, on a prompt as vLLM's scheduler has it, its block hashes computed already, as
vLLM does for its prefix cache. The router's part is the proof by tokens, which stock engines need.
"""

from __future__ import annotations

import hashlib
import json
import timeit
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from backhaul_cli.options import Count
from backhaul_connector.claims import Claims
from backhaul_connector.decode_side import DecodeSide
from backhaul_connector.lease_table import Grant, LeaseTable
from backhaul_connector.prefill_side import PrefillSide
from backhaul_connector.shape import Shape
from backhaul_protocol.lease_channel import Claim
from backhaul_router.ledger import digests

from .options import OptionsError, Written

_NEW = 1000
"""Tokens that a turn adds."""


@dataclass(frozen=True, kw_only=True)
class Options(Written):
    tokens: Annotated[Count, "of the history"] = 131_072
    block_size: Annotated[Count, "TOKENS", "of a block"] = 16
    repeats: Annotated[Count, "of each measurement"] = 30

    def __post_init__(self) -> None:
        if self.tokens < self.block_size:
            raise OptionsError(f"--tokens {self.tokens}: at least one block of {self.block_size}")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The fastest of the repeats, in milliseconds of one core: what the work takes, whatever else the machine does."""

    tokens: int
    block_size: int
    repeats: int
    publish_ms: float
    """D: the handle, and the lease."""
    locate_ms: float
    """P: reading the handle, and finding what is in common."""
    claim_ms: float
    """D: the claim, its end, and the lease's."""
    chain_ms: float
    """The router, with stock engines: the digests of a prompt of which it knows nothing."""
    extend_ms: float
    """The same where all but the last 1,000 tokens are those of an earlier turn."""
    bytes_per_token: float
    """What D's answer has for the proof, as it is in the JSON."""


@dataclass
class _Request:
    """As far as the connector looks at vLLM's."""

    block_hashes: list[bytes]
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    all_token_ids: Sequence[int]
    kv_transfer_params: dict[str, Any]
    request_id: str = "lease"
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    num_output_tokens: int = 1
    skip_reading_prefix_cache: bool = False
    abort_immediately: bool = False


def _request(hashes: list[bytes], tokens: int, params: dict[str, Any]) -> _Request:
    return _Request(hashes, tokens, tokens, tokens, range(tokens), params)


def measure(options: Options) -> Costs:
    size, blocks = options.block_size, options.tokens // options.block_size
    hashes = [hashlib.sha256(i.to_bytes(4)).digest() for i in range(blocks)]
    ids = list(range(1, blocks + 2))
    shape = Shape(size, 1, [1], 64, True, None)
    ran = _request(hashes, blocks * size + 1, {"backhaul": {"version": 1, "shared": True}})
    out = {
        "remote_block_ids": (ids,),
        "remote_engine_id": "D",
        "remote_request_id": ran.request_id,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "remote_num_tokens": ran.num_tokens,
    }

    def publish() -> dict[str, Any]:
        table = LeaseTable("D", 10 * blocks)
        side = DecodeSide(shape, table, ttl_s=480.0, port=5700, prompt_from_p=int)
        decode = side.admit(ran, dict(ran.kv_transfer_params))
        tokens = side.kept_tokens(ran, decode)
        assert tokens is not None
        return side.keep(ran, decode, tokens, (ids,), out)

    handle = publish()
    claims = Claims(timeout_s=1.0, hold_s=30.0)
    prefill = PrefillSide(shape, claims)

    def locate() -> None:
        asked = _request(hashes, blocks * size + 1, {**handle, "do_remote_decode": True})
        assert prefill.admit(asked, asked.kv_transfer_params).blocks == blocks

    lists, table = [ids[:blocks]], LeaseTable("D", 10 * blocks)

    def claim() -> None:
        table.add("read", hashes, lists, ids, block_size=size, ttl_s=480.0, shared=True)
        asked = Claim(1, "read", "D", table.epoch, blocks, hashes[-1], hold_s=30.0, claim="c")
        assert isinstance(table.claim(asked), Grant)
        table.done("read", "c", read=True)
        table.release(["read"])

    prompt = [i * 7919 % 50_000 for i in range(options.tokens)]
    known = digests.block_chain(prompt[: max(0, options.tokens - _NEW)], size)
    try:
        return Costs(
            tokens=options.tokens,
            block_size=size,
            repeats=options.repeats,
            publish_ms=_best_ms(publish, options.repeats),
            locate_ms=_best_ms(locate, options.repeats),
            claim_ms=_best_ms(claim, options.repeats),
            chain_ms=_best_ms(lambda: digests.block_chain(prompt, size), options.repeats),
            extend_ms=_best_ms(lambda: digests.block_chain(prompt, size, known), options.repeats),
            bytes_per_token=len(json.dumps(handle["backhaul"])) / options.tokens,
        )
    finally:
        claims.close()


def _best_ms(run: Callable[[], object], repeats: int) -> float:
    return min(timeit.repeat(run, number=1, repeat=repeats)) * 1e3


def main(options: Options) -> int:
    """Prints the costs, and returns 0."""
    costs = measure(options)
    print(f"{costs.tokens:,} tokens in blocks of {costs.block_size}, best of {costs.repeats}, one core")
    for what, value in (
        ("D, scheduler: publish, and enter the lease", f"{costs.publish_ms:.2f} ms a turn"),
        ("P, scheduler: check, and locate", f"{costs.locate_ms:.2f} ms a turn"),
        ("D, lease channel: claim, done and release", f"{costs.claim_ms:.2f} ms a turn"),
        ("router, stock engines: a prompt's digests", f"{costs.chain_ms:.2f} ms"),
        (f"router: of one that goes on by {_NEW:,} tokens", f"{costs.extend_ms:.2f} ms a turn"),
        ("on the wire", f"{costs.bytes_per_token:.2f} bytes a token"),
    ):
        print(f"{what:44} {value}")
    options.write(asdict(costs))
    return 0
