"""`backhaul bench overhead`: what the router adds to a turn, embedded and served, over the engine calls that it makes.

Each measured turn is the second of a conversation and runs `warm`: on engines of ours a prefill and a decode request, on stock
ones a render request before. `direct` sends the same bodies with the HTTP client that the router uses, one after the other, and
does nothing else; `aiohttp` does so with that library, which is what somebody would write by hand. The variants take turns, in
changing order, on the same loopback engines, which cost nothing and are processes of their own. The served router is a
process as well; the others run in this process.

Longer than most modules: the three ways of making a turn are read side by side.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
import json
import math
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

import aiohttp
import msgspec
from backhaul_cli.errors import CommandError
from backhaul_protocol.leases import LeaseOperation
from backhaul_router import wire
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Request, Router
from backhaul_router.engines.client import EngineAnswer, EngineCall, EngineFailure
from backhaul_router.engines.http_client import HttpClient
from backhaul_router.report import Route
from backhaul_router.wire.stream import Listeners, StreamFilter

from .programs import cpu_s, p99, program, rss_mb

SIZES = range(2_000, 800_001)
"""Bodies that hold a history worth reading, and that the engines take."""
VARIANTS = ("direct", "aiohttp", "embedded", "served")
MODEL = "loopback"
BLOCK = 16
ANSWER_TOKENS = 16
MAX_MODEL_LEN = 262_144
BLOCKS = MAX_MODEL_LEN // BLOCK * 64
"""Of an engine: what 32 large conversations leave is far from what a router has given up for want of room."""
_NEW_BYTES = 600
"""About what the measured turn adds to its history, the answer included."""
_LIMIT_S = 600.0
_PATH = wire.Endpoint.CHAT
_CONVERSATION = "x-conversation-id"
_JSON = {"content-type": "application/json"}


class NotWarm(CommandError):
    """A turn that was to be measured ran otherwise, or failed."""


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    body_bytes: int
    stream: bool
    concurrency: int
    turns: int
    """Measured turns of each variant; rounded up to whole rounds of `concurrency`."""

    @property
    def rounds(self) -> int:
        return math.ceil(self.turns / self.concurrency)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant in one case. Milliseconds per turn; `added` is over `direct`."""

    body_bytes: int
    prompt_tokens: int
    stream: bool
    concurrency: int
    variant: str
    turns: int
    p50_ms: float
    p99_ms: float
    added_p50_ms: float
    added_p99_ms: float
    cpu_ms: float | None
    """CPU time of the process that runs the variant; for `served` the server's alone. `None` where the system does not tell."""
    rss_mb: float | None
    """Memory of that process at the end of the case."""


def cases(sizes: Sequence[int], concurrencies: Sequence[int], turns: int) -> list[Case]:
    """Large bodies get a quarter of the turns."""
    return [
        Case(size, stream, concurrency, turns if size < 50_000 else math.ceil(turns / 4))
        for size in sizes
        for concurrency in concurrencies
        for stream in (False, True)
    ]


async def measure(
    wanted: Sequence[Case], progress: Callable[[str], None] = lambda _: None, *, ours: bool = True
) -> list[Row]:
    """Runs the cases. Raises `NotWarm` or `OSError` when a program does not start or fails."""
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        size = ("--max-model-len", str(MAX_MODEL_LEN), "--num-blocks", str(BLOCKS))
        engine = ("--connector", "backhaul" if ours else "stock", *size)
        prefill, decode = [
            await stack.enter_async_context(program("backhaul_loopback", "--role", role, *engine))
            for role in ("prefill", "decode")
        ]
        at = ("--prefill", prefill.url, "--decode", decode.url, "--route", "warm", "--port", "0")
        server = await stack.enter_async_context(program("backhaul_cli", "serve", "--no-log-turns", *at))
        aio = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_LIMIT_S)
            )
        )
        http = HttpClient()
        stack.push_async_callback(http.aclose)
        router = Router(RouterConfig(prefill=(prefill.url,), decode=(decode.url,), route=Route.WARM))
        urls = (prefill.url, decode.url)
        stack.push_async_callback(router.aclose)
        direct = _Direct(http, *urls, ours=ours)
        variants: dict[str, _Variant] = {
            "direct": direct,
            "aiohttp": _ByAiohttp(aio, http, *urls, ours=ours),
            "embedded": _Embedded(router),
            "served": _Served(http, aio, server.url.removesuffix("/v1"), server.pid),
        }
        for case in wanted:
            progress(describe(case))
            rows += await _measure(case, await direct.workload(case), variants)
    return rows


