"""The lease table in any order of events, and the lease channel on the wire, against the connector's own as well."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from backhaul_connector import lease_channel as real_channel
from backhaul_connector.lease_table import LeaseTable
from backhaul_loopback.blocks import Block
from backhaul_loopback.config import Faults
from backhaul_loopback.lease_channel import LeaseChannel, LeaseClient
from backhaul_loopback.leases import Leases
from backhaul_loopback.metrics import ConnectorMetrics
from backhaul_protocol.lease_channel import Answer, Claim, Decline, Done, Message, frame
from backhaul_protocol.leases import LeaseOperation
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

ROOM = 12
WHICH = st.integers(0, 7)


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


def digest(lease: str, block: int) -> bytes:
    return f"{lease} {block}".encode().ljust(32)


class LeaseMachine(RuleBasedStateMachine):
    """Whatever comes in whatever order: blocks are let go of once, and never under a live lease or a reader."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.metrics = ConnectorMetrics()
        self.let_go: list[int] = []
        self.leases = Leases(
            engine_id="d",
            clock=self.clock,
            blocks=ROOM,
            max_leased_fraction=1.0,
            metrics=self.metrics,
            release=self.release,
        )
        self.made: list[str] = []
        self.blocks: dict[str, list[int]] = {}
        self.deadline: dict[str, float] = {}
        self.shared: set[str] = set()
        self.holds: dict[str, tuple[str, float]] = {}

    def release(self, blocks: Sequence[Block]) -> None:
        self.let_go += [block.id for block in blocks]

    def held_blocks(self) -> int:
        return sum(len(self.blocks[lease]) for lease in self.made if lease in self.leases)

    def known(self, which: int) -> str:
        return self.made[which % len(self.made)] if self.made else "none"

    @rule(size=st.integers(1, 5), ttl_s=st.floats(1, 20), shared=st.booleans())
    def a_turn_ends(self, size: int, ttl_s: float, shared: bool) -> None:
        lease = f"lease {len(self.made)}"
        ids = [100 * len(self.made) + i for i in range(size)]
        made = self.leases.add(
            lease,
            [Block(number) for number in ids],
            [digest(lease, i) for i in range(size)],
            block_size=16,
            ttl_s=ttl_s,
            shared=shared,
        )
        self.made.append(lease)
        self.blocks[lease] = ids
        if shared:
            self.shared.add(lease)
        assert made or (shared and self.held_blocks() + size > ROOM)
        self.deadline[lease] = self.clock.time + ttl_s

    @rule(
        which=WHICH,
        blocks=st.integers(1, 5),
        lie=st.sampled_from(["", "", "hash", "engine", "epoch"]),
        hold=st.floats(1, 9),
    )
    def a_reader_claims(self, which: int, blocks: int, lie: str, hold: float) -> None:
        lease, claim = self.known(which), uuid.uuid4().hex
        answer = self.leases.answer(
            Claim(
                v=1,
                lease=lease,
                engine="d" if lie != "engine" else "x",
                epoch=self.leases.epoch if lie != "epoch" else "x",
                blocks=blocks,
                hash=digest(lease, blocks - 1) if lie != "hash" else bytes(32),
                hold_s=hold,
                claim=claim,
            ),
            dict,
        )
        if answer.ok:
            assert lie == ""
            assert self.clock.time < self.deadline[lease]
            assert blocks <= len(self.blocks[lease])
            self.holds[claim] = (lease, self.clock.time + hold)

    @rule(which=WHICH, read=st.booleans())
    def a_reader_is_done(self, which: int, read: bool) -> None:
        if self.holds:
            claim = list(self.holds)[which % len(self.holds)]
            lease, _ = self.holds.pop(claim)
            self.leases.answer(Done(lease=lease, claim=claim, read=read), dict)

    @rule(which=WHICH)
    def the_router_releases(self, which: int) -> None:
        self.leases.operate(LeaseOperation(release=[self.known(which)]), 9.0)

    @rule(which=WHICH)
    def a_reader_declines(self, which: int) -> None:
        self.leases.answer(Decline(lease=self.known(which)), dict)

    @rule(which=WHICH)
    def a_stock_reader_is_done(self, which: int) -> None:
        self.leases.notified(self.known(which))

    @rule(which=WHICH, ttl_s=st.floats(1, 20))
    def the_router_renews(self, which: int, ttl_s: float) -> None:
        lease = self.known(which)
        if self.leases.operate(LeaseOperation(renew=[lease], ttl_s=ttl_s), 9.0).renewed:
            self.deadline[lease] = self.clock.time + ttl_s

    @rule()
    def the_router_flushes(self) -> None:
        before = self.leases.epoch
        assert self.leases.operate(LeaseOperation(flush=True), 9.0).epoch == self.leases.epoch != before
        assert list(self.leases) == []

    @rule(seconds=st.floats(0.1, 8))
    def time_passes(self, seconds: float) -> None:
        self.clock.time += seconds
        self.leases.reap()

    @invariant()
    def blocks_are_let_go_of_once(self) -> None:
        assert len(self.let_go) == len(set(self.let_go))

    @invariant()
    def nothing_is_freed_that_someone_may_read(self) -> None:
        held = {lease for lease, until in self.holds.values() if until > self.clock.time}
        for lease in {*held, *self.leases}:
            assert not set(self.blocks[lease]) & set(self.let_go), lease

    @invariant()
    def nothing_is_pinned_for_nobody(self) -> None:
        pinned = {block for lease in self.made if lease in self.leases for block in self.blocks[lease]}
        assert self.leases.block_ids == pinned
        everything = {block for blocks in self.blocks.values() for block in blocks}
        assert everything - pinned == set(self.let_go)

    @invariant()
    def every_lease_ends_one_way(self) -> None:
        leases, _, _ = self.leases.count()
        assert sum(self.metrics.leases_ended.values()) + leases == len(self.made)

    @invariant()
    def leases_nobody_reads_stay_within_their_room(self) -> None:
        assert self.held_blocks() <= ROOM or self.holds or not any(lease in self.leases for lease in self.shared)


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=30)


