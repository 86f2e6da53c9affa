"""Reading the configuration again while the router runs.

All of it is checked first, and new engines are asked; where anything is wrong nothing changes. Engines that the configuration
named before and names no more are drained, and taken out when nothing is left to do there. Those that were added or removed by
hand meanwhile, and that it says nothing new about, stay as they are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import ssl
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..config import RouterConfig
from ..engines.tls import load_certificate
from ..errors import ConfigError
from ..fleet.engine import Role
from .settings import SETTINGS, Setting, Settings

if TYPE_CHECKING:
    from .asgi import App

log = logging.getLogger("backhaul")

LIVE = frozenset(
    {
        *("prefill", "decode", "admin_key"),
        *("max_concurrent_turns", "max_queued_turns", "queue_timeout_s"),
        *("reuse", "match_history", "exact_histories", "route", "check_pairs"),
        *("decoder_kv_blocks_ttl", "lease_margin_s", "kv_recompute_threshold", "local_max_tokens"),
        *("prefill_timeout_s", "decode_timeout_s", "max_body_bytes", "api_keys"),
    }
)
"""Settings that take effect at once. Others need a restart."""
_OF_TURNS = LIVE & {field.name for field in dataclasses.fields(RouterConfig)}
_LOOK_S = 1.0


@dataclasses.dataclass(frozen=True)
class _Before:
    """An engine as it was before a reload added it."""

    url: str
    known: bool
    draining: bool
    leaving: bool
    absent: Role | None


class Reload:
    """Of one application. `load` reads the configuration anew, and raises `ConfigError`."""

    def __init__(
        self, app: App, settings: Settings, load: Callable[[], Settings], tls: ssl.SSLContext | None = None
    ) -> None:
        self._app = app
        self._settings = settings
        self._load = load
        self._tls = tls
        self._one_at_a_time = asyncio.Lock()
        self._leaving: dict[str, asyncio.Task[None]] = {}

    async def __call__(self) -> dict[str, Any]:
        """What has changed, as JSON types. Raises `ConfigError`, and then nothing has."""
        async with self._one_at_a_time:
            before, after = self._settings, self._load()
            after.check_files()
            await self._app.router.connect()
            added, removed = _new(before, after), _new(after, before)
            undo: list[_Before] = []
            try:
                for url, role in added.items():
                    undo.append(await self._add(role, url))
                if self._tls is not None and after.server.tls_cert is not None:
                    load_certificate(self._tls, after.server.tls_cert, after.server.tls_key)
            except BaseException:
                for engine in undo:
                    await self._take_back(engine)
                raise
            self._apply(after)
            draining = [url for url in removed if await self._leave(url)]
            live = _live(before, after)
            changed = [one for one in SETTINGS if _value(before, one) != _value(after, one)]
            said = {
                "changed": [_place(one) for one in changed if one.name in live],
                "needs_restart": [_place(one) for one in changed if one.name not in live],
                "added": list(added),
                "draining": draining,
            }
            log.info("the configuration was read again: %s", said)
            return said

    @property
    def leaving(self) -> Collection[str]:
        """Engines that are taken out as soon as nothing is left to do there."""
        return self._leaving.keys()

    async def aclose(self) -> None:
        """Gives up taking engines out."""
        for task in (leaving := list(self._leaving.values())):
            task.cancel()
        if leaving:
            await asyncio.wait(leaving)

    def _apply(self, after: Settings) -> None:
        app = self._app
        live = {name: getattr(after.router, name) for name in _OF_TURNS}
        app.router.reconfigure(dataclasses.replace(app.router.config, **live))
        app.admission.limits = after.limits
        app.tenants = after.tenants
        app.admin.set_key(after.admin_key)
        self._settings = in_force(self._settings, after)

    async def _add(self, role: Role, url: str) -> _Before:
        router = self._app.router
        before = _Before(
            url,
            known=router.fleet.get(url) is not None,
            draining=url in router.fleet.draining,
            leaving=url in self._leaving,
            absent=router.absent.get(url),
        )
        await router.add_engine(role, url)
        if (leaving := self._leaving.pop(url, None)) is not None:
            leaving.cancel()
        return before

    async def _take_back(self, before: _Before) -> None:
        """Has an engine be again what it was. One that was removed by hand meanwhile stays away."""
        router, url = self._app.router, before.url
        if router.fleet.get(url) is None:
            return
        if before.leaving:
            await self._leave(url)
        elif before.known:
            if before.draining:
                router.fleet.drain(url)
        else:
            await router.remove_engine(url, within_s=0)
            if before.absent is not None:
                router.membership.absent[url] = before.absent

    async def _leave(self, url: str) -> bool:
        """Drains an engine, which is then taken out. Returns whether it is there."""
        router = self._app.router
        if router.membership.absent.pop(url, None) or router.fleet.get(url) is None:
            return False
        await router.drain_engine(url)
        task = asyncio.get_running_loop().create_task(self._take_out(url))
        self._leaving[url] = task
        task.add_done_callback(lambda _: self._leaving.pop(url, None) if self._leaving.get(url) is task else None)
        return True

    async def _take_out(self, url: str) -> None:
        """When nothing is left to do there; what is held there ends with its TTL."""
        router = self._app.router
        until = router.clock() + router.config.decoder_kv_blocks_ttl
        try:
            while not (await router.drain_engine(url)).done and router.clock() < until:
                await asyncio.sleep(_LOOK_S)
                if url not in router.fleet.draining:
                    return  # taken back, or removed by hand
            await router.remove_engine(url)
        except ConfigError as error:
            log.error("%s stays: %s", url, error)  # noqa: TRY400
        else:
            log.info("%s was taken out", url)


def in_force(before: Settings, after: Settings) -> Settings:
    """What a server that began with `before` follows once `after` was read. What needs a restart stays as it was, so that the
    next reload names it again."""
    kept = {one.name: _value(before, one) for one in SETTINGS if one.name not in _live(before, after)}
    of_router = {name: value for name, value in kept.items() if hasattr(after.router, name)}
    of_server = {name: value for name, value in kept.items() if hasattr(after.server, name)}
    return dataclasses.replace(
        after,
        router=dataclasses.replace(after.router, **of_router),
        server=dataclasses.replace(after.server, **of_server),
    )


def _live(before: Settings, after: Settings) -> frozenset[str]:
    """A server that speaks TLS can take another certificate, but neither begin with TLS nor end it."""
    has_tls = before.server.tls_cert is not None and after.server.tls_cert is not None
    return LIVE | {"tls_cert", "tls_key"} if has_tls else LIVE


def _new(before: Settings, after: Settings) -> Mapping[str, Role]:
    """Engines of `after` that are not in `before` in the same role."""
    known = _engines(before).items()
    return {url: role for url, role in _engines(after).items() if (url, role) not in known}


def _engines(settings: Settings) -> dict[str, Role]:
    router = settings.router
    return dict.fromkeys(router.prefill, Role.PREFILL) | dict.fromkeys(router.decode, Role.DECODE)


def _value(settings: Settings, setting: Setting) -> Any:
    for part in (settings.router, settings.server, settings.limits, settings):
        if hasattr(part, setting.name):
            return getattr(part, setting.name)
    raise AssertionError(f"{setting.name} is no setting")


def _place(setting: Setting) -> str:
    return f"[{setting.table}] {setting.key}"
