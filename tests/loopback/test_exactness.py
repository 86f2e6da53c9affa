"""The exactness suite on loopback engines, where wrong KV changes the answer, with either proof."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from backhaul_bench import exact, retokenise
from backhaul_bench.wanderers import Wanderer
from backhaul_loopback import LoopbackEngine, kv
from backhaul_router.report import Proof, Reason, Route
from exactness import CASES, Site, play
from exactness.proofs import PROOFS, loopback_settings
from router_turns import STORY, first_turn, run_cluster, user

BLOCK = 16
CONVERSATIONS = 25
NAMES = [name for name, case in CASES.items() if case.needs != "adapters"]


@asynccontextmanager
async def site(proof: Proof, forgets: bool) -> AsyncIterator[Site]:
    """One P, one D, and an engine beside them that transfers nothing."""
    settings = loopback_settings(proof)
    async with AsyncExitStack() as stack:
        p = await stack.enter_async_context(LoopbackEngine("prefill", **settings))
        d, reference = [await stack.enter_async_context(LoopbackEngine("decode", **settings)) for _ in range(2)]
        yield Site(
            prefill=(p.url,),
            decode=(d.url,),
            reference=reference.url,
            model=p.model,
            block_size=BLOCK,
            proof=proof,
            forgets=forgets,
            in_floats=False,
        )


@pytest.mark.parametrize(
    "forgets",
    [pytest.param(True, id="P has forgotten"), pytest.param(False, id="P remembers", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("proof", PROOFS)
@pytest.mark.parametrize("name", NAMES)
async def test_reuse_changes_no_answer(name: str, proof: Proof, forgets: bool) -> None:
    async with site(proof, forgets) as engines:
        await play(CASES[name], engines, stream=forgets)


@pytest.mark.parametrize("proof", PROOFS)
async def test_random_conversations_get_no_wrong_answer(proof: Proof) -> None:
    async with exact.loopback(proof) as engines:
        tally = await exact.measure(engines, conversations=CONVERSATIONS, seed=1)
    assert tally.wrong == 0, tally.examples
    assert tally.pulled > 0
    assert tally.turns >= 2 * CONVERSATIONS


def load_weights(engine: LoopbackEngine, name: str) -> None:
    """As an update without a restart does: other weights, and no prefix cache."""
    engine.core._initial = kv.initial_state(name)
    assert engine.core.pool.reset_cache(), f"{engine} still holds blocks"


@pytest.mark.parametrize("proof", PROOFS)
async def test_after_a_flush_nothing_of_the_old_weights_is_read(proof: Proof) -> None:
    async with run_cluster(engine=loopback_settings(proof)) as cluster:
        history = await first_turn(cluster)
        await cluster.router.flush()
        await cluster.until(lambda: not any(engine.usage for engine in cluster.engines))
        for engine in (*cluster.engines, cluster.reference):
            load_weights(engine, "tuned further")
        answer = await cluster.exact({"messages": history})
        assert (answer.reused.route, answer.reused.reason) == (Route.COLD, Reason.FLUSHED)
        answer = await cluster.exact({"messages": [*history, answer.message, user(f"Third: {STORY}")]})
        assert answer.reused.route is Route.WARM


async def test_the_random_conversations_find_wrong_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """D's handles name their blocks in another order."""

    def lie(handle: dict[str, Any]) -> dict[str, Any]:
        return {**handle, "remote_block_ids": [group[::-1] for group in handle["remote_block_ids"]]}

    start = LoopbackEngine.start

    async def start_lying(engine: LoopbackEngine) -> None:
        await start(engine)
        engine.faults.lie = lie if engine.config.role == "decode" else None

    monkeypatch.setattr(LoopbackEngine, "start", start_lying)
    async with exact.loopback(Proof.TOKENS) as engines:
        tally = await exact.measure(engines, conversations=10)
    assert tally.wrong > 0
    assert tally.examples[0].keys() == {"conversation", "turn", "change", "under", "body", "answer", "expected"}
    assert list(tally.lines())[-1] == f"wrong answers {tally.wrong:,}"


async def test_equal_seeds_make_equal_conversations() -> None:
    bodies: list[list[Any]] = []
    for _ in range(2):
        agent = Wanderer(5, 1, longest_answer=9)
        bodies.append([agent.next()])
        for turn in range(8):
            agent.heard({"role": "assistant", "content": f"Answer {turn}."})
            bodies[-1].append(agent.next())
    assert bodies[0] == bodies[1]


async def test_answers_that_come_back_as_the_same_tokens_lose_nothing() -> None:
    """Loopback engines have a token for each byte."""
    async with LoopbackEngine("decode") as engine:
        options = retokenise.Options(conversations=1)
        result = await retokenise.measure([engine.url], engine.model, "loopback", options)
    assert (result.answers, result.differences, result.lost_tokens) == (len(retokenise.QUESTIONS), [], 0)
    assert retokenise.lines(result)[1].startswith("0 (0%) become other tokens")


def test_the_command_prints_what_it_counted_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "exact.json"
    assert exact.main(exact.Options(conversations=5, seed=3, json=file)) == 0
    written = json.loads(file.read_text())
    assert (written["conversations"], written["wrong"], written["examples"]) == (5, 0, [])
    assert sum(row["turns"] for row in written["routes"]) == written["turns"] > 10
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "loopback engines, 2 P and 2 D, proof tokens, seed 3"
    assert printed[-1] == "wrong answers 0"


def test_the_command_fails_for_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(*_: Any, **__: Any) -> exact.Tally:
        return exact.Tally("title", Proof.TOKENS, 0, wrong=1)

    monkeypatch.setattr(exact, "measure", measure)
    assert exact.main(exact.Options()) == 1
