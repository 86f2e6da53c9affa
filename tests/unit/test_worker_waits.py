"""Workers on a CPU sleep between steps, and keep vLLM's own wait beyond the first second."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import pytest
from backhaul_connector.vllm_patches import worker_waits


class Poller:
    def __init__(self, notified: list[Any]) -> None:
        self.notified = notified
        self.timeouts: list[float] = []

    def poll(self, timeout: float) -> list[tuple[Any, int]]:
        self.timeouts.append(timeout)
        return [(socket, 1) for socket in self.notified]


class Socket:
    def __init__(self) -> None:
        self.received = 0

    def recv(self, copy: bool = True) -> None:
        self.received += 1


@pytest.fixture
def queue() -> ModuleType:
    module = ModuleType("shm_broadcast")

    class SpinCondition:
        busy_loop_s = 1.0

        def __init__(self, last_read: float, notified: bool) -> None:
            self.last_read = last_read
            self.local_notify_socket = Socket()
            self.poller = Poller([self.local_notify_socket] if notified else [])
            self.own_waits: list[int | None] = []

        def wait(self, timeout_ms: int | None = None) -> None:
            self.own_waits.append(timeout_ms)

    module.SpinCondition = SpinCondition  # type: ignore[attr-defined]
    worker_waits.set_wait(module, wait_ms=1)
    return module


def just_now() -> float:
    """However long it takes until it is looked at."""
    return time.monotonic() + 60.0


def test_within_a_second_of_the_last_read_a_reader_sleeps_for_a_millisecond_at_most(queue: ModuleType) -> None:
    condition = queue.SpinCondition(just_now(), notified=False)
    condition.wait(timeout_ms=500)
    assert condition.poller.timeouts == [1]
    assert condition.own_waits == []
    assert condition.local_notify_socket.received == 0


def test_a_notification_is_taken_so_that_the_next_wait_sleeps_again(queue: ModuleType) -> None:
    condition = queue.SpinCondition(just_now(), notified=True)
    condition.wait()
    assert condition.local_notify_socket.received == 1


def test_later_the_wait_is_vllms_own(queue: ModuleType) -> None:
    condition = queue.SpinCondition(time.monotonic() - 2.0, notified=True)
    condition.wait(timeout_ms=500)
    assert condition.own_waits == [500]
    assert condition.poller.timeouts == []


@pytest.mark.parametrize(("variable", "asked"), [(None, []), ("1", [worker_waits.QUEUE_MODULE])])
def test_nothing_changes_unless_the_environment_asks(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, asked: list[str]
) -> None:
    changed: list[str] = []
    monkeypatch.setattr(worker_waits, "change_on_import", lambda module, change: changed.append(module))
    monkeypatch.delenv(worker_waits.WAIT_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(worker_waits.WAIT_VARIABLE, variable)
    worker_waits.register()
    assert changed == asked