# -- the wire ----------------------------------------------------------------------------------------------------

CLAIM = Claim(v=1, lease="turn 1", engine="d", epoch="e", blocks=2, hash=digest("turn 1", 1), hold_s=5.0, claim="c1")


@asynccontextmanager
async def listening(
    answer: Any = None, faults: Faults | None = None
) -> AsyncIterator[tuple[LeaseChannel, list[Message]]]:
    asked: list[Message] = []

    def note(question: Message) -> Answer:
        asked.append(question)
        return answer or Answer(ok=True)

    channel = LeaseChannel(note, faults or Faults(), "127.0.0.1", 0)
    await channel.start()
    try:
        yield channel, asked
    finally:
        await channel.stop()


@asynccontextmanager
async def asking(timeout_s: float = 5.0) -> AsyncIterator[LeaseClient]:
    client = LeaseClient(timeout_s)
    try:
        yield client
    finally:
        await client.aclose()


async def test_questions_arrive_as_they_were_asked_on_one_connection() -> None:
    questions = [CLAIM, Done(lease="turn 1", claim="c1", read=True), Decline(lease="turn 2")]
    async with listening() as (channel, asked), asking() as client:
        for question in questions:
            assert (await client.ask("127.0.0.1", channel.port, question)).ok
        assert asked == questions
        assert len(channel.connections) == 1


async def test_kept_connection_that_died_is_replaced() -> None:
    async with asking() as client:
        async with listening() as (channel, _):
            await client.ask("127.0.0.1", channel.port, CLAIM)
            port = channel.port
        again = LeaseChannel(lambda _: Answer(ok=True), Faults(), "127.0.0.1", port)
        await again.start()
        assert (await client.ask("127.0.0.1", port, CLAIM)).ok
        await again.stop()


@pytest.mark.parametrize("faults", [Faults(lease_channel="stall"), Faults(lease_channel="refuse")])
async def test_channel_without_an_answer_is_unreachable(faults: Faults) -> None:
    async with listening(faults=faults) as (channel, asked), asking(timeout_s=0.1) as client:
        with pytest.raises(real_channel.BrokenChannel, match=f"127.0.0.1:{channel.port}"):
            await client.ask("127.0.0.1", channel.port, CLAIM)
        assert asked == []


@pytest.mark.parametrize("host", ["no.such.host.invalid", "x" * 300, "a..b"])
async def test_host_that_is_none_is_unreachable(host: str) -> None:
    async with asking(timeout_s=2.0) as client:
        with pytest.raises(real_channel.BrokenChannel):
            await client.ask(host, 1, CLAIM)


async def test_frame_in_pieces_is_put_together() -> None:
    async with listening() as (channel, asked):
        reader, writer = await asyncio.open_connection("127.0.0.1", channel.port)
        whole = frame(Decline("turn 3"))
        for byte in (whole + whole)[:-1]:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(whole[-1:])
        for _ in range(2):
            size = int.from_bytes(await reader.readexactly(4), "big")
            await reader.readexactly(size)
        writer.close()
        assert asked == [Decline(lease="turn 3")] * 2


async def test_the_connector_s_reader_understands_a_loopback_engine() -> None:
    granted = Answer(ok=True, block_ids=[[7, 8]], tokens=32, peer={"remote_port": 5600})
    async with listening(granted) as (channel, asked):
        client = real_channel.LeaseClient(5.0)
        try:
            answer = await asyncio.to_thread(client.ask, "127.0.0.1", channel.port, CLAIM)
            assert (answer.ok, answer.block_ids, answer.tokens) == (True, [[7, 8]], 32)
            for told in (Done("turn 1", "c1", True), Decline("turn 1")):
                assert (await asyncio.to_thread(client.ask, "127.0.0.1", channel.port, told)).ok
        finally:
            client.close()
        assert asked == [CLAIM, Done(lease="turn 1", claim="c1", read=True), Decline(lease="turn 1")]


async def test_a_loopback_engine_understands_the_connector_s_holder() -> None:
    table = LeaseTable("d", 1000)
    hashes = [digest("turn 1", block) for block in range(3)]
    table.add("turn 1", hashes, [[7, 8, 9]], [7, 8, 9], block_size=16, ttl_s=60.0, shared=True)
    server = real_channel.LeaseServer("127.0.0.1", 0, table, lambda: {"remote_port": 5600})
    try:
        async with asking() as client:
            refused = await client.ask("127.0.0.1", server.port, CLAIM)
            assert (refused.ok, refused.why) == (False, "epoch")
            claim = Claim(
                v=1, lease="turn 1", engine="d", epoch=table.epoch, blocks=2, hash=CLAIM.hash, hold_s=5.0, claim="c1"
            )
            answer = await client.ask("127.0.0.1", server.port, claim)
            assert (answer.ok, answer.block_ids, answer.tokens, answer.peer) == (
                True,
                [[7, 8]],
                32,
                {"remote_port": 5600},
            )
            (listed,) = table.listed()
            assert listed.holds == 1
            assert (await client.ask("127.0.0.1", server.port, Done(lease="turn 1", claim="c1", read=True))).ok
            (listed,) = table.listed()
            assert listed.holds == 0
    finally:
        await asyncio.to_thread(server.stop)
