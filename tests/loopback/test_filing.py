"""What a turn leaves is filed once its answer is on its way, and before anybody looks for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from backhaul_router.report import Route
from router_turns import STORY, Cluster, run_cluster, user


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with run_cluster(engine={"connector": "backhaul"}, p={"prefix_caching": False}) as started:
        yield started


@pytest.fixture
def filed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The conversations that were filed, in their order. One called `broken` cannot be."""
    ledger, names = cluster.router.ledger, list[str]()
    settle: Any = ledger.settle

    def noted(key: Any, *rest: Any) -> Any:
        if key.conversation == "broken":
            raise RuntimeError("cannot be filed")
        names.append(key.conversation)
        return settle(key, *rest)

    monkeypatch.setattr(ledger, "settle", noted)
    return names


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_does_not_wait_for_it(cluster: Cluster, filed: list[str], stream: bool) -> None:
    await cluster.ask({"messages": [user(STORY)], "stream": stream})
    assert filed == []
    await asyncio.sleep(0)
    assert filed == ["c"]


async def test_whoever_looks_at_the_ledger_finds_it(cluster: Cluster, filed: list[str]) -> None:
    await cluster.ask({"messages": [user(STORY)]})
    assert len(cluster.router.ledger.handles()) == 1
    assert filed == ["c"]
    await asyncio.sleep(0)
    assert filed == ["c"]


async def test_a_turn_that_follows_at_once_finds_it(cluster: Cluster, filed: list[str]) -> None:
    first = [user(STORY * 4)]
    answer = await cluster.ask({"messages": first})
    again = await cluster.ask({"messages": [*first, answer.message, user(STORY)]})
    assert again.reused.route is Route.WARM


async def test_so_does_whoever_looks_from_a_thread_without_a_loop(cluster: Cluster, filed: list[str]) -> None:
    await cluster.ask({"messages": [user(STORY)]})
    with ThreadPoolExecutor(1) as elsewhere:
        assert len(elsewhere.submit(lambda: cluster.router.ledger.handles()).result()) == 1
    assert filed == ["c"]
    await cluster.ask({"messages": [user("More. " + STORY)]})
    with ThreadPoolExecutor(1) as elsewhere:
        assert len(elsewhere.submit(lambda: cluster.router.retention.names()).result()) == 2
    assert filed == ["c", "c"]


async def test_nobody_sees_it_half_filed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = cluster.router.ledger
    settle: Any = ledger.settle
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*left: Any) -> Any:
        begun.set()
        assert go_on.wait(5)
        return settle(*left)

    monkeypatch.setattr(ledger, "settle", slowly)
    await cluster.ask({"messages": [user(STORY)]})
    with ThreadPoolExecutor(2) as elsewhere:
        first = elsewhere.submit(lambda: cluster.router.ledger)
        assert begun.wait(5)
        second = elsewhere.submit(lambda: len(cluster.router.ledger.handles()))
        assert not second.done()
        go_on.set()
        first.result()
        assert second.result() == 1


async def test_what_cannot_be_filed_is_told_and_costs_nobody_else(cluster: Cluster, filed: list[str]) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    cluster.pinned_until_ttl = True
    try:
        for name in ("broken", "other"):
            answer = await cluster.ask({"messages": [user(f"{name}: {STORY}")]}, conversation=name)
            assert answer.status == 200
        await asyncio.sleep(0)
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
    assert filed == ["other"]
    assert [str(context["exception"]) for context in told] == ["cannot be filed"]


async def test_a_router_that_is_closed_right_after_an_answer_releases_it(cluster: Cluster) -> None:
    await cluster.ask({"messages": [user(STORY)]})
    await cluster.router.aclose()
    assert cluster.router.ledger.handles() == ()
