"""`backhaul bench peers --conversation`: time to first token of the same growing conversation through `backhaul serve` and
through `vllm-router`, over engines of a cost model in real time, with prefix caching off on P and on.

The conversations take turns, in changing order. Each has a first message of its own, so that no engine has seen it before,
and is sent whole, as an agent sends it: with what was answered so far. The prompts of the two are equally long.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backhaul_loopback import CostModel
from backhaul_router.engines.client import EngineCall, EngineFailure
from backhaul_router.engines.http_client import HttpClient
from rich.table import Table

from . import answers
from .clusters import say
from .options import Written
from .peers import JSON_HEADERS, LIMIT_S, PeerError, site
from .setups import Setup
from .table import console, plain_table

ROUTERS = ("backhaul", "vllm-router")
ANSWER_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Options(Written):
    vllm_router: Path
    setup: Setup
    turns: int = 6
    new_tokens: int = 4_096
    """What each turn adds to the prompt, the answer before it included."""
    repeats: int = 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """One turn of a conversation, the median over the repeats."""

    prefix_caching: bool
    """Of the prefill engine; the decode engine's is always on."""
    turn: int
    """From 1."""
    prompt_tokens: int
    router: str
    ttft_ms: float


async def measure(options: Options, progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Runs the conversations. Raises `PeerError` or `OSError`."""
    rows: list[Row] = []
    for prefix_caching in (False, True):
        progress(f"prefix caching {'on' if prefix_caching else 'off'}")
        costs = _flags(options.setup.costs)
        prefill = () if prefix_caching else ("--no-prefix-caching",)
        async with site(options.vllm_router, engine=costs, prefill=prefill) as at:
            found: dict[tuple[int, str], list[tuple[float, int]]] = {}
            for repeat in range(options.repeats):
                progress(f"repeat {repeat + 1} of {options.repeats}")
                talks = {router: _Conversation(at.http, at.urls[router]) for router in ROUTERS}
                for turn in range(1, options.turns + 1):
                    for router in ROUTERS if (repeat + turn) % 2 else reversed(ROUTERS):
                        found.setdefault((turn, router), []).append(await talks[router].turn(options.new_tokens))
        for (turn, router), measured in sorted(found.items()):
            rows.append(
                Row(
                    prefix_caching=prefix_caching,
                    turn=turn,
                    prompt_tokens=measured[0][1],
                    router=router,
                    ttft_ms=statistics.median(ttft_ms for ttft_ms, _ in measured),
                )
            )
    return rows


def _flags(costs: CostModel) -> tuple[str, ...]:
    return tuple(word for name, value in asdict(costs).items() for word in (f"--{name.replace('_', '-')}", str(value)))


class _Conversation:
    def __init__(self, http: HttpClient, url: str) -> None:
        self._http = http
        self._url = url
        self._messages: list[dict[str, Any]] = []
        self._answered = 0
        """Tokens of the answer before."""

    async def turn(self, new_tokens: int) -> tuple[float, int]:
        """Time to first token in ms, and the length of the prompt. Raises `PeerError`."""
        about = uuid.uuid4().hex
        # a token is a byte there; what the chat template adds is a few of them
        text = (about * (new_tokens // len(about) + 1))[: new_tokens - self._answered]
        self._messages.append({"role": "user", "content": text})
        body = {
            "model": "loopback",
            "messages": self._messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        call = EngineCall(self._url, json.dumps(body).encode(), JSON_HEADERS, LIMIT_S)
        began, first, raw = time.perf_counter(), None, b""
        try:
            stream = await self._http.open(call)
            async for chunk in stream:
                raw += chunk
                if first is None and _has_begun(raw):
                    first = time.perf_counter()
        except EngineFailure as failure:
            raise PeerError(failure.message) from failure
        if stream.status != 200 or first is None:
            raise PeerError(f"{self._url} answered {stream.status}: {raw[:300].decode(errors='replace')}")
        try:
            events = answers.events(raw)
        except ValueError as error:
            raise PeerError(f"{self._url}: {error}") from error
        (choice,) = answers.assemble(events)
        usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
        self._messages.append(answers.message(choice))
        self._answered = usage["completion_tokens"]
        return (first - began) * 1e3, usage["prompt_tokens"]


def _has_begun(raw: bytes) -> bool:
    """Whether a stream has brought anything of the answer itself yet; what it begins with is a role."""
    events = (event.removeprefix(b"data: ") for event in raw.split(b"\n\n")[:-1])
    begun = (choice for event in events if event != b"[DONE]" for choice in json.loads(event).get("choices", ()))
    return any(choice["delta"].get("content") for choice in begun)


def table(rows: Sequence[Row], setup: Setup) -> Table:
    """A line a turn."""
    columns = [(caching, router) for caching in (False, True) for router in ROUTERS]
    shown = (f"{router}, caching {'on' if caching else 'off'}" for caching, router in columns)
    made = plain_table(
        title=f"The same conversation through two routers, {setup.title}",
        caption="ms to the first token at the client; prefix caching is P's, and always on on D",
        columns=("turn", "prompt tokens", *shown),
    )
    found = {(row.turn, row.prefix_caching, row.router): row for row in rows}
    for turn in sorted({row.turn for row in rows}):
        made.add_row(
            str(turn),
            f"{found[turn, False, ROUTERS[0]].prompt_tokens:,}",
            *(f"{found[turn, *column].ttft_ms:.0f}" for column in columns),
        )
    return made


def main(options: Options) -> int:
    """Measures and prints. Raises `PeerError` or `OSError`."""
    rows = asyncio.run(measure(options, say))
    console().print(table(rows, options.setup))
    options.write({"rows": [asdict(row) for row in rows]})
    return 0
