"""The engine core: admits sequences, reads and computes their KV, generates, and decides what stays held afterwards.

Names follow vLLM's scheduler. One sequence is one call of `run`; sequences share the blocks, the prefix cache and
the leases, and nothing awaits between looking at those and changing them.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import kv, transfer
from .blocks import Block, BlockPool, chain_digest
from .clock import Clock
from .config import EngineConfig, Faults
from .errors import EngineDeadError, KVLoadError
from .leases import LeaseTable
from .metrics import Metrics
from .script import Script
from .side_channel import connect
from .template import Prompt
from .tokenizer import EOS
from .transfer import Load, Params, Source

_SPACE = 32


@dataclass(eq=False, kw_only=True)
class Seq:
    """One prompt on its way to one answer."""

    request_id: str
    prompt: Prompt
    script: Script
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    token_steps: bool = False
    """One token per step, where the caller has to look at each (stop strings); else about a word."""
    params: Params | None = None
    salt: str = ""
    choice: int = 0

    keys: list[int] = field(default_factory=list)
    """What each position's KV is computed from: the prompt's, then the answer's."""
    digests: list[bytes] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    num_computed: int = 0
    state: int = 0
    """Over the KV of the first `num_computed` positions."""
    seed: int = 0
    """What the answer is a function of: the state after the prompt."""
    output: list[int] = field(default_factory=list)
    num_local: int = 0
    num_external: int = 0
    tracked: bool = False
    """The connector knows the request; a lease of one that it does not know never ends."""

    @property
    def num_prompt(self) -> int:
        return len(self.prompt.tokens)


@dataclass(frozen=True)
class Step:
    """Tokens that came out together, and on the last one how it ended."""

    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | None = None
    kv_transfer_params: Params | None = None


