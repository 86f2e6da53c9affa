"""Active probe of a pair: a tiny conversation of two turns between one P and one D shows whether P can read what D holds.

    P computes a prompt, D reads it and answers (turn 1); P is given D's handle for a longer prompt (turn 2)

The prompt is random, and turn 2 runs under a `cache_salt` that P has not seen: its own prefix cache would hide that nothing
was read. Everything that the engines keep for it is released.
"""

from __future__ import annotations

import asyncio
import enum
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from backhaul_protocol import KEY
from backhaul_protocol.account import Account
from backhaul_protocol.leases import LeaseOperation
from backhaul_protocol.messages import Ask

from .. import wire
from ..errors import FailureKind
from ..fleet.engine import Engine
from ..fleet.restarts import is_fixed
from ..wire.connector_object import asking, keeps_waiting
from .client import EngineCall, EngineClient, EngineFailure

_RELEASE_TIMEOUT_S = 5.0
_PATH = str(wire.Endpoint.COMPLETIONS)


class Verdict(enum.StrEnum):
    """What came of a probe."""

    WARM = "warm"
    """P read what D held."""
    NOT_READ = "not_read"
    """P answered and read nothing."""
    UNSEEN = "unseen"
    """P answered, and does not say whether it read."""
    HANGS = "hangs"
    """P did not answer a request with D's handle in time."""
    READ_FAILS = "read_fails"
    """P answered it with an error."""
    NO_PREFILL_HANDLE = "no_prefill_handle"
    """P keeps nothing for D: no KV connector."""
    NO_DECODE_HANDLE = "no_decode_handle"
    """D keeps nothing for P: no KV connector, or bi-directional mode is off."""
    PREFILL_FAILS = "prefill_fails"
    DECODE_FAILS = "decode_fails"

    @property
    def unsafe(self) -> bool:
        """A turn of this pair that reads would fail or hang."""
        return self in (Verdict.HANGS, Verdict.READ_FAILS)

    @property
    def broken(self) -> bool:
        """Not even a first turn runs."""
        return self in (Verdict.NO_PREFILL_HANDLE, Verdict.PREFILL_FAILS, Verdict.DECODE_FAILS)


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Outcome of the probe of one pair."""

    prefill: str
    decode: str
    verdict: Verdict
    detail: str = ""
    offered: int = 0
    """Tokens that P was given to read."""
    pulled: int | None = None
    """Tokens that it read, as far as it says."""
    received: int | None = None
    """Tokens that D read from P; `None` where D does not say."""
    ttl_s: float | None = None
    """For how long D keeps a handle; `None` where it does not say."""
    fixed_id: str | None = None
    """D's `engine_id`, where an operator has chosen it."""
    left_pinned: tuple[str, ...] = ()
    """What could not be released, and why: it ends with its TTL."""
    ms: float = 0.0


class _ProbeEnded(Exception):
    """The probe ends here."""

    def __init__(self, verdict: Verdict, detail: str) -> None:
        super().__init__(detail)
        self.verdict = verdict
        self.detail = detail


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    usage: wire.Usage | None = None
    choices: list[_Choice] = []
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_decode_answer = msgspec.json.Decoder(_Answer).decode


@dataclass(frozen=True)
class _Reply:
    """What an engine's answer says."""

    handle: wire.Handle | None
    account: Account | None
    usage: wire.Usage | None
    generated: Sequence[int]
    no_handle: str = ""
    """What there was instead of a handle."""


