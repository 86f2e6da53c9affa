"""What a router shows to Prometheus: its numbers are those of the turns, and it holds nothing that is not for everybody."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from backhaul_loopback import LoopbackPair, loopback_pair
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Router
from backhaul_router.fleet.fleet import Fleet
from backhaul_router.ledger.memory import MemoryLedger
from backhaul_router.ledger.records import Key
from backhaul_router.report import ReuseReport, Route
from backhaul_router.serve.asgi import App, make_app
from backhaul_router.serve.metrics import OTHER_MODEL, PREFIX, RouterMetrics
from core_values import D1, branch, held
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from router_turns import CHAT, Cluster, first_turn, opening, run_cluster
from served import in_thread

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
CONFIG: Any = {"prefill": ("http://p1:1",), "decode": (D1,)}
HEAD: Any = {"conversation": "c1", "turn": 1}


class Page:
    """A scrape, as Prometheus reads it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, name: str, **labels: str) -> float:
        """The sum over the samples that have these labels; one must be there."""
        found = [sample.value for sample in self.samples(name, **labels)]
        assert found, f"{name} {labels} is not there:\n{self.text}"
        return sum(found)

    def samples(self, name: str, **labels: str) -> list[Any]:
        wanted = f"{PREFIX}_{name}"
        return [
            sample
            for family in self.families.values()
            for sample in family.samples
            if sample.name == wanted and labels.items() <= sample.labels.items()
        ]


def watched(cluster: Cluster) -> RouterMetrics:
    """Metrics of the cluster's router, beside the reports that the tests read."""
    metrics = RouterMetrics()
    metrics.watch(cluster.router)

    def record(report: ReuseReport) -> None:
        cluster.reports.append(report)
        metrics.record(report)

    cluster.router.on_report = record
    return metrics


def read(metrics: RouterMetrics) -> Page:
    return Page(metrics.page()[0].decode())


def of_report(**fields: Any) -> Page:
    metrics = RouterMetrics()
    metrics.record(ReuseReport(**HEAD, **fields))
    return read(metrics)


@pytest.fixture
async def pair() -> AsyncIterator[LoopbackPair]:
    async with loopback_pair() as pair:
        yield pair


async def get(app: App, client: str, accept: str = "") -> tuple[int, dict[bytes, bytes], str]:
    messages: list[Any] = []
    headers = [(b"accept", accept.encode())] if accept else []
    scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": headers, "client": (client, 1)}

    async def send(message: Any) -> None:
        messages.append(message)

    await app(scope, asyncio.Queue[Any]().get, send)
    start, end = messages
    return start["status"], dict(start["headers"]), end["body"].decode()


# --- turns


async def test_turns_are_counted_by_route_and_reason() -> None:
    async with run_cluster() as cluster:
        metrics = watched(cluster)
        await cluster.exact({"messages": await first_turn(cluster)})
        page = read(metrics)
        model = cluster.p.model
    assert page.value("turns_total", model=model, route="cold", reason="first_turn") == 1
    assert page.value("turns_total", model=model, route="warm", reason="none") == 1


async def test_the_sources_of_prompt_tokens_add_up_to_the_prompts() -> None:
    async with run_cluster(engine={"connector": "backhaul"}, p={"prefix_caching": False}) as cluster:
        metrics = watched(cluster)
        await cluster.exact({"messages": await first_turn(cluster)})
        page = read(metrics)
        cold, warm = cluster.reports
    assert page.value("prompt_tokens_total") == (cold.prompt or 0) + (warm.prompt or 0)
    assert page.value("prompt_tokens_total", source="pulled") == warm.pulled
    assert page.value("prompt_tokens_total", source="computed") == (cold.computed or 0) + (warm.computed or 0)
    assert page.value("generated_tokens_total") == (cold.generated or 0) + (warm.generated or 0)


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"route": Route.WARM, "cached": 60}, {"cached": 60, "computed": 40}),
        (
            {"route": Route.WARM, "cached": 60, "local": 10, "pulled": 50},
            {"prefill_cache": 10, "pulled": 50, "computed": 40},
        ),
        ({"route": Route.LOCAL, "cached": 60}, {"decode_cache": 60, "computed": 40}),
        ({"route": Route.COLD}, {"unknown": 100}),
    ],
    ids=["stock", "ours", "local", "untold"],
)
def test_a_prompt_is_split_by_what_is_known_of_it(fields: Any, source: dict[str, float]) -> None:
    page = of_report(prompt=100, **fields)
    counted = {sample.labels["source"]: sample.value for sample in page.samples("prompt_tokens_total") if sample.value}
    assert counted == source


