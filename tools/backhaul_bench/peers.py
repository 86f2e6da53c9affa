"""`backhaul bench peers`: `backhaul serve` beside `vllm-router`, vLLM's router in Rust, over the same engines in one run.

Each request is the first turn of a conversation without a name, a prefill and a decode call for either router: what
`vllm-router` does for chat. `direct` makes those two calls by hand. The three take turns, in changing order. Engines and
routers are processes of their own, and the engines cost nothing; the requests come from this process.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import socket
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from backhaul_cli.errors import CommandError
from backhaul_router import wire
from backhaul_router.engines.client import EngineCall, EngineFailure
from backhaul_router.engines.http_client import HttpClient
from rich.table import Table

from .clusters import say
from .options import OptionsError, Written
from .overhead import BLOCKS, MAX_MODEL_LEN, first_turn, handed_on
from .programs import Program, cpu_s, p99, program, rss_mb
from .table import console, plain_table

VARIANTS = ("direct", "backhaul", "vllm-router")
PATH = wire.Endpoint.CHAT
JSON_HEADERS = {"content-type": "application/json"}
LIMIT_S = 120.0
_START_S = 60.0
_ROUNDS = 4


class PeerError(CommandError):
    """A program did not start, or did not answer; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Options(Written):
    vllm_router: Path
    body_bytes: tuple[int, ...] = (2_000, 200_000)
    concurrency: tuple[int, ...] = (1, 32)
    turns: int = 200
    """Of each variant in each case; large bodies get a quarter."""

    def __post_init__(self) -> None:
        if min(self.concurrency) < 1 or min(self.body_bytes) < 2_000:
            raise OptionsError("--concurrency: 1 or more; --body-bytes: 2000 or more")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant in one case. Times are milliseconds of a request, its whole answer included."""

    body_bytes: int
    stream: bool
    concurrency: int
    variant: str
    requests: int
    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float | None
    """CPU time of the router's process, a request; `None` for `direct`."""
    rss_mb: float | None


@dataclass(frozen=True)
class _Way:
    """How a request is made, and the process that routes it."""

    send: Callable[[bytes], Awaitable[object]]
    pid: int | None = None


class _Direct:
    """The two calls by hand, with the client that Backhaul uses too."""

    def __init__(self, http: HttpClient, prefill: str, decode: str) -> None:
        self._http = http
        self._prefill, self._decode = prefill + PATH, decode + PATH
        self._bodies: dict[bytes, tuple[bytes, wire.Facts]] = {}

    async def send(self, body: bytes) -> None:
        if body not in self._bodies:
            facts = wire.read_request(PATH, body)
            self._bodies[body] = (wire.prefill_body(facts, None, None), facts)
        prefill, facts = self._bodies[body]
        handle = handed_on(await _post(self._http, self._prefill, prefill))
        await _post(self._http, self._decode, wire.decode_body(facts, None, handle, ids_back=False))


