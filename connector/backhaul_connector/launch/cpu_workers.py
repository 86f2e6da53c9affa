"""CPU affinity reset, which makes CPU engines share a machine's cores.

vLLM's NIXL connector pins every CPU worker to the last core of its NUMA node (0.32, nixl/base_worker.py), so that all
engines of a machine would compute on the same core. That is undone from outside, once an engine is healthy.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path


def move(pids: Sequence[int], cores: Iterable[int]) -> None:
    """Moves the workers among an engine's processes, with all of their threads, to these cores.

    `pids` begins with the API server, which nobody pinned; the workers are the processes that differ from it."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        unpinned = os.sched_getaffinity(pids[0]) if pids else set()
        for pid in pids[1:]:
            if os.sched_getaffinity(pid) != unpinned:
                for task in Path(f"/proc/{pid}/task").iterdir():
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(int(task.name), cores)
