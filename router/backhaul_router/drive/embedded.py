"""HTTP transport over a router in this process, for `httpx2` and for `httpx`, asynchronous and synchronous.

Whatever takes an http client runs on the router this way, without a server in between. Both modules have the same
interface under different classes: the classes here are written once, and joined with a module's base classes on demand.

The asynchronous transport calls the router in the caller's task. The synchronous one runs it on the process's background
loop: a pump there puts chunks into a queue as they come, so that a chunk costs a queue operation and no switch of threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import os
import queue
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from types import AsyncGeneratorType, ModuleType
from typing import Any, NoReturn, Protocol, TypeAlias, cast, runtime_checkable

import anyio

from ..identity import frameworks, hints
from ..identity.ids import ConversationScope, current
from . import background_loop
from .router import Reply, Request, Router

_log = logging.getLogger("backhaul")

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})
_NOT_ASKED = _HOP_BY_HOP | {"accept-encoding"}
_DONE = b"data: [DONE]"


@runtime_checkable
class AttachingScope(ConversationScope, Protocol):
    """Observer scope: a conversation that wants to know which routers it ran on, to end it there."""

    def attach(self, router: Router) -> None:
        """Called before each request, in the caller's thread."""


def make_transport(router: Router, httpx_module: ModuleType) -> Any:
    """A `BaseTransport` of `httpx_module` (`httpx2` or `httpx`) that runs requests on `router`.

    The request's scheme and host mean nothing: only its path matters. Closing the transport closes the router."""
    return _classes(httpx_module).sync_transport(router, httpx_module)


def make_async_transport(router: Router, httpx_module: ModuleType) -> Any:
    """The same as an `AsyncBaseTransport`. It needs asyncio."""
    return _classes(httpx_module).async_transport(router, httpx_module)


@dataclass(frozen=True)
class _Classes:
    sync_transport: Any
    sync_body: Any
    async_transport: Any
    async_body: Any


@functools.cache
def _classes(module: ModuleType) -> _Classes:
    return _Classes(
        sync_transport=type("RouterTransport", (_SyncTransport, module.BaseTransport), {}),
        sync_body=type("RouterBody", (_SyncBody, module.SyncByteStream), {}),
        async_transport=type("AsyncRouterTransport", (_AsyncTransport, module.AsyncBaseTransport), {}),
        async_body=type("AsyncRouterBody", (_AsyncBody, module.AsyncByteStream), {}),
    )


