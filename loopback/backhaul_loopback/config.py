"""Configuration of one loopback engine, in vLLM's words and with its defaults, and fault injection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from .clock import CostModel

Role = Literal["prefill", "decode"]

GENERATE_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    role: Role
    model: str = "loopback"
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port, and keeps it over restarts."""
    side_channel_port: int = 0
    vllm_version: str = "0.33.0"
    """Whose dialect is spoken: 0.33 puts handles, or null, into the chunks of streams, says how a response ended in its last
    event, and uses Anthropic's words for errors; what is older than that, as 0.32 does, none of it."""
    engine_id: str | None = None
    """A fixed one, which outlives restarts; `None` makes a new one at every start, as vLLM does."""
    block_size: int = 16
    num_blocks: int = 16_384
    """As vLLM's `num_gpu_blocks`, the null block included."""
    max_model_len: int = 131_072
    prefix_caching: bool = True
    bidirectional_kv_xfer: bool = True
    kv_recompute_threshold: int = 64
    decoder_kv_blocks_ttl: float = 480.0
    kv_lease_duration: float = 30.0
    """Seconds for which P keeps blocks for D, unless D's heartbeats extend it."""
    stream_handles: Literal["plugin", "off"] = "plugin"
    """`plugin`: the last streamed chunk carries the handle and the generated ids, as with Backhaul's vLLM plugin.
    `off`: stock vLLM, where some streams hide the handle although D holds the blocks: all of 0.32's, of 0.33's only those
    of `/v1/messages`."""
    enable_scale_out: bool = True
    """False answers the render endpoints with 403, as vLLM without `--enable-scale-out`."""
    enable_prompt_tokens_details: bool = True
    connector: Literal["stock", "backhaul"] = "stock"
    """`backhaul`: what D publishes is verified before it is read, leases can be shared, renewed and released, and a read
    that fails is computed instead. `stock`: vLLM's NIXL connector, traps included."""
    lease_port: int = 0
    """Of the connector's lease channel. 0 takes a free one."""
    claim_timeout_s: float = 1.0
    """Real seconds, whatever the clock: for how long P waits for D's answer before it computes instead."""
    hold_s: float = 30.0
    """For how long P asks D to keep blocks that it is about to read."""
    max_leased_fraction: float = 0.8
    """Of the blocks: beyond it the oldest leases are evicted, so that leases never starve requests."""
    costs: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        if self.role not in ("prefill", "decode"):
            raise ValueError(f"role={self.role!r}: use prefill or decode")
        if self.block_size < 1 or self.num_blocks < 2:
            raise ValueError(f"block_size={self.block_size}, num_blocks={self.num_blocks}: at least 1 and 2")
        if self.connector not in ("stock", "backhaul"):
            raise ValueError(f"connector={self.connector!r}: use stock or backhaul")
        if not 0 <= self.max_leased_fraction <= 1:
            raise ValueError(f"max_leased_fraction={self.max_leased_fraction}: from 0 to 1")

    @property
    def speaks_033(self) -> bool:
        major, minor, *_ = self.vllm_version.split(".")
        return (int(major), int(minor)) >= (0, 33)


@dataclass
class Faults:
    """Failures to order while the engine runs. `status`, `drop`, `stall` and `die_after_bytes` hit requests to `paths`,
    the next `times` of them, or all until they are unset when `times` is `None`."""

    status: int | None = None
    """Answer with this status and an error object."""
    drop: bool = False
    """Close the connection without an answer."""
    stall: bool = False
    """Say nothing until the client leaves."""
    die_after_bytes: int | None = None
    """Cut the connection once this many bytes of the answer's body were sent."""
    times: int | None = None
    paths: tuple[str, ...] = GENERATE_PATHS
    fail_kv_loads: int = 0
    """So many of the next reads from a peer fail."""
    lie: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Rewrites each handle before it goes out."""
    lie_digests: Callable[[bytes], bytes] | None = None
    """Rewrites what D publishes of its blocks: 4 bytes for each, before they are encoded."""
    lease_channel: Literal["stall", "refuse"] | None = None
    """`stall`: claims are never answered. `refuse`: whoever connects is hung up on."""
    drop_reads: int = 0
    """So many of the next reads of this engine's blocks lose their connection."""

    def clear(self) -> None:
        for switch in fields(self):
            setattr(self, switch.name, switch.default)

    def strikes(self, path: str) -> bool:
        """Whether a request to `path` is hit; counts `times` down."""
        armed = self.status is not None or self.drop or self.stall or self.die_after_bytes is not None
        if not armed or path not in self.paths or self.times == 0:
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass(frozen=True)
class Received:
    """One HTTP request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: Any
    """The parsed JSON; `None` when there was none."""
    raw: bytes
