"""Plays a case over running engines, and checks all that must hold.

Every answer is that of the client's own body, sent straight to an engine that has none of it cached. What was reused is
exactly what the case says. Afterwards the same prompt, and another one that begins like it, are answered right by each
engine's own prefix cache, and nothing of the conversation is left on any engine.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
from backhaul_bench import answers
from backhaul_bench.answers import CHAT
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Request, Router
from backhaul_router.report import Proof, Reason, ReuseReport, Route

from .model import Ask, AtOnce, Body, Case, Expect, Flush, Load, Past, Turn, cold

RELEASED_WITHIN_S = 8.0
"""So soon after the last release an engine's blocks must be free; what ends by itself takes twice as long or longer."""
SHORT_ANSWER = 10
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Loading certificates takes longer than many a case."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Running engines, and the proof that is asked of them."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    reference: str
    """An engine that answers bodies as they are. It may be one of the others: it is given a fresh cache salt each time."""
    model: str
    block_size: int
    proof: Proof
    threshold: int = 64
    caches: bool = True
    """Whether P has a prefix cache."""
    forgets: bool = True
    """Whether P's prefix cache is emptied before each turn, so that all that is proven has to be read."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Directories of adapters that the engines can load, by name."""
    in_floats: bool = True
    """Whether answers come from floating-point numbers, in which two tokens can be as good as equal."""

    @property
    def engines(self) -> tuple[str, ...]:
        return (*self.prefill, *self.decode)

    @property
    def remembers(self) -> bool:
        """Whether P finds parts of later turns in its own cache."""
        return self.caches and not self.forgets


async def play(case: Case, site: Site, *, stream: bool = False) -> None:
    """Raises `AssertionError`, naming the step, for the first thing that is not as it must be."""
    async with httpx2.AsyncClient(timeout=120.0, trust_env=False, verify=_NO_TLS) as http:
        player = _Player(case, site, http, stream)
        await player.nothing_is_held(within_s=20.0)
        reports: list[ReuseReport] = []
        config = RouterConfig(
            prefill=site.prefill,
            decode=site.decode,
            local_max_tokens=0,
            place_by_cost=False,
            kv_recompute_threshold=site.threshold,
            connect_timeout_s=2.0,
            check_pairs=False,
            # Requests without a name are sent to see what is in the caches: nothing of theirs is to be kept.
            match_history=False,
        )
        async with _closing(Router(config, on_report=reports.append)) as router:
            player.router, player.reports = router, reports
            await player.run()
            for conversation in sorted(player.conversations):
                await router.end_conversation(conversation)
            await router.settled()
            await player.nothing_is_held(within_s=RELEASED_WITHIN_S)


@asynccontextmanager
async def _closing(router: Router) -> AsyncIterator[Router]:
    try:
        yield router
    finally:
        await router.aclose()


