"""HTTP hooks for a router elsewhere: its answers bring their reports, and a conversation that is left is ended there.

A response hook of the HTTP client looks for the head of a Backhaul router's answer, `x-backhaul-turn`; every other answer
passes untouched. The turn's report is in `usage.backhaul` of a whole answer, and in a comment before the last events of a
stream, which is taken out. An answer without one, as of an older router or of a stream that broke, has the report fetched, for
which its last bytes wait: when the caller has the whole answer, `chat.reuse.last` is about it. Where it cannot be fetched, what
the answer itself says has to do. Nothing here raises into a caller's request.

Longer than most modules: hooks and bodies are there twice, for synchronous and for asynchronous clients, over one account of
a turn.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import quote

import anyio
import anyio.to_thread
import msgspec
from backhaul_router.drive.pauses import Paused
from backhaul_router.errors import LeaseError
from backhaul_router.identity import frameworks, hints
from backhaul_router.identity.identify import FIELDS, HEADERS
from backhaul_router.identity.ids import ConversationScope, current, parent_of
from backhaul_router.report import Reason, ReuseReport, Route
from backhaul_router.wire.json_members import NULL
from backhaul_router.wire.stream import COMMENT, data_of

from ._totals import note, turns_are_heard

_log = logging.getLogger("backhaul")

FETCH_LIMIT_S = 3.0
_WAIT_S = 2
"""How long the router may wait for a turn that is just ending, as after an early close."""
_END_LIMIT_S = 4.0
_TAIL_BYTES = 4096
_CREDENTIALS = ("authorization", "x-api-key")
_DONE = b"data: [DONE]"
_MARK = b"\n" + COMMENT


def follow(client: Any) -> None:
    """Has an HTTP client of `httpx2` or `httpx` collect the reports of Backhaul routers, once however often it is asked to.
    The client may be the caller's own, and in use."""
    hooks = client.event_hooks
    if any(isinstance(hook, _Hook) for hook in hooks["response"]):
        return
    module = _module_of(client)
    hook = (_AsyncHook if isinstance(client, module.AsyncClient) else _SyncHook)(client, module)
    client.event_hooks = {"request": [*hooks["request"], hook.wants_report], "response": [*hooks["response"], hook]}


def headers_of(scope: ConversationScope | None) -> dict[str, str]:
    """What a request tells a router elsewhere of the scope that it is made in, or else of the framework's conversation."""
    if scope is None:
        return _headers_by_framework()
    headers = {"X-Conversation-ID": scope.id}
    if (parent := parent_of(scope)) is not None:
        headers["X-Backhaul-Parent"] = parent
    if hints.inside(scope.id).last_turn:
        headers["X-Backhaul-Last-Turn"] = "true"
    return headers


def _headers_by_framework() -> dict[str, str]:
    found = frameworks.discover()
    if found is None or found.by_history or not _fits_a_header(found.conversation):
        return {}  # a router elsewhere goes by the history, then
    headers = {"X-Conversation-ID": found.conversation}
    if found.parent is not None and _fits_a_header(found.parent):
        headers["X-Backhaul-Parent"] = found.parent
    return headers


def _fits_a_header(value: str) -> bool:
    return value.isascii() and value == value.strip()


def _module_of(client: Any) -> ModuleType:
    """`httpx2` or `httpx`, under whatever subclass."""
    for base in type(client).__mro__:
        name = base.__module__.partition(".")[0]
        if name in ("httpx", "httpx2"):
            return sys.modules[name]
    raise TypeError(f"{type(client).__name__} is no client of httpx2 or httpx")


class _Reports(msgspec.Struct):
    reports: list[ReuseReport]


class _Named(msgspec.Struct):
    """The ids that a request's body can name."""

    conversation_id: str | None = None
    session_id: str | None = None


class _Note(msgspec.Struct):
    """What an answer says itself of its turn, where it has not the whole report."""

    offered: int = 0
    cached: int | None = None
    computed: int | None = None


