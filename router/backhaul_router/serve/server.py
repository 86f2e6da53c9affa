"""`serve`: the ASGI application on uvicorn, until a signal comes. Needs the extra `server`.

At the end `/ready` says so first, for as long as `shutdown_delay_s`; then requests finish within a grace time, and what the
engines hold for conversations is released. A second Ctrl-C does not wait for requests. A server that is killed leaves its leases
to their TTL, and no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
import uvloop

from ..config import RouterConfig
from ..engines.tls import server_context
from ..errors import ConfigError
from . import team_admin
from .admission import Limits
from .asgi import App, is_loopback, make_app
from .http_limits import LimitedHttp
from .otlp import tracing_from
from .reload import Reload
from .settings import ServerSettings, Settings
from .team import Team
from .team_app import Colleagues
from .tenants import KEYS_VARIABLE, NO_TENANTS, Tenants

log = logging.getLogger("backhaul")

DEFAULT_PORT = 8000
GRACE_S = 30.0

_KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that it is never the server that closes one which is just reused."""
_BACKLOG = 2048
_CHECK_S = 0.25
_CLEANUP_S = 5.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class WorkersFailed(Exception):
    """The workers do not stay up, or did not end as they should have."""


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
        from . import workers  # which imports this module

        if not settings.tenants:
            _warn_where_anybody_may_ask(listener)
        workers.serve(listener, settings, load, started)


def _say_how_to_reach(url: str, *, asks_for_key: bool) -> None:
    print(how_to_reach(url, "KEY" if asks_for_key else "none"), flush=True)


def serve_on(
    listener: socket.socket,
    config: RouterConfig,
    *,
    grace_s: float = GRACE_S,
    metrics_public: bool = True,
    started: Callable[[str], None] = lambda _: None,
    check: Callable[[], None] = lambda: None,
    tenants: Tenants = NO_TENANTS,
) -> None:
    """As `serve_settings`, with those settings and the defaults."""
    of_server = ServerSettings(grace_s=grace_s, metrics_public=metrics_public)
    settings = Settings(router=config, server=of_server, limits=Limits(), tenants=tenants)
    serve_settings(listener, settings, started=started, check=check)


def serve_settings(
    listener: socket.socket,
    settings: Settings,
    load: Callable[[], Settings] | None = None,
    *,
    started: Callable[[str], None] = lambda _: None,
    check: Callable[[], None] = lambda: None,
    team: Team | None = None,
) -> None:
    """As `serve`, on a socket that `listen` returned. `started` gets the base URL once requests are answered. `check` is called
    all along; what it raises ends the server at once. `team`: that of which it is a worker."""
    of_server = settings.server
    tls = None if of_server.tls_cert is None else server_context(of_server.tls_cert, of_server.tls_key)
    if not settings.tenants and team is None:
        _warn_where_anybody_may_ask(listener)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        app = make_app(
            settings.router if team is None else team_admin.with_members(settings.router, team.members),
            settings.tenants,
            metrics_public=of_server.metrics_public,
            limits=settings.limits,
            log_turns=of_server.log_turns,
            tracing=tracing_from(of_server.otlp_endpoint),
        )
        app.admin.set_key(settings.admin_key)
        if load is not None:
            app.admin.reload = Reload(app, settings, load, tls)
        if team is not None:
            app.team = Colleagues(team, app)
            app.record = app.team.record
        runner.run(_serve(app, listener, of_server, tls, started, check, team))


def listen(host: str, port: int) -> socket.socket:
    """A socket that holds the address until it is served. Raises `ConfigError`, one line that says what to change."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"port {port}: from 0 to {2**16 - 1}")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} is no address of this machine: {error}") from None
    family, kind, protocol, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from None
    return listener


def start_listening(listener: socket.socket) -> None:
    """Has a socket that `listen` returned take connections, without waiting for them. Raises `ConfigError`: another process
    began to listen on the address meanwhile."""
    host, port = listener.getsockname()[:2]
    listener.setblocking(False)
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _unusable(host, port, error) from None


def base_url(listener: socket.socket, scheme: str = "http") -> str:
    """What clients on this machine take as `base_url=`."""
    host, port = listener.getsockname()[:2]
    host = _ANY_ADDRESS.get(host, host)
    return f"{scheme}://[{host}]:{port}/v1" if ":" in host else f"{scheme}://{host}:{port}/v1"


def how_to_reach(url: str, key: str = "none") -> str:
    """The server's address, and what one pastes into a program."""
    return f"""router   {url}

    from backhaul import AsyncOpenAI
    client = AsyncOpenAI(base_url="{url}", api_key="{key}")

Ctrl-C stops it."""