class _Exchange:
    """One request's limits and errors, in the terms of the module that it came from."""

    def __init__(self, module: ModuleType, request: Any) -> None:
        self.module = module
        self.request = request
        self.read_s: float | None = request.extensions.get("timeout", {}).get("read")
        """Longest silence that the caller accepts; `None` waits for as long as the router does."""

    def timed_out(self) -> NoReturn:
        raise self.module.ReadTimeout(
            f"no answer from the engines for {self.read_s:g} s, the client's own read timeout", request=self.request
        ) from None

    def broken(self) -> NoReturn:
        raise self.module.ReadError("the router was closed while it answered", request=self.request) from None

    def response(self, status: int, headers: Iterable[tuple[str, str]], body: Any) -> Any:
        kept = [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
        return self.module.Response(status, headers=kept, stream=body)


class _Transport:
    def __init__(self, router: Router, module: ModuleType) -> None:
        self._router = router
        self._module = module
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._pid = os.getpid()

    def _routed(self, request: Any, body: bytes) -> Request:
        self._arm()
        scope = current.get()
        if isinstance(scope, AttachingScope):
            scope.attach(self._router)
        return Request(
            method=request.method,
            path=request.url.raw_path.decode("ascii"),
            headers=[(k, v) for k, v in request.headers.multi_items() if k.lower() not in _NOT_ASKED],
            body=body,
            scope=scope,
            framework=None if scope is not None and scope.id else frameworks.discover(),
            hints=hints.inside(scope.id if scope is not None else None),
        )

    def _arm(self) -> None:
        """From its first request on, a router is closed when its transport is dropped or the process exits."""
        self._leave_parents_router()
        if self._finalizer is None:
            background_loop.close_at_exit(self._router)
            self._finalizer = weakref.finalize(self, background_loop.close_soon, self._router, self._pid)
            self._finalizer.atexit = False

    def _leave_parents_router(self) -> None:
        """A forked child gets a router of its own: the handles on file are the parent's, and each can be used once."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            background_loop.abandon(self._router)
            old = self._router
            self._router = Router(old.config, on_report=old.on_report, tracing=old.tracing)
            self._finalizer = None

    def _disarm(self) -> None:
        self._leave_parents_router()
        if self._finalizer is not None:
            self._finalizer.detach()
        background_loop.closed(self._router)


class _AsyncTransport(_Transport):
    async def handle_async_request(self, request: Any) -> Any:
        exchange = _Exchange(self._module, request)
        routed = self._routed(request, await request.aread())
        limit = asyncio.timeout(exchange.read_s)
        try:
            async with limit:
                reply = await self._router.handle(routed)
        except TimeoutError:
            if limit.expired():
                exchange.timed_out()
            raise
        return exchange.response(reply.status, reply.headers, _classes(self._module).async_body(self, exchange, reply))

    async def aclose(self) -> None:
        self._disarm()
        await self._router.aclose()


class _AsyncBody:
    def __init__(self, transport: _Transport, exchange: _Exchange, reply: Reply) -> None:
        self._transport = transport  # a client that is dropped while its answer is read must not close the router
        self._exchange = exchange
        self._reply = reply
        self._chunks = aiter(reply)
        self._tail = b""
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """May be called again to read on, as openai does after `[DONE]`."""
        try:
            while (chunk := await self._next()) is not None:
                yield chunk
        finally:
            await self.aclose()

    async def _next(self) -> bytes | None:
        limit = asyncio.timeout(self._exchange.read_s)
        try:
            async with limit:
                chunk = await anext(self._chunks, None)
        except TimeoutError:
            if limit.expired():
                self._exchange.timed_out()
            raise
        if chunk is not None:
            self._tail = (self._tail + chunk[-16:])[-16:]
        return chunk

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        with anyio.move_on_after(background_loop.CLOSE_LIMIT_S, shield=True) as limit:
            if _complete(self._tail):
                async for _ in self._chunks:
                    pass
            await self._reply.aclose()
            if isinstance(self._chunks, AsyncGeneratorType) and not self._chunks.ag_running:
                await self._chunks.aclose()
        if limit.cancelled_caught:
            _log.warning("an answer was not closed within %g s", background_loop.CLOSE_LIMIT_S)


@dataclass(frozen=True)
class _Head:
    status: int
    headers: list[tuple[str, str]]


@dataclass(frozen=True)
class _End:
    failure: BaseException | None


_Queue: TypeAlias = "queue.SimpleQueue[_Head | bytes | _End]"


async def _pump(router: Router, request: Request, out: _Queue) -> None:
    """Puts the reply into `out`: its head, its chunks, and always an end."""
    failure: BaseException | None = None
    try:
        async with contextlib.aclosing(await router.handle(request)) as reply:
            out.put(_Head(reply.status, list(reply.headers)))
            async for chunk in reply:
                out.put(chunk)
    except BaseException as error:
        failure = error
        raise
    finally:
        out.put(_End(failure))


class _SyncTransport(_Transport):
    def handle_request(self, request: Any) -> Any:
        exchange = _Exchange(self._module, request)
        routed = self._routed(request, request.read())
        out: _Queue = queue.SimpleQueue()
        work = background_loop.shared().submit(_pump(self._router, routed, out))
        body = _classes(self._module).sync_body(self, exchange, out, work)
        head = body.take()
        if head is None:
            raise RuntimeError("the router's reply ended before its head")
        return exchange.response(head.status, head.headers, body)

    def close(self) -> None:
        self._disarm()
        background_loop.shared().run(self._router.aclose())


class _SyncBody:
    """The pump reads ahead of a slow reader: an answer's bytes are few."""

    def __init__(
        self, transport: _Transport, exchange: _Exchange, out: _Queue, work: concurrent.futures.Future[None]
    ) -> None:
        self._transport = transport  # a client that is dropped while its answer is read must not close the router
        self._exchange = exchange
        self._out = out
        self._work = work
        self._tail = b""
        self._ended = False

    def take(self) -> _Head | bytes | None:
        """What comes next; `None` at the end."""
        if self._ended:
            return None
        try:
            item = self._out.get(timeout=self._exchange.read_s)
        except queue.Empty:
            self._work.cancel()
            self._exchange.timed_out()
        except BaseException:
            self._work.cancel()
            raise
        if not isinstance(item, _End):
            return item
        self._ended = True
        if isinstance(item.failure, asyncio.CancelledError):
            self._exchange.broken()
        if item.failure is not None:
            raise item.failure
        return None

    def __iter__(self) -> Iterator[bytes]:
        while (chunk := cast("bytes | None", self.take())) is not None:
            self._tail = (self._tail + chunk[-16:])[-16:]
            yield chunk

    def close(self) -> None:
        """Returns when the engines are told, so that the turn's report is complete."""
        if self._ended:
            return
        self._ended = True
        if not _complete(self._tail):
            self._work.cancel()
        try:
            while not isinstance(end := self._out.get(timeout=background_loop.CLOSE_LIMIT_S), _End):
                pass
        except queue.Empty:
            self._work.cancel()
            _log.warning("an answer was not closed within %g s", background_loop.CLOSE_LIMIT_S)
            return
        if end.failure is not None and not isinstance(end.failure, asyncio.CancelledError):
            _log.warning("an answer that was closed early ended with an error", exc_info=end.failure)


def _complete(tail: bytes) -> bool:
    """Whether a stream has said `[DONE]`: a client that closes it then, as openai does, has the whole answer."""
    return tail.rstrip().endswith(_DONE)