class _Usage(msgspec.Struct):
    """Token counts in the words of each API."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    backhaul: msgspec.Raw = NULL

    @property
    def prompt(self) -> int | None:
        if self.input_tokens is None:
            return self.prompt_tokens
        return self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)

    @property
    def generated(self) -> int | None:
        return self.completion_tokens if self.output_tokens is None else self.output_tokens


class _Told(msgspec.Struct):
    model: str | None = None
    usage: _Usage | None = None
    response: _Told | None = None
    """The whole answer, in the last event of `/v1/responses`."""


class _Renewed(msgspec.Struct):
    remaining_s: float | None


_T = TypeVar("_T", _Renewed, Paused)


class RemoteRouter:
    """A router behind an HTTP client, as a conversation needs it."""

    def __init__(self, hook: _Hook, base: str) -> None:
        self.base = base
        """URL below which `/v1` and `/backhaul` lie."""
        self.credentials: dict[str, str] = {}
        self._hook = hook
        self._refused = False
        """It does not take orders of this client; asking again would be of no use."""

    def __repr__(self) -> str:
        return f"<router at {self.base}>"

    async def end_conversation(self, conversation: str) -> None:
        """Has the router release what the engines hold for it. Raises what the HTTP library does."""
        answer = await self._hook.ask("DELETE", self.url(conversation), self.credentials)
        if answer.status_code not in (204, 404):
            self._hook.warn(
                f"{self!r} answered {answer.status_code} to the end of a conversation: its leases end with their TTL"
            )

    def renewable(self, conversation: str) -> bool:
        """Whether to ask: only the router knows of the leases."""
        return not self._refused

    async def renew(self, conversation: str) -> float | None:
        """As `Router.renew`. Raises `LeaseError`."""
        if self._refused:
            return None
        return (await self._tell(conversation, "renew", _Renewed)).remaining_s

    async def pause(self, conversation: str, seconds: float) -> Paused:
        """As `Router.pause`. Raises `LeaseError`."""
        return await self._tell(conversation, f"pause?seconds={seconds!r}", Paused)

    async def _tell(self, conversation: str, what: str, kind: type[_T]) -> _T:
        try:
            answer = await self._hook.ask("POST", f"{self.url(conversation)}/{what}", self.credentials)
        except self._hook.module.HTTPError as error:
            raise LeaseError(f"{self!r} could not be asked to {what}: {error!r}") from error
        if answer.status_code != 200:
            self._refused = answer.status_code in (401, 403, 404, 405)
            raise LeaseError(f"{self!r} answered {answer.status_code} to {what}: {answer.text[:200]}")
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            raise LeaseError(f"{self!r} sent an answer to {what} that cannot be read: {error}") from None

    def url(self, conversation: str) -> str:
        return f"{self.base}/backhaul/conversations/{quote(conversation, safe='')}"


class _Hook:
    """What both kinds of clients share."""

    def __init__(self, client: Any, module: ModuleType) -> None:
        self.client = client
        self.module = module
        self.reports_refused = False
        """The router does not show reports to this client; asking again would cost a round trip a turn."""
        self._routers: dict[str, RemoteRouter] = {}
        self._warned = False

    def warn(self, message: str, error: BaseException | None = None) -> None:
        """Says something once at a level that shows, for it holds for every turn."""
        _log.log(logging.DEBUG if self._warned else logging.WARNING, "%s", message, exc_info=error)
        self._warned = True

    async def ask(self, method: str, url: str, headers: dict[str, str]) -> Any:
        """The answer, read. Raises what the HTTP library does."""
        raise NotImplementedError

    def mark(self, request: Any) -> None:
        """Asks for the report, where anybody wants it."""
        if request.method == "POST" and (current.get() is not None or turns_are_heard()):
            request.headers["X-Backhaul-Report"] = "comment"

    def followed(self, response: Any) -> _Turn | None:
        """The turn that a response answers."""
        scope = current.get()
        turn = response.headers.get("x-backhaul-turn", "")
        if not (turn.isascii() and turn.isdecimal()):
            return None
        request = response.request
        base, found, _ = str(request.url.copy_with(query=None, fragment=None)).rpartition("/v1/")
        conversation = _conversation_of(request)
        if not found or (conversation is None and scope is not None):
            return None
        router = self._routers.setdefault(base, RemoteRouter(self, base))
        if sent := {name: request.headers[name] for name in _CREDENTIALS if name in request.headers}:
            router.credentials = sent
        attach = getattr(scope, "attach", None)
        if attach is not None:
            attach(router)
        return _Turn(self, router, scope, conversation, int(turn), response.headers)


def _conversation_of(request: Any) -> str | None:
    """What the request's ids say; the router has checked that they agree."""
    for name in HEADERS:
        if value := request.headers.get(name):
            return str(value)
    try:
        named = msgspec.json.decode(request.content, type=_Named)
    except (msgspec.DecodeError, RuntimeError):  # RuntimeError: the body was streamed, and is gone
        return None
    return next((value for field in FIELDS if (value := getattr(named, field))), None)


