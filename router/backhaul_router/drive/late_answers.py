"""Late answers: what an engine sends to a client that has left, read for the handle in it, whose blocks nobody else frees."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from .. import wire
from ..engines.client import EngineFailure, EngineStream
from ..turn.effects import Action, Actions

log = logging.getLogger("backhaul")

_LIMIT_S: Final = 0.25
"""For what an engine has said by the time that it is told. It closes the connection at once then; a proxy may not."""


class TakesLateAnswer(Protocol):
    """State of a turn whose engine may answer with a handle."""

    def overheard(self, status: int, content_type: str, data: bytes, *, whole: bool) -> Actions:
        """What frees the blocks that the engine keeps, by the rest of its answer (`whole`: up to its end). Raises
        `wire.MalformedBody` or `msgspec.DecodeError`."""


async def read_late_answer(state: TakesLateAnswer, stream: EngineStream, perform: Callable[[Action], None]) -> None:
    """Ends an exchange that has been left. `state` knows of what was read of it."""
    data: list[bytes] = []
    whole = False
    try:
        async with asyncio.timeout(_LIMIT_S):
            async for chunk in stream:
                data.append(chunk)  # noqa: PERF401 - they are needed when it ends early
        whole = True
    except (TimeoutError, EngineFailure) as end:
        log.debug("an engine's answer to a client that has left was cut off: %r", end)
    finally:
        await stream.aclose()
    try:
        content_type = stream.headers.get("content-type", "")
        for action in state.overheard(stream.status, content_type, b"".join(data), whole=whole):
            perform(action)
    except (wire.MalformedBody, msgspec.DecodeError) as error:
        log.info("an engine's answer to a client that has left cannot be read: %s", error)
