"""`backhaul bench scale`: what a turn's decisions cost, and what a conversation takes in memory, from a thousand to a million.

No engine runs and nothing is sent. One ledger is filled step by step, each conversation with a handle as engines of ours write
it; at each step turns of conversations all over it run through the router's own state machine, with answers made here.
Memory is the process's: what it has grown by since the ledger was empty, allocator and all.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from backhaul_cli.options import Count, Numbers
from backhaul_router import wire
from backhaul_router.config import RouterConfig
from backhaul_router.fleet.engine import Engine, Role
from backhaul_router.fleet.fleet import Fleet
from backhaul_router.identity.ids import Identity
from backhaul_router.ledger import digests
from backhaul_router.ledger.memory import MemoryLedger
from backhaul_router.ledger.records import Branch, Held, Key
from backhaul_router.report import Reason, Route
from backhaul_router.turn.effects import (
    Answered,
    Call,
    Chunk,
    Done,
    Ended,
    Open,
    Opened,
    Read,
    Record,
    Settle,
    Take,
    Took,
)
from backhaul_router.turn.placement import Placement, Prompt, place
from backhaul_router.turn.states import begin
from backhaul_router.turn.turn import Turn
from rich.table import Table

from .clusters import say
from .options import OptionsError, Written
from .programs import p99
from .table import console, plain_table

STEPS = (1_000, 10_000, 100_000, 1_000_000)
LIMIT_BYTES = 1_500
"""What a conversation may take besides its handle and its digests."""
_TELLING = 10_000
"""Conversations; the pages of fewer are those that the process had already."""
_BLOCK = 16
_MODEL = "meta-llama/Llama-3.3-70B-Instruct"
_PREFILL, _DECODE = "http://prefill-0.engines:8100", "http://decode-0.engines:8200"
_MESSAGES = 9
_IDLE_S = 1e9
_ANSWER_TOKENS = 200


@dataclass(frozen=True, kw_only=True)
class Options(Written):
    conversations: Annotated[Numbers, "kept at a time"] = STEPS
    tokens: Annotated[Count, "of each history"] = 1_024
    turns: Annotated[Count, "measured at each step"] = 400

    def __post_init__(self) -> None:
        if min(self.conversations) < 1:
            raise OptionsError("--conversations: 1 or more")
        if self.tokens < 1_024:
            raise OptionsError(f"--tokens {self.tokens}: 1024 or more, so that a handle is worth reading")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step. Microseconds of CPU time; bytes per conversation."""

    conversations: int
    decide_p50_us: float
    """The ledger's `take` and `settle`, and `place` between them."""
    decide_p99_us: float
    turn_p50_us: float
    """A whole warm turn of the state machine, the ledger included: every body read and written."""
    turn_p99_us: float
    payload_bytes: float
    """Its handle and its digests, as objects."""
    record_bytes: float | None
    """What the process has grown by besides; `None` where Linux's /proc is not, and where it is too little to tell."""


def settings(most: int) -> RouterConfig:
    """Of a router that keeps so many conversations, and has every turn run warm."""
    return RouterConfig(prefill=(_PREFILL,), decode=(_DECODE,), max_conversations=most, route=Route.WARM)


def engines() -> Fleet:
    """One of each role, both with our connector."""
    about: dict[str, Any] = {
        "version": "0.32.0",
        "models": (_MODEL,),
        "adapters": frozenset(),
        "block_size": _BLOCK,
        "max_model_len": 131_072,
        "renders": True,
        "streams_handles": True,
        "connector": 1,
    }
    return Fleet([Engine(_PREFILL, Role.PREFILL, **about), Engine(_DECODE, Role.DECODE, **about)])