@dataclass(eq=False)
class _Turn:
    """One turn on a remote router: sees the answer pass, and puts its report on record."""

    hook: _Hook
    router: RemoteRouter
    scope: ConversationScope | None
    conversation: str | None
    number: int
    headers: Any

    def __post_init__(self) -> None:
        self._stream = self.headers.get("content-type", "").startswith("text/event-stream")
        self._parts: list[bytes] = []
        self._tail = b""
        self._comment = b""
        self._recorded = False
        self.held = b""
        """The end of what `feed` was given and did not hand on."""

    def feed(self, chunk: bytes) -> bytes:
        """A chunk of the body on its way to the caller, which has to wait where it may be the last one."""
        if not self._stream:
            self._parts.append(chunk)
            passed, self.held = self.held, chunk
            return passed
        data, self.held = self.held + chunk, b""
        passed = data if self._recorded else self._without_comment(data)
        self._tail = (self._tail + passed)[-_TAIL_BYTES:]
        if self._recorded or not self._tail.rstrip().endswith(_DONE):
            return passed
        self.held = passed + self.held
        return b""

    def _without_comment(self, data: bytes) -> bytes:
        """Takes the report out, and holds back what may be the beginning of it."""
        text = (self._tail[-1:] or b"\n") + data
        at = text.find(_MARK)
        end = -1 if at < 0 else data.find(b"\n\n", at)
        if end >= 0:
            self._comment = data[at + len(COMMENT) : end]
            self._record_whole(self._comment)
            return data[:at] + data[end + 2 :]
        if at < 0:
            at = text.rfind(b"\n")
            if at < 0 or not _MARK.startswith(text[at:]):
                return data
        self.held = data[at:]
        return data[:at]

    def settle(self) -> str | None:
        """The body has ended: puts its report on record. Returns where it is to be fetched, if the answer had none; what nobody
        would miss is not."""
        if self._recorded or (not self._stream and self._record_whole(self._note)):
            return None
        if self.conversation is None or (self.scope is None and not turns_are_heard()):
            self.count()
            return None
        if self.hook.reports_refused:
            self.make_do("does not show reports")
            return None
        return f"{self.router.url(self.conversation)}?turn={self.number}&wait={_WAIT_S}"

    def _record_whole(self, told: bytes) -> bool:
        """Puts on record what the answer says, if that is the whole report."""
        if b'"total_ms"' not in told:
            return False
        try:
            self._record(msgspec.json.decode(told, type=ReuseReport))
        except msgspec.DecodeError:
            return False
        return True

    def take(self, answer: Any) -> None:
        """Puts the fetched report on record."""
        if answer.status_code != 200:
            self.hook.reports_refused = answer.status_code in (401, 403)
            self.make_do(f"answered {answer.status_code}")
            return
        try:
            reports = msgspec.json.decode(answer.content, type=_Reports).reports
        except msgspec.DecodeError as error:
            self.make_do(f"sent a report that cannot be read ({error})")
            return
        if not reports:
            self.make_do("has no report of this turn")
            return
        self._record(reports[-1])

    def count(self) -> None:
        """Puts on record what the answer itself says, which is all that is wanted."""
        if (report := self._from_answer()) is not None:
            self._record(report)

    def _record(self, report: ReuseReport) -> None:
        self._recorded = True
        if self.scope is not None:
            self.scope.record(report)
        note(report)

    def make_do(self, why: str, error: BaseException | None = None) -> None:
        """Puts on record what the answer itself says."""
        self.hook.warn(f"{self.router!r} {why}: reports have only what the answers say themselves", error)
        self.count()

    def _from_answer(self) -> ReuseReport | None:
        try:
            route = Route(self.headers.get("x-backhaul-route"))
        except ValueError:
            return None
        reason = self.headers.get("x-backhaul-reason")
        usage = self._told.usage or _Usage()
        try:
            said = msgspec.json.decode(self._note, type=_Note | None) or _Note()
        except msgspec.DecodeError:
            said = _Note()
        return ReuseReport(
            conversation=self.conversation,
            turn=self.number,
            model=self._told.model,
            route=route,
            reason=Reason(reason) if reason in tuple(Reason) else None,
            prompt=usage.prompt,
            generated=usage.generated,
            offered=said.offered,
            cached=said.cached,
            computed=said.computed,
        )

    @property
    def _note(self) -> bytes:
        """Our own part of the answer."""
        return self._comment or bytes(self._told.usage.backhaul if self._told.usage else NULL)

    @functools.cached_property
    def _told(self) -> _Told:
        """The answer's usage; in a stream the last event that has one, if it came that far."""
        events = [b"".join(self._parts)]
        if self._stream:
            events = [data_of(event) or b"" for event in self._tail.split(b"\n\n") if b'"usage"' in event]
        for event in reversed(events):
            try:
                told = msgspec.json.decode(event, type=_Told)
            except msgspec.DecodeError:  # compressed on the way, or cut at the front: it says nothing
                continue
            told = told.response or told
            if told.usage is not None:
                return told
        return _Told()