def test_times_are_seconds_by_leg() -> None:
    page = of_report(
        route=Route.WARM, render_ms=10.0, prefill_ms=200.0, read_ms=20.0, first_byte_ms=250.0, total_ms=900.0
    )
    assert page.value("leg_seconds_sum", leg="prefill", route="warm") == pytest.approx(0.2)
    assert page.value("leg_seconds_sum", leg="read", route="warm") == pytest.approx(0.02)
    assert page.value("leg_seconds_sum", leg="decode_first_byte", route="warm") == pytest.approx(0.04)
    assert page.value("first_byte_seconds_sum", route="warm") == pytest.approx(0.25)
    assert page.value("turn_seconds_sum", route="warm") == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("error", "leg"),
    [("prefill_failed", "prefill"), ("decode_timeout", "decode"), ("render_failed", "render"), ("client_gone", "none")],
)
def test_what_ends_a_turn_early_is_counted_with_its_leg(error: str, leg: str) -> None:
    page = of_report(route=Route.COLD, error=error, first_byte_ms=5.0)
    assert page.value("turn_errors_total", leg=leg, error=error) == 1
    assert page.value("first_byte_seconds_count") == 0


async def test_an_engine_that_fails_shows_in_the_errors() -> None:
    async with run_cluster() as cluster:
        metrics = watched(cluster)
        await cluster.router.connect()
        await cluster.kill(cluster.p)
        answer = await cluster.ask({"messages": opening()})
        page = read(metrics)
    assert answer.status == 502
    assert page.value("turn_errors_total", leg="prefill", error="prefill_failed") == 1


async def test_model_names_that_clients_make_up_are_one_series() -> None:
    async with run_cluster() as cluster:
        metrics = watched(cluster)
        for number in range(5):
            await cluster.ask({"model": f"made-up-{number}", "messages": opening()})
        await cluster.ask({"messages": opening()})
        page = read(metrics)
        model = cluster.p.model
    assert "made-up" not in page.text
    assert {sample.labels["model"] for sample in page.samples("turns_total")} == {model, OTHER_MODEL}
    assert page.value("turns_total", model=OTHER_MODEL) == 5


# --- the router's state


async def test_the_fleet_and_the_ledger_show_as_they_are() -> None:
    async with run_cluster(prefill=1, decode=2) as cluster:
        metrics = watched(cluster)
        await first_turn(cluster)
        page = read(metrics)
        (held,) = cluster.router.ledger.handles()
        idle = next(engine.url for engine in cluster.decode if engine.url != held.decode)
    assert page.value("engines_configured", role="decode") == page.value("engines_connected", role="decode") == 2
    assert page.value("ledger_conversations") == 1
    assert page.value("ledger_handles", engine=held.decode) == 1
    assert page.value("retained_tokens", engine=held.decode) == math.ceil(held.tokens / 16) * 16 > 0  # whole blocks
    assert page.value("retained_tokens_budget", engine=held.decode) > 0
    assert page.value("ledger_available") == 1
    assert page.value("ledger_handles", engine=idle) == page.value("retained_tokens", engine=idle) == 0
    assert page.value("engine_in_flight", engine=held.decode, role="decode") == 0


async def test_calls_in_flight_are_shown_by_engine() -> None:
    async with run_cluster() as cluster:
        metrics = watched(cluster)
        await cluster.router.connect()
        cluster.router.fleet.load.begin(cluster.router.fleet.prefill[0].url)
        page = read(metrics)
        cluster.router.fleet.load.end(cluster.router.fleet.prefill[0].url)
    assert page.value("engine_in_flight", engine=cluster.p.url) == 1
    assert page.value("engine_in_flight", engine=cluster.d.url) == 0


async def test_releases_are_counted() -> None:
    async with run_cluster() as cluster:
        metrics = watched(cluster)
        await first_turn(cluster)
        await cluster.router.end_conversation("c")
        page = read(metrics)
    assert page.value("releases_total") == 1
    assert page.value("failed_releases_total") == 0


async def test_before_the_engines_are_asked_it_shows_what_is_configured() -> None:
    metrics = RouterMetrics()
    router = Router(RouterConfig(**CONFIG))
    metrics.watch(router)
    page = read(metrics)
    await router.aclose()
    assert page.value("engines_configured", role="prefill") == 1
    assert not page.samples("engines_connected")


async def test_breakers_show_the_state_that_they_are_in() -> None:
    async with run_cluster(prefill=2) as cluster:
        metrics = watched(cluster)
        await first_turn(cluster)
        down = cluster.prefill[0].url
        await cluster.kill(cluster.prefill[0])
        for conversation in "abcd":
            await first_turn(cluster, conversation=conversation)
        page = read(metrics)
    assert page.value("breaker_state", engine=down, leg="prefill", state="closed") == 0
    assert page.value("breaker_state", engine=cluster.d.url, leg="decode", state="closed") == 1
    assert page.value("breakers_opened_total") == 2  # rendering too: nobody listens there


