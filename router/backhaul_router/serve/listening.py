"""The address of a server: a socket that holds it, what clients are told of it, and workers that share it (`SO_REUSEPORT`)."""

from __future__ import annotations

import errno
import logging
import socket

from ..errors import ConfigError
from .answers import is_loopback
from .tenants import KEYS_VARIABLE

log = logging.getLogger("backhaul")

BACKLOG = 2048
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


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
        raise unusable(host, port, error) from None
    return listener


def let_share(holder: socket.socket) -> None:
    """Has processes of the same user listen on the address too, each on a socket of its own, between which the system spreads
    connections. `holder` keeps it from others, and must not listen."""
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def share(holder: socket.socket) -> socket.socket:
    """Another socket on the same address."""
    listener = socket.socket(holder.family, holder.type, holder.proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if holder.family == socket.AF_INET6:
        only = holder.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
    listener.bind(holder.getsockname())
    return listener


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


def warn_where_anybody_may_ask(listener: socket.socket) -> None:
    address = listener.getsockname()
    if not is_loopback(address):
        log.warning(
            "listening on %s without API keys: whoever can reach it can use the engines. Set %s, or give --api-keys FILE",
            address[0],
            KEYS_VARIABLE,
        )


def unusable(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} of {host or 'this machine'} is in use: choose another with --port")
    return ConfigError(f"cannot listen on port {port} of {host or 'this machine'}: {error.strerror or error}")