# --- synchronous


class _SyncHook(_Hook):
    def wants_report(self, request: Any) -> None:
        self.mark(request)

    def __call__(self, response: Any) -> None:
        if (turn := self.followed(response)) is None:
            return
        body = _bodies(self.module)[0](response.stream, turn)
        if response.is_closed:  # a transport that had the whole answer, such as a mock
            turn.feed(response.content)
            body.close()
        else:
            response.stream = body

    async def ask(self, method: str, url: str, headers: dict[str, str]) -> Any:
        return await anyio.to_thread.run_sync(self._ask, method, url, headers)

    def _ask(self, method: str, url: str, headers: dict[str, str]) -> Any:
        if not self.client.is_closed:
            return self.client.request(method, url, headers=headers, timeout=_END_LIMIT_S)
        with self.module.Client(timeout=_END_LIMIT_S) as client:
            return client.request(method, url, headers=headers)


class _SyncBody:
    def __init__(self, stream: Any, turn: _Turn) -> None:
        self._stream = stream
        self._turn = turn
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        """May be called again to read on, as openai does after `[DONE]`."""
        if self._closed:
            return
        for chunk in self._stream:
            if passed := self._turn.feed(chunk):
                yield passed
        self.close()
        if self._turn.held:
            yield self._turn.held

    def close(self) -> None:
        """Lets go of the connection first: it serves the report's request, or tells the router that the client is gone."""
        if self._closed:
            return
        self._closed = True
        self._stream.close()
        turn = self._turn
        if (question := turn.settle()) is None:
            return
        try:
            answer = turn.hook.client.get(question, headers=turn.router.credentials, timeout=FETCH_LIMIT_S)
        except (turn.hook.module.HTTPError, RuntimeError) as error:  # RuntimeError: the client is closed
            turn.make_do(f"could not be asked for a report ({error!r})")
        else:
            turn.take(answer)


# --- asynchronous


class _AsyncHook(_Hook):
    def __init__(self, client: Any, module: ModuleType) -> None:
        super().__init__(client, module)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wants_report(self, request: Any) -> None:
        self.mark(request)

    async def __call__(self, response: Any) -> None:
        if (turn := self.followed(response)) is None:
            return
        self._loop = asyncio.get_running_loop()
        body = _bodies(self.module)[1](response.stream, turn)
        if response.is_closed:
            turn.feed(response.content)
            await body.aclose()
        else:
            response.stream = body

    async def ask(self, method: str, url: str, headers: dict[str, str]) -> Any:
        """From another event loop than its own the client's connections cannot be used."""
        if self._loop is asyncio.get_running_loop() and not self.client.is_closed:
            return await self.client.request(method, url, headers=headers, timeout=_END_LIMIT_S)
        async with self.module.AsyncClient(timeout=_END_LIMIT_S) as client:
            return await client.request(method, url, headers=headers)


class _AsyncBody:
    def __init__(self, stream: Any, turn: _Turn) -> None:
        self._stream = stream
        self._turn = turn
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._closed:
            return
        async for chunk in self._stream:
            if passed := self._turn.feed(chunk):
                yield passed
        await self.aclose()
        if self._turn.held:
            yield self._turn.held

    async def aclose(self) -> None:
        """As `_SyncBody.close`; runs to its end when the calling task is cancelled meanwhile."""
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True):
            await self._stream.aclose()
            await self._report()

    async def _report(self) -> None:
        turn = self._turn
        if (question := turn.settle()) is None:
            return
        try:
            with anyio.fail_after(FETCH_LIMIT_S):
                answer = await turn.hook.client.get(question, headers=turn.router.credentials)
        except (turn.hook.module.HTTPError, RuntimeError, TimeoutError) as error:  # RuntimeError: the client is closed
            turn.make_do(f"could not be asked for a report ({error!r})")
        else:
            turn.take(answer)


@functools.cache
def _bodies(module: ModuleType) -> tuple[Any, Any]:
    """The bodies' classes, joined with a module's own base classes."""
    return (
        type("FollowedBody", (_SyncBody, module.SyncByteStream), {}),
        type("AsyncFollowedBody", (_AsyncBody, module.AsyncByteStream), {}),
    )
