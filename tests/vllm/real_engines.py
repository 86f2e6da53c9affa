"""What the real-engine tests share: sets of running engines, and what can be asked of one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from backhaul_connector.launch.cluster import Connector, Engine, Engines, EnginesConfig

PYTHON = Path(os.environ.get("BACKHAUL_VLLM_PYTHON") or Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python")
"""The interpreter that has vLLM."""
FORKING_PYTHON = Path(__file__).parent / "forking" / "python"
"""The same, for engines that start sooner (see `forking/sitecustomize.py`)."""

ADAPTERS = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")


@dataclass(frozen=True)
class EngineSet:
    """Running engines of one model."""

    running: Engines
    """To kill or restart an engine of the set; whoever does must leave it healthy."""

    @property
    def prefill(self) -> tuple[str, ...]:
        """Base URLs."""
        return tuple(engine.url for engine in self.running.prefill)

    @property
    def decode(self) -> tuple[str, ...]:
        return tuple(engine.url for engine in self.running.decode)

    @property
    def model(self) -> str:
        return self.running.model


class EngineSets:
    """Starts sets when a test asks for one. One or two are alive at a time, since each engine takes 2 GB and a share of the
    cores; the tests are ordered so that each set is started once."""

    DEFAULT = EnginesConfig(
        python=str(FORKING_PYTHON), connector=Connector.STOCK, prefill_prefix_caching=False, dtype="float32"
    )
    """vLLM's own connector."""
    CONNECTOR = replace(DEFAULT, connector=Connector.BACKHAUL)

    def __init__(self, logs: Callable[[], Path]) -> None:
        """`logs` makes a directory for the logs of each set."""
        self._logs = logs
        self._default: Engines | None = None
        self._special: Engines | None = None
        self._special_env: Mapping[str, str] = {}

    def default(self) -> EngineSet:
        """The tiny model, one P without prefix caching, one D."""
        if self._default is None:
            self.make_room()
            self._default = self._start(self.DEFAULT)
        return EngineSet(self._default)

    def adaptable(self, connector: Connector) -> EngineSet:
        """P with prefix caching, as in production. Adapters can be exchanged, and, in development mode, prefix caches be
        forgotten."""
        config = replace(self.DEFAULT, connector=connector, prefill_prefix_caching=True, vllm_args=ADAPTERS)
        return self.special(config, VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")

    def special(self, config: EnginesConfig, *, beside_default: bool = False, **env: str) -> EngineSet:
        """A set of another shape, in place of the set before it; `env` is set while it starts."""
        if self._special is None or (self._special.config, self._special_env) != (config, env):
            self.make_room(keep_default=beside_default)
            with pytest.MonkeyPatch.context() as patch:
                for name, value in env.items():
                    patch.setenv(name, value)
                self._special, self._special_env = self._start(config), env
        elif not beside_default:
            self._end_default()
        return EngineSet(self._special)

    def _start(self, config: EnginesConfig) -> Engines:
        return Engines(
            config, logs=self._logs(), report=lambda line: print(line, file=sys.stderr, flush=True)
        ).__enter__()

    def make_room(self, *, keep_default: bool = False) -> None:
        """Ends the sets that are there: for tests that start engines themselves."""
        if self._special is not None:
            self._special.stop()
            self._special = None
        if not keep_default:
            self._end_default()

    def _end_default(self) -> None:
        if self._default is not None:
            self._default.stop()
            self._default = None


def restart(engines: EngineSet, engine: Engine) -> None:
    """Starts a killed or stopped engine again on its ports, and waits until it is healthy."""
    engine.start()
    engines.running.wait_healthy()


class Metrics(Mapping[str, float]):
    """One reading of an engine's /metrics: by name, summed over all labels."""

    def __init__(self, text: str) -> None:
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            sample = re.fullmatch(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
            if sample is not None:
                labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', sample[2] or ""))
                self._samples.append((sample[1], labels, float(sample[3])))

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels; 0 if there are none."""
        return sum(v for n, have, v in self._samples if n == name and labels.items() <= have.items())

    def __getitem__(self, name: str) -> float:
        values = [value for sample, _, value in self._samples if sample == name]
        if not values:
            raise KeyError(name)
        return sum(values)

    def __iter__(self) -> Iterator[str]:
        return iter({name for name, _, _ in self._samples})

    def __len__(self) -> int:
        return len({name for name, _, _ in self._samples})


def client(**options: Any) -> httpx2.AsyncClient:
    """An HTTP client for engines on this machine."""
    return httpx2.AsyncClient(timeout=120.0, trust_env=False, **options)


async def metrics(url: str) -> Metrics:
    """What an engine's /metrics says now."""
    async with client() as http:
        answer = await http.get(f"{url}/metrics")
    answer.raise_for_status()
    return Metrics(answer.text)


def assert_none_is_left(pids: list[int], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


async def kv_usage(url: str) -> float:
    """The share of an engine's KV blocks that are in use, pinned ones included: 0 to 1."""
    return (await metrics(url))["vllm:kv_cache_usage_perc"]


_left: dict[str, tuple[float, str]] = {}
"""By engine: the share of its blocks that a failed test left in use, and that test."""
_asked: set[str] = set()


async def note_leftovers(leaver: str) -> None:
    """After a failed test: what it left in use is named, and not held against the tests that come after."""
    for url in _asked:
        with contextlib.suppress(httpx2.HTTPError):
            if usage := await kv_usage(url):
                _left[url] = usage, leaver


async def wait_for_baseline(url: str, baseline: float = 0.0, timeout_s: float = 15.0) -> None:
    """Returns once the engine uses no more KV blocks than `baseline`, or than a failed test had left in use before this
    one; fails if it still does after `timeout_s`.

    vLLM renews the number when its engine core steps, so a release shows with some delay."""
    _asked.add(url)
    left, leaver = _left.get(url, (0.0, ""))
    deadline = time.monotonic() + timeout_s
    while (usage := await kv_usage(url)) > max(baseline, left) + 1e-9:
        assert time.monotonic() < deadline, (
            f"{url} still uses {usage:.6f} of its KV blocks, more than {baseline:.6f}"
            + (f" and more than the {left:.6f} that {leaver} left" if leaver else "")
        )
        await asyncio.sleep(0.1)
    if usage <= baseline + 1e-9:
        _left.pop(url, None)


def salted(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request under a salt of its own, so that no prefix cache has any of it."""
    return {**body, "cache_salt": uuid.uuid4().hex}


async def post(url: str, path: str, body: Mapping[str, Any], **headers: str) -> dict[str, Any]:
    """Sends a request as it is, and returns the answer. Any status but 200 fails."""
    async with client(headers=headers) as http:
        answer = await http.post(f"{url}{path}", json=body)
    assert answer.status_code == 200, f"{answer.status_code} from {url}{path}: {answer.text}"
    result: dict[str, Any] = answer.json()
    return result


async def direct(url: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The reference that a routed answer must equal: the client's own body, sent straight to one engine that has
    nothing of it cached."""
    return await post(url, path, salted(body))


async def stream(url: str, path: str, body: Mapping[str, Any], **headers: str) -> list[str]:
    """Sends a streaming request as it is; the data of each event, `[DONE]` included."""
    async with client(headers=headers) as http:
        answer = await http.post(f"{url}{path}", json={**body, "stream": True})
    assert answer.status_code == 200, f"{answer.status_code} from {url}{path}: {answer.text}"
    return [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]


async def direct_stream(url: str, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`direct` for streams: the events' JSON, without `[DONE]`."""
    return [json.loads(event) for event in await stream(url, path, salted(body)) if event != "[DONE]"]


async def prefill(
    url: str, path: str, body: Mapping[str, Any], handle: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The prefill leg of a turn, by hand: P's parameters for D. `handle` is D's, of the turn before."""
    params = handle or {"do_remote_decode": True, "do_remote_prefill": False}
    leg = {name: value for name, value in body.items() if name not in ("stream_options", "max_completion_tokens")}
    answer = await post(url, path, {**leg, "stream": False, "max_tokens": 1, "kv_transfer_params": params})
    result: dict[str, Any] = answer["kv_transfer_params"]
    return result


async def release(prefill_url: str, handle: Mapping[str, Any]) -> None:
    """Frees the blocks behind D's handle, by a request that P refuses: vLLM then tells D that no one will read them."""
    refused = {"model": "no such model", "prompt": "x", "max_tokens": 1}
    params = {name: value for name, value in handle.items() if name != "backhaul"}
    async with client() as http:
        answer = await http.post(
            f"{prefill_url}/v1/completions",
            json={**refused, "kv_transfer_params": {**params, "do_remote_prefill": True, "do_remote_decode": False}},
        )
    assert answer.status_code == 404, answer.text
