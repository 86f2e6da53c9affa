"""Transfer client: how a request's KV gets here from the peer, and how the peer learns that its blocks can go.

The rules are in `transfer`; this carries them out over the side channel.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from . import kv, transfer
from .blocks import Block
from .clock import Clock
from .config import EngineConfig, Faults
from .errors import KVLoadError
from .metrics import Metrics
from .sequence import Seq
from .side_channel import connect
from .transfer import Load, Params, Source


class ExpiredError(KVLoadError):
    """The lease on the peer's blocks has ended or is about to."""


class HoldEndedError(KVLoadError):
    """The peer stopped holding the blocks before the read was finished."""


def ignore_read(seq: Seq, ok: bool) -> None:
    """For engines that nobody waits for."""


class Reader:
    """Reads and notifications of one engine. What was begun goes on when its request is gone, until `aclose`."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock,
        faults: Faults,
        metrics: Metrics,
        release: Callable[[Sequence[Block]], None],
        read_ended: Callable[[Seq, bool], None],
    ) -> None:
        """`read_ended` hears of every read that had begun, and whether it gave the KV, after its request or before."""
        self._config = config
        self._clock = clock
        self._faults = faults
        self._metrics = metrics
        self._release = release
        self._read_ended = read_ended
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    async def load(self, seq: Seq, external: int) -> None:
        if not seq.params:
            return
        params, bidirectional = seq.params, self._config.bidirectional_kv_xfer
        seq.tracked = bool(params.get("do_remote_decode") or (params.get("do_remote_prefill") and bidirectional))
        source = Source.of(params) if transfer.readable(params) else None
        load = transfer.start_load(params, external, bidirectional=bidirectional)
        if load is Load.PARK:
            await asyncio.Event().wait()
        elif load is Load.NOTIFY and source is not None:
            await self.notify(source)
        elif load is Load.READ and source is not None:
            self._metrics.num_requests_deferred += 1
            try:
                await self._read_whatever_happens(seq, external, source)
            finally:
                self._metrics.num_requests_deferred -= 1

    async def _read_whatever_happens(self, seq: Seq, external: int, source: Source) -> None:
        """A read that has begun is finished even if its request is aborted: the blocks are being written to."""
        seq.reading = True
        reading = self._spawn(self._read(seq, external, source))
        reading.add_done_callback(lambda task: self._read_ended(seq, not task.cancelled() and task.exception() is None))
        try:
            await asyncio.shield(reading)
        except asyncio.CancelledError:
            if not reading.done():
                blocks, seq.blocks = seq.blocks, []

                def finished(task: asyncio.Task[None]) -> None:
                    if not task.cancelled():
                        task.exception()  # nobody waits for it any more
                    self._release(blocks)

                reading.add_done_callback(finished)
            raise

    async def _read(self, seq: Seq, external: int, source: Source) -> None:
        size, now = self._config.block_size, self._clock.now()
        end = seq.num_local + external
        local = seq.blocks[seq.num_local // size : -(-end // size)]
        if self._faults.fail_kv_loads > 0:
            self._faults.fail_kv_loads -= 1
            self._metrics.nixl_num_failed_transfers += 1
            raise KVLoadError(f"reading {source.request_id}: failure ordered by a test")
        try:
            async with connect(source.host, source.port, source.engine_id) as peer:
                self._check_expiry(source, peer.welcome.clock - now)
                if peer.welcome.block_size != size:
                    raise KVLoadError(f"peer has blocks of {peer.welcome.block_size} tokens, not {size}")
                if cost := external * self._config.costs.transfer_s:
                    await self._clock.sleep(cost)
                found = await peer.read(source.request_id, transfer.align(local, source.block_ids))
                await peer.notify(source.request_id)
            seq.read_s = self._clock.now() - now
            if seq.read_before is not None and self._clock.now() >= seq.read_before:
                raise HoldEndedError(
                    f"read of {source.request_id} took {seq.read_s} s, longer than its blocks were held"
                )
        except ExpiredError:
            self._metrics.nixl_num_kv_expired_reqs += 1
            raise
        except KVLoadError:
            self._metrics.nixl_num_failed_transfers += 1
            raise
        self._metrics.transfers += 1
        self._metrics.transferred_tokens += external
        self._metrics.transfer_seconds += seq.read_s
        for index, (block, values) in enumerate(zip(local, found, strict=True), start=seq.num_local // size):
            wanted = min(size, end - index * size)
            block.load([*values[:wanted], *kv.garbage(block.id, wanted - len(values))])
        seq.num_external = external

    def _check_expiry(self, source: Source, clock_offset: float) -> None:
        if not self._config.bidirectional_kv_xfer or source.expiry is None:
            return
        if self._clock.now() + transfer.EXPIRY_MARGIN_S >= source.expiry - clock_offset:
            raise ExpiredError(f"declining expired remote read of {source.request_id}")

    async def notify(self, source: Source) -> None:
        try:
            async with connect(source.host, source.port, source.engine_id) as peer:
                await peer.notify(source.request_id)
        except KVLoadError:
            # The peer frees at its own deadline; the request that has its KV already does not fail over this.
            self._metrics.nixl_num_failed_notifications += 1
            self._metrics.nixl_num_failed_transfers += 1

    def let_go(self, params: Params | None) -> None:
        """Tells P, without waiting for it, that a request will never read its blocks."""
        if params and params.get("do_remote_prefill") and transfer.readable(params) and not self._closed:
            self._spawn(self.notify(Source.of(params)))

    def keep_source_alive(self, seq: Seq, stack: contextlib.AsyncExitStack) -> None:
        """D tells P that it still means to read while its request waits for blocks."""
        if seq.params and seq.params.get("do_remote_prefill") and transfer.readable(seq.params):
            task = self._spawn(self._send_heartbeats(Source.of(seq.params)))
            stack.callback(task.cancel)

    async def _send_heartbeats(self, source: Source) -> None:
        while True:
            await self._clock.sleep(self._config.kv_lease_duration / 6)
            with contextlib.suppress(KVLoadError):  # a peer that is gone shows when its blocks are read
                async with connect(source.host, source.port, source.engine_id) as peer:
                    await peer.heartbeat(source.request_id)

    async def aclose(self) -> None:
        """Ends what is going on; from now on nobody is told anything, as when a process dies."""
        self._closed = True
        for task in tuple(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
