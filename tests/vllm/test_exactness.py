"""The exactness suite on real engines, with either proof: P caches prefixes and is made to forget them before each turn, so
that all that is proven is read, and what was read stays in its cache for the checks that follow."""

from __future__ import annotations

import asyncio
import subprocess
from itertools import zip_longest
from pathlib import Path

import exactness
import pytest
from backhaul_bench import exact
from backhaul_connector.launch.cluster import Connector
from backhaul_router.report import Proof
from exactness import CASES, Site, play
from exactness.proofs import PROOFS
from real_engines import EngineSet, EngineSets

BLOCK = 32
HERE = Path(exactness.__file__).parent
CONVERSATIONS = 6
NAMES = [name for name, case in CASES.items() if case.needs != "images"]
SAMPLED = [name for name in NAMES if CASES[name].sampled]
PLAYED = {name: (name, name) for name in NAMES if name not in SAMPLED}
PLAYED |= {
    f"{one}; {other}": (one, other) for one, other in zip_longest(SAMPLED[::2], SAMPLED[1::2], fillvalue=SAMPLED[0])
}
"""Of cases that are alike each is played with one of the proofs."""


def started(sets: EngineSets, proof: Proof) -> EngineSet:
    return sets.adaptable(Connector.BACKHAUL if proof is Proof.CONNECTOR else Connector.STOCK)


@pytest.fixture(scope="module", params=PROOFS)
def proof(request: pytest.FixtureRequest) -> Proof:
    """Of the module's scope, so that all tests of one proof come together, and its engines are started once."""
    found: Proof = request.param
    return found


@pytest.fixture(scope="module")
def adapters(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("adapters")
    subprocess.run([vllm_python, HERE / "vllm_adapters.py", out], check=True)
    return {path.name: str(path) for path in out.iterdir()}


@pytest.mark.parametrize("names", PLAYED, ids=str)
async def test_reuse_changes_no_answer(
    names: str, proof: Proof, adapters: dict[str, str], engine_sets: EngineSets
) -> None:
    engines = started(engine_sets, proof)
    site = Site(
        prefill=engines.prefill,
        decode=engines.decode,
        reference=engines.decode[0],
        model=engines.model,
        block_size=BLOCK,
        proof=proof,
        adapters=adapters,
    )
    name = PLAYED[names][PROOFS.index(proof)]
    await play(CASES[name], site, stream=NAMES.index(name) % 2 == 1)


async def test_random_conversations_get_no_wrong_answer(proof: Proof, engine_sets: EngineSets) -> None:
    engines = started(engine_sets, proof)
    site = exact.Site(
        prefill=engines.prefill,
        decode=engines.decode,
        reference=engines.decode[0],
        model=engines.model,
        title="vLLM",
        proof=proof,
        in_floats=True,
        longest_answer=40,
        at_once=2,
    )
    tally = await exact.measure(site, conversations=CONVERSATIONS, seed=1)
    assert tally.wrong == 0, tally.examples
    assert tally.pulled > 0


@pytest.mark.parametrize("name", ["vllm_hashes.py", "vllm_groups.py"])
async def test_what_vllm_hashes_and_keeps_is_what_the_connector_takes_it_for(vllm_python: Path, name: str) -> None:
    script = await asyncio.create_subprocess_exec(
        vllm_python, HERE / name, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await script.communicate()
    assert script.returncode == 0, said.decode()
