"""Scheduler and executor (vLLM's engine core): admits sequences, gets their KV, generates, decides what stays held then.

Names follow vLLM's scheduler. One sequence is one call of `run`; sequences share the blocks, the prefix cache and
the pins and leases, and nothing awaits between looking at those and changing them.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from backhaul_connector import handles
from backhaul_protocol import KEY

from . import kv, transfer
from .blocks import Block, BlockPool
from .clock import Clock
from .config import EngineConfig, Faults
from .connector import Connector
from .errors import EngineDeadError, KVLoadError
from .metrics import Metrics
from .pins import Pins
from .reader import Reader, ignore_read
from .sequence import Seq, Step
from .tokenizer import EOS
from .transfer import Params

_SPACE = 32


class EngineCore:
    def __init__(self, config: EngineConfig, clock: Clock, faults: Faults) -> None:
        self.config = config
        self.clock = clock
        self.faults = faults
        self.engine_id = config.engine_id or str(uuid.uuid4())
        self.pool = BlockPool(config.num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self.pins = Pins()
        self.metrics = Metrics()
        self.max_model_len = min(config.max_model_len, self.pool.usable * config.block_size)
        self.side_channel_host = config.host
        self.side_channel_port = config.side_channel_port
        self.dead: EngineDeadError | None = None
        self._initial = kv.initial_state(config.model)
        self._freed = asyncio.Event()
        self._admission = asyncio.Lock()
        self._device = asyncio.Lock()
        self.connector: Connector | None = None
        if config.connector == "backhaul":
            self.connector = Connector(
                config,
                clock,
                faults,
                engine_id=self.engine_id,
                blocks=self.pool.usable,
                release=self._release,
                let_go=self.reject,
            )
        read_ended = self.connector.read_ended if self.connector is not None else ignore_read
        self._reader = Reader(config, clock, faults, self.metrics, self._release, read_ended)

    # -- what the side channel asks (the `Owner` protocol) ---------------------------------------------------

    @property
    def block_size(self) -> int:
        return self.config.block_size

    def clock_now(self) -> float:
        return self.clock.now()

    def read_blocks(self, request_id: str, block_ids: Sequence[int]) -> list[list[int]]:
        """What the blocks hold. Without a pin or lease they may be anyone's: their owner's KV is never shown then."""
        self.reap()
        if self.faults.drop_reads > 0:
            self.faults.drop_reads -= 1
            raise ConnectionAbortedError("failure ordered by a test")
        held = request_id in self.pins or (self.connector is not None and request_id in self.connector.leases)
        size = self.block_size
        return [list(self.pool[i].values) if held and i in self.pool else kv.garbage(i, size) for i in block_ids]

    def notified(self, request_id: str) -> None:
        self.reap()
        if self.connector is not None and self.connector.leases.notified(request_id):
            return
        blocks = self.pins.end(request_id)
        if blocks is None:
            self.metrics.nixl_num_notifications_after_expiry += 1
        else:
            self._release(blocks)

    def heartbeat(self, request_id: str) -> None:
        self.reap()
        self.pins.extend(request_id, self.clock.now() + self.config.kv_lease_duration * 2 / 3)

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
            if self.connector is not None:
                self.connector.ended(seq)

    def reject(self, params: Params | None) -> None:
        """A request ended before its load was started: P's blocks for it can go."""
        if params and self.connector is not None:
            told = {**params, "do_remote_prefill": True}
            params = told if params.get("do_remote_prefill") and handles.keep_sender(told, groups=1) else None
        self._reader.let_go(params)

    def reap(self) -> None:
        """Ends the pins and leases whose time is up."""
        for request_id in self.pins.expired(self.clock.now()):
            self.metrics.nixl_num_kv_expired_reqs += 1
            self._release(self.pins.end(request_id) or ())
        if self.connector is not None:
            self.connector.leases.reap()

    def forget_lease(self, request_id: str | None = None) -> None:
        """Frees a request's pin and lease (all for `None`) without anyone having been told, as a bug in the engine would."""
        for known in [request_id] if request_id is not None else list(self.pins):
            self._release(self.pins.end(known) or ())
        if self.connector is not None:
            self.connector.leases.forget(request_id)

    def lease_ids(self) -> list[str]:
        """The requests whose blocks are pinned or leased, oldest first."""
        self.reap()
        return [*self.pins, *(self.connector.leases if self.connector is not None else ())]

    def pinned_blocks(self) -> int:
        """Blocks of pins and leases, each counted once."""
        self.reap()
        more = self.connector.leases.block_ids if self.connector is not None else set()
        return len(self.pins.block_ids | more)

    def reset_cache(self, *, reset_external: bool) -> bool:
        """Forgets every cached prefix, unless blocks are held; then the connector forgets its leases, if it is told to."""
        self.reap()
        success = self.pool.reset_cache()
        if reset_external and self.connector is not None:
            self.connector.leases.flush()
        return success

    async def aclose(self) -> None:
        if self.connector is not None:
            await self.connector.aclose()
        await self._reader.aclose()

    # -- admission: blocks, then KV from the prefix cache and from the peer ------------------------------------

    async def _admit(self, seq: Seq) -> None:
        self.metrics.num_requests_waiting += 1
        try:
            seq.keys = list(seq.prompt.keys())
            seq.extend_digests(self.block_size)
            if self.connector is None:
                await self._reader.load(seq, await self._allocate(seq) or 0)
            else:
                await self._admit_with(self.connector, seq)
        finally:
            self.metrics.num_requests_waiting -= 1

    async def _admit_with(self, connector: Connector, seq: Seq) -> None:
        """What cannot be read is computed: vLLM's policy `recompute`."""
        connector.arrived(seq)
        external = None
        while external is None:
            await connector.claim(seq, len(self._local_hit(seq)) * self.block_size)
            external = await self._allocate(seq)
        failure = None
        try:
            await self._reader.load(seq, external)
        except KVLoadError as error:
            failure = error
        connector.loaded(seq, failure)

    def _local_hit(self, seq: Seq) -> list[Block]:
        return self.pool.match(seq.digests[: (seq.num_prompt - 1) // self.block_size])

    async def _allocate(self, seq: Seq) -> int | None:
        """Takes blocks for the prompt and the longest answer, and says how many tokens to expect from the peer.

        `None`, and no blocks, when the peer's promise has nearly run out meanwhile."""
        size = self.block_size
        longest = seq.script.longest(seq.max_tokens, min_tokens=seq.min_tokens, ignore_eos=seq.ignore_eos)
        positions = seq.num_prompt + longest - 1
        async with contextlib.AsyncExitStack() as stack:
            if self._admission.locked():
                self._reader.keep_source_alive(seq, stack)
            await stack.enter_async_context(self._admission)
            waited = False
            while True:
                self.reap()
                hit = self._local_hit(seq)
                fresh = -(-positions // size) - len(hit)
                if self.pool.can_hold(hit, fresh):
                    break
                if not waited:
                    waited = True
                    self._reader.keep_source_alive(seq, stack)
                await self._some_blocks_freed()
            seq.num_local = len(hit) * size
            external = self._external_tokens(seq)
            if external is None:
                return None
            seq.blocks = self.pool.hold(hit, fresh)
        self.metrics.prefix_cache_queries += seq.num_prompt if self.config.prefix_caching else 0
        self.metrics.prefix_cache_hits += seq.num_local
        return external

    def _external_tokens(self, seq: Seq) -> int | None:
        if not seq.params:
            return 0
        if self.connector is not None:
            external = self.connector.external_tokens(seq)
            if external is None:
                return None
        else:
            external = transfer.external_tokens(
                seq.params,
                num_prompt=seq.num_prompt,
                num_local=seq.num_local,
                threshold=self.config.kv_recompute_threshold,
            )
        self.metrics.external_prefix_cache_queries += seq.num_prompt - seq.num_local
        self.metrics.external_prefix_cache_hits += external
        return external

    async def _some_blocks_freed(self) -> None:
        self._freed.clear()
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(self._freed.wait())]
        deadlines = [self.pins.next_deadline()]
        if self.connector is not None:
            deadlines.append(self.connector.leases.next_deadline())
        deadline = min((at for at in deadlines if at is not None), default=None)
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
        if self.config.prefix_caching:
            seq.num_created = max(0, seq.num_prompt // self.block_size * self.block_size - have)

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
            seq.extend_digests(self.block_size)
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
        """Releases, pins or leases the sequence's blocks, and makes the handle (`request_finished`)."""
        params, config = seq.params, self.config
        kept = -(-seq.num_computed // self.block_size)
        self._release(seq.blocks[kept:])
        seq.blocks = seq.blocks[:kept]
        is_prefill_leg = bool(params and params.get("do_remote_decode"))
        if self.connector is not None and not is_prefill_leg:
            return self._finish_decode(self.connector, seq)
        if not params or not (is_prefill_leg or config.bidirectional_kv_xfer):
            return None
        ttl = config.kv_lease_duration if is_prefill_leg else config.decoder_kv_blocks_ttl
        deadline = self.clock.now() + ttl
        blocks, seq.blocks = seq.blocks, []
        self.pins.add(seq.request_id, blocks, deadline if seq.tracked else None)
        result = self._handle(seq, blocks, seq.num_computed, None if is_prefill_leg else deadline)
        if is_prefill_leg and len(seq.output) == 1:
            result["remote_prefill_cached_tokens"] = seq.num_local + seq.num_external
        if self.connector is not None:
            result[KEY] = self.connector.prefill_answer(seq)
        return self.faults.lie(result) if self.faults.lie is not None else result

    def _finish_decode(self, connector: Connector, seq: Seq) -> Params | None:
        blocks = connector.retain(seq)
        answer = connector.decode_answer(seq, blocks)
        if not blocks:
            return None if answer is None else {KEY: answer}
        expiry = self.clock.now() + connector.ttl_s(seq)
        result = self._handle(seq, blocks, len(blocks) * self.block_size, expiry) | {KEY: answer}
        return self.faults.lie(result) if self.faults.lie is not None else result

    def _handle(self, seq: Seq, blocks: Sequence[Block], num_tokens: int, expiry: float | None) -> Params:
        return transfer.handle(
            is_prefill_leg=bool(seq.params and seq.params.get("do_remote_decode")),
            engine_id=self.engine_id,
            request_id=seq.request_id,
            host=self.side_channel_host,
            port=self.side_channel_port,
            block_ids=[block.id for block in blocks],
            num_tokens=num_tokens,
            expiry=expiry,
            speaks_033=self.config.speaks_033,
        )

    def _release(self, blocks: Sequence[Block]) -> None:
        if blocks:
            self.pool.release(blocks)
            self._freed.set()
