"""Graceful close of a TCP listener, with nothing left half open."""

from __future__ import annotations

import asyncio

_ROUNDS = 5
"""Of the event loop, until a connection that was accepted has its transport and its handler."""


async def stop_listening(server: asyncio.Server) -> None:
    """Closes the listening sockets. Connections that were accepted just before are complete then, for the caller to end:
    asyncio drops the socket of one whose server closes in between."""
    loop = asyncio.get_running_loop()
    for sock in server.sockets:
        loop.remove_reader(sock.fileno())
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)
    server.close()
