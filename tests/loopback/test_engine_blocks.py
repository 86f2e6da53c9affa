"""Block bookkeeping, the stand-in for attention, and virtual time."""

from __future__ import annotations

import asyncio

from backhaul_loopback import CostModel, LoopbackEngine, VirtualClock
from backhaul_loopback import kv as kv_module
from backhaul_loopback.blocks import Block, BlockPool, chain_digest
from backhaul_loopback.script import Script
from conformance.engines import Engines
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

SIZE = 4
VALUES = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20)


class BlockPoolMachine(RuleBasedStateMachine):
    """Any order of taking, sharing and letting go keeps the pool's books straight."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, SIZE)
        self.held: list[list[Block]] = []
        self.made: dict[bytes, list[int]] = {}

    @rule(family=st.integers(0, 2), length=st.integers(1, 5))
    def take_a_sequence(self, family: int, length: int) -> None:
        digests: list[bytes] = []
        for index in range(length):
            digests.append(chain_digest(digests[-1] if digests else b"", [family, index, 0, 0]))
        hit = self.pool.match(digests)
        for digest, block in zip(digests, hit, strict=False):
            assert block.values == self.made[digest], "a cached block holds what its digest names"
        fresh = length - len(hit)
        if not self.pool.can_hold(hit, fresh):
            return
        blocks = self.pool.hold(hit, fresh)
        for index in range(len(hit), length):
            assert blocks[index].values == []
            blocks[index].load([family * 100 + index] * SIZE)
            self.made[digests[index]] = blocks[index].values
            self.pool.cache(blocks[index], digests[index])
        self.held.append(blocks)

    @rule(which=st.integers(0, 100))
    def let_go(self, which: int) -> None:
        if self.held:
            self.pool.release(self.held.pop(which % len(self.held)))

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_cache() == (not self.held)

    @invariant()
    def blocks_are_counted_by_their_holders(self) -> None:
        counts: dict[int, int] = {}
        for block in (block for blocks in self.held for block in blocks):
            counts[block.id] = counts.get(block.id, 0) + 1
        assert self.pool.num_used == len(counts)
        assert all(self.pool[number].refs == count for number, count in counts.items())
        assert self.pool.num_free + self.pool.num_used == self.pool.usable


TestBlockPool = BlockPoolMachine.TestCase


def test_freed_tail_is_given_out_before_the_head() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.hold([], 3)
    pool.release(blocks)
    assert pool.hold([], 3) == blocks[::-1]


@given(state=st.integers(0, 2**64 - 1), values=VALUES)
def test_block_summary_equals_attending_to_each_position(state: int, values: list[int]) -> None:
    summary = kv_module.summarize(values)
    assert kv_module.apply_summary(state, summary) == kv_module.attend(state, values)


@given(values=VALUES, where=st.integers(0, 100), other=st.integers(0, 2**64 - 1))
def test_state_depends_on_every_position(values: list[int], where: int, other: int) -> None:
    changed = list(values)
    changed[where % len(values)] = other
    same = changed == values
    assert (kv_module.attend(0, changed) == kv_module.attend(0, values)) == same


@given(state=st.integers(0, 2**64 - 1), min_tokens=st.integers(0, 200))
def test_no_answer_is_longer_than_the_blocks_set_aside_for_it(state: int, min_tokens: int) -> None:
    schema = {"properties": {"a": {"enum": ["x", "long option"]}, "b": {"type": "boolean"}, "c": {"type": "number"}}}
    for script in (Script(), Script(schema=schema), Script(tool={"name": "f", "parameters": schema})):
        answer = list(script.tokens(state, min_tokens=min_tokens))
        assert len(answer) <= script.longest(10**6, min_tokens=min_tokens, ignore_eos=False)


async def test_virtual_sleepers_wake_in_order_and_at_their_time() -> None:
    clock = VirtualClock(start=0)
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.now()))

    async with asyncio.TaskGroup() as group:
        group.create_task(sleeper("late", 3))
        group.create_task(sleeper("early", 1))
        await asyncio.sleep(0)
        await clock.advance(2)
        assert woken == [("early", 1)]
        await clock.advance(1)
    assert woken == [("early", 1), ("late", 3)]


async def test_automatic_clock_makes_costs_pass_in_no_time() -> None:
    clock = VirtualClock(start=0, auto=True)
    costs = CostModel(fixed_s=10, prefill_s=1, decode_s=2, render_s=0.5)
    async with LoopbackEngine("decode", clock=clock, costs=costs) as engine:
        async with Engines(engine.url, engine.url, engine.model) as engines:
            await engines.complete(engine.url, [60] * 100, max_tokens=5, ignore_eos=True)
    assert clock.now() == 0.5 * 100 + 10 + 100 + 2 * 5


async def test_prefills_take_turns_on_one_accelerator() -> None:
    clock = VirtualClock(start=0, auto=True)
    async with LoopbackEngine("decode", clock=clock, costs=CostModel(prefill_s=1)) as engine:
        async with Engines(engine.url, engine.url, engine.model) as engines:
            prompts = [[first] * 50 for first in (60, 61)]
            await asyncio.gather(*(engines.complete(engine.url, prompt, max_tokens=1) for prompt in prompts))
    assert clock.now() == 100


async def test_cached_tokens_cost_nothing() -> None:
    clock = VirtualClock(start=0, auto=True)
    async with LoopbackEngine("decode", clock=clock, costs=CostModel(prefill_s=1)) as engine:
        async with Engines(engine.url, engine.url, engine.model) as engines:
            await engines.complete(engine.url, [60] * 160, max_tokens=1)
            before = clock.now()
            await engines.complete(engine.url, [60] * 160, max_tokens=1)
    assert clock.now() - before == 16, "all but the last block, since the last token is always computed"
