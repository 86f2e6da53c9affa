"""What routers share on a Redis server: each handle is used once whatever fails, nothing stays for ever, and a server that is
gone costs reuse alone."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis_takers
from backhaul_router.config import RouterConfig
from backhaul_router.errors import ConfigError, LeaseError
from backhaul_router.ledger import digests, redis_link
from backhaul_router.ledger.protocol import arrived, open_ledger
from backhaul_router.ledger.records import Branch, Held, Key, Taken
from backhaul_router.ledger.redis_ledger import RedisLedger
from backhaul_router.ledger.redis_scripts import MOVE_EPOCH
from backhaul_router.report import Reason
from backhaul_router.serve.settings import load
from backhaul_router.wire.exact_history import AnswerContent, TokenHistory
from core_values import D1, D2, branch, config, held, leased
from redis_servers import RedisServer, needs_redis, redis_server

pytestmark = [needs_redis, pytest.mark.alone]

KEY = Key("", "m", "", "c")
Open = Callable[..., RedisLedger]


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    running.command("FLUSHALL")
    return running


@asynccontextmanager
async def ledgers() -> AsyncIterator[Open]:
    """Opens ledgers, which are closed in the end."""
    opened: list[RedisLedger] = []

    def open_one(server: RedisServer, **settings: Any) -> RedisLedger:
        opened.append(RedisLedger(server.url, **{"timeout_s": 5.0, **settings}))
        return opened[-1]

    try:
        yield open_one
    finally:
        for ledger in opened:
            await ledger.aclose()


@pytest.fixture
async def opens() -> AsyncIterator[Open]:
    async with ledgers() as open_one:
        yield open_one


def usable(_: Held) -> Reason | None:
    return None


def soon(request_id: str, in_s: float = 100.0, *, shared: bool = False, **fields: Any) -> Held:
    make = leased if shared else held
    return make(request_id, deadline=time.monotonic() + in_s, **fields)


async def take(ledger: RedisLedger, *messages: bytes, key: Key = KEY) -> Taken:
    return await ledger.take(key, digests.chain(messages), time.monotonic(), usable)


async def settle(
    ledger: RedisLedger, *messages: bytes, handle: Held | None, key: Key = KEY, **fields: Any
) -> tuple[Held, ...]:
    """A whole turn that asked with `messages` and left `handle`."""
    taken = await take(ledger, *messages, key=key)
    return await ledger.settle(key, taken, branch(messages, held=handle, **fields), time.monotonic())


def names(handles: tuple[Held, ...]) -> list[str]:
    return [one.handle.request_id for one in handles]


def name(of: Held | None) -> str | None:
    return of.handle.request_id if of is not None else None


# --- shared --------------------------------------------------------------------------------------------------------------


async def test_what_a_turn_leaves_with_one_router_the_next_one_finds_with_another(
    server: RedisServer, opens: Open
) -> None:
    a, b = opens(server), opens(server)
    said = AnswerContent("hello", (("look", b'{"a":1}'), ("raw", "{")), "because")
    left = branch(
        (b"a",),
        range(1024),
        held=soon("1"),
        prompt_tokens=700,
        exact=TokenHistory(array("I", (1, 2**31, 2**32 - 1)), said, b"rendering"),
    )
    taken = await take(a, b"a")
    assert await a.settle(KEY, taken, left, time.monotonic()) == ()
    found = await take(b, b"a", b"b")
    assert found.branch is not None
    assert found.held is not None
    assert left.held is not None
    assert (found.turn, found.reason, found.common, found.extends) == (2, None, 1, True)
    assert found.held.handle == left.held.handle
    assert found.held.deadline == pytest.approx(left.held.deadline, abs=0.5)
    for what in Branch.__struct_fields__:
        if what != "held":
            assert getattr(found.branch, what) == getattr(left, what), what


async def test_deadlines_hold_on_machines_whose_clocks_began_at_other_times(server: RedisServer, opens: Open) -> None:
    a, b = opens(server), opens(server, clock=lambda: time.monotonic() + 10_000.0)
    await settle(a, b"a", handle=soon("1", 50.0))
    found = await take(b, b"a")
    assert found.held is not None
    assert found.held.deadline - (time.monotonic() + 10_000.0) == pytest.approx(50.0, abs=10.0)


async def test_a_conversation_that_ends_with_one_router_ends_with_all(server: RedisServer, opens: Open) -> None:
    a, b = opens(server), opens(server)
    await settle(a, b"a", handle=soon("1"))
    await settle(a, b"a", handle=soon("2"), key=KEY._replace(model="m2"))
    await settle(a, b"a", handle=soon("other"), key=KEY._replace(tenant="t"))
    assert sorted(names(await b.forget("c"))) == ["1", "2"]
    assert (await take(a, b"a")).reason is Reason.FIRST_TURN
    assert names(await b.held_for("c", "t")) == ["other"]


async def test_a_conversation_without_a_name_is_found_with_any_router(server: RedisServer, opens: Open) -> None:
    a, b = opens(server), opens(server)
    key = KEY._replace(conversation="anon-1", tenant="t")
    first = Taken(reason=Reason.FIRST_TURN)
    await a.settle(key, first, branch((b"s", b"u"), held=soon("1"), by_history=True), time.monotonic())
    chain = digests.chain([b"s", b"u", b"a", b"v"])
    assert await b.find(KEY._replace(tenant="t"), chain) == "anon-1"
    assert await b.find(KEY, chain) is None
    await b.forget("anon-1", "t")
    assert await a.find(KEY._replace(tenant="t"), chain) is None


async def test_fleets_with_names_of_their_own_do_not_see_each_other(server: RedisServer, opens: Open) -> None:
    a, b = opens(server, prefix="east"), opens(server, prefix="west")
    await settle(a, b"a", handle=soon("1"))
    assert (await take(b, b"a")).reason is Reason.FIRST_TURN
    assert names(await b.flush()) == []
    assert names(await a.flush()) == ["1"]


async def test_a_flush_is_everybodys(server: RedisServer, opens: Open) -> None:
    a, b = opens(server), opens(server)
    keys = [KEY._replace(conversation=f"c{n}") for n in range(40)]
    for n, key in enumerate(keys):
        await settle(a if n % 2 else b, b"a", handle=soon(str(n)), key=key)
    assert sorted(names(await b.flush())) == sorted(map(str, range(40)))
    found = [await take(a, b"a", key=key) for key in keys]
    assert {(one.held, one.reason) for one in found} == {(None, Reason.FLUSHED)}
    assert await a.flush() == ()


async def test_what_was_flushed_is_void_before_anybody_has_looked_for_it(server: RedisServer, opens: Open) -> None:
    a, b = opens(server), opens(server)
    await settle(a, b"a", handle=soon("1"))
    await b._link.run(MOVE_EPOCH, [b._keys.epoch])
    taken = await take(a, b"a")
    assert (taken.held, taken.reason, names(taken.drop)) == (None, Reason.FLUSHED, ["1"])


async def test_the_handles_of_an_engine_that_is_gone_are_dropped_for_all(server: RedisServer, opens: Open) -> None:
    a, b = opens(server), opens(server)
    await settle(a, b"a", handle=soon("1", engine_id="old"), key=KEY._replace(conversation="x"))
    await settle(a, b"a", handle=soon("2", engine_id="old", decode=D2), key=KEY._replace(conversation="y"))
    assert names(await b.drop_engine(D1, "old")) == ["1"]
    assert (await take(a, b"a", key=KEY._replace(conversation="x"))).reason is Reason.ENGINE_CHANGED


# --- one turn has a handle -----------------------------------------------------------------------------------------------


async def test_of_a_thousand_turns_of_four_processes_one_gets_the_handle(server: RedisServer, opens: Open) -> None:
    ledger = opens(server)
    await settle(ledger, b"a", handle=soon("1"))
    program = (sys.executable, str(Path(redis_takers.__file__)))
    process = await asyncio.create_subprocess_exec(*program, server.url, "4", "250", stdout=asyncio.subprocess.PIPE)
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    counts = [tuple(map(int, line.split())) for line in out.decode().splitlines()]
    assert sorted(got for got, _ in counts) == [0, 0, 0, 1]
    assert sum(in_use for _, in_use in counts) == 999, "each of the others knows why it has none"
    assert (await take(ledger, b"a")).turn == 1002


async def test_a_server_that_goes_back_in_time_hands_out_nothing_that_may_have_been_used(opens: Open) -> None:
    with redis_server(persists=True) as server:
        ledger = opens(server)
        await settle(ledger, b"a", handle=soon("stock"))
        await settle(ledger, b"a", handle=soon("ours", shared=True), key=KEY._replace(conversation="shared"))
        server.kill()
        server.start()
        await answering(ledger)
        taken = await take(ledger, b"a", b"b")
        assert (taken.held, taken.reason, taken.extends) == (None, Reason.LEDGER_UNAVAILABLE, True)
        # D confirms each read of a shared one.
        assert name((await take(ledger, b"a", key=KEY._replace(conversation="shared"))).held) == "ours"
        await ledger.settle(KEY, taken, branch((b"a", b"b"), held=soon("new")), time.monotonic())
        assert name((await take(ledger, b"a", b"b")).held) == "new"


async def test_a_caller_that_leaves_while_it_takes_has_taken_nothing(server: RedisServer, opens: Open) -> None:
    ledger = opens(server)
    await settle(ledger, b"a", handle=soon("1"))
    taking = asyncio.create_task(take(ledger, b"a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    while ledger._background:
        await asyncio.wait(tuple(ledger._background))
    assert name((await take(ledger, b"a")).held) == "1"


# --- nothing stays for ever ----------------------------------------------------------------------------------------------


def keys_of(server: RedisServer) -> list[str]:
    answer = server.command("KEYS", "*").decode().split("\r\n")
    return sorted(word for word in answer if word.startswith("backhaul:"))


def left_ms(server: RedisServer, key: str) -> int:
    return int(server.command("PTTL", key)[1:])


async def test_every_key_ends_by_itself(server: RedisServer, opens: Open) -> None:
    ledger = opens(server, max_idle_s=600.0)
    await settle(ledger, b"a", handle=soon("1"))
    once = branch((b"s",), held=soon("2", 40.0), by_history=True)
    key = KEY._replace(conversation="anon-1")
    await ledger.settle(key, Taken(reason=Reason.FIRST_TURN), once, time.monotonic())
    left = {key: left_ms(server, key) for key in keys_of(server)}
    assert len(left) == 5, "two records, two lists of them, and the end of a history"
    assert all(0 < ms <= 600_000 for ms in left.values())
    assert sorted(ms > 100_000 for ms in left.values()) == [False] * 3 + [True] * 2
    await ledger.forget("c")
    await ledger.forget("anon-1")
    assert keys_of(server) == []


async def test_a_silent_conversation_is_forgotten(server: RedisServer, opens: Open) -> None:
    ledger = opens(server, max_idle_s=0.05)
    await settle(ledger, b"a", handle=soon("1"))
    await until(lambda: keys_of(server) == [])
    assert (await take(ledger, b"a")).reason is Reason.FIRST_TURN


async def test_the_conversation_that_was_silent_longest_makes_room_among_its_tenants(
    server: RedisServer, opens: Open
) -> None:
    ledger = opens(server, max_conversations=2, max_conversations_per_tenant=3)
    x, y, z = (KEY._replace(conversation=name) for name in "xyz")
    for key in (x, y):
        await settle(ledger, b"a", handle=soon(key.conversation), key=key)
        await settle(ledger, b"a", handle=soon(key.conversation), key=key._replace(tenant="t"))
    await settle(ledger, b"a", b"b", handle=soon("x2"), key=x)
    assert names((await take(ledger, b"a", key=z)).drop) == ["y"]
    assert (await take(ledger, b"a", key=z._replace(tenant="t"))).drop == ()
    assert names(await ledger.held_for("x")) == ["x2"]
    assert await ledger.held_for("y") == ()


async def test_conversations_without_a_name_make_room_for_each_other_alone(server: RedisServer, opens: Open) -> None:
    ledger = opens(server, max_conversations=4)
    await settle(ledger, b"a", handle=soon("named"))
    dropped = []
    for conversation in ("anon-1", "anon-2", "anon-3", "anon-4"):
        left = branch((b"s", conversation.encode()), held=soon(conversation, 50.0), by_history=True)
        key = KEY._replace(conversation=conversation)
        dropped += await ledger.settle(key, Taken(reason=Reason.FIRST_TURN), left, time.monotonic())
    assert names(tuple(dropped)) == ["anon-1", "anon-2"]
    assert name((await take(ledger, b"a")).held) == "named"
    assert len(keys_of(server)) == 3 + 2 + 2, "three records, two lists of them, two ends of histories"


async def test_a_router_sweeps_what_it_has_filed(server: RedisServer, opens: Open) -> None:
    a, b = opens(server), opens(server)
    other = KEY._replace(conversation="other")
    await settle(a, b"a", handle=soon("2"), key=other)
    await settle(a, b"a", handle=soon("1", 0.02))
    assert (len(a), sorted(names(a.handles())), len(b)) == (2, ["1", "2"], 0)
    await asyncio.sleep(0.03)
    assert b.sweep(time.monotonic()) == ()
    assert names(await arrived(a.sweep(time.monotonic()))) == ["1"]
    assert (names(a.handles()), (await take(b, b"a")).reason) == (["2"], Reason.EXPIRED)


async def test_what_another_router_has_renewed_is_swept_later(server: RedisServer, opens: Open) -> None:
    a, b = opens(server), opens(server)
    left = soon("1", 10.0, shared=True)
    await settle(a, b"a", handle=left)
    now = time.monotonic()
    await b.renewed("c", {left.name: now + 100.0}, now)
    assert await arrived(a.sweep(now + 11.0)) == ()
    assert names(a.handles()) == ["1"]
    await b.renewed("c", {left.name: now}, now)
    assert names(await arrived(a.sweep(now + 101.0))) == ["1"]


async def test_a_record_that_cannot_be_read_counts_as_none(
    server: RedisServer, opens: Open, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = opens(server)
    await settle(ledger, b"a", handle=soon("1"))
    (record,) = (key for key in keys_of(server) if ":c:" in key)
    server.command("HSET", record, "h", "nonsense")
    assert (await take(ledger, b"a")).reason is Reason.FIRST_TURN
    assert "cannot be read" in caplog.text


# --- a server that is gone -----------------------------------------------------------------------------------------------


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


async def answering(ledger: RedisLedger) -> None:
    """Returns when the ledger knows that its server answers."""
    async with asyncio.timeout(20):
        await ledger.held_for("nobody")
        while not ledger.available:
            await asyncio.sleep(0.02)
            await ledger.held_for("nobody")


async def test_a_server_that_stands_still_costs_one_turn_its_wait(
    server: RedisServer, opens: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "backhaul")
    ledger = opens(server, timeout_s=2.0)
    await answering(ledger)
    await settle(ledger, b"a", handle=soon("1"))
    server.pause()
    try:
        before = time.monotonic()
        first = await take(ledger, b"a", b"b")
        waited = time.monotonic() - before
        assert (first.held, first.branch, first.reason) == (None, None, Reason.LEDGER_UNAVAILABLE)
        assert 1.5 < waited < 15.0
        assert not ledger.available
        blind = [await take(ledger, b"a", b"b") for _ in range(3)]
        assert [one.reason for one in blind] == [Reason.LEDGER_UNAVAILABLE] * 3
        assert [one.turn for one in (first, *blind)] == [2, 3, 4, 5]
        assert await ledger.find(KEY, digests.chain([b"a"])) is None
        assert await ledger.forget("c") == ()
        assert await ledger.held_for("c") == ()
    finally:
        server.resume()
    assert ledger.failures >= 4
    await answering(ledger)
    after = await take(ledger, b"a", b"b")
    assert (name(after.held), after.turn) == ("1", 6)
    said = [record.message for record in caplog.records]
    assert ["does not answer" in said[0], "answers again" in said[1], len(said)] == [True, True, 2]


async def test_a_turn_that_could_not_take_leaves_its_history_all_the_same(server: RedisServer, opens: Open) -> None:
    ledger = opens(server)
    await settle(ledger, b"a", handle=soon("1"))
    blind = Taken(reason=Reason.LEDGER_UNAVAILABLE)
    left = branch((b"a", b"b"), held=soon("2"))
    assert names(await ledger.settle(KEY, blind, left, time.monotonic())) == ["1"], (
        "superseded, as if it had been taken"
    )
    taken = await take(ledger, b"a", b"b", b"c")
    assert (name(taken.held), taken.common) == ("2", 2)
    new = KEY._replace(conversation="new")
    await ledger.settle(new, blind, branch((b"x",), held=soon("3")), time.monotonic())
    assert name((await take(ledger, b"x", key=new)).held) == "3"


async def test_what_certainly_was_not_filed_is_released_and_what_may_have_been_is_not(
    server: RedisServer, opens: Open
) -> None:
    ledger = opens(server, timeout_s=2.0)
    await answering(ledger)
    await settle(ledger, b"a", handle=soon("1"))
    taken = await take(ledger, b"a")
    unsure = await take(ledger, b"x", key=KEY._replace(conversation="x"))
    run = ledger._link.run

    async def written_without_an_answer(script: str, keys: Any, arguments: Any = ()) -> Any:
        answer = await run(script, keys, arguments)
        if arguments:
            raise redis_link.LedgerUnavailable("no answer in time", unknown=True)
        return answer

    ledger._link.run = written_without_an_answer  # type: ignore[method-assign]
    new = KEY._replace(conversation="x")
    assert await ledger.settle(new, unsure, branch((b"x",), held=soon("2")), time.monotonic()) == ()
    ledger._link.run = run  # type: ignore[method-assign]
    assert names(await ledger.held_for("x")) == ["2"]
    server.pause()
    try:
        assert names(await ledger.settle(KEY, taken, branch((b"a",), held=soon("3")), time.monotonic())) == ["3"]
        assert names(await ledger.give_back(KEY, taken)) == ["1"]
    finally:
        server.resume()


async def test_a_flush_that_is_not_certain_fails(server: RedisServer, opens: Open) -> None:
    ledger = opens(server, timeout_s=0.5)
    await answering(ledger)
    server.pause()
    try:
        with pytest.raises(LeaseError, match="no answer in time"):
            await ledger.flush()
    finally:
        server.resume()


async def test_a_server_that_was_never_there_is_waited_for_by_turns_alone(opens: Open) -> None:
    with redis_server() as server:
        pass
    ledger = opens(server, timeout_s=0.5)
    assert (await take(ledger, b"a")).reason is Reason.LEDGER_UNAVAILABLE


# --- settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://redis:6379", "redis", ""])
def test_a_url_that_is_none_of_redis_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url= should begin with one of redis://, rediss://, unix://"):
        RouterConfig(prefill=["http://p:1"], decode=["http://d:1"], redis_url=url)


def test_a_wrong_port_is_told_without_the_password() -> None:
    with pytest.raises(ConfigError, match="redis_url= is not a URL; it should look like redis://host:6379/0") as told:
        open_ledger(config(redis_url="redis://:secret@host:port/0"), time.monotonic)
    assert "secret" not in str(told.value)


def test_the_password_does_not_show(server: RedisServer) -> None:
    given = config(redis_url=server.url.replace("//", "//:secret@"))
    assert "secret" not in repr(given) + repr(open_ledger(given, time.monotonic))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(ConfigError, match=r"pip install 'backhaul\[redis\]'"):
        open_ledger(config(redis_url="redis://host"), time.monotonic)


def test_a_server_takes_the_url_from_the_environment_where_nothing_else_says_it() -> None:
    engines = {"prefill": ["http://p:1"], "decode": ["http://d:1"]}
    environ = {"BACKHAUL_REDIS_URL": "redis://:secret@there"}
    assert load(None, engines, environ).router.redis_url == "redis://:secret@there"
    assert load(None, {**engines, "redis_url": "redis://here"}, environ).router.redis_url == "redis://here"