class Conversations:
    """A ledger, and the conversations in it, as turns on engines of ours leave them."""

    def __init__(self, most: int, tokens: int, *, named: bool = True) -> None:
        """`most` of them; without names they are found by their histories."""
        self.ledger = MemoryLedger(max_conversations=most if named else 2 * most, max_idle_s=_IDLE_S)
        self._named = named
        self.payload = 0
        self.tokens = tokens
        self._source = random.Random(7)
        self._messages = [_message(n, tokens * 4 // _MESSAGES) for n in range(_MESSAGES)]

    def key(self, number: int) -> Key:
        """Of a conversation's state: the strings are new ones, as they are in every request."""
        return Key(
            "", wire.read_request(wire.Endpoint.CHAT, b'{"model":"%s"}' % _MODEL.encode()).model, "", name(number)
        )

    def add(self, number: int, fleet: Fleet) -> None:
        """Its first turn, or its next one, with what a fleet keeps of it: retention's account, and placement's."""
        key = self.key(number)
        chain = self.chain(number)
        now = number * 1e-7  # an object of its own, as in life
        taken = self.ledger.take(key, chain, now, _usable)
        fleet.retention.took(taken)
        payload = self.payload
        branch = self.branch(chain, number)
        if taken.held is not None:  # which this turn supersedes
            self.payload = payload
        fleet.load.placed((key.tenant, key.conversation), fleet.decode[0].url, fleet.prefill[0].url, now)
        ended = now + 1e-3
        dropped = self.ledger.settle(key, taken, branch, ended)
        fleet.retention.settled(key, taken, branch, dropped, ended)

    def messages(self, number: int) -> list[bytes]:
        """The second turn's; the first has all but the last two."""
        return [b'{"role":"system","content":"%d"}' % number, *self._messages[1:]]

    def chain(self, number: int, *, second: bool = False) -> bytes:
        messages = self.messages(number)
        return digests.chain(messages if second else messages[:-2])

    def branch(self, chain: bytes, number: int) -> Branch:
        handle = wire.read_params(self.params(f"chatcmpl-{name(number)}-2")).handle
        if handle is None:
            raise AssertionError("no handle")
        kept = (handle, handle.params, handle.passed_on or b"", handle.request_id, chain)
        self.payload += sum(map(sys.getsizeof, kept))
        return Branch(
            chain=chain,
            blocks=b"",
            block_size=0,
            tokens=self.tokens + number % 7,
            message_bytes=(self.tokens + number % 7) * 4,
            decode=_DECODE,
            prefill=_PREFILL,
            held=Held(handle, _DECODE, 450.0 + number * 1e-4, handle.tokens),
            prompt_tokens=self.tokens + number % 7 - _ANSWER_TOKENS,
            by_history=not self._named,
        )

    def params(self, request_id: str) -> bytes:
        """What D returns beside its answer."""
        blocks = self.tokens // _BLOCK
        first = self._source.randrange(1, 50_000)
        return msgspec.json.encode(
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [list(range(first, first + blocks))],
                "remote_engine_id": "9f0c2b0e-6a52-4e0e-8a3f-dec0de000000",
                "remote_request_id": request_id,
                "remote_host": "10.0.0.7",
                "remote_port": 5600,
                "tp_size": 1,
                "remote_num_tokens": self.tokens,
                "backhaul": {
                    "version": 1,
                    "digests": base64.b64encode(self._source.randbytes(4 * blocks)).decode(),
                    "block_size": _BLOCK,
                    "epoch": "e0",
                    "lease": {"port": 40123, "ttl_s": 480.0, "shared": True},
                    "account": {"prompt": self.tokens - _ANSWER_TOKENS, "local": 0, "received": self.tokens},
                },
            }
        )

    def answer(self, params: bytes, prompt_tokens: int) -> bytes:
        """An engine's whole answer."""
        return (
            b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
            b'{"role":"assistant","content":"' + b"w" * (4 * _ANSWER_TOKENS) + b'"},"finish_reason":"stop"}],"usage":'
            b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d},"kv_transfer_params":'
            % (prompt_tokens, prompt_tokens + _ANSWER_TOKENS, _ANSWER_TOKENS)
            + params
            + b"}"
        )

    def body(self, number: int) -> bytes:
        """The conversation's second turn."""
        return b'{"model":"%s","max_tokens":%d,"messages":[%s]}' % (
            _MODEL.encode(),
            _ANSWER_TOKENS,
            b",".join(self.messages(number)),
        )


def name(number: int) -> str:
    """An id as long as a UUID."""
    return f"{number:032x}-abc"


