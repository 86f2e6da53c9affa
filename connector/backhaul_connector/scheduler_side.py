"""Adapter to vLLM's scheduler: its hooks, and what the legs of a turn and the lease table do at each of them.

A request that comes with `do_remote_decode` is a prefill leg (`prefill_side`), any other with parameters a decode leg
(`decode_side`) or a request for the leases; one engine may see all. vLLM calls on_new_request, get_num_new_matched_tokens (at
every attempt to schedule), update_state_after_alloc, update_connector_output (when a read has ended) and request_finished, in
this order; build_connector_meta at the end of every step.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from backhaul_protocol.why import Why
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.request import RequestStatus

from . import cache_groups, handles
from .claims import Claims
from .decode_side import Decode, DecodeSide
from .lease_channel import LeaseServer
from .lease_table import LeaseTable
from .prefill_side import Prefill, PrefillSide
from .room import Room
from .settings import Settings
from .shape import Shape
from .stats import BackhaulStats
from .worker_side import Orders

logger = logging.getLogger("vllm.backhaul_connector")

_FINISHED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
_GAUGES_EVERY_S = 1.0

Answer = tuple[bool, dict[str, Any] | None]
"""Of request_finished: whether vLLM is to keep the blocks, and the response's `kv_transfer_params`."""


@dataclass
class _Outbox:
    """What the next step's metadata will carry."""

    keep: set[str] = field(default_factory=set)
    hold_ends: dict[str, float] = field(default_factory=dict)


class BackhaulScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any, settings: Settings) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        groups = kv_cache_config.transfer_groups
        self._windows = cache_groups.windows([group.kv_cache_spec for group in groups], self.block_size)
        self._shape = Shape(
            block_size=self.block_size,
            groups=len(groups),
            block_bytes=[self.transfer_tp_size * _bytes_of_block(group) for group in groups],
            recompute_threshold=self.kv_recompute_threshold,
            bidirectional=bool(self.is_bidirectional_kv_xfer_enabled),
            unsupported=self._why_unsupported(),
            windows=() if isinstance(self._windows, str) else self._windows,
            extra_keys=cache_groups.extra_keys,
        )
        self.leases = LeaseTable(engine_id, kv_cache_config.num_blocks, settings.max_leased_fraction)
        self._room = Room(self.leases, self.block_size, len(kv_cache_config.kv_cache_groups))
        port = settings.lease_port
        if port:
            port += vllm_config.parallel_config.data_parallel_index
        self._server = LeaseServer(self.side_channel_host, port, self.leases, self._peer)
        self._claims = Claims(timeout_s=settings.claim_timeout_s, hold_s=settings.hold_s)
        self._prefill_side = PrefillSide(self._shape, self._claims)
        self._decode_side = DecodeSide(
            self._shape,
            self.leases,
            ttl_s=self.decoder_kv_blocks_ttl,
            port=self._server.port,
            prompt_from_p=self._get_remote_prefill_token_count,
        )
        self._pool: Any = None
        self._prefills: dict[str, Prefill] = {}
        self._decodes: dict[str, Decode] = {}
        self._lease_answers: dict[str, dict[str, object]] = {}
        self._reads: dict[str, Prefill | Decode] = {}
        """Reads under way; vLLM says of each when it has ended, even if its request was aborted."""
        self._outbox = _Outbox()
        self._gauges_shown = (0, 0)
        self._gauges_at = 0.0
        if self._shape.whole:
            logger.info("Backhaul: KV is read as a whole or not at all: some layers have a sliding window")
        if self._shape.unsupported:
            logger.warning("Backhaul: no digests are published and no handle is read: %s", self._shape.unsupported)

    def _why_unsupported(self) -> str | None:
        """What about this engine keeps whole blocks from being compared and cut; `None` where they can be."""
        parallel = self.vllm_config.parallel_config
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            return "context parallelism spreads a block over ranks"
        if self.use_host_buffer:
            return "KV travels through a host buffer"
        if isinstance(self._windows, str):
            return self._windows
        if self._has_mamba or self._bounded_replay:
            return "some layers keep no KV of whole prefixes"
        return None

    def _peer(self) -> dict[str, int]:
        """How this engine's workers are reached and sharded, as its handles say too."""
        parallel = self.vllm_config.parallel_config
        peer = {
            "remote_port": self.side_channel_port,
            "tp_size": self.transfer_tp_size,
            "dcp_size": parallel.decode_context_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
        }
        generation = getattr(self, "_registration_generation", None)  # vLLM 0.33: grows with each sleep
        return peer if generation is None else {**peer, "remote_registration_generation": generation}

    def bind_block_pool(self, pool: Any) -> None:
        """vLLM's blocks, and in which units it hashes them: a block's own hash is the one at its end."""
        self._pool = pool
        if self.block_size % pool.hash_block_size:
            self._shape.unsupported = f"blocks of {self.block_size} tokens are hashed by {pool.hash_block_size}"
        else:
            self._shape.hashes_per_block = self.block_size // pool.hash_block_size

    def shutdown(self) -> None:
        self._claims.close()
        self._server.stop()
        super().shutdown()

    # --- hooks --------------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if params is None:
            return
        if not isinstance(params, dict):
            logger.warning("Backhaul: kv_transfer_params of %s is no object: it is ignored", request.request_id)
            request.kv_transfer_params = None
            return
        handles.normalize(params)
        if params.get("do_remote_decode"):
            super().on_new_request(request)
            self._prefills[request.request_id] = self._prefill_side.admit(request, params)
        elif (answer := self._decode_side.lease_operations(params)) is not None:
            self._lease_answers[request.request_id] = answer
        else:
            self._decodes[request.request_id] = self._decode_side.admit(request, params)
            super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._pool is not None:
            self._room.make(request, num_computed_tokens, self._pool.get_num_free_blocks())
        matched = self._match(request, num_computed_tokens)
        if matched[0] is not None:
            self._room.attempted(request.request_id)
        return matched

    def _match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        prefill = self._prefills.get(request.request_id)
        if prefill is not None:
            return self._prefill_side.match(request, prefill, num_computed_tokens)
        decode = self._decodes.get(request.request_id)
        if decode is None:
            return 0, False
        if request.num_preemptions == 0:
            decode.account.local = num_computed_tokens
        if decode.notify_only:
            return 0, False
        matched: tuple[int, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        rid = request.request_id
        self._room.over(rid)
        prefill, decode = self._prefills.get(rid), self._decodes.get(rid)
        if prefill is not None and not request.kv_transfer_params.get("_remote_blocks_processed"):
            must_end = self._prefill_side.start(request, prefill, num_external_tokens)
            if num_external_tokens > 0:
                self._reads[rid] = prefill
            if must_end is not None:
                self._outbox.hold_ends[rid] = must_end
        elif decode is not None:
            if decode.retain:
                self._reqs_in_batch.add(rid)  # without it the worker would never let go of the blocks
                if decode.shared:
                    self._outbox.keep.add(rid)
            if num_external_tokens > 0:
                decode.account.received = num_external_tokens
                self._reads[rid] = decode
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if self._pool is not None:
            self._room.keep(len(scheduler_output.num_scheduled_tokens), self._pool.get_num_free_blocks())
        ended = self.leases.sweep()
        meta = super().build_connector_meta(scheduler_output)
        keep = self.leases.take_kept() | self._outbox.keep
        if ended or keep or self._outbox.hold_ends:
            now = time.monotonic()
            holds = {rid: ends - now for rid, ends in self._outbox.hold_ends.items()}
            meta.backhaul = Orders(ended, keep, holds)
            self._outbox = _Outbox()
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        failed = connector_output.failed_recving or ()
        for rid in connector_output.finished_recving or ():
            match self._reads.pop(rid, None):
                case Prefill() as prefill:
                    self._prefill_side.ended(prefill, failed=rid in failed)
                case Decode() as decode if rid in failed:
                    decode.account.received = 0
                    decode.account.why = Why.READ_FAILED
        for rid in connector_output.finished_sending or ():
            self.leases.forget(rid)

    def request_finished(self, request: Any, block_ids: Any) -> Answer:
        rid = request.request_id
        self._room.over(rid)
        if (answer := self._lease_answers.pop(rid, None)) is not None:
            return False, answer
        if (prefill := self._prefills.pop(rid, None)) is not None:
            return self._finish_prefill(request, prefill, block_ids)
        if (decode := self._decodes.pop(rid, None)) is not None:
            return self._finish_decode(request, decode, block_ids)
        return False, None

    def _finish_prefill(self, request: Any, prefill: Prefill, block_ids: Any) -> Answer:
        if request.request_id not in self._reads:
            self._prefill_side.abandon(prefill)
        delay, out = super().request_finished(request, block_ids)
        return delay, out and {**out, **self._prefill_side.answer(request, prefill)}

    def _finish_decode(self, request: Any, decode: Decode, block_ids: Any) -> Answer:
        rid = request.request_id
        if request.kv_transfer_params.get("do_remote_prefill"):
            done: Answer = super().request_finished(request, block_ids)  # never scheduled: P is told
            return done
        tokens = self._decode_side.kept_tokens(request, decode) if request.status in _FINISHED else None
        if tokens is None:
            self._stop_heartbeat(rid)
            self._reqs_not_processed.add(rid)
            return False, self._decode_side.account(request, decode)
        delay, out = super().request_finished(request, block_ids)
        if out is None or not delay:  # preempted: its blocks are gone
            self._reqs_not_processed.add(rid)
            return delay, self._decode_side.account(request, decode)
        self._reqs_need_send[rid] = float("inf")  # the lease table says when it ends
        return delay, self._decode_side.keep(request, decode, tokens, block_ids, out)

    # --- leases -------------------------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """What was kept belongs to a cache, or weights, that are gone."""
        ended = self.leases.flush()
        if ended:
            logger.info("Backhaul: %d leases have ended with the cache", ended)

    def rests(self) -> bool:
        """Whether nothing but leases, and notifications to come, is left to do."""
        return not (
            self.leases.urgent
            or self._reads
            or self._reqs_need_recv
            or self._reqs_need_send
            or self._reqs_not_processed
            or self._outbox.keep
        )

    def take_stats(self) -> BackhaulStats | None:
        """What has happened since the last call, for /metrics."""
        totals = self.leases.totals()
        counts, self._prefill_side.counts = self._prefill_side.counts, Counter()
        counts.update({("backhaul_leases_ended", how): count for how, count in totals.ended.items()})
        counts.update({("backhaul_claims", outcome): count for outcome, count in totals.claims.items()})
        now = time.monotonic()
        shown = totals.leases, totals.blocks
        gauges = None
        if shown != self._gauges_shown or (totals.leases and now - self._gauges_at >= _GAUGES_EVERY_S):
            gauges = (*shown, totals.oldest_s)
            self._gauges_shown, self._gauges_at = shown, now
        return BackhaulStats.of(counts, gauges) if counts or gauges is not None else None


def _bytes_of_block(group: Any) -> int:
    """What one block of a KV cache group takes on one worker."""
    spec = group.kv_cache_spec
    layers = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
    return int(spec.page_size_bytes) * layers
