"""Connections on their way from the parent to its workers: none is lost, and none is kept by a process that does not serve it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import selectors
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from backhaul_router.serve import workers
from backhaul_router.serve.admin import Answer
from backhaul_router.serve.settings import Settings, load
from backhaul_router.serve.team import Team, said
from backhaul_router.serve.team_admin import TeamAdmin, changed
from backhaul_router.serve.worker_connections import Connections
from backhaul_router.serve.worker_link import RELOAD, Answers, Ask, Do, Message, Said, Unpacker, Whom
from backhaul_router.serve.worker_process import Place, Process
from backhaul_router.serve.worker_questions import Questions

LIMIT_S = 10.0


class Ends:
    """The pairs of sockets between the parent and a worker. The worker's process is this one."""

    def __init__(self) -> None:
        self.link, self.workers_link = socket.socketpair()
        self.gives, self.gets = socket.socketpair()
        self.gives.setblocking(False)
        self.process = Process(os.getpid(), self.link, self.gives, serves_since=0.0)
        self.place = Place(1, self.process)

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self.link, self.workers_link, self.gives, self.gets):
            one.close()

    def taken(self) -> int:
        """Takes connections until the parent has closed its end. How many they were."""
        self.gets.settimeout(LIMIT_S)
        for number in itertools.count():
            data, descriptors, _, _ = socket.recv_fds(self.gets, 1, 1)
            if not data:
                return number
            for descriptor in descriptors:
                os.close(descriptor)
        raise AssertionError


@pytest.fixture
def ends() -> Iterator[Ends]:
    with Ends() as ends:
        yield ends


# --- the parent, at the end


class Listener(socket.socket):
    aborted = 0
    """So many clients have given up meanwhile."""

    def accept(self) -> tuple[socket.socket, Any]:
        if self.aborted:
            self.aborted -= 1
            raise ConnectionAbortedError
        return super().accept()


@contextmanager
def clients(count: int) -> Iterator[Listener]:
    """A socket on which so many wait."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(Listener())
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        listener.setblocking(False)
        for _ in range(count):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        yield listener


@pytest.mark.parametrize("aborted", [0, 2])
def test_all_connections_that_have_come_by_the_end_are_handed_out(ends: Ends, aborted: int) -> None:
    with clients(100) as listener, selectors.DefaultSelector() as selector:
        listener.aborted = aborted
        connections = Connections(listener, [ends.place])
        connections.attend(selector)
        connections.close(selector, within_s=LIMIT_S)
        ends.gives.close()
        assert ends.taken() == 100


def test_what_no_worker_had_room_for_is_handed_out_at_the_end_too(ends: Ends) -> None:
    ends.gives.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with clients(40) as listener, selectors.DefaultSelector() as selector:
        connections = Connections(listener, [ends.place])
        connections.attend(selector)
        for key, events in selector.select(0):
            key.data(events)
        connections.attend(selector)
        assert connections.try_again_at is not None
        counts: list[int] = []
        worker = threading.Thread(target=lambda: counts.append(ends.taken()))
        worker.start()
        connections.close(selector, within_s=LIMIT_S)
        ends.gives.close()
        worker.join()
        assert counts == [40]


def test_at_the_end_nothing_is_waited_for_longer_than_said(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    ends.gives.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with clients(40) as listener, selectors.DefaultSelector() as selector:
        Connections(listener, [ends.place]).close(selector, within_s=0.02)
    assert caplog.messages == ["connections that have come are cut: no worker takes them"]


def test_before_the_parent_listens_there_is_nothing_to_hand_out(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as listener, selectors.DefaultSelector() as selector:
        listener.bind(("127.0.0.1", 0))
        Connections(listener, [ends.place]).close(selector, within_s=LIMIT_S)
    assert not caplog.messages


# --- a worker that was forked


def test_a_worker_does_not_keep_a_connection_that_the_parent_has_yet_to_hand_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its client would never see it end."""

    def work(listener: socket.socket, settings: Settings, _: object, team: Team) -> int:
        team.failed("forked")
        signal.pause()
        return 0

    monkeypatch.setattr(workers, "_work", work)
    settings = load(None, {"prefill": ["http://p:1"], "decode": ["http://d:1"]}, {})
    connection, client = socket.socketpair()
    with socket.socket() as listener, client, connection, selectors.DefaultSelector() as selector:
        parent: Any = workers._Parent(listener, settings, None, lambda _: None)
        parent._selector = selector
        parent._woken, wakes = socket.socketpair()
        parent._connections._unplaced = connection
        place = parent._places[0]
        parent._start(place)
        try:
            with parent._woken, wakes:
                place.process.link.setblocking(True)
                place.process.link.settimeout(LIMIT_S)
                assert place.process.received()
            connection.close()
            client.settimeout(LIMIT_S)
            assert client.recv(1) == b""
        finally:
            os.kill(place.process.pid, signal.SIGKILL)
            os.waitpid(place.process.pid, 0)
            place.process.close()


