"""The lease channel over real sockets: claims, what a broken peer gets, and that nothing waits for the dead."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from backhaul_connector import lease_channel
from backhaul_connector.claims import WORKERS_PER_HOLDER, Claim, Claims, Target
from backhaul_connector.lease_channel import BrokenChannel, LeaseClient, LeaseServer
from backhaul_connector.lease_table import LeaseTable
from backhaul_protocol.lease_channel import LONGEST_FRAME, Answer, Decline, Done
from backhaul_protocol.lease_channel import Claim as ClaimMessage
from backhaul_protocol.why import Why

HOST = "127.0.0.1"
HASH = b"h" * 32
PEER = {"remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1}
LIMIT_S = 20.0
"""For what is answered at once, by a machine that may have much else to do."""
HOLD_S = 300.0


@pytest.fixture
def table() -> LeaseTable:
    table = LeaseTable("D", 1000)
    for name in ("shared", "single"):
        table.add(name, [b"0" * 32, HASH], [[4, 5]], [4, 5], block_size=16, ttl_s=60.0, shared=name == "shared")
    return table


@pytest.fixture
def server(table: LeaseTable) -> Iterator[LeaseServer]:
    server = LeaseServer(HOST, 0, table, lambda: PEER)
    yield server
    server.stop()


@pytest.fixture
def client() -> Iterator[LeaseClient]:
    client = LeaseClient(timeout_s=LIMIT_S)
    yield client
    client.close()


@pytest.fixture
def claims() -> Iterator[Claims]:
    claims = Claims(timeout_s=LIMIT_S, hold_s=HOLD_S)
    yield claims
    claims.close()


def message(table: LeaseTable, lease: str = "shared", **other: object) -> ClaimMessage:
    fields = {
        "v": 1,
        "lease": lease,
        "engine": "D",
        "epoch": table.epoch,
        "blocks": 2,
        "hash": HASH,
        "hold_s": 30.0,
        "claim": "c1",
    }
    return ClaimMessage(**{**fields, **other})  # type: ignore[arg-type]


def target(server: LeaseServer, table: LeaseTable, lease: str = "shared") -> Target:
    return Target(HOST, server.port, lease, "D", table.epoch, shared=lease == "shared")


def settled(claim: Claim) -> Answer:
    deadline = time.monotonic() + LIMIT_S
    while claim.answer is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return claim.answer


def eventually(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_claim_is_answered_with_the_holders_blocks(
    server: LeaseServer, table: LeaseTable, client: LeaseClient
) -> None:
    answer = client.ask(HOST, server.port, message(table))
    assert answer == Answer(ok=True, block_ids=[[4, 5]], tokens=32, peer=PEER)
    assert table.listed()[0].holds == 1
    assert client.ask(HOST, server.port, Done("shared", "c1", read=True)) == Answer(ok=True)
    assert table.listed()[0].holds == 0
    assert client.ask(HOST, server.port, Decline("single")) == Answer(ok=True)
    assert table.sweep() == {"single"}


def test_a_claim_that_is_wrong_is_refused_with_the_reason(
    server: LeaseServer, table: LeaseTable, client: LeaseClient
) -> None:
    assert client.ask(HOST, server.port, message(table, hash=b"x" * 32)) == Answer(ok=False, why="differs")
    assert client.ask(HOST, server.port, message(table, engine="other")).why == "other_engine"


def test_a_frame_that_is_no_message_is_refused_and_one_that_is_no_frame_ends_the_connection(
    server: LeaseServer, table: LeaseTable
) -> None:
    def exchange(sent: bytes) -> bytes:
        with socket.create_connection((HOST, server.port), timeout=5.0) as connection:
            connection.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                return connection.recv(1000)
        return b""

    def frame(body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + body

    for wrong in ({"op": "claim"}, {"op": "dance"}, {"v": 2, **msgspec.to_builtins(Done("a", "b", read=True))}, [1], 7):
        assert b"malformed" in exchange(frame(msgspec.msgpack.encode(wrong))) or isinstance(wrong, dict)
    assert exchange(frame(b"\xc1")) == b""
    assert exchange(struct.pack(">I", LONGEST_FRAME + 1)) == b""
    assert exchange(b"GET / HTTP/1.1\r\n\r\n") == b""
    assert table.count() == (2, 2)


def test_a_connection_is_used_again_and_replaced_when_the_holder_has_restarted(
    server: LeaseServer, table: LeaseTable, client: LeaseClient
) -> None:
    client.ask(HOST, server.port, message(table))
    client.ask(HOST, server.port, message(table))
    assert len(server._open) == 1
    server.stop()
    again = LeaseServer(HOST, server.port, LeaseTable("D2", 10), lambda: PEER)
    try:
        assert client.ask(HOST, server.port, message(table)).why == "other_engine"
    finally:
        again.stop()


def test_what_cannot_be_encoded_leaves_no_connection_behind(
    server: LeaseServer, table: LeaseTable, client: LeaseClient
) -> None:
    with pytest.raises(BrokenChannel):
        client.ask(HOST, server.port, message(table, lease="\ud800"))
    assert not client._busy


def test_nobody_there_is_told_at_once(client: LeaseClient, table: LeaseTable) -> None:
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        began = time.monotonic()
        with pytest.raises(BrokenChannel, match="cannot be reached"):
            client.ask(HOST, unused.getsockname()[1], message(table))
        assert time.monotonic() - began < LIMIT_S / 2


def test_a_holder_that_says_nothing_costs_the_time_limit_and_no_more(table: LeaseTable) -> None:
    client = LeaseClient(timeout_s=0.2)
    with socket.create_server((HOST, 0)) as silent:
        began = time.monotonic()
        with pytest.raises(BrokenChannel):
            client.ask(HOST, silent.getsockname()[1], message(table))
        assert 0.15 < time.monotonic() - began < LIMIT_S / 2
    client.close()


def test_closing_frees_whoever_waits(table: LeaseTable) -> None:
    client = LeaseClient(timeout_s=30.0)
    failed = threading.Event()

    def ask(port: int) -> None:
        with contextlib.suppress(BrokenChannel):
            client.ask(HOST, port, message(table))
        failed.set()

    with socket.create_server((HOST, 0)) as silent:
        thread = threading.Thread(target=ask, args=(silent.getsockname()[1],))
        thread.start()
        eventually(lambda: client._busy)
        client.close()
        assert failed.wait(LIMIT_S)
        thread.join()


def test_a_reason_of_another_release_is_told_once_and_costs_a_read_each_time(
    table: LeaseTable, claims: Claims, caplog: pytest.LogCaptureFixture
) -> None:
    class Newer(LeaseServer):
        def reply(self, message: object) -> Any:
            return {"ok": False, "why": "a word of tomorrow"}

    newer = Newer(HOST, 0, table, lambda: PEER)
    try:
        for _ in range(2):
            assert settled(claims.claim(target(newer, table), 2, HASH)).why is Why.MALFORMED
    finally:
        newer.stop()
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "tomorrow" in line.getMessage()
    assert str(newer.port) in line.getMessage()


def test_a_claim_settles_in_the_background(server: LeaseServer, table: LeaseTable, claims: Claims) -> None:
    claim = claims.claim(target(server, table, "single"), 2, HASH)
    assert settled(claim).block_ids == [[4, 5]]
    assert HOLD_S - LIMIT_S < claim.left_s() <= HOLD_S
    claims.done(claim, read=True)
    eventually(lambda: "single" in table.sweep())


def test_a_claim_that_is_no_longer_wanted_is_given_back(
    server: LeaseServer, table: LeaseTable, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = threading.Event(), threading.Event()
    grant = table.claim

    def slow(*args: Any, **fields: Any) -> Any:
        asked.set()
        answers.wait(LIMIT_S)
        return grant(*args, **fields)

    monkeypatch.setattr(table, "claim", slow)
    claim = claims.claim(target(server, table), 2, HASH)
    assert asked.wait(LIMIT_S)
    claims.done(claim, read=False)
    answers.set()
    assert settled(claim).ok
    eventually(lambda: table.listed()[0].holds == 0)


def test_only_a_lease_kept_for_one_reader_is_declined(server: LeaseServer, table: LeaseTable, claims: Claims) -> None:
    claims.decline(target(server, table, "shared"))
    claims.decline(target(server, table, "single"))
    eventually(lambda: table.sweep() == {"single"})
    assert table.count()[0] == 1


def test_an_unreachable_holder_is_a_refusal(table: LeaseTable, claims: Claims) -> None:
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        nobody = Target(HOST, unused.getsockname()[1], "shared", "D", table.epoch, shared=True)
        assert settled(claims.claim(nobody, 2, HASH)) == Answer(ok=False, why="unreachable")


@pytest.mark.parametrize("host", ["no such host.invalid", "\x00", "x" * 255, "1.2.3.4.5"])
def test_a_host_that_is_none_is_a_refusal(table: LeaseTable, claims: Claims, host: str) -> None:
    assert settled(claims.claim(Target(host, 9, "shared", "D", table.epoch, shared=True), 2, HASH)).why == "unreachable"


@pytest.mark.alone
def test_many_claims_on_a_holder_that_says_nothing_are_over_soon(table: LeaseTable) -> None:
    claims = Claims(timeout_s=0.5, hold_s=HOLD_S)
    with socket.create_server((HOST, 0), backlog=100) as silent:
        nobody = Target(HOST, silent.getsockname()[1], "shared", "D", table.epoch, shared=True)
        began = time.monotonic()
        made = [claims.claim(nobody, 2, HASH) for _ in range(100)]
        assert {settled(claim).why for claim in made} == {"unreachable"}
        assert time.monotonic() - began < 6.0, "half a second in all, not for every four of them"
    claims.close()


def test_a_silent_holder_takes_no_time_from_the_claims_on_others(server: LeaseServer, table: LeaseTable) -> None:
    claims = Claims(timeout_s=2 * LIMIT_S, hold_s=HOLD_S)
    with socket.create_server((HOST, 0)) as silent:
        dead = Target(HOST, silent.getsockname()[1], "shared", "D", table.epoch, shared=True)
        waiting = [claims.claim(dead, 2, HASH) for _ in range(100)]
        claim = claims.claim(target(server, table), 2, HASH)
        assert settled(claim).ok
        assert claim.left_s() > HOLD_S - LIMIT_S
        assert not any(one.answer for one in waiting)
    claims.close()


def test_claims_that_wait_behind_one_that_nobody_answered_fail_with_it(table: LeaseTable) -> None:
    claims = Claims(timeout_s=1.0, hold_s=HOLD_S)
    with socket.create_server((HOST, 0)) as silent:
        dead = Target(HOST, silent.getsockname()[1], "shared", "D", table.epoch, shared=True)
        waiting = [claims.claim(dead, 2, HASH) for _ in range(20)]
        assert {settled(claim).why for claim in waiting} == {"unreachable"}
        assert 1 <= connections_to(silent) <= WORKERS_PER_HOLDER
    claims.close()


def connections_to(listener: socket.socket) -> int:
    """How many nobody has accepted, those that were given up included."""
    listener.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            count += 1
    return count


def test_a_holder_that_is_back_is_asked_again(server: LeaseServer, table: LeaseTable, claims: Claims) -> None:
    server.stop()
    assert settled(claims.claim(target(server, table), 2, HASH)).why == "unreachable"
    again = LeaseServer(HOST, server.port, table, lambda: PEER)
    try:
        assert settled(claims.claim(target(again, table), 2, HASH)).ok
    finally:
        again.stop()


def test_connections_to_holders_that_are_gone_do_not_pile_up(
    table: LeaseTable, client: LeaseClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_channel, "MOST_IDLE", 2)
    servers = [LeaseServer(HOST, 0, table, lambda: PEER) for _ in range(4)]
    for server in servers:
        client.ask(HOST, server.port, message(table))
    assert [port for _, port in client._idle] == [server.port for server in servers[2:]]
    for server in servers:
        server.stop()


def test_a_silent_connection_is_closed_and_replaced_when_its_reader_comes_back(
    monkeypatch: pytest.MonkeyPatch, server: LeaseServer, table: LeaseTable, client: LeaseClient
) -> None:
    monkeypatch.setattr(lease_channel, "IDLE_S", 1.0)
    assert client.ask(HOST, server.port, message(table)).ok
    eventually(lambda: not server._open)
    assert client.ask(HOST, server.port, message(table, claim="c2")).ok


def test_connections_beyond_the_most_are_refused_with_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, server: LeaseServer, table: LeaseTable, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease_channel, "MOST_CONNECTIONS", 1)
    with socket.create_connection((HOST, server.port)):
        eventually(lambda: len(server._open) == 1)
        for _ in range(3):
            with socket.create_connection((HOST, server.port), timeout=5.0) as refused:
                with contextlib.suppress(ConnectionResetError):
                    assert refused.recv(1) == b""
        lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "the most there may be" in line and str(server.port) in line]) == 1
    eventually(lambda: not server._open)