class EngineCore:
    def __init__(self, config: EngineConfig, clock: Clock, faults: Faults) -> None:
        self.config = config
        self.clock = clock
        self.faults = faults
        self.engine_id = str(uuid.uuid4())
        self.pool = BlockPool(config.num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self.leases = LeaseTable()
        self.metrics = Metrics()
        self.max_model_len = min(config.max_model_len, self.pool.usable * config.block_size)
        self.side_channel_host = config.host
        self.side_channel_port = config.side_channel_port
        self.dead: EngineDeadError | None = None
        self._initial = kv.initial_state(config.model)
        self._freed = asyncio.Event()
        self._admission = asyncio.Lock()
        self._device = asyncio.Lock()
        self._background: set[asyncio.Task[Any]] = set()

    # -- what the side channel asks (the `Owner` protocol) ---------------------------------------------------

    @property
    def block_size(self) -> int:
        return self.config.block_size

    def clock_now(self) -> float:
        return self.clock.now()

    def read_blocks(self, request_id: str, block_ids: Sequence[int]) -> list[list[int]]:
        """What the blocks hold. Without a live lease they may be anyone's: their owner's KV is never shown then."""
        self.reap()
        held = request_id in self.leases
        size = self.block_size
        return [list(self.pool[i].values) if held and i in self.pool else kv.garbage(i, size) for i in block_ids]

    def notified(self, request_id: str) -> None:
        self.reap()
        blocks = self.leases.end(request_id)
        if blocks is None:
            self.metrics.nixl_num_notifications_after_expiry += 1
        else:
            self._release(blocks)

    def heartbeat(self, request_id: str) -> None:
        self.reap()
        self.leases.extend(request_id, self.clock.now() + self.config.kv_lease_duration * 2 / 3)

    # -- sequences -------------------------------------------------------------------------------------------

    async def run(self, seq: Seq) -> AsyncGenerator[Step, None]:
        """Generates. Closing the iterator early aborts: nothing stays held, no handle is made.

        Raises `KVLoadError` when blocks could not be read, `EngineDeadError` when the engine core is gone.
        """
        if self.dead is not None:
            raise self.dead
        started = self.clock.now()
        outcome = "abort"
        try:
            await self._admit(seq)
            self.metrics.num_requests_running += 1
            try:
                await self._prefill(seq)
                self.metrics.time_to_first_token_sum += self.clock.now() - started
                self.metrics.time_to_first_token_count += 1
                async with contextlib.aclosing(self._decode(seq)) as steps:
                    async for step in steps:
                        outcome = step.finish_reason or outcome
                        yield step
            finally:
                self.metrics.num_requests_running -= 1
        except KVLoadError:
            outcome = "error"
            raise
        except EngineDeadError as error:
            outcome = "error"
            self.dead = error
            raise
        finally:
            self.metrics.request_success[outcome] += 1
            self._release(seq.blocks)
            seq.blocks = []
            self.reject(seq.params)

    def reject(self, params: Params | None) -> None:
        """A request ended before its load was started: P's blocks for it can go (vLLM PR 41269)."""
        if params and params.get("do_remote_prefill") and transfer.readable(params):
            self._spawn(self._notify(Source.of(params)))

    def reap(self) -> None:
        """Ends the leases whose time is up."""
        for request_id in self.leases.expired(self.clock.now()):
            self.metrics.nixl_num_kv_expired_reqs += 1
            self._release(self.leases.end(request_id) or ())

    def forget_lease(self, request_id: str | None = None) -> None:
        """Frees a lease (every lease for `None`) as if it had never been, as a bug in the engine would."""
        for known in [request_id] if request_id is not None else list(self.leases):
            self._release(self.leases.end(known) or ())

    async def aclose(self) -> None:
        for task in tuple(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # -- admission: blocks, then KV from the prefix cache and from the peer ------------------------------------

    async def _admit(self, seq: Seq) -> None:
        self.metrics.num_requests_waiting += 1
        try:
            external = await self._allocate(seq)
            await self._load(seq, external)
        finally:
            self.metrics.num_requests_waiting -= 1

    async def _allocate(self, seq: Seq) -> int:
        """Takes blocks for the prompt and the longest answer, and says how many tokens to expect from the peer."""
        size = self.block_size
        seq.keys = list(seq.prompt.keys())
        _extend_digests(seq, size)
        open_ended = seq.ignore_eos or seq.min_tokens > 0
        positions = seq.num_prompt + seq.script.longest(seq.max_tokens, open_ended=open_ended) - 1
        async with contextlib.AsyncExitStack() as stack:
            if self._admission.locked():
                self._keep_source_alive(seq, stack)
            await stack.enter_async_context(self._admission)
            waited = False
            while True:
                self.reap()
                hit = self.pool.match(seq.digests[: (seq.num_prompt - 1) // size])
                fresh = -(-positions // size) - len(hit)
                if self.pool.can_hold(hit, fresh):
                    break
                if not waited:
                    waited = True
                    self._keep_source_alive(seq, stack)
                await self._some_blocks_freed()
            seq.num_local = len(hit) * size
            external = self._external_tokens(seq)
            seq.blocks = self.pool.hold(hit, fresh)
        self.metrics.prefix_cache_queries += seq.num_prompt if self.config.prefix_caching else 0
        self.metrics.prefix_cache_hits += seq.num_local
        return external

    def _external_tokens(self, seq: Seq) -> int:
        if not seq.params:
            return 0
        threshold = self.config.kv_recompute_threshold
        external = transfer.external_tokens(
            seq.params, num_prompt=seq.num_prompt, num_local=seq.num_local, threshold=threshold
        )
        self.metrics.external_prefix_cache_queries += seq.num_prompt - seq.num_local
        self.metrics.external_prefix_cache_hits += external
        return external

    async def _load(self, seq: Seq, external: int) -> None:
        if not seq.params:
            return
        params, bidirectional = seq.params, self.config.bidirectional_kv_xfer
        seq.tracked = bool(params.get("do_remote_decode") or (params.get("do_remote_prefill") and bidirectional))
        source = Source.of(params) if transfer.readable(params) else None
        load = transfer.start_load(params, external, bidirectional=bidirectional)
        if load is Load.PARK:
            await asyncio.Event().wait()
        elif load is Load.NOTIFY and source is not None:
            await self._notify(source)
        elif load is Load.READ and source is not None:
            self.metrics.num_requests_deferred += 1
            try:
                await self._read_whatever_happens(seq, external, source)
            finally:
                self.metrics.num_requests_deferred -= 1

    async def _read_whatever_happens(self, seq: Seq, external: int, source: Source) -> None:
        """A read that has begun is finished even if its request is aborted: the blocks are being written to."""
        reading = self._spawn(self._read(seq, external, source))
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
        size, now = self.block_size, self.clock.now()
        end = seq.num_local + external
        local = seq.blocks[seq.num_local // size : -(-end // size)]
        if self.faults.fail_kv_loads > 0:
            self.faults.fail_kv_loads -= 1
            self.metrics.nixl_num_failed_transfers += 1
            raise KVLoadError(f"reading {source.request_id}: failure ordered by a test")
        try:
            async with connect(source.host, source.port, source.engine_id) as peer:
                self._check_expiry(source, peer.welcome.clock - now)
                if peer.welcome.block_size != size:
                    raise KVLoadError(f"peer has blocks of {peer.welcome.block_size} tokens, not {size}")
                found = await peer.read(source.request_id, transfer.align(local, source.block_ids))
                if cost := external * self.config.costs.transfer_s:
                    await self.clock.sleep(cost)
                await peer.notify(source.request_id)
        except ExpiredError:
            self.metrics.nixl_num_kv_expired_reqs += 1
            raise
        except KVLoadError:
            self.metrics.nixl_num_failed_transfers += 1
            raise
        self.metrics.transfers += 1
        self.metrics.transferred_tokens += external
        self.metrics.transfer_seconds += self.clock.now() - now
        for index, (block, values) in enumerate(zip(local, found, strict=True), start=seq.num_local // size):
            wanted = min(size, end - index * size)
            block.load([*values, *kv.garbage(block.id, size)[len(values) :]][:wanted])
        seq.num_external = external

    def _check_expiry(self, source: Source, clock_offset: float) -> None:
        if not self.config.bidirectional_kv_xfer or source.expiry is None:
            return
        if self.clock.now() + transfer.EXPIRY_MARGIN_S >= source.expiry - clock_offset:
            raise ExpiredError(f"declining expired remote read of {source.request_id}")

    async def _notify(self, source: Source) -> None:
        try:
            async with connect(source.host, source.port, source.engine_id) as peer:
                await peer.notify(source.request_id)
        except KVLoadError:
            # The peer frees at its own deadline; the request that has its KV already does not fail over this.
            self.metrics.nixl_num_failed_notifications += 1
            self.metrics.nixl_num_failed_transfers += 1

    def _keep_source_alive(self, seq: Seq, stack: contextlib.AsyncExitStack) -> None:
        """D tells P that it still means to read while its request waits for blocks."""
        if seq.params and seq.params.get("do_remote_prefill") and transfer.readable(seq.params):
            task = self._spawn(self._send_heartbeats(Source.of(seq.params)))
            stack.callback(task.cancel)

    async def _send_heartbeats(self, source: Source) -> None:
        while True:
            await self.clock.sleep(self.config.kv_lease_duration / 6)
            with contextlib.suppress(KVLoadError):  # a peer that is gone shows when its blocks are read
                async with connect(source.host, source.port, source.engine_id) as peer:
                    await peer.heartbeat(source.request_id)

    async def _some_blocks_freed(self) -> None:
        self._freed.clear()
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(self._freed.wait())]
        deadline = self.leases.next_deadline()
        if deadline is not None:
            waits.append(asyncio.create_task(self._sleep(deadline - self.clock.now())))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _sleep(self, seconds: float) -> None:
        await self.clock.sleep(seconds)

    # -- computing -------------------------------------------------------------------------------------------

    async def _prefill(self, seq: Seq) -> None:
        have = seq.num_local + seq.num_external
        for block, digest in zip(seq.blocks, seq.digests[: have // self.block_size], strict=False):
            self.pool.cache(block, digest)
        # The last prompt token is always computed, so that there is something to sample from.
        seq.num_computed = min(have, seq.num_prompt - 1)
        self._read_state(seq)
        costs, todo = self.config.costs, seq.num_prompt - seq.num_computed
        if cost := costs.fixed_s + todo * costs.prefill_s:
            async with self._device:
                await self.clock.sleep(cost)
        while seq.num_computed < seq.num_prompt:
            self._compute_next(seq)
        seq.seed = kv.kv_value(seq.state, seq.choice)
        self.metrics.prompt_tokens += seq.num_prompt
        self.metrics.local_cache_hit += seq.num_local
        self.metrics.external_kv_transfer += seq.num_external
        self.metrics.local_compute += seq.num_prompt - have

    def _read_state(self, seq: Seq) -> None:
        """The state over what the sequence's blocks hold, whoever computed it."""
        full, rest = divmod(seq.num_computed, self.block_size)
        state = self._initial
        for block in seq.blocks[:full]:
            state = block.attend(state, self.block_size)
        seq.state = kv.attend(state, seq.blocks[full].values[:rest]) if rest else state

    def _compute_next(self, seq: Seq) -> None:
        index, offset = divmod(seq.num_computed, self.block_size)
        value = kv.kv_value(seq.state, seq.keys[seq.num_computed])
        block = seq.blocks[index]
        block.write(offset, value)
        seq.state = kv.attend(seq.state, (value,))
        seq.num_computed += 1
        if offset == self.block_size - 1:
            _extend_digests(seq, self.block_size)
            self.pool.cache(block, seq.digests[index])

    async def _decode(self, seq: Seq) -> AsyncGenerator[Step, None]:
        step: list[int] = []
        for token in seq.script.tokens(seq.seed, min_tokens=seq.min_tokens, ignore_eos=seq.ignore_eos):
            if seq.output:
                self._compute_next(seq)
            seq.output.append(token)
            seq.keys.append(token)
            step.append(token)
            self.metrics.generation_tokens += 1
            finish_reason, stop_reason = self._check_stop(seq, token)
            if finish_reason is None and not seq.token_steps and token != _SPACE:
                continue
            if cost := len(step) * self.config.costs.decode_s:
                await self.clock.sleep(cost)
            else:
                await asyncio.sleep(0)
            if finish_reason is not None:
                yield Step(tuple(step), finish_reason, stop_reason, self._finish(seq))
                return
            yield Step(tuple(step))
            step = []

    def _check_stop(self, seq: Seq, token: int) -> tuple[str | None, int | None]:
        if len(seq.output) >= seq.min_tokens:
            if token == EOS and not seq.ignore_eos:
                return "stop", None
            if token in seq.stop_token_ids:
                return "stop", token
        if len(seq.output) >= seq.max_tokens or seq.num_prompt + len(seq.output) >= self.max_model_len:
            return "length", None
        return None, None

    # -- the end ---------------------------------------------------------------------------------------------

    def _finish(self, seq: Seq) -> Params | None:
        """Releases or leases the sequence's blocks, and makes the handle (`request_finished`)."""
        params, config = seq.params, self.config
        kept = -(-seq.num_computed // self.block_size)
        self._release(seq.blocks[kept:])
        seq.blocks = seq.blocks[:kept]
        is_prefill_leg = bool(params and params.get("do_remote_decode"))
        if not params or not (is_prefill_leg or config.bidirectional_kv_xfer):
            return None
        ttl = config.kv_lease_duration if is_prefill_leg else config.decoder_kv_blocks_ttl
        deadline = self.clock.now() + ttl
        self.leases.add(seq.request_id, seq.blocks, deadline if seq.tracked else None)
        result = transfer.handle(
            is_prefill_leg=is_prefill_leg,
            engine_id=self.engine_id,
            request_id=seq.request_id,
            host=self.side_channel_host,
            port=self.side_channel_port,
            block_ids=[block.id for block in seq.blocks],
            num_tokens=seq.num_computed,
            expiry=None if is_prefill_leg else deadline,
        )
        seq.blocks = []
        if is_prefill_leg and len(seq.output) == 1:
            result["remote_prefill_cached_tokens"] = seq.num_local + seq.num_external
        return self.faults.lie(result) if self.faults.lie is not None else result

    def _release(self, blocks: Sequence[Block]) -> None:
        if blocks:
            self.pool.release(blocks)
            self._freed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class ExpiredError(KVLoadError):
    """The lease on the peer's blocks has ended or is about to."""


def _extend_digests(seq: Seq, block_size: int) -> None:
    parent = seq.digests[-1] if seq.digests else b""
    for index in range(len(seq.digests), len(seq.keys) // block_size):
        keys = seq.keys[index * block_size : (index + 1) * block_size]
        parent = chain_digest(parent, keys, seq.salt if index == 0 else "")
        seq.digests.append(parent)