def describe(case: Case) -> str:
    how = "streamed" if case.stream else "whole"
    return f"{case.body_bytes / 1000:,.0f} kB, {how}, {case.concurrency} at a time"


async def _measure(case: Case, work: _Workload, variants: dict[str, _Variant]) -> list[Row]:
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    cpu: dict[str, list[float | None]] = {name: [] for name in VARIANTS}
    orders = itertools.cycle([VARIANTS[i:] + VARIANTS[:i] for i in range(len(VARIANTS))])
    for number in range(case.rounds + 1):
        for name in next(orders):
            variant = variants[name]
            turns = await asyncio.gather(*(variant.begin(work) for _ in range(case.concurrency)))
            before = _cpu_s(variant.pid)
            took = await asyncio.gather(*(_timed(turn) for turn in turns))
            after = _cpu_s(variant.pid)
            await asyncio.gather(*(turn.end() for turn in turns))
            if number:  # the first round warms up
                times[name] += took
                cpu[name].append(None if before is None or after is None else (after - before) / case.concurrency)
    base = times["direct"]
    return [
        Row(
            body_bytes=len(work.second),
            prompt_tokens=work.prompt_tokens,
            stream=case.stream,
            concurrency=case.concurrency,
            variant=name,
            turns=len(times[name]),
            p50_ms=statistics.median(times[name]),
            p99_ms=p99(times[name]),
            added_p50_ms=statistics.median(times[name]) - statistics.median(base),
            added_p99_ms=p99(times[name]) - p99(base),
            cpu_ms=_mean_ms(cpu[name]),
            rss_mb=rss_mb(variants[name].pid),
        )
        for name in VARIANTS
    ]


async def _timed(turn: _Turn) -> float:
    began = time.perf_counter()
    await turn.run()
    return (time.perf_counter() - began) * 1e3


def _cpu_s(pid: int) -> float | None:
    return time.process_time() if pid == os.getpid() else cpu_s(pid)


