"""The lease table: who may read what, until when, and what a lease's end waits for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from backhaul_connector.lease_table import Grant, LeaseTable
from backhaul_protocol.lease_channel import Claim
from backhaul_protocol.leases import LeaseRow
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

BLOCK = 16


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def hashes(prompt: str, blocks: int) -> list[bytes]:
    return [f"{prompt}{i}".encode().ljust(32) for i in range(blocks)]


class Table:
    """A table of 100 blocks and its clock, with short ways to use it."""

    def __init__(self, fraction: float = 0.8) -> None:
        self.clock = Clock()
        self.table = LeaseTable("D", 100, fraction, clock=self.clock)
        self._next_block = 0

    def lease(
        self,
        name: str,
        blocks: int = 4,
        *,
        ttl_s: float = 60.0,
        shared: bool = True,
        ids: Sequence[int] | None = None,
    ) -> str:
        taken = list(ids) if ids is not None else list(range(self._next_block, self._next_block + blocks))
        self._next_block += 0 if ids is not None else blocks
        self.table.add(name, hashes(name, blocks), [taken], taken, block_size=BLOCK, ttl_s=ttl_s, shared=shared)
        return name

    def claim(self, name: str, blocks: int = 4, claim: str = "c", **other: object) -> Grant | str:
        asked: dict[str, object] = {
            "v": 1,
            "lease": name,
            "engine": "D",
            "epoch": self.table.epoch,
            "blocks": blocks,
            "hash": hashes(name, blocks)[-1] if blocks > 0 else b"",
            "claim": claim,
            "hold_s": 10.0,
        }
        return self.table.claim(Claim(**{**asked, **other}))  # type: ignore[arg-type]


@pytest.fixture
def on() -> Table:
    return Table()


def test_a_grant_names_the_holders_own_leading_blocks(on: Table) -> None:
    on.lease("a", ids=[7, 3, 9, 1])
    assert on.claim("a", 3) == Grant([[7, 3, 9]], 3 * BLOCK)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"engine": "D2"}, "other_engine"),
        ({"epoch": "before"}, "epoch"),
        ({"hash": b"x" * 32}, "differs"),
        ({"hash": hashes("a", 4)[2]}, "differs"),
        ({"hash": b""}, "differs"),
        ({"blocks": 5}, "malformed"),
        ({"blocks": 0}, "malformed"),
        ({"blocks": -1}, "malformed"),
        ({"hold_s": 0.0}, "malformed"),
        ({"hold_s": float("nan")}, "malformed"),
        ({"hold_s": 1e9}, "malformed"),
    ],
)
def test_a_claim_that_is_not_exactly_right_is_refused(on: Table, wrong: dict[str, object], why: str) -> None:
    on.lease("a")
    assert on.claim("a", **{"hash": hashes("a", 4)[3], **wrong}) == why  # type: ignore[arg-type]
    assert on.table.totals().claims == {why: 1}


def test_an_unknown_lease_is_refused(on: Table) -> None:
    assert on.claim("never") == "unknown_lease"


def test_a_shared_lease_is_read_by_many_until_it_is_released(on: Table) -> None:
    on.lease("a")
    for reader in "xyz":
        assert isinstance(on.claim("a", claim=reader), Grant)
        on.table.done("a", reader, read=True)
    assert on.table.sweep() == frozenset()
    assert on.table.release(["a", "b"]) == (["a"], ["b"])
    assert on.table.sweep() == {"a"}
    assert on.claim("a") == "released"


def test_a_lease_that_is_not_shared_ends_with_its_first_read(on: Table) -> None:
    on.lease("a", shared=False)
    assert isinstance(on.claim("a", claim="x"), Grant)
    assert on.claim("a", claim="y") == "released"
    assert on.table.take_kept() == {"a"}
    on.table.done("a", "x", read=True)
    assert on.table.sweep() == {"a"}
    assert on.claim("a") == "released"
    assert on.table.totals().ended == {"read": 1}


def test_a_read_that_did_not_happen_leaves_the_lease(on: Table) -> None:
    on.lease("a", shared=False)
    on.claim("a", claim="x")
    on.table.done("a", "x", read=False)
    assert isinstance(on.claim("a", claim="y"), Grant)


def test_a_declined_lease_ends_unless_it_is_shared(on: Table) -> None:
    on.lease("mine", shared=False)
    on.lease("ours")
    on.table.decline("mine")
    on.table.decline("ours")
    assert on.table.sweep() == {"mine"}


@pytest.mark.parametrize("end", ["release", "expire", "flush", "evict"])
def test_no_block_is_let_go_of_while_someone_reads(on: Table, end: str) -> None:
    on.lease("a", ttl_s=5.0)
    on.claim("a", claim="x")
    match end:
        case "release":
            on.table.release(["a"])
        case "expire":
            on.clock.now += 6.0
        case "flush":
            on.table.flush()
        case "evict":
            on.lease("huge", 78)
            on.lease("more", 4)
    assert "a" not in on.table.sweep()
    if end != "evict":
        assert not isinstance(on.claim("a", claim="y"), Grant)
    on.table.done("a", "x", read=True)
    assert ("a" in on.table.sweep()) == (end != "evict")


def test_a_hold_ends_by_itself_when_its_reader_is_gone(on: Table) -> None:
    on.lease("a")
    on.claim("a", claim="x")
    on.table.release(["a"])
    on.clock.now += 9.9
    assert on.table.sweep() == frozenset()
    on.clock.now += 0.2
    assert on.table.urgent
    assert on.table.sweep() == {"a"}


def test_a_lease_expires_unless_it_is_renewed(on: Table) -> None:
    on.lease("a", ttl_s=10.0)
    on.lease("b", ttl_s=10.0)
    on.clock.now += 9.0
    assert on.table.renew(["a", "nobody"], 50.0) == ({"a": 50.0}, ["nobody"])
    on.clock.now += 2.0
    assert on.table.sweep() == {"b"}
    assert on.claim("b") == "expired"
    assert isinstance(on.claim("a"), Grant)
    assert on.table.renew(["b"], 5.0) == ({}, ["b"])


def test_an_expired_lease_cannot_be_claimed_even_before_anyone_swept(on: Table) -> None:
    on.lease("a", ttl_s=10.0)
    on.clock.now += 10.0
    assert on.claim("a") == "expired"


def test_a_flush_ends_everything_and_begins_a_new_epoch(on: Table) -> None:
    on.lease("a")
    on.lease("b")
    before = on.table.epoch
    assert on.table.flush() == 2
    assert on.table.epoch != before
    assert on.table.sweep() == {"a", "b"}
    assert on.claim("a", epoch=before) == "epoch"
    assert on.table.count() == (0, 0)


def test_a_lease_kept_for_one_read_is_never_evicted(on: Table) -> None:
    """Its reader may be a stock engine, which reads without asking."""
    on.lease("single", 30, shared=False)
    on.lease("shared", 30)
    on.lease("newest", 30)
    assert on.claim("shared", 30) == "evicted"
    assert isinstance(on.claim("single", 30), Grant)


def test_beyond_its_share_of_blocks_the_oldest_leases_are_evicted(on: Table) -> None:
    for name in "abc":
        on.lease(name, 30)
    assert on.table.sweep() == {"a"}
    assert on.claim("a", 30) == "evicted"
    assert on.table.count() == (2, 60)


def test_a_request_that_waits_for_blocks_goes_before_the_oldest_leases(on: Table) -> None:
    on.lease("a", 10)
    on.lease("b", 10)
    on.lease("c", 10)
    on.claim("a", 10)
    on.table.make_room(5)
    assert on.table.sweep() == {"b"}
    on.table.make_room(10)  # asked again before the workers have let go of b
    assert on.table.sweep() == frozenset()
    on.table.forget("b")
    on.table.make_room(5)
    assert on.table.sweep() == {"c"}
    on.table.make_room(50)
    assert on.table.sweep() == frozenset()  # a is being read


def test_blocks_that_leases_have_in_common_count_once(on: Table) -> None:
    on.lease("a", 4, ids=[1, 2, 3, 4])
    on.lease("b", 6, ids=[1, 2, 3, 4, 5, 6])
    assert on.table.count() == (2, 6)
    on.table.release(["a"])
    assert on.table.count() == (1, 6)
    on.table.release(["b"])
    assert on.table.count() == (0, 0)


def test_what_a_stock_engine_read_is_forgotten_as_read(on: Table) -> None:
    on.lease("a", shared=False)
    on.table.forget("a")
    assert "a" not in on.table
    assert on.table.sweep() == frozenset()
    assert on.table.totals().ended == {"read": 1}


def test_a_list_says_what_each_lease_holds(on: Table) -> None:
    on.lease("a", ttl_s=60.0)
    on.claim("a")
    on.clock.now += 2.5
    assert on.table.listed() == (
        LeaseRow(id="a", blocks=4, tokens=64, age_s=2.5, remaining_s=57.5, holds=1, shared=True),
    )


NAMES = st.sampled_from(["a", "b", "c", "d"])
READERS = st.sampled_from(["x", "y", "z"])


class AnyUse(RuleBasedStateMachine):
    """Whatever happens in whatever order, nothing is let go of under a reader, and nothing that was let go of is granted."""

    def __init__(self) -> None:
        super().__init__()
        self.on = Table(0.5)
        self.reading: dict[tuple[str, str], float] = {}
        self.gone: set[str] = set()
        self.serial = 0

    def _live(self) -> list[str]:
        return [lease.id for lease in self.on.table.listed()]

    @rule(blocks=st.integers(1, 20), ttl_s=st.floats(1, 50), shared=st.booleans())
    def add(self, blocks: int, ttl_s: float, shared: bool) -> None:
        self.serial += 1
        self.on.lease(f"{self.serial}", blocks, ttl_s=ttl_s, shared=shared)

    @rule(data=st.data(), reader=READERS, hold_s=st.floats(1, 20))
    def claim(self, data: st.DataObject, reader: str, hold_s: float) -> None:
        if not self.serial:
            return
        name = str(data.draw(st.integers(1, self.serial)))
        answer = self.on.claim(name, 1, claim=reader, hold_s=hold_s)
        if isinstance(answer, Grant):
            assert name not in self.gone
            self.reading[name, reader] = self.on.clock.now + hold_s

    @rule(data=st.data(), read=st.booleans())
    def done(self, data: st.DataObject, read: bool) -> None:
        if self.reading:
            name, reader = data.draw(st.sampled_from(sorted(self.reading)))
            del self.reading[name, reader]
            self.on.table.done(name, reader, read=read)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if live := self._live():
            self.on.table.release([data.draw(st.sampled_from(live))])

    @rule(data=st.data(), ttl_s=st.floats(1, 50))
    def renew(self, data: st.DataObject, ttl_s: float) -> None:
        if live := self._live():
            self.on.table.renew([data.draw(st.sampled_from(live))], ttl_s)

    @rule()
    def flush(self) -> None:
        self.on.table.flush()
        assert self._live() == []

    @rule(passed=st.floats(0.1, 15))
    def wait(self, passed: float) -> None:
        self.on.clock.now += passed
        self.reading = {key: until for key, until in self.reading.items() if until > self.on.clock.now}

    @invariant()
    def nothing_is_let_go_of_under_a_reader(self) -> None:
        ended = self.on.table.sweep()
        assert not ended & {name for name, _ in self.reading}
        assert not ended & self.gone
        self.gone |= ended
        for name in ended:
            self.on.table.forget(name)

    @invariant()
    def what_is_gone_pins_nothing(self) -> None:
        leases, blocks = self.on.table.count()
        assert (blocks == 0) <= (leases == 0)
        if not leases and not self.reading:
            assert blocks == 0


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