async def test_an_audit_shows_what_the_router_believes_beside_what_the_engine_counts() -> None:
    async with run_cluster(engine={"connector": "backhaul"}, p={"prefix_caching": False}) as cluster:
        metrics = RouterMetrics()
        collector = metrics.watch(cluster.router)
        await cluster.exact({"messages": await first_turn(cluster)})
        assert not read(metrics).samples("audit_counted_tokens")
        collector.audited(await cluster.router.audit())
        page = read(metrics)
    believed = page.value("audit_reported_tokens", engine=cluster.p.url, counter="pulled")
    assert believed == page.value("audit_counted_tokens", engine=cluster.p.url, counter="pulled") > 0
    assert page.value("engine_tokens_total", engine=cluster.p.url, counter="pulled") == believed
    assert page.value("audits_total") == 1


# --- the page


async def test_a_served_router_is_scraped(pair: LoopbackPair) -> None:
    async with in_thread(pair) as http:
        body = {"model": pair.model, "messages": opening(), "max_tokens": 4}
        answered = await http.post(CHAT, json=body, headers={"X-Conversation-ID": "c-secret"})
        answer = await http.get("/metrics")
    assert answered.status_code == answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    page = Page(answer.text)
    assert page.value("turns_total", model=pair.model) == 1
    assert page.value("engines_connected", role="prefill") == 1
    assert "c-secret" not in answer.text


async def test_the_router_is_audited_while_it_is_served() -> None:
    async with loopback_pair(connector="backhaul") as pair:
        app = make_app(RouterConfig(prefill=(pair.prefill.url,), decode=(pair.decode.url,)), audit_every_s=0.005)
        await app.connect()
        async with asyncio.timeout(10):
            while not Page((await get(app, "127.0.0.1"))[2]).value("audits_total"):
                await asyncio.sleep(0.002)
        await app.aclose()


@pytest.mark.parametrize(
    ("public", "client", "status"), [(True, "10.0.0.7", 200), (False, "10.0.0.7", 403), (False, "::1", 200)]
)
async def test_scrapers_come_from_other_hosts_unless_they_may_not(public: bool, client: str, status: int) -> None:
    app = make_app(RouterConfig(**CONFIG), metrics_public=public)
    answered, _, _ = await get(app, client)
    await app.aclose()
    assert answered == status


async def test_a_scraper_that_asks_for_openmetrics_gets_it() -> None:
    app = make_app(RouterConfig(**CONFIG))
    _, headers, text = await get(app, "127.0.0.1", "application/openmetrics-text; version=1.0.0")
    await app.aclose()
    assert headers[b"content-type"].startswith(b"application/openmetrics-text")
    assert text.endswith("# EOF\n")


async def test_several_routers_in_one_process_have_series_of_their_own() -> None:
    apps = [make_app(RouterConfig(**CONFIG)) for _ in range(2)]
    apps[0].router.on_report(ReuseReport(**HEAD, route=Route.COLD, error="client_gone"))  # type: ignore[misc]
    pages = [Page((await get(app, "127.0.0.1"))[2]) for app in apps]
    for app in apps:
        await app.aclose()
    assert [len(page.samples("turns_total")) for page in pages] == [1, 0]


async def test_a_router_that_is_embedded_can_use_its_programs_registry() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    router = Router(RouterConfig(**CONFIG), on_report=metrics.record)
    metrics.watch(router)
    await router.aclose()
    assert registry.get_sample_value(f"{PREFIX}_engines_configured", {"role": "decode"}) == 1
    with pytest.raises(ValueError, match="make others for"):
        metrics.watch(router)


async def test_without_prometheus_client_the_page_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "backhaul_router.serve.metrics")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    app = make_app(RouterConfig(**CONFIG))
    app.router.on_report(ReuseReport(**HEAD, route=Route.COLD))  # type: ignore[misc]
    status, _, text = await get(app, "127.0.0.1")
    await app.aclose()
    assert (status, "backhaul[server]" in text) == (501, True)


async def test_ten_thousand_conversations_are_a_page_of_the_same_size() -> None:
    router = Router(RouterConfig(**CONFIG))
    metrics = RouterMetrics()
    metrics.watch(router)
    before = len(metrics.page()[0])
    file_conversations(router.ledger, 10_000)
    body, _ = metrics.page()
    router.ledger.flush()
    await router.aclose()
    page = Page(body.decode())
    assert page.value("ledger_conversations") == page.value("ledger_handles", engine=D1) == 10_000
    assert len(body) < before + 100


def file_conversations(ledger: MemoryLedger, number: int) -> None:
    left = branch(held=held("r", decode=D1))
    for name in range(number):
        key = Key("", "m", "", f"c{name}")
        ledger.settle(key, ledger.take(key, left.chain, 0.0, lambda _: None), left, 0.0)


def test_every_series_has_its_line_in_the_docs() -> None:
    metrics = RouterMetrics()
    metrics.watch(_Connected())
    metrics.count_lost(lambda: 0)
    named = {name.removesuffix("_total") for name in re.findall(rf"`({PREFIX}_\w+)`", DOCS.read_text())}
    assert named == {family.name for family in metrics.registry.collect()}


class _Connected:
    config = RouterConfig(**CONFIG)
    ledger = MemoryLedger()
    fleet = Fleet([])
    retention = fleet.retention
