"""Patch of vLLM's busy loop, which lets an engine rest, or end, that has nothing but leases.

A finished request whose blocks are kept counts as work for vLLM's engine core, which therefore steps about every
millisecond for as long as there is a lease (0.32, v1/engine/core.py, `_process_engine_step`). Here it waits for its next
request instead, for `REST_S` at most, so that notifications, ends of leases and heartbeats are still seen in time. An engine
that is asked to end would wait for its leases too; here they end with it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Final

REST_S: Final = 0.02

logger = logging.getLogger("vllm.backhaul_connector.vllm_patches.idle")


def install(core: Any, rests: Callable[[Any], bool], end_leases: Callable[[Any], None]) -> bool:
    """Makes the engine core class `core` wait wherever `rests(scheduler)` says that only leases are left, and call
    `end_leases(scheduler)` when it is asked to end. Returns False,
    with a warning logged, where it is not as expected: that costs processor time, and nothing else."""
    original = getattr(core, "_process_input_queue", None)
    if hasattr(original, "backhaul"):
        return True
    if original is None:
        logger.warning(
            "Backhaul: vLLM's engine core has another loop: an idle engine with leases will keep a core busy, and end late"
        )
        return False

    @functools.wraps(original)
    def process_input_queue(engine: Any) -> None:
        if not engine.is_running():
            end_leases(engine.scheduler)
        elif _only_leases(engine) and rests(engine.scheduler):
            queue = engine.input_queue
            with queue.not_empty:
                if not queue.queue:
                    queue.not_empty.wait(REST_S)
        original(engine)

    process_input_queue.backhaul = True  # type: ignore[attr-defined]
    core._process_input_queue = process_input_queue
    return True


def _only_leases(engine: Any) -> bool:
    """Whether no request is under way: running, queued, in the batch queue, being aborted, or in another rank's wave."""
    return not (
        engine.engines_running
        or engine.batch_queue
        or not engine.aborts_queue.empty()
        or engine.scheduler.has_unfinished_requests()
        or engine.scheduler.finished_req_ids
        or engine._idle_state_callbacks
    )
