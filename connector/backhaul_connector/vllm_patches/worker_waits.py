"""Patch of vLLM's spin wait: CPU workers sleep between steps, so that engines on one machine leave each other the cores.

For a second after every message vLLM's worker polls its queue with `sched_yield` (0.32,
device_communicators/shm_broadcast.py, `SpinCondition.wait`). That suits a GPU, whose host has cores to spare. An engine
that pins blocks steps about every millisecond, so on a CPU its worker never stops polling, and several engines on two cores
starve each other: steps were seen to wait for a minute. `backhaul up` asks CPU workers to wait for the writer's
notification instead, for a millisecond at a time, through an environment variable that reaches them. Not for longer: vLLM
does not count on the notification in that second, and one can be missed.
"""

from __future__ import annotations

import functools
import os
import time
from types import ModuleType
from typing import Any

from .on_import import change_on_import

WAIT_VARIABLE = "BACKHAUL_WORKER_WAIT_MS"
QUEUE_MODULE = "vllm.distributed.device_communicators.shm_broadcast"


def register() -> None:
    """Does what the environment asks for, when vLLM's message queue is imported."""
    wait_ms = os.environ.get(WAIT_VARIABLE)
    if wait_ms is not None:
        change_on_import(QUEUE_MODULE, functools.partial(set_wait, wait_ms=int(wait_ms)))


def set_wait(queue: ModuleType, *, wait_ms: int) -> None:
    """Makes a reader that would poll without pause sleep for up to `wait_ms`, in milliseconds, or until it is notified."""
    condition: Any = queue.SpinCondition
    wait = condition.wait

    @functools.wraps(wait)
    def calm_wait(self: Any, timeout_ms: int | None = None) -> None:
        if time.monotonic() > self.last_read + self.busy_loop_s:
            wait(self, timeout_ms)
        elif self.local_notify_socket in dict(self.poller.poll(timeout=wait_ms)):
            self.local_notify_socket.recv(copy=False)

    condition.wait = calm_wait