def _message(number: int, size: int) -> bytes:
    role = b"user" if number % 2 else b"assistant"
    return b'{"role":"%s","content":"%s"}' % (role, random.Random(number).randbytes(size // 2).hex().encode())


def _usable(held: Held) -> Reason | None:
    return None


def decide(conversations: Conversations, fleet: Fleet, config: RouterConfig, number: int) -> Callable[[], None]:
    """One turn's decisions: what it finds, where it runs, what it leaves."""
    key = conversations.key(number)
    chain = conversations.chain(number, second=True)
    branch = conversations.branch(chain, number)
    prompt = Prompt(conversations.tokens * 4)

    def run() -> None:
        ledger = conversations.ledger
        ledger.sweep(1.0)
        taken = ledger.take(key, chain, 1.0, _usable)
        if not isinstance(place(prompt, taken, fleet, config, force=Route.WARM), Placement):
            raise AssertionError("not placed")  # noqa: TRY004
        ledger.settle(key, taken, branch, 1.0)

    return run


def turn(conversations: Conversations, fleet: Fleet, config: RouterConfig, number: int) -> Callable[[], None]:
    """The same turn as the router runs it, but for the sending: from the client's body to its answer."""
    body = conversations.body(number)
    identity = Identity(name(number), "header:x-conversation-id")
    prompt_tokens = conversations.tokens
    account = {"prompt": prompt_tokens, "offered": prompt_tokens, "verified": prompt_tokens, "local": 0}
    said = {"version": 1, "account": {**account, "pulled": prompt_tokens - _BLOCK}}
    prefilled = conversations.answer(_with(conversations.params("chatcmpl-p"), said), prompt_tokens)
    answered = conversations.answer(conversations.params(f"chatcmpl-{name(number)}-4"), prompt_tokens)

    def run() -> None:
        ledger = conversations.ledger
        facts = wire.read_request(wire.Endpoint.CHAT, body)
        ledger.sweep(1.0)
        running = Turn(facts, identity, config, fleet, 1.0, chain=digests.chain(facts.parts))
        state, _ = begin(running, 1.0)
        chunks = iter((Chunk(answered), Ended()))
        while not isinstance(state, Done):
            match state.ask():
                case Take(key, chain, parent):
                    state, actions = state.next(Took(ledger.take(key, chain, 1.0, _usable, parent)), 1.0)
                case Call():
                    state, actions = state.next(Answered(200, {}, prefilled), 1.0)
                case Open():
                    state, actions = state.next(Opened(200, {"content-type": "application/json"}), 1.0)
                case Read():
                    state, actions = state.next(next(chunks), 1.0)
                case other:
                    raise AssertionError(other)
            for action in actions:
                if isinstance(action, Settle):
                    ledger.settle(action.key, action.taken, action.branch, 1.0)
                elif isinstance(action, Record) and action.report.route is not Route.WARM:
                    raise AssertionError(f"a turn ran {action.report.route}: {action.report.reason}")

    return run


def _with(params: bytes, said: dict[str, Any]) -> bytes:
    return json.dumps({**json.loads(params), "backhaul": said}).encode()


def measure(options: Options, progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Runs the steps."""
    steps = sorted(set(options.conversations))
    config = settings(steps[-1])
    fleet = engines()
    conversations = Conversations(steps[-1], options.tokens)
    for number in range(200):  # the code itself and its caches
        conversations.add(number, fleet)
        decide(conversations, fleet, config, number)()
        turn(conversations, fleet, config, number)()
    conversations, fleet = Conversations(steps[-1], options.tokens), engines()
    empty = _rss()
    rows: list[Row] = []
    filled = 0
    for step in steps:
        progress(f"{step:,} conversations")
        for number in range(filled, step):
            conversations.add(number, fleet)
        filled = step
        payload = conversations.payload
        grown = None if empty is None else (_rss() or empty) - empty
        sample = random.Random(step).choices(range(step), k=options.turns)
        decided = _timed(decide(conversations, fleet, config, number) for number in sample)
        turned = _timed(turn(conversations, fleet, config, number) for number in sample)
        conversations.payload = payload
        rows.append(
            Row(
                conversations=step,
                decide_p50_us=statistics.median(decided),
                decide_p99_us=p99(decided),
                turn_p50_us=statistics.median(turned),
                turn_p99_us=p99(turned),
                payload_bytes=payload / step,
                record_bytes=None if grown is None or step < _TELLING else (grown - payload) / step,
            )
        )
    return rows


def _timed(runs: Iterable[Callable[[], None]]) -> list[float]:
    times = []
    for run in runs:
        began = time.thread_time()
        run()
        times.append((time.thread_time() - began) * 1e6)
    return times


def _rss() -> int | None:
    """Bytes."""
    gc.collect()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def table(rows: Sequence[Row], options: Options) -> Table:
    """A line a step."""
    made = plain_table(
        title=f"A turn and a conversation of {options.tokens:,} tokens, with so many in the ledger",
        caption="decide: the ledger's take and settle, and place; turn: the whole state machine, without I/O\n"
        "bytes a conversation: its handle and digests, and what the process has grown by besides",
        columns=("conversations", "decide p50 µs", "p99", "turn p50 µs", "p99", "handle, digests", "besides"),
    )
    for row in rows:
        times = (row.decide_p50_us, row.decide_p99_us, row.turn_p50_us, row.turn_p99_us)
        besides = "–" if row.record_bytes is None else f"{row.record_bytes:,.0f}"
        made.add_row(f"{row.conversations:,}", *(f"{t:,.0f}" for t in times), f"{row.payload_bytes:,.0f}", besides)
    return made


def main(options: Options) -> int:
    """Measures, prints, and returns the exit status: 1 where a conversation takes more than it may."""
    rows = measure(options, say)
    out = console()
    out.print(table(rows, options))
    last = rows[-1]
    options.write({"tokens": options.tokens, "rows": [asdict(r) for r in rows]})
    if last.record_bytes is None:
        return 0
    holds = last.record_bytes < LIMIT_BYTES
    out.print(
        f"{last.record_bytes:,.0f} bytes a conversation at {last.conversations:,}, {'under' if holds else 'NOT under'} "
        f"{LIMIT_BYTES:,}, besides its handle and its digests."
    )
    return 0 if holds else 1
