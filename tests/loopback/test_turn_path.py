"""docs/architecture.md names the modules that a turn goes through: those, and no others, run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from backhaul_router.report import Route
from router_turns import first_turn, run_cluster

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
ROUTER = Path(sys.modules["backhaul_router"].__file__ or "").parent
NOW_AND_THEN = {
    *("engines/load_polling.py", "engines/retention_polling.py", "engines/describe.py", "wire/engine_metrics.py"),
    *("urls.py", "ranks.py"),
}
"""Chores that fall into a turn by chance, and another connection to an engine."""
MOST = 35
"""Each is one more that a reader of a turn has to know."""


def named_modules() -> set[str]:
    section = PAGE.read_text().partition("## A turn's path")[2].partition("\n## ")[0]
    return set(re.findall(r"`([\w/]+\.py)`", section.partition("\n1. ")[2]))


@contextmanager
def modules_that_run() -> Iterator[set[str]]:
    """The router's modules of which a function is called in this thread meanwhile."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROUTER):
                seen.add(path.relative_to(ROUTER).as_posix())

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("engine", [{"connector": "backhaul"}, {}], ids=["connector", "stock"])
async def test_a_turn_goes_through_the_modules_that_the_page_names(engine: dict[str, Any]) -> None:
    async with run_cluster(engine=engine, p={"prefix_caching": False}, load_interval_s=3600.0) as cluster:
        messages = await first_turn(cluster)
        with modules_that_run() as seen:
            answer = await cluster.ask({"messages": messages, "stream": True})
            await cluster.router.settled()
    assert answer.reused.route is Route.WARM
    named = named_modules()
    assert seen - NOW_AND_THEN <= named
    assert named - seen == set()
    assert len(named) <= MOST
