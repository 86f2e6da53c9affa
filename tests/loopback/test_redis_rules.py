"""A ledger on Redis does as one in memory does: the tests of the one run with the other in its place."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import test_forks
import test_histories
import test_ledger
import test_ledger_flush
from backhaul_router.ledger import redis_ledger
from backhaul_router.ledger.protocol import Later, arrived
from backhaul_router.ledger.records import Branch, Held, Key, Taken
from backhaul_router.ledger.redis_copy import WorkingCopy
from backhaul_router.ledger.redis_ledger import RedisLedger
from backhaul_router.ledger.redis_records import Name, Snapshot, name_in
from backhaul_router.report import Reason
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from redis_servers import RedisServer, needs_redis, redis_server

pytestmark = needs_redis

_T = TypeVar("_T")
MODULES = (test_ledger, test_ledger_flush, test_forks, test_histories)
OTHERWISE = {
    "test_a_silent_conversation_is_forgotten",  # by Redis itself, in real time
    "test_a_conversation_is_silent_from_its_last_turns_end",
    "test_a_parent_whose_children_work_is_not_silent",
    "test_the_ledger_tells_its_size",
    "test_what_is_found_is_what_a_search_of_all_histories_finds",  # of the index in memory
    "test_a_branch_keeps_its_number_when_its_handle_changes",
}
FEW = settings(
    max_examples=8, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
_prefixes = itertools.count()


class OnRedis:
    """A ledger on Redis with the face of one in memory, in a time of its own: that of the last call that told it."""

    def __init__(self, server: RedisServer, **limits: Any) -> None:
        self._now = 0.0
        self._loop = asyncio.new_event_loop()
        self._ledger = RedisLedger(
            server.url, prefix=f"rules-{next(_prefixes)}", timeout_s=5.0, clock=lambda: self._now, **limits
        )

    def close(self) -> None:
        self._wait(self._ledger.aclose())
        self._loop.close()

    def _wait(self, later: Later[_T]) -> _T:
        return self._loop.run_until_complete(arrived(later))

    def take(
        self,
        key: Key,
        chain: bytes,
        now: float,
        usable: Callable[[Held], Reason | None],
        parent: str | None = None,
    ) -> Taken:
        self._now = now
        return self._wait(self._ledger.take(key, chain, now, usable, parent))

    def settle(self, key: Key, taken: Taken, branch: Branch, now: float) -> tuple[Held, ...]:
        self._now = now
        return self._wait(self._ledger.settle(key, taken, branch, now))

    def sweep(self, now: float) -> tuple[Held, ...]:
        self._now = now
        return self._wait(self._ledger.sweep(now))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._ledger, name)
        return lambda *given: self._wait(method(*given))

    async def _all(self) -> list[WorkingCopy]:
        """Everything on file, whoever filed it."""
        ledger = self._ledger
        found = []
        async for keys in ledger._link.scan(ledger._keys.every_record):
            for head in await ledger._link.read(keys, "h"):
                name = name_in(head)
                assert isinstance(name, Name)
                loaded = await ledger._load([ledger._keys.record(name)])
                found.append(WorkingCopy([name], loaded, ledger._limits, ledger._keys))
        return found

    def __len__(self) -> int:
        return sum(map(len, self._wait(self._all())))

    def handles(self) -> tuple[Held, ...]:
        return tuple(held for copy in self._wait(self._all()) for held in copy.handles())

    @property
    def _conversations(self) -> list[Key]:
        return [key for copy in self._wait(self._all()) for key in copy._conversations]

    @property
    def flushes(self) -> int:
        return self._ledger.flushes

    @property
    def _left(self) -> Any:
        return self._ledger._ref_counts._left

    @property
    def _takers(self) -> Any:
        return self._ledger._ref_counts._takers


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as one:
        yield one


@pytest.fixture
def opened(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OnRedis]]:
    """Makes ledgers, in place of `MemoryLedger` too. The server's clock is the ledger's own."""
    made: list[OnRedis] = []

    def make(**limits: Any) -> OnRedis:
        made.append(OnRedis(server, **limits))
        return made[-1]

    def loaded(answer: Sequence[bytes], here: float) -> Snapshot:
        return Snapshot(
            here, answer[2].decode(), int(answer[3]), tuple(zip(answer[4::2], answer[5::2], strict=True)), 0.0
        )

    monkeypatch.setattr(redis_ledger.Snapshot, "of", loaded)
    for module in MODULES:
        monkeypatch.setattr(module, "MemoryLedger", make)
    yield make
    for one in made:
        one.close()


def cases() -> Iterator[Any]:
    for module in MODULES:
        for name, test in vars(module).items():
            if not name.startswith("test_") or name in OTHERWISE or not inspect.isfunction(test):
                continue
            marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
            for number, values in enumerate(marks[0].args[1] if marks else [None]):
                names = marks[0].args[0] if marks else ()
                given = {names: values} if isinstance(names, str) else dict(zip(names, values or (), strict=True))
                yield pytest.param(test, given, id=f"{name}-{number}" if marks else name)


@pytest.mark.parametrize(("test", "given"), list(cases()))
def test_as_in_memory(test: Callable[..., None], given: dict[str, Any], opened: Callable[..., OnRedis]) -> None:
    if "ledger" in inspect.signature(test).parameters:
        given = {**given, "ledger": opened()}
    test(**given)


@pytest.mark.parametrize("machine", [test_ledger.Interleaving, test_ledger.SharedInterleaving, test_forks.Forking])
def test_whatever_the_interleaving(
    machine: type[RuleBasedStateMachine], opened: Callable[..., OnRedis], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Room for conversations and how long they may be silent are counted otherwise (test_redis_ledger.py).
    monkeypatch.setattr(test_ledger, "MAX_CONVERSATIONS", 100)
    monkeypatch.setattr(test_ledger, "MAX_IDLE_S", 1e6)
    run_state_machine_as_test(machine, settings=FEW)