# --- a worker


class Served:
    """Serves nothing, and knows what it was to serve."""

    def __init__(self) -> None:
        self.connections: list[socket.socket] = []
        self.ended = asyncio.Event()

    async def accept(self, connection: socket.socket) -> None:
        self.connections.append(connection)

    def end_soon(self) -> None: ...

    def end(self) -> None:
        self.ended.set()

    def end_now(self) -> None: ...


@asynccontextmanager
async def serving(ends: Ends) -> AsyncIterator[tuple[Team, Served]]:
    team, served = Team(ends.workers_link, ends.gets, 1), Served()
    await team.join()
    team.connected()
    team.serve_with(served)
    team.serves("http://here")
    try:
        yield team, served
    finally:
        await team.aclose()
        for one in served.connections:
            one.close()
        if team._writer is not None:
            team._writer.close()
            await team._writer.wait_closed()


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def until_served(served: Served, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(served.connections) < count:
            await asyncio.sleep(0.002)


async def test_connections_wait_while_a_worker_has_no_descriptors(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    try:
        async with serving(ends) as (_, served):
            with no_descriptors_left():
                for given, _ in pairs:
                    assert ends.process.hand(given)
                async with asyncio.timeout(LIMIT_S):
                    while "no descriptors left (ulimit -n): connections wait" not in caplog.text:
                        await asyncio.sleep(0.002)
                assert len(served.connections) == 1  # in place of the one in reserve
            await until_served(served, 3)
            for number, connection in enumerate(served.connections):
                connection.send(b"%d" % number)
            assert [client.recv(1) for _, client in pairs] == [b"0", b"1", b"2"]
    finally:
        for one in (one for pair in pairs for one in pair):
            one.close()


async def test_a_worker_that_is_to_end_waits_for_descriptors_first(ends: Ends) -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    try:
        async with serving(ends) as (team, served):
            with no_descriptors_left():
                for given, _ in pairs:
                    assert ends.process.hand(given)
                await until_served(served, 1)
                ending = asyncio.create_task(team._end())
                await asyncio.sleep(0)
            await ending
            assert (len(served.connections), served.ended.is_set()) == (3, True)
    finally:
        for one in (one for pair in pairs for one in pair):
            one.close()


# --- a worker that cannot answer


async def heard(ends: Ends, kind: type[Message]) -> Any:
    """The next message of that kind that the worker says."""
    ends.link.setblocking(False)
    unpacker = Unpacker()
    async with asyncio.timeout(LIMIT_S):
        while True:
            for message in unpacker.feed(await asyncio.get_running_loop().sock_recv(ends.link, 65536)):
                if isinstance(message, kind):
                    return message


async def fails(_: object) -> Said:
    raise ZeroDivisionError("of all things")


async def cannot_be_said(_: object) -> Said:
    return said(object())


@pytest.mark.parametrize("work", [fails, cannot_be_said])
async def test_a_worker_that_fails_at_an_answer_says_so(
    ends: Ends, work: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(ends) as (team, _):
        team.does("show", work)
        team.does("change", work, if_it_fails=[500, {}])
        ends.process.send(Do(7, "show"))
        assert await heard(ends, Said) == Said(7, good=False, failed=True)
        ends.process.send(Do(8, "change"))
        assert await heard(ends, Said) == Said(8, good=False, value=[500, {}])
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


async def test_a_change_at_which_a_worker_fails_is_answered_500(ends: Ends) -> None:
    class Broken:
        async def answer(self, *_: object) -> Answer:
            raise ZeroDivisionError

    app: Any = SimpleNamespace(admin=Broken())
    async with serving(ends) as (team, _):
        TeamAdmin(team, app)
        ends.process.send(Do(9, RELOAD, ["POST", "/backhaul/admin/reload", {}, b""]))
        said_so = await heard(ends, Said)
    assert not said_so.good
    answer = changed(("POST", "/reload"), 1, Answers(1, {1: said_so.value}, [], []))
    assert (answer.status, answer.value["error"]["code"]) == (500, "internal_error")


def test_a_worker_that_failed_is_missing_in_the_answer_and_nobody_waits_for_it(ends: Ends) -> None:
    with Ends() as others:
        others.place.number = 2
        questions = Questions([ends.place, others.place], lambda: None)
        questions.ask(ends.place, ends.process, Ask(5, "show", Whom.ALL, LIMIT_S))
        questions.said(others.place, Said(1, good=False, failed=True))
        questions.said(ends.place, Said(1, good=True, value="here"))
        assert questions.next_until is None
        answer = Unpacker().feed(ends.workers_link.recv(65536))[-1]
        assert isinstance(answer, Answers)
        assert (answer.answers, answer.missing) == ({1: "here"}, [2])