def _mean_ms(seconds: Sequence[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return statistics.fmean(known) * 1e3 if known else None


# --- the conversation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Workload:
    """The two turns of every conversation of a case, and what an engine made of the second."""

    first: bytes
    second: bytes
    prompt_tokens: int
    token_ids: tuple[int, ...]
    history_blocks: int
    """Whole blocks of what D ran in the first turn, all of them in the second's prompt."""

    @property
    def facts(self) -> wire.Facts:
        return wire.read_request(_PATH, self.second)


def _message(role: str, text: str) -> bytes:
    return b'{"role":"%s","content":"%s"}' % (role.encode(), text.encode())


def _text(source: random.Random, size: int) -> str:
    """`size` bytes of JSON. Three letters in five are escaped: a loopback engine's token is a byte, and so four bytes of a
    body make a token, as they do with a real vocabulary."""
    letters = source.choices("etaoinshrdlu ", k=size // 4)
    return "".join(f"\\u{ord(letter):04x}" if source.random() < 0.6 else letter for letter in letters)


def _history(size: int) -> list[bytes]:
    """Messages of a user and an assistant, a user's last, of about `size` bytes altogether."""
    source = random.Random(1)
    per_message = min(2_000, size // 6)
    roles = itertools.cycle(("user", "assistant"))
    messages: list[bytes] = []
    while len(messages) % 2 == 0 or sum(map(len, messages)) < size - per_message:
        messages.append(_message(next(roles), _text(source, per_message)))
    return messages


def _body(messages: Sequence[bytes], *, stream: bool) -> bytes:
    head = {"model": MODEL, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
    return json.dumps(head).encode()[:-1] + b', "messages": [' + b", ".join(messages) + b"]}"


def first_turn(size: int, *, stream: bool) -> bytes:
    """A body of about `size` bytes."""
    return _body(_history(size), stream=stream)


def handed_on(answer: bytes) -> bytes:
    """The handle in an answer of P."""
    return bytes(_params_of(answer).kv_transfer_params)


# --- the variants --------------------------------------------------------------------------------------------------------


class _Turn(Protocol):
    """A conversation whose second turn is next."""

    async def run(self) -> None: ...
    async def end(self) -> None:
        """Has everything released."""


class _Variant(Protocol):
    pid: int

    async def begin(self, work: _Workload) -> _Turn: ...


async def _post(http: HttpClient, url: str, body: bytes, headers: dict[str, str]) -> EngineAnswer:
    """The whole answer, of any status. Raises `NotWarm` when there is none."""
    try:
        return await http.call(EngineCall(url, body, headers, _LIMIT_S))
    except EngineFailure as failure:
        raise NotWarm(failure.message) from failure


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw


_params_of = msgspec.json.Decoder(_Answer).decode
_PLACEHOLDER = b'{"_":0}'
_OURS = re.compile(rb'"backhaul": ?{')


class _Direct:
    """The calls that the router makes, made by hand."""

    pid = os.getpid()

    def __init__(self, http: HttpClient, prefill: str, decode: str, *, ours: bool) -> None:
        self.http = http
        self.ours = ours
        self.prefill = prefill
        self.decode = decode

    async def workload(self, case: Case) -> _Workload:
        """The turns of a case's conversations: an engine's answer to the first is part of the second."""
        messages = _history(case.body_bytes - _NEW_BYTES)
        asked = json.loads(_body(messages, stream=False))
        alone = json.dumps({**asked, "return_token_ids": True}).encode()
        answer = json.loads(await self.post(self.decode, _PATH, alone))
        said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        ran = [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"][:-1]]
        messages += [json.dumps(said).encode(), _message("user", "")]
        missing = case.body_bytes - len(_body(messages, stream=case.stream))
        messages[-1] = _message("user", _text(random.Random(2), max(missing, _NEW_BYTES // 2)))
        second = _body(messages, stream=case.stream)
        rendered = wire.read_rendered(await self.post(self.prefill, f"{_PATH}/render", second))
        if rendered is None or list(rendered[: len(ran)]) != ran:
            raise NotWarm("the second turn's prompt does not continue the first")
        first = _body(messages[:-2], stream=case.stream)
        return _Workload(first, second, len(rendered), rendered, len(ran) // BLOCK)

    def handed_on(self, handle: bytes) -> bytes:
        """P's handle for D. One of ours keeps something for the next turn when it is asked to."""
        return _OURS.sub(rb'\g<0>"retain": true, ', handle, count=1) if self.ours else handle

    async def post(self, engine: str, path: str, body: bytes) -> bytes:
        answer = await _post(self.http, engine + path, body, _JSON)
        if answer.status != 200:
            raise NotWarm(f"{engine}{path} answered {answer.status}: {answer.body[:300].decode(errors='replace')}")
        return answer.body

    async def begin(self, work: _Workload) -> _DirectTurn:
        facts = wire.read_request(_PATH, work.first)
        answer = await self.post(self.prefill, _PATH, wire.prefill_body(facts, None, None))
        prefilled = self.handed_on(bytes(_params_of(answer).kv_transfer_params))
        body = wire.decode_body(facts, None, prefilled, ids_back=not self.ours)
        left = _left(await self.post(self.decode, _PATH, body))
        return _DirectTurn(self, work, left)


class _ByAiohttp(_Direct):
    def __init__(
        self, session: aiohttp.ClientSession, http: HttpClient, prefill: str, decode: str, *, ours: bool
    ) -> None:
        super().__init__(http, prefill, decode, ours=ours)
        self._session = session

    async def post(self, engine: str, path: str, body: bytes) -> bytes:
        async with self._session.post(engine + path, data=body, headers=_JSON) as response:
            data = await response.read()
        if response.status != 200:
            raise NotWarm(f"{engine}{path} answered {response.status}: {data[:300].decode(errors='replace')}")
        return data


class _DirectTurn:
    def __init__(self, direct: _Direct, work: _Workload, left: wire.Handle) -> None:
        self._direct = direct
        facts, ids = work.facts, None if direct.ours else work.token_ids
        self._render = wire.render_body(facts)
        read = wire.whole_handle(left) if direct.ours else wire.cut_handle(left, work.history_blocks, BLOCK)
        self._prefill = wire.prefill_body(facts, ids, read)
        decode = wire.decode_body(facts, ids, _PLACEHOLDER, ids_back=not direct.ours)
        self._decode = decode.split(_PLACEHOLDER[1:-1])
        self._answer = b""

    async def run(self) -> None:
        direct = self._direct
        if not direct.ours:
            await direct.post(direct.prefill, f"{_PATH}/render", self._render)
        answer = await direct.post(direct.prefill, _PATH, self._prefill)
        handle = direct.handed_on(bytes(_params_of(answer).kv_transfer_params))
        self._answer = await direct.post(direct.decode, _PATH, handle[1:-1].join(self._decode))

    async def end(self) -> None:
        direct, left = self._direct, _left(self._answer)
        engine = direct.decode if direct.ours else direct.prefill
        body = LeaseOperation(release=[left.request_id]).body(MODEL) if direct.ours else wire.release_body(left.params)
        await _post(direct.http, f"{engine}{wire.Endpoint.COMPLETIONS}", body, _JSON)


def _left(answer: bytes) -> wire.Handle:
    """D's handle, in a whole answer or in a stream."""
    if answer.startswith(b"{"):
        handle = wire.read_params(_params_of(answer).kv_transfer_params).handle
    else:
        events = StreamFilter(Listeners(lambda _: None))
        events.feed(answer)
        handle = events.handle
    if handle is None:
        raise NotWarm("the decode engine left no handle")
    return handle


class _Routed(abc.ABC):
    """A router, which each measured turn gives a conversation of its own."""

    pid = os.getpid()

    async def begin(self, work: _Workload) -> _RoutedTurn:
        turn = _RoutedTurn(self, work, f"measured-{next(_numbers)}")
        await self.send(work.first, turn.conversation)
        return turn

    @abc.abstractmethod
    async def send(self, body: bytes, conversation: str) -> str:
        """Returns how the turn ran."""

    @abc.abstractmethod
    async def end(self, conversation: str) -> None: ...


@dataclass(frozen=True)
class _RoutedTurn:
    router: _Routed
    work: _Workload
    conversation: str

    async def run(self) -> None:
        how_it_ran = await self.router.send(self.work.second, self.conversation)
        if how_it_ran != Route.WARM:
            raise NotWarm(f"a turn that was to be measured ran {how_it_ran}, not warm")

    async def end(self) -> None:
        await self.router.end(self.conversation)


class _Embedded(_Routed):
    def __init__(self, router: Router) -> None:
        self._router = router

    async def begin(self, work: _Workload) -> _RoutedTurn:
        turn = await super().begin(work)
        await self._router.settled()
        return turn

    async def send(self, body: bytes, conversation: str) -> str:
        headers = [*_JSON.items(), (_CONVERSATION, conversation)]
        reply = await self._router.handle(Request("POST", _PATH, headers, body))
        async for _ in reply:
            pass
        return _how_it_ran(reply.status, dict(reply.headers))

    async def end(self, conversation: str) -> None:
        await self._router.end_conversation(conversation)


class _Served(_Routed):
    def __init__(self, http: HttpClient, admin: aiohttp.ClientSession, url: str, pid: int) -> None:
        self._http = http
        self._admin = admin
        self._url = url
        self.pid = pid

    async def send(self, body: bytes, conversation: str) -> str:
        answer = await _post(self._http, self._url + _PATH, body, {**_JSON, _CONVERSATION: conversation})
        return _how_it_ran(answer.status, answer.headers)

    async def end(self, conversation: str) -> None:
        async with self._admin.delete(f"{self._url}/backhaul/conversations/{conversation}") as response:
            await response.read()


_numbers = itertools.count(1)


def _how_it_ran(status: int, headers: Mapping[str, str]) -> str:
    if status != 200:
        return f"with status {status}"
    reason = headers.get("x-backhaul-reason")
    return headers["x-backhaul-route"] + (f" ({reason})" if reason else "")
