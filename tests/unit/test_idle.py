"""An engine core that has nothing but leases waits for its next request instead of stepping."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from backhaul_connector.vllm_patches import idle


class Core:
    """The parts of vLLM's engine core that matter here."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[str] = queue.Queue()
        self.aborts_queue: queue.Queue[str] = queue.Queue()
        self.batch_queue: list[object] = []
        self.engines_running = False
        self._idle_state_callbacks: list[object] = []
        self.scheduler = SimpleNamespace(has_unfinished_requests=lambda: False, finished_req_ids=set(), ended=False)
        self.running = True

    def is_running(self) -> bool:
        return self.running

    def _process_input_queue(self) -> None:
        while not self.input_queue.empty():
            self.input_queue.get_nowait()


@pytest.fixture
def core() -> Any:
    class Patched(Core):
        _process_input_queue = Core._process_input_queue

    def end_leases(scheduler: Any) -> None:
        scheduler.ended = True

    assert idle.install(Patched, lambda scheduler: True, end_leases)
    return Patched()


def waits(core: Core, rest_s: float = 30.0) -> bool:
    """Whether it waits for its rest to be over, of which half is enough to tell."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(idle, "REST_S", rest_s)
        began = time.monotonic()
        core._process_input_queue()
    return time.monotonic() - began > rest_s / 2


def test_with_only_leases_it_waits(core: Core) -> None:
    assert waits(core, rest_s=0.2)


def test_a_request_wakes_it_at_once(core: Core) -> None:
    threading.Timer(0.02, core.input_queue.put, ["request"]).start()
    assert not waits(core)
    assert core.input_queue.empty()


def test_what_came_before_is_not_waited_over(core: Core) -> None:
    core.input_queue.put("request")
    assert not waits(core)


@pytest.mark.parametrize(
    "busy",
    [
        lambda core: setattr(core.scheduler, "has_unfinished_requests", lambda: True),
        lambda core: core.scheduler.finished_req_ids.add("r"),
        lambda core: core.batch_queue.append(1),
        lambda core: core.aborts_queue.put("r"),
        lambda core: setattr(core, "engines_running", True),
        lambda core: core._idle_state_callbacks.append(1),
    ],
    ids=["requests", "finished", "batch", "abort", "wave", "callback"],
)
def test_with_anything_else_to_do_it_does_not(core: Core, busy: Any) -> None:
    busy(core)
    assert not waits(core)


def test_an_engine_that_is_asked_to_end_does_not_wait_for_its_leases(core: Core) -> None:
    assert waits(core, rest_s=0.2)
    assert not core.scheduler.ended
    core.running = False
    assert not waits(core)
    assert core.scheduler.ended


def test_an_unknown_engine_core_is_left_alone() -> None:
    class Other:
        pass

    assert not idle.install(Other, lambda scheduler: True, lambda scheduler: None)


def test_installing_twice_changes_nothing(core: Core) -> None:
    once = type(core)._process_input_queue
    assert idle.install(type(core), lambda scheduler: False, lambda scheduler: None)
    assert type(core)._process_input_queue is once
