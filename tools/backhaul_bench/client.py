"""`backhaul bench client`: what a call costs the agent's own process, with openai's client and with ours.

Both send to a transport that answers at once, without a socket, so that nothing but the client is measured. They take
turns, call by call. The histories are an agent's: questions, tool calls and results of tools.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import openai
from backhaul import AsyncOpenAI, OpenAI
from backhaul._http import openais_http_module
from backhaul_cli.options import Count, Numbers
from rich.table import Table

from . import table
from .options import OptionsError, Written
from .table import plain_table

_ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Yes."}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_TEXT = "Half of what an agent sends are results of its tools, such as lines of a log or of a file. " * 4
_TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


EPILOG = "Exit status: 1 if the two sent different bodies."


@dataclass(frozen=True, kw_only=True)
class Options(Written):
    messages: Annotated[Numbers, "in a history"] = (2, 20, 200)
    repeats: Annotated[Count, "for each figure"] = 50

    def __post_init__(self) -> None:
        if min(self.messages) < 1:
            raise OptionsError("--messages: 1 or more")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: medians, in milliseconds per call."""

    messages: int
    body_bytes: int
    client: str
    """`sync` or `async`."""
    repeats: int
    openai_ms: float
    backhaul_ms: float
    same_body: bool
    """Every request of the two had equal bodies."""


def main(options: Options) -> int:
    """Measures, and returns the exit status: 1 if the two clients sent different bodies."""
    rows = measure(options)
    out = table.console()
    out.print(_table(rows))
    same = all(row.same_body for row in rows)
    out.print("Both sent the same bodies, byte for byte." if same else "The clients sent DIFFERENT BODIES.")
    options.write({"openai": openai.__version__, "rows": [asdict(row) for row in rows]})
    return 0 if same else 1


def measure(options: Options) -> list[Row]:
    return [
        row
        for count in options.messages
        for row in (_sync(count, options.repeats), asyncio.run(_async(count, options.repeats)))
    ]


def history(count: int) -> list[dict[str, Any]]:
    """Messages as an agent has them: question, tool call, result, answer, over and over."""
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.log"}'}}
    turn: list[dict[str, Any]] = [
        {"role": "user", "content": "What does the file say?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": _TEXT},
        {"role": "assistant", "content": "It says what tools return."},
    ]
    return list(itertools.islice(itertools.cycle(turn), count))


class _Wire:
    """Answers every request at once, and keeps the last one's body."""

    def __init__(self) -> None:
        self.module = openais_http_module()
        self.transport = self.module.MockTransport(self._answer)
        self.body = b""

    def _answer(self, request: Any) -> Any:
        self.body = request.content
        return self.module.Response(200, json=_ANSWER)


def _sync(count: int, repeats: int) -> Row:
    wire = _Wire()
    with wire.module.Client(transport=wire.transport) as http:
        at: Any = {"api_key": "none", "base_url": "http://nowhere/v1", "http_client": http}
        clients = (openai.OpenAI(**at), OpenAI(**at))
        request = _request(count)
        samples = _Samples()
        for number in range(repeats + 1):
            for client in _order(clients, number):
                began = time.perf_counter()
                client.chat.completions.create(**request)
                samples.add(client, time.perf_counter() - began, wire.body, keep=number > 0)
    return samples.row(count, "sync")


async def _async(count: int, repeats: int) -> Row:
    wire = _Wire()
    async with wire.module.AsyncClient(transport=wire.transport) as http:
        at: Any = {"api_key": "none", "base_url": "http://nowhere/v1", "http_client": http}
        clients = (openai.AsyncOpenAI(**at), AsyncOpenAI(**at))
        request = _request(count)
        samples = _Samples()
        for number in range(repeats + 1):
            for client in _order(clients, number):
                began = time.perf_counter()
                await client.chat.completions.create(**request)
                samples.add(client, time.perf_counter() - began, wire.body, keep=number > 0)
    return samples.row(count, "async")


def _request(count: int) -> dict[str, Any]:
    return {"model": "m", "messages": history(count), "tools": [_TOOL], "max_tokens": 16}


def _order(clients: Sequence[Any], number: int) -> Sequence[Any]:
    return clients if number % 2 else clients[::-1]


class _Samples:
    """Times of both clients. The first call of each warms up."""

    def __init__(self) -> None:
        self.openai: list[float] = []
        self.backhaul: list[float] = []
        self.bodies: set[bytes] = set()

    def add(self, client: Any, seconds: float, body: bytes, *, keep: bool) -> None:
        self.bodies.add(body)
        if keep:
            (self.backhaul if isinstance(client, OpenAI | AsyncOpenAI) else self.openai).append(seconds * 1e3)

    def row(self, count: int, client: str) -> Row:
        return Row(
            messages=count,
            body_bytes=max(map(len, self.bodies)),
            client=client,
            repeats=len(self.openai),
            openai_ms=statistics.median(self.openai),
            backhaul_ms=statistics.median(self.backhaul),
            same_body=len(self.bodies) == 1,
        )


def _table(rows: Sequence[Row]) -> Table:
    made = plain_table(
        title=f"What a call costs the client, in ms, median of {rows[0].repeats}\nopenai {openai.__version__}, no network",
        columns=("messages", "body", "client", "openai", "backhaul", "faster by"),
        left=("client",),
    )
    for row in rows:
        made.add_row(
            f"{row.messages:,}",
            f"{row.body_bytes / 1000:,.1f} kB",
            row.client,
            f"{row.openai_ms:.2f}",
            f"{row.backhaul_ms:.2f}",
            f"{row.openai_ms / row.backhaul_ms:.1f}x",
        )
    return made
