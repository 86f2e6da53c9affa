"""Engines that come and go while the router runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import ranks
from ..config import engine_url
from ..engines.describe import Unreachable, describe
from ..errors import ConfigError
from ..fleet.engine import Engine, Role

if TYPE_CHECKING:
    from .router import Router

_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Draining:
    """What an engine that drains still has to do."""

    url: str
    in_flight: int
    """Calls that run there now."""
    handles: int
    """Histories that turns to come may read there. 0 of a prefill engine, which keeps none."""

    @property
    def done(self) -> bool:
        return not self.in_flight and not self.handles


async def add_engine(router: Router, role: Role, url: str) -> Engine:
    """Asks the engine what it is, and lets turns go there from now on; one that drains is taken back. Raises `ConfigError`: it
    does not answer, does not fit the others, or has the other role."""
    url = engine_url(role, url)
    await router.connect()
    server, _ = ranks.split(url)
    there = [one for one in router.fleet.engines if ranks.split(one.url)[0] == server]
    if other := next((one for one in there if one.role is not role), None):
        raise ConfigError(f"{server} is a {other.role} engine here: an engine has one role; remove it first")
    if ranks.listed_twice((url, *(one.url for one in there))):
        raise ConfigError(f"{server} would be there both as one engine and by its data-parallel ranks: remove it first")
    try:
        engine = await describe(router.client, url, role)
    except Unreachable as error:
        raise ConfigError(f"{role} engine {error}: it has to run before it is added") from None
    router.fleet.add(engine)
    await router.note_began(engine)
    router.note_added(url)
    return engine


async def drain_engine(router: Router, url: str) -> Draining:
    """Sends no new conversation there from now on. Turns of conversations whose history a decode engine holds still go there.
    May be called again, to see what is left. Raises `ConfigError` for an engine that is not there."""
    engine = await _known(router, url)
    router.fleet.drain(engine.url)
    held = sum(1 for one in router.ledger.handles() if one.decode == engine.url)
    return Draining(url=engine.url, in_flight=router.fleet.load.in_flight[engine.url], handles=held)


async def remove_engine(router: Router, url: str, *, within_s: float = 30.0) -> None:
    """Begins no turn there any more, waits up to `within_s` for those that run, and has it release what it holds for this
    router. Turns that run on end as they would have; what they leave there ends with its TTL. Raises `ConfigError` for an
    engine that is not there, and for the last one of its role."""
    engine = await _known(router, url)
    fleet = router.fleet
    others = [one for one in fleet.engines if one.role is engine.role and fleet.takes_part(one) and one != engine]
    if not others:
        raise ConfigError(f"{engine.url} is the only {engine.role} engine: add another one before it is removed")
    fleet.close(engine.url)
    try:
        async with asyncio.timeout(within_s):
            while fleet.load.in_flight[engine.url]:
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        pass  # what they leave cannot be named to an engine that is gone, and ends with its TTL
    except BaseException:
        fleet.reopen(engine.url)
        raise
    await router.release_engine(engine)
    fleet.remove(engine.url)


async def _known(router: Router, url: str) -> Engine:
    await router.connect()
    url = engine_url("engine", url)
    engine = router.fleet.get(url)
    if engine is None:
        known = ", ".join(one.url for one in router.fleet.engines)
        raise ConfigError(f"{url} is none of this router's engines: {known}")
    return engine