@dataclass
class _Probe:
    """One run of it."""

    client: EngineClient
    prefill: Engine
    decode: Engine
    threshold: int
    timeout_s: float
    name: str = field(default_factory=lambda: f"backhaul-check-{uuid.uuid4().hex}")
    """By which the engines' logs tell it from a client's requests."""
    calls: int = 0
    ids: list[int] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    pinned: list[tuple[Engine, wire.Handle]] = field(default_factory=list)
    """Handles that are still to be released, with the engine that holds the blocks."""
    given_up: Callable[[], bool] = bool
    """Asked before each request. A request that is under way is left to end: its answer names what has to be released."""

    @property
    def block_size(self) -> int:
        return self.decode.block_size or 16

    async def run(self) -> Verdict:
        self.ids = await self._random_ids()
        first, second = (f"backhaul-{uuid.uuid4().hex}" for _ in range(2))
        reply = await self._turn_one(first, second)
        if reply.handle is None:
            raise _ProbeEnded(Verdict.NO_DECODE_HANDLE, f"{self.decode} returned {reply.no_handle}")
        if is_fixed(reply.handle.engine_id):
            self.found["fixed_id"] = reply.handle.engine_id
        if reply.handle.lease is not None:
            self.found["ttl_s"] = reply.handle.lease.ttl_s
        return await self._turn_two(reply.handle, [*self.ids, *reply.generated, self.ids[0]], second)

    async def _random_ids(self) -> list[int]:
        """Token ids of this model, in an order that nobody has asked for before: whole blocks, above the threshold."""
        text = "The keys and values of every token that an engine ran stay where they are, block by block."
        body = {"model": self.prefill.models[0], "prompt": text}
        answer = await self._post(self.prefill, "/tokenize", body, Verdict.PREFILL_FAILS)
        known = sorted(set(wire.read_rendered(answer) or ()))
        if not known:
            raise _ProbeEnded(Verdict.PREFILL_FAILS, f"{self.prefill} does not tokenize")
        blocks = max(-(-self.threshold // self.block_size), 2) + 1
        return random.choices(known, k=blocks * self.block_size + 1)

    async def _turn_one(self, first: str, second: str) -> _Reply:
        """D's answer to the first turn. With our connector on both sides D would notice that P's prompt has another salt, so
        there turn 1 has one of its own, and D then runs the prompt alone under the salt of turn 2."""
        both = self.prefill.connector is not None and self.decode.connector is not None
        reply = await self._ask_prefill(self.ids, first, None)
        if reply.handle is None:
            raise _ProbeEnded(Verdict.NO_PREFILL_HANDLE, f"{self.prefill} returned {reply.no_handle}")
        self.pinned.append((self.prefill, reply.handle))
        answer = await self._ask_decode(reply.handle, first if both else second, retain=not both)
        self.pinned.remove((self.prefill, reply.handle))
        if both:
            self.found["received"] = answer.account.received if answer.account else None
            answer = await self._ask_decode(None, second, retain=True)
        if answer.handle is not None:
            self.pinned.append((self.decode, answer.handle))
        return answer

    async def _turn_two(self, handle: wire.Handle, ids: Sequence[int], salt: str) -> Verdict:
        by_connector = self.prefill.connector is not None and handle.digests
        blocks = min(handle.tokens, len(ids) - 1) // self.block_size
        self.found["offered"] = blocks * self.block_size
        if by_connector:
            params = wire.whole_handle(handle)
        else:
            params = wire.cut_handle(handle, blocks, self.block_size, to_ours=self.prefill.connector is not None)
        try:
            reply = await self._ask_prefill(ids, salt, params)
        except _ProbeEnded as ended:
            hangs = ended.verdict is Verdict.HANGS
            raise _ProbeEnded(Verdict.HANGS if hangs else Verdict.READ_FAILS, ended.detail) from None
        shared = handle.lease is not None and handle.lease.shared
        if not shared and not (reply.account is not None and keeps_waiting(reply.account)):
            self.pinned.remove((self.decode, handle))  # read once, or declined: either way P has told D
        if reply.handle is not None:
            self.pinned.append((self.prefill, reply.handle))
        pulled, why = self._pulled(reply)
        self.found["pulled"] = pulled
        if pulled is None:
            return Verdict.UNSEEN
        if pulled == 0:
            raise _ProbeEnded(Verdict.NOT_READ, why or f"{self.prefill} read none of {blocks * self.block_size} tokens")
        return Verdict.WARM

    @staticmethod
    def _pulled(reply: _Reply) -> tuple[int | None, str | None]:
        if reply.account is not None:
            return reply.account.pulled, reply.account.why or reply.account.unknown_why
        if reply.handle is not None and reply.handle.cached is not None:
            return reply.handle.cached, None
        return (reply.usage.cached if reply.usage else None), None

    async def _ask_prefill(self, ids: Sequence[int], salt: str, handle: wire.Members | None) -> _Reply:
        params: dict[str, Any] = {**(handle or {}), "do_remote_decode": True, "do_remote_prefill": False}
        body = {**self._body(self.prefill, ids, salt, 1), wire.HANDLE: params}
        return await self._ask(self.prefill, body, Verdict.PREFILL_FAILS)

    async def _ask_decode(self, handle: wire.Handle | None, salt: str, *, retain: bool) -> _Reply:
        params: dict[str, Any] = {}
        if handle is not None:
            params = msgspec.json.decode(handle.params)
            params |= {"do_remote_prefill": True, "do_remote_decode": False}
        if self.decode.connector is not None:
            ask = Ask(retain=retain, shared=self.prefill.connector is not None)
            params[KEY] = asking(ask, handle.passed_on if handle else None)
        body = {**self._body(self.decode, self.ids, salt, 2), "return_token_ids": True, wire.HANDLE: params}
        return await self._ask(self.decode, body, Verdict.DECODE_FAILS)

    async def _ask(self, engine: Engine, body: Mapping[str, Any], verdict: Verdict) -> _Reply:
        raw = await self._post(engine, _PATH, body, verdict)
        try:
            answer = _decode_answer(raw)
            params = wire.read_params(answer.kv_transfer_params)
        except msgspec.DecodeError as error:
            raise _ProbeEnded(verdict, f"{engine} sent an answer that cannot be read: {error}") from None
        generated = (answer.choices[0].token_ids if answer.choices else None) or ()
        no_handle = "" if params.handle else wire.no_handle(answer.kv_transfer_params)
        return _Reply(params.handle, params.account, answer.usage, generated, no_handle)

    @staticmethod
    def _body(engine: Engine, ids: Sequence[int], salt: str, max_tokens: int) -> dict[str, Any]:
        return {
            "model": engine.models[0],
            "prompt": ids,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": False,
            "cache_salt": salt,
        }

    async def _post(self, engine: Engine, path: str, body: Mapping[str, Any], verdict: Verdict) -> bytes:
        if self.given_up():
            raise asyncio.CancelledError
        self.calls += 1
        headers = {"x-request-id": f"{self.name}-{self.calls}"}
        call = EngineCall(engine.url + path, msgspec.json.encode(body), headers, self.timeout_s)
        try:
            answer = await self.client.call(call)
        except EngineFailure as failure:
            hangs = failure.kind is FailureKind.TIMEOUT
            raise _ProbeEnded(Verdict.HANGS if hangs else verdict, failure.message) from None
        if answer.status != 200:
            message = wire.error_message(answer.body)
            raise _ProbeEnded(verdict, f"{engine} answered {answer.status} to {path}: {message}")
        return answer.body

    async def release(self) -> tuple[str, ...]:
        """Why something stays pinned."""
        failed = []
        for holder, handle in self.pinned:
            if (why := await self._release(holder, handle)) is not None:
                failed.append(f"{holder} keeps {handle.blocks} blocks until their TTL: {why}")
        return tuple(failed)

    async def _release(self, holder: Engine, handle: wire.Handle) -> str | None:
        leased = handle.lease is not None and holder is self.decode
        via = holder if leased else self.decode if holder is self.prefill else self.prefill
        body = (
            LeaseOperation(release=(handle.request_id,)).body(holder.models[0])
            if leased
            else wire.release_body(handle.params)
        )
        try:
            answer = await self.client.call(EngineCall(via.url + _PATH, body, timeout_s=_RELEASE_TIMEOUT_S))
        except EngineFailure as failure:
            return failure.message
        if answer.status in ((200,) if leased else (400, 404)):
            return None
        return f"{via} answered {answer.status}"


async def probe_pair(
    client: EngineClient,
    prefill: Engine,
    decode: Engine,
    *,
    threshold: int = 64,
    timeout_s: float = 10.0,
    given_up: Callable[[], bool] = bool,
) -> ProbeResult:
    """Runs it. Never raises for what engines do; `timeout_s` limits each request. `threshold` is `kv_recompute_threshold`. Once
    `given_up` says so the request under way is the last one, what engines keep is released, and the task is cancelled."""
    run = _Probe(client, prefill, decode, threshold, timeout_s, given_up=given_up)
    started = time.monotonic()
    detail = ""
    try:
        verdict = await run.run()
    except _ProbeEnded as ended:
        verdict, detail = ended.verdict, ended.detail
        if verdict is Verdict.HANGS and "offered" not in run.found:
            verdict = Verdict.PREFILL_FAILS if not run.pinned else Verdict.DECODE_FAILS
    finally:
        left_pinned = await run.release()
    return ProbeResult(
        prefill=prefill.url,
        decode=decode.url,
        verdict=verdict,
        detail=detail,
        left_pinned=left_pinned,
        ms=(time.monotonic() - started) * 1e3,
        **run.found,
    )
