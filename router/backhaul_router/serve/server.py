"""`serve`: the ASGI application on uvicorn, until a signal comes. Needs the extra `server`.

At the end `/ready` says so first, for as long as `shutdown_delay_s`; then requests finish within a grace time, and what the
engines hold for conversations is released. A second Ctrl-C does not wait for requests. A server that is killed leaves its leases
to their TTL, and no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
import uvloop

from ..engines.tls import server_context
from ..errors import ConfigError
from .asgi import App, make_app
from .http_limits import LimitedHttp
from .listening import BACKLOG, base_url, how_to_reach, listen, unusable, warn_where_anybody_may_ask
from .otlp import tracing_from
from .reload import Reload
from .settings import ServerSettings, Settings
from .siblings import Seat, Siblings
from .supervisor import Supervisor

DEFAULT_PORT = 8000

_KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that it is never the server that closes one which is just reused."""
_READ_S = 0.05
_COME_S = 1.0
"""At most so long requests are waited for that have come by the end."""
_CHECK_S = 0.25
_CLEANUP_S = 5.0


def serve(settings: Settings, load: Callable[[], Settings] | None = None) -> None:
    """Runs a router until SIGINT or SIGTERM, and prints where. Port 0 takes a free one. `load` reads the settings again.

    Raises `ConfigError`: the address cannot be used, or the engines cannot; with several workers `WorkersFailed` too."""
    with listen(settings.server.host, settings.server.port) as listener:
        started = functools.partial(_say_how_to_reach, asks_for_key=bool(settings.tenants))
        if settings.server.workers == 1:
            serve_settings(listener, settings, load, started=started)
            return
        if not hasattr(os, "fork"):
            raise ConfigError(
                f"workers={settings.server.workers}: this system cannot fork; run several routers instead"
            )
        settings.check_files()
        if not settings.tenants:
            warn_where_anybody_may_ask(listener)
        Supervisor(listener, settings, load, serve_settings, started).run()


def _say_how_to_reach(url: str, *, asks_for_key: bool) -> None:
    print(how_to_reach(url, "KEY" if asks_for_key else "none"), flush=True)


def serve_settings(
    listener: socket.socket,
    settings: Settings,
    load: Callable[[], Settings] | None = None,
    *,
    started: Callable[[str], None] = lambda _: None,
    check: Callable[[], None] = lambda: None,
    seat: Seat | None = None,
) -> None:
    """As `serve`, on a socket that `listen` returned. `started` gets the base URL once requests are answered. `check` is called
    all along; what it raises ends the server at once. `seat`: which of several workers it is."""
    of_server = settings.server
    tls = None if of_server.tls_cert is None else server_context(of_server.tls_cert, of_server.tls_key)
    if not settings.tenants and seat is None:
        warn_where_anybody_may_ask(listener)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        app = make_app(
            settings.router,
            settings.tenants,
            metrics_public=of_server.metrics_public,
            limits=settings.limits,
            log_turns=of_server.log_turns,
            tracing=tracing_from(of_server.otlp_endpoint),
            worker=None if seat is None else seat.number,
        )
        app.admin.set_key(settings.admin_key)
        if load is not None:
            app.admin.reload = Reload(app, settings, load, tls)
        if seat is not None:
            app.join(Siblings(seat))
        runner.run(_serve(app, listener, of_server, tls, started, check))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: App, delay_s: float, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._app = app
        self._delay_s = delay_s
        self._say_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._say_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Requests on connections that have just come are read first: where none was, a connection is closed."""
        until, come = time.monotonic() + _COME_S, -1
        while not self.force_exit and come != len(self.server_state.connections) and time.monotonic() < until:
            come = len(self.server_state.connections)
            await asyncio.sleep(_READ_S)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        loop = asyncio.get_running_loop()
        if self._app.stopping:
            loop.call_soon_threadsafe(self.end_now)
        elif self._delay_s:
            loop.call_soon_threadsafe(loop.call_later, self._delay_s, self._end)
        else:
            self.should_exit = True
        self._app.stopping = True

    def _end(self) -> None:
        self.should_exit = True

    def end_now(self) -> None:
        """Ends without waiting for requests."""
        self._app.stopping = True
        self.should_exit = self.force_exit = True
        for task in self.server_state.tasks:
            task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal is not raised again in the end: there is more to do, and the exit status is 0. What is
        ignored stays so: a terminal's Ctrl-C is for the supervisor of workers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def _serve(
    app: App,
    listener: socket.socket,
    settings: ServerSettings,
    tls: ssl.SSLContext | None,
    started: Callable[[str], None],
    check: Callable[[], None],
) -> None:
    config = uvicorn.Config(
        app,
        http=LimitedHttp,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.grace_s)),
    )
    config.load()
    config.ssl = tls
    url = base_url(listener, "http" if tls is None else "https")
    try:
        await app.connect()
        server = _Server(config, app, settings.shutdown_delay_s, lambda: started(url))
        watch = asyncio.create_task(_watch(check, server))
        try:
            await server.serve(sockets=[listener])
        except OSError as error:  # another process began to listen on the address meanwhile
            host, port = listener.getsockname()[:2]
            raise unusable(host, port, error) from None
        finally:
            watch.cancel()
            await asyncio.wait((watch, *server.server_state.tasks), timeout=_CLEANUP_S)
        if not watch.cancelled() and (failure := watch.exception()):
            raise failure
    finally:
        await app.aclose()


async def _watch(check: Callable[[], None], server: _Server) -> None:
    try:
        while True:
            check()
            await asyncio.sleep(_CHECK_S)
    except Exception:
        server.end_now()
        raise