def _warn_where_anybody_may_ask(listener: socket.socket) -> None:
    address = listener.getsockname()
    if not is_loopback(address):
        log.warning(
            "listening on %s without API keys: whoever can reach it can use the engines. Set %s, or give --api-keys FILE",
            address[0],
            KEYS_VARIABLE,
        )


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} of {host or 'this machine'} is in use: choose another with --port")
    return ConfigError(f"cannot listen on port {port} of {host or 'this machine'}: {error.strerror or error}")


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        app: App,
        delay_s: float,
        started: Callable[[], None],
        leave: Callable[[], None] | None = None,
    ) -> None:
        """`leave`, of a worker, is called at a signal instead of ending: the parent tells when."""
        super().__init__(config)
        self._leave = leave
        self._app = app
        self._delay_s = delay_s
        self._say_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._say_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        loop = asyncio.get_running_loop()
        if self._leave is not None:
            loop.call_soon_threadsafe(self._leave)
            return
        if self._app.stopping:
            loop.call_soon_threadsafe(self.end_now)
        elif self._delay_s:
            loop.call_soon_threadsafe(loop.call_later, self._delay_s, self.end)
        else:
            self.should_exit = True
        self._app.stopping = True

    def end_soon(self) -> None:
        """Goes on, and says that it is not ready."""
        self._app.stopping = True

    def end(self) -> None:
        """Ends when requests have."""
        self.should_exit = True

    def end_now(self) -> None:
        """Ends without waiting for requests."""
        self._app.stopping = True
        self.should_exit = self.force_exit = True
        for task in self.server_state.tasks:
            task.cancel()

    async def accept(self, connection: socket.socket) -> None:
        """Serves a connection that another process has accepted."""
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            return LimitedHttp(
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state, _loop=loop
            )

        with contextlib.suppress(OSError):  # the client is gone, or does not speak TLS
            await loop.connect_accepted_socket(protocol, connection, ssl=self.config.ssl)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal is not raised again in the end: there is more to do, and the exit status is 0. Ctrl-C is for
        the parent, which a terminal tells too."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGTERM,) if self._leave else (signal.SIGINT, signal.SIGTERM)
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
    team: Team | None = None,
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
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.grace_s)),
    )
    config.load()
    config.ssl = tls
    url = base_url(listener, "http" if tls is None else "https")
    if team is not None:
        listener.close()  # the parent has it too, and hands connections over
    try:
        if team is not None:
            await team.join()
        await app.connect()
        leave = None if team is None else team.leave
        server = _Server(config, app, settings.shutdown_delay_s, lambda: started(url), leave)
        if team is not None:
            team_admin.drain(app.router, team.members)
            team.connected()
            team.serve_with(server)
        watch = asyncio.create_task(_watch(check, server))
        try:
            await server.serve(sockets=[listener] if team is None else [])
        except OSError as error:  # another process began to listen on the address meanwhile
            host, port = listener.getsockname()[:2]
            raise _unusable(host, port, error) from None
        finally:
            watch.cancel()
            await asyncio.wait((watch, *server.server_state.tasks), timeout=_CLEANUP_S)
        if not watch.cancelled() and (failure := watch.exception()):
            raise failure
    finally:
        await app.aclose()
        if team is not None:
            await team.aclose()


async def _watch(check: Callable[[], None], server: _Server) -> None:
    try:
        while True:
            check()
            await asyncio.sleep(_CHECK_S)
    except Exception:
        server.end_now()
        raise