@dataclass
class _Player:
    case: Case
    site: Site
    http: httpx2.AsyncClient
    stream: bool
    past: Past = field(init=False)
    router: Router = field(init=False)
    reports: list[ReuseReport] = field(init=False)
    conversations: set[str] = field(default_factory=set)
    references: dict[str, bytes] = field(default_factory=dict)
    prefilled: list[tuple[str, list[int]]] = field(default_factory=list)
    """Salts and prompts that P has run since it last forgot."""

    def __post_init__(self) -> None:
        block, threshold = self.site.block_size, self.site.threshold
        answer = max(block, threshold if self.site.remembers else 0) + block // 2
        self.past = Past(block, threshold, answer, uuid.uuid4().hex[:8])

    async def run(self) -> None:
        for load in self.case.before:
            await self._load(load)
        opening = Ask(body=lambda past: self.case.first(past), path=self.case.path, expect=_FIRST)
        await self._one(opening, "the first turn")
        asked: list[tuple[str, Body]] = []
        for number, step in enumerate(self.case.then, 2):
            name = f"step {number}"
            match step:
                case Flush():
                    await self.router.flush()
                case Load():
                    await self._load(step)
                case AtOnce(asks):
                    await self._forget()
                    bodies = [self._body(ask) for ask in asks]
                    turns = [self._turn(*both, f"{name}.{n}") for n, both in enumerate(zip(asks, bodies, strict=True))]
                    await asyncio.gather(*turns)
                    asked += [(ask.path, body) for ask, body in zip(asks, bodies, strict=True)]
                case Ask():
                    body = await self._one(step, name)
                    asked += [(step.path, body)] if step.status == 200 else []
        await self._no_cache_is_poisoned(asked)

    async def _one(self, ask: Ask, name: str) -> Body:
        """A turn with nothing beside it, of which what P read is known to the token."""
        await self._forget()
        body = self._body(ask)
        before = await self._pulled()
        report, turn = await self._turn(ask, body, name)
        if turn is not None:
            if report.route is not Route.LOCAL:
                self._check_what_p_found(ask, report, turn, await self._pulled() - before, name)
                self.prefilled.append((_salt(body), turn.prompt))
            if ask.leaves and ask.conversation == Ask.conversation:
                self.past.turns.append(turn)
        return body

    def _body(self, ask: Ask) -> Body:
        return {"model": self.site.model, "temperature": 0, "stream": self.stream, **ask.body(self.past)}

    async def _turn(self, ask: Ask, body: Body, name: str) -> tuple[ReuseReport, Turn | None]:
        conversation = f"{self.past.mark}-{ask.conversation}"
        self.conversations.add(conversation)
        ran = [turn.ran for turn in self.past.turns]
        status, raw, report = await self._routed(body, ask.path, conversation)
        assert status == ask.status, f"{name}: {raw!r}"
        if status != 200:
            expected = await self._post(self.site.reference, ask.path, _salted(body))
            assert (status, _error(raw)) == (expected.status_code, _error(expected.content)), name
            return report, None
        found = await self._compare(ask.path, body, raw, name)
        prompt = await self._ids(ask.path, body)
        self._check_report(ask.expected(self.site.proof), report, ran, prompt, name)
        choice = found[0]
        message = answers.message(choice) if ask.path == CHAT else {}
        return report, Turn(body, prompt, message, answers.text(choice), list(choice.get("token_ids") or ()))

    def _check_report(
        self, expect: Expect, report: ReuseReport, ran: Sequence[list[int]], prompt: list[int], name: str
    ) -> None:
        assert (report.route, report.reason) == (expect.route, expect.reason), f"{name}: {report}"
        best = max((expect.rule(one, prompt, self.site.block_size) for one in ran), default=0)
        assert _proven(report, self.site.proof) == best, f"{name}: {best} tokens may be reused: {report}"
        if expect.route is Route.WARM:
            assert best > 0, f"{name}: the case proves nothing on these engines"
            assert report.proof is self.site.proof, f"{name}: {report}"

    def _check_what_p_found(self, ask: Ask, report: ReuseReport, turn: Turn, pulled: float, name: str) -> None:
        proven = _proven(report, self.site.proof) if report.route is Route.WARM else 0
        known = [prompt for salt, prompt in self.prefilled if self.site.remembers and salt == _salt(turn.body)]
        had = max((ask.own(one, turn.prompt, self.site.block_size) for one in known), default=0)
        missing = proven - had
        expected = missing if missing >= max(1, self.site.threshold) else 0
        assert pulled == expected, f"{name}: P read {pulled:g} tokens of {proven} proven, and had {had}: {report}"
        if report.cached is not None:
            assert report.cached == had + expected, f"{name}: {had} + {expected} tokens were there: {report}"

    # --- requests

    async def _routed(self, body: Body, path: str, conversation: str | None) -> tuple[int, bytes, ReuseReport]:
        reports: list[ReuseReport] = []
        scope = _Scope(conversation, reports) if conversation else None
        seen = len(self.reports)
        reply = await self.router.handle(Request("POST", path, (), json.dumps(body).encode(), scope=scope))
        raw = b"".join([chunk async for chunk in reply])
        return reply.status, raw, (reports or self.reports[seen:])[-1]

    async def _compare(self, path: str, body: Body, raw: bytes, name: str) -> answers.Choices:
        """The answer's choices, which must be the reference's."""
        reference = await self._reference(path, body)
        stream = bool(body.get("stream"))
        ours, expected = (answers.choices(answer, stream=stream) for answer in (raw, reference))
        if answers.comparable(ours) != answers.comparable(expected):
            tie = self.site.in_floats and await answers.near_tie(self._ask_reference, path, body, ours, expected)
            assert tie, f"{name}: {ours} is not {expected}"
        elif not stream:
            probabilities = [answers.comparable(json.loads(one).get("prompt_logprobs")) for one in (raw, reference)]
            assert probabilities[0] == probabilities[1], name
        return ours

    async def _reference(self, path: str, body: Body) -> bytes:
        """What an engine answers that has nothing of the body cached; asked once."""
        key = json.dumps((path, body))
        if key not in self.references:
            answer = await self._post(self.site.reference, path, _salted(body))
            assert answer.status_code == 200, f"the reference answers {answer.text}"
            self.references[key] = answer.content
        return self.references[key]

    async def _ask_reference(self, path: str, body: Mapping[str, Any]) -> Any:
        answer = await self._post(self.site.reference, path, _salted(body))
        answer.raise_for_status()
        return answer.json()

    async def _ids(self, path: str, body: Body) -> list[int]:
        """The prompt's ids, as an engine renders them."""
        rendered = await self._ask_reference(f"{path}/render", body)
        ids: list[int] = (rendered[0] if isinstance(rendered, list) else rendered)["token_ids"]
        return ids

    async def _post(self, url: str, path: str, body: Mapping[str, Any]) -> httpx2.Response:
        return await self.http.post(url + path, json=body)

    # --- what is left on the engines

    async def _no_cache_is_poisoned(self, asked: Sequence[tuple[str, Body]]) -> None:
        """Without any handle, only an engine's own prefix cache can serve what it does not compute: P's is asked directly, and
        both by a turn without a conversation."""
        if not self.site.caches:
            return
        for path, body in {json.dumps(both): both for both in asked}.values():
            plain = _plain(body)
            for what, one in (("the same prompt", plain), ("a prompt that begins like it", _beginning_like(plain))):
                for url in self.site.prefill:
                    answer = await self._post(url, path, one)
                    assert answer.status_code == 200, answer.text
                    await self._compare(path, one, answer.content, f"{what}, on {url}")
            status, raw, _ = await self._routed(plain, path, None)
            assert status == 200, raw
            await self._compare(path, plain, raw, "the same prompt, without a conversation")

    async def _load(self, load: Load) -> None:
        body = {"lora_name": load.name, "lora_path": self.site.adapters[load.adapter], "load_inplace": True}
        for url in self.site.engines:
            answer = await self._post(url, "/v1/load_lora_adapter", body)
            assert answer.status_code == 200, answer.text

    async def _forget(self) -> None:
        """Empties P's prefix cache."""
        if not (self.site.caches and self.site.forgets):
            return
        self.prefilled.clear()
        for url in self.site.prefill:
            answer = await self.http.post(f"{url}/reset_prefix_cache")
            assert answer.status_code == 200, answer.text

    async def _pulled(self) -> float:
        """Tokens whose KV the prefill engines have read from others."""
        pages = [await self._metrics(url) for url in self.site.prefill]
        return sum(
            _metric(page, "vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"') for page in pages
        )

    async def nothing_is_held(self, within_s: float) -> None:
        """Fails unless every engine's blocks are free in time."""
        deadline = time.monotonic() + within_s
        for url in self.site.engines:
            while held := await self._held(url):
                assert time.monotonic() < deadline, f"{url} still holds {held} after {within_s:g} s"
                await asyncio.sleep(0.02)

    async def _held(self, url: str) -> str:
        page = await self._metrics(url)
        usage, leases = _metric(page, "vllm:kv_cache_usage_perc"), _metric(page, "backhaul_leases")
        return f"{usage:.4%} of its blocks, {leases:g} leases" if usage > 1e-9 or leases else ""

    async def _metrics(self, url: str) -> str:
        answer = await self.http.get(f"{url}/metrics")
        answer.raise_for_status()
        return answer.text


class _Scope:
    """Tells the router the conversation, and takes its reports."""

    def __init__(self, conversation: str, reports: list[ReuseReport]) -> None:
        self.id = conversation
        self._reports = reports

    def record(self, report: ReuseReport) -> None:
        self._reports.append(report)


def _proven(report: ReuseReport, proof: Proof) -> int:
    """Tokens that were shown to be the prompt's: by the router before it offers them, by the connector afterwards."""
    return report.offered if proof is Proof.TOKENS else getattr(report, "verified", None) or 0


def _salt(body: Body) -> str:
    return str(body.get("cache_salt", ""))


def _salted(body: Mapping[str, Any]) -> Body:
    return {**body, "cache_salt": uuid.uuid4().hex}


_ABOUT_THE_PROMPT = ("model", "temperature", "messages", "prompt", "tools", "cache_salt")


def _plain(body: Body) -> Body:
    """The prompt, with a short answer and nothing else."""
    kept = {key: value for key, value in body.items() if key in _ABOUT_THE_PROMPT}
    return {**kept, "temperature": 0, "max_tokens": SHORT_ANSWER}


def _beginning_like(plain: Body) -> Body:
    if "messages" in plain:
        other = {"role": "user", "content": "And now for something else: what is a block?"}
        return {**plain, "messages": [*plain["messages"][:-1], other]}
    return {**plain, "prompt": [*plain["prompt"][:-1], 99, 98, 97]}


def _error(raw: bytes) -> Any:
    error = json.loads(raw)["error"]
    return error["type"], error["message"]


def _metric(page: str, name: str, label: str = "") -> float:
    """A metric's value, summed over the samples that have the label; 0 where the page does not have it."""
    samples = re.findall(rf"^{re.escape(name)}(?:\{{([^\n]*)\}})? (\S+)$", page, re.M)
    return sum(float(value) for labels, value in samples if label in labels)


_FIRST = cold(Reason.FIRST_TURN)
