"""Cluster membership: which engines take part, from when they are first asked, and as they come and go while the router runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from .. import ranks
from ..config import engine_url
from ..engines.describe import Unreachable, describe
from ..errors import ConfigError
from ..fleet.engine import Engine, Role
from .services import Services

log = logging.getLogger("backhaul")

_ASK_AGAIN_S = 10.0
_BUSY_S = 0.02
"""Between two looks at whether an engine that is taken out still runs turns."""


@dataclass(frozen=True, kw_only=True)
class Draining:
    """Drain status: what an engine that drains still has to do."""

    url: str
    in_flight: int
    """Calls that run there now."""
    handles: int
    """Histories that turns to come may read there. 0 of a prefill engine, which keeps none."""

    @property
    def done(self) -> bool:
        return not self.in_flight and not self.handles


class Membership:
    """Membership of one router's fleet."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.connected = False
        """Whether the engines have been asked, so that the fleet is there."""
        self.urls: list[bytes] = []
        """Of every engine that is or was there; errors for clients elsewhere must not show them."""
        self.absent: dict[str, Role] = {}
        """Configured engines that have not answered yet, which are asked again from time to time."""
        self._asked_absent = 0.0
        for url in (*services.config.prefill, *services.config.decode):
            self._withhold(url)

    async def connect(self) -> None:
        """`Router.connect`."""
        services = self._services
        config, clock = services.config, services.clock
        if self.connected:
            if self.absent and clock() - self._asked_absent > _ASK_AGAIN_S:
                self._asked_absent = clock()
                services.spawn(self._ask_absent())
            return
        wanted = dict.fromkeys(config.prefill, Role.PREFILL) | dict.fromkeys(config.decode, Role.DECODE)
        found, absent = await self._ask(wanted)
        for role in Role:
            if not any(engine.role is role for engine in found):
                raise ConfigError(f"no {role} engine answers: " + "; ".join(absent.values()))
        if self.connected:
            return
        services.fleet.add(*found)
        for message in absent.values():
            log.warning("left out for now: %s", message)
        for engine in found:
            if engine.role is Role.DECODE and not engine.streams_handles:
                log.warning(
                    "%s does not show handles in %s: those turns leave nothing to reuse, and pin its blocks for "
                    "%.0f s. Install backhaul beside vLLM, which loads its plugin.",
                    engine,
                    engine.silent_streams,
                    config.decoder_kv_blocks_ttl,
                )
        self.absent = {url: wanted[url] for url in absent}
        self._asked_absent = clock()
        self.connected = True

    async def _ask(self, wanted: Mapping[str, Role]) -> tuple[list[Engine], dict[str, str]]:
        answers = await asyncio.gather(
            *(describe(self._services.client, url, role) for url, role in wanted.items()), return_exceptions=True
        )
        found: list[Engine] = []
        absent: dict[str, str] = {}
        for (url, role), answer in zip(wanted.items(), answers, strict=True):
            if isinstance(answer, Engine):
                found.append(answer)
            elif isinstance(answer, Unreachable):
                absent[url] = f"{role} engine {answer}"
            else:
                raise answer
        return found, absent

    async def _ask_absent(self) -> None:
        for url, role in list(self.absent.items()):
            try:
                engine = await describe(self._services.client, url, role)
                if url in self.absent:  # still wanted
                    await self._join(engine)
            except Unreachable as error:
                log.info("still left out: %s engine %s", role, error)
            except ConfigError as error:
                log.error("left out: %s", error)  # noqa: TRY400
            else:
                self.absent.pop(url, None)

    async def add(self, role: Role, url: str) -> Engine:
        """`Router.add_engine`. The engine does not answer, does not fit the others, or has the other role: `ConfigError`."""
        url = engine_url(role, url)
        await self.connect()
        server, _ = ranks.split(url)
        there = [one for one in self._services.fleet.engines if ranks.split(one.url)[0] == server]
        if other := next((one for one in there if one.role is not role), None):
            raise ConfigError(f"{server} is a {other.role} engine here: an engine has one role; remove it first")
        if ranks.listed_twice((url, *(one.url for one in there))):
            raise ConfigError(
                f"{server} would be there both as one engine and by its data-parallel ranks: remove it first"
            )
        try:
            engine = await describe(self._services.client, url, role)
        except Unreachable as error:
            raise ConfigError(f"{role} engine {error}: it has to run before it is added") from None
        await self._join(engine)
        self.absent.pop(url, None)
        self._withhold(url)
        return engine

    async def _join(self, engine: Engine) -> None:
        self._services.fleet.add(engine)
        await self._services.fence.described(engine)

    async def drain(self, url: str) -> Draining:
        """`Router.drain_engine`. Turns of conversations whose history a decode engine holds still go there."""
        engine = await self._known(url)
        fleet = self._services.fleet
        fleet.drain(engine.url)
        held = sum(1 for one in self._services.handles.ledger.handles() if one.decode == engine.url)
        return Draining(url=engine.url, in_flight=fleet.load.in_flight[engine.url], handles=held)

    async def remove(self, url: str, *, within_s: float) -> None:
        """`Router.remove_engine`. Turns that run on end as they would have; what they leave there ends with its TTL."""
        engine = await self._known(url)
        fleet, handles = self._services.fleet, self._services.handles
        others = [one for one in fleet.engines if one.role is engine.role and fleet.takes_part(one) and one != engine]
        if not others:
            raise ConfigError(f"{engine.url} is the only {engine.role} engine: add another one before it is removed")
        fleet.close(engine.url)
        try:
            async with asyncio.timeout(within_s):
                while fleet.load.in_flight[engine.url]:
                    await asyncio.sleep(_BUSY_S)
        except TimeoutError:
            pass  # what they leave cannot be named to an engine that is gone, and ends with its TTL
        except BaseException:
            fleet.reopen(engine.url)
            raise
        if (engine_id := fleet.restarts.engine_id(engine.url)) is not None:
            await handles.end_now(handles.ledger.drop_engine(engine.url, engine_id))
        fleet.remove(engine.url)

    async def _known(self, url: str) -> Engine:
        await self.connect()
        url = engine_url("engine", url)
        engine = self._services.fleet.get(url)
        if engine is None:
            known = ", ".join(one.url for one in self._services.fleet.engines)
            raise ConfigError(f"{url} is none of this router's engines: {known}")
        return engine

    def _withhold(self, url: str) -> None:
        for name in (url, ranks.split(url)[0]):  # messages of the HTTP client have no rank
            if (encoded := name.encode()) not in self.urls:
                self.urls.append(encoded)