async def _post(http: HttpClient, url: str, body: bytes) -> bytes:
    try:
        answer = await http.call(EngineCall(url, body, JSON_HEADERS, LIMIT_S))
    except EngineFailure as failure:
        raise PeerError(failure.message) from failure
    if answer.status != 200:
        raise PeerError(f"{url} answered {answer.status}: {answer.body[:300].decode(errors='replace')}")
    return answer.body


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@asynccontextmanager
async def vllm_router(path: Path, prefill: str, decode: str, http: HttpClient, body: bytes) -> AsyncIterator[Program]:
    """`vllm-router` until the block ends; it is there when it has answered a request. Raises `PeerError`."""
    port, metrics = _free_ports()
    url = f"http://127.0.0.1:{port}"
    arguments = ("--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode, "--policy", "round_robin")
    where = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), "--log-level", "error")
    try:
        process = await asyncio.create_subprocess_exec(
            path, *arguments, *where, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        raise PeerError(f"{path} cannot be started: {error.strerror}") from error
    try:
        until = time.monotonic() + _START_S
        while True:
            try:
                await _post(http, url + PATH, body)
                break
            except PeerError as error:
                if process.returncode is not None:
                    raise PeerError(f"{path} ended with status {process.returncode}") from error
                if time.monotonic() > until:
                    raise PeerError(f"{path} did not answer within {_START_S:.0f} s: {error}") from error
            await asyncio.sleep(0.2)
        yield Program(url, process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@dataclass(frozen=True)
class Site:
    """Two engines, and both routers over them, each as a process of its own."""

    http: HttpClient
    prefill: str
    decode: str
    routers: dict[str, Program]

    @property
    def urls(self) -> dict[str, str]:
        """Where each router takes chat requests."""
        return {name: router.url.removesuffix("/v1") + PATH for name, router in self.routers.items()}


@asynccontextmanager
async def site(path: Path, *, engine: Sequence[str] = (), prefill: Sequence[str] = ()) -> AsyncIterator[Site]:
    """Starts everything, with these further flags of both engines and of P. Raises `PeerError` or `OSError`."""
    async with AsyncExitStack() as stack:
        size = ("--connector", "backhaul", "--max-model-len", str(MAX_MODEL_LEN), "--num-blocks", str(BLOCKS))
        p, d = [
            await stack.enter_async_context(program("backhaul_loopback", "--role", role, *size, *engine, *more))
            for role, more in (("prefill", prefill), ("decode", ()))
        ]
        http = HttpClient()
        stack.push_async_callback(http.aclose)
        at = ("--prefill", p.url, "--decode", d.url, "--port", "0")
        ours = await stack.enter_async_context(program("backhaul_cli", "serve", "--no-log-turns", *at))
        small = first_turn(2_000, stream=False)
        peer = await stack.enter_async_context(vllm_router(path, p.url, d.url, http, small))
        yield Site(http, p.url, d.url, {"backhaul": ours, "vllm-router": peer})


async def measure(options: Options, progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Runs the cases. Raises `PeerError` or `OSError`."""
    rows: list[Row] = []
    async with site(options.vllm_router) as at:
        ways = {"direct": _Way(_Direct(at.http, at.prefill, at.decode).send)}
        for name, router in at.routers.items():
            ways[name] = _Way(functools.partial(_post, at.http, at.urls[name]), router.pid)
        for body_bytes, concurrency, stream in itertools.product(
            options.body_bytes, options.concurrency, (False, True)
        ):
            how = "streamed" if stream else "whole"
            progress(f"{body_bytes / 1000:,.0f} kB, {how}, {concurrency} at a time")
            turns = options.turns if body_bytes < 50_000 else -(-options.turns // 4)
            rows += await _case(first_turn(body_bytes, stream=stream), stream, concurrency, turns, ways)
    return rows


async def _case(body: bytes, stream: bool, concurrency: int, turns: int, ways: dict[str, _Way]) -> list[Row]:
    each = max(1, turns // (_ROUNDS * concurrency))
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    walls = dict.fromkeys(VARIANTS, 0.0)
    cpu: dict[str, float | None] = dict.fromkeys(VARIANTS, 0.0)
    for number in range(_ROUNDS + 1):
        turn = number % len(VARIANTS)
        for name in VARIANTS[turn:] + VARIANTS[:turn]:
            way = ways[name]
            before, began = _cpu(way), time.perf_counter()
            took = await asyncio.gather(*(_client(way, body, each) for _ in range(concurrency)))
            wall, after = time.perf_counter() - began, _cpu(way)
            if not number:  # the first round warms up
                continue
            times[name] += itertools.chain.from_iterable(took)
            walls[name] += wall
            total = cpu[name]
            cpu[name] = None if before is None or after is None or total is None else total + after - before
    rows = []
    for name in VARIANTS:
        pid, used, count = ways[name].pid, cpu[name], len(times[name])
        rows.append(
            Row(
                body_bytes=len(body),
                stream=stream,
                concurrency=concurrency,
                variant=name,
                requests=count,
                per_s=count / walls[name],
                p50_ms=statistics.median(times[name]),
                p99_ms=p99(times[name]),
                cpu_ms=None if used is None else used / count * 1e3,
                rss_mb=None if pid is None else rss_mb(pid),
            )
        )
    return rows


def _cpu(way: _Way) -> float | None:
    return None if way.pid is None else cpu_s(way.pid)


async def _client(way: _Way, body: bytes, requests: int) -> list[float]:
    times = []
    for _ in range(requests):
        began = time.perf_counter()
        await way.send(body)
        times.append((time.perf_counter() - began) * 1e3)
    return times


def table(rows: Sequence[Row]) -> Table:
    """A line a variant."""
    made = plain_table(
        title="Two routers over the same engines: first turns, prefill and decode",
        caption="added: over direct, the same two calls by hand; CPU and RSS are those of the router's process",
        columns=[
            "body",
            "answer",
            "at a time",
            "by",
            "requests/s",
            "p50 ms",
            "added",
            "p99 ms",
            "added",
            "CPU ms",
            "MB",
        ],
        left=("answer", "by"),
    )
    for start in range(0, len(rows), len(VARIANTS)):
        direct = rows[start]
        for row in rows[start : start + len(VARIANTS)]:
            made.add_row(
                f"{row.body_bytes / 1000:,.0f} kB" if row is direct else "",
                ("stream" if row.stream else "whole") if row is direct else "",
                str(row.concurrency) if row is direct else "",
                row.variant,
                f"{row.per_s:,.0f}",
                f"{row.p50_ms:.2f}",
                "" if row is direct else f"{row.p50_ms - direct.p50_ms:+.2f}",
                f"{row.p99_ms:.2f}",
                "" if row is direct else f"{row.p99_ms - direct.p99_ms:+.2f}",
                "" if row.cpu_ms is None else f"{row.cpu_ms:.2f}",
                "" if row.rss_mb is None else f"{row.rss_mb:.0f}",
            )
    return made


def main(options: Options) -> int:
    """Measures and prints. Raises `PeerError` or `OSError`."""
    rows = asyncio.run(measure(options, say))
    out = console()
    out.print(table(rows))
    out.print(
        f"Everything shares {os.cpu_count()} cores here, engines and clients too: with many at a time all wait for a core."
    )
    options.write({"rows": [asdict(row) for row in rows]})
    return 0
