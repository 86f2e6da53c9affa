"""`backhaul serve` in operation, as a process: how it is told to stop, and to read its file again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from backhaul_loopback import LoopbackPair, loopback_pair
from served import serving

CHAT = "/v1/chat/completions"
ADMIN = "/backhaul/admin"


@pytest.fixture
async def pair() -> AsyncIterator[LoopbackPair]:
    async with loopback_pair() as pair:
        yield pair


def body(pair: LoopbackPair) -> dict[str, Any]:
    return {"model": pair.model, "messages": [{"role": "user", "content": "What is carried back?"}], "max_tokens": 8}


async def test_told_to_stop_it_says_so_first_and_answers_as_before(pair: LoopbackPair) -> None:
    async with serving(pair, "--shutdown-delay-s", "60", "--log-format", "json") as served:
        assert (await served.http.get("/ready")).status_code == 200
        served.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while (answer := await served.http.get("/ready")).status_code == 200:
                await asyncio.sleep(0.01)
        assert (answer.json()["reason"], answer.headers["connection"]) == ("shutting down", "close")
        assert (await served.http.post(CHAT, json=body(pair))).status_code == 200
        status, out, err = await served.stop()  # a second signal does not wait
        assert (status, out.splitlines()[-1]) == (0, "stopped")
        assert '"route":"cold"' in err


async def test_the_configuration_file_is_read_again(pair: LoopbackPair, tmp_path: Path) -> None:
    file = tmp_path / "backhaul.toml"
    file.write_text("[router]\nmax_body_bytes = 100000\n")
    async with serving(pair, "--config", str(file)) as served:
        file.write_text("[router]\nmax_body_bytes = 10\n")
        answer = await served.http.post(f"{ADMIN}/reload")
        assert answer.json()["changed"] == ["[router] max_body_bytes"]
        assert (await served.http.post(CHAT, json=body(pair))).status_code == 413
        file.write_text("[router]\nmax_body_byte = 10\n")
        answer = await served.http.post(f"{ADMIN}/reload")
        assert (answer.status_code, "did you mean max_body_bytes?" in answer.text) == (400, True)
