"""The endpoints for whoever operates a router.

    GET    /backhaul/admin/engines              what there is, and how each of them is
    POST   /backhaul/admin/engines              {"role": "decode", "url": "http://d3:8200"}: turns go there from now on
    POST   /backhaul/admin/engines/drain?url=U  no new conversation goes there; what is left to do
    DELETE /backhaul/admin/engines?url=U        takes it out, after its turns' end or ?within_s=30 seconds
    POST   /backhaul/admin/flush                drops and releases every handle, for a weight update
    POST   /backhaul/admin/reload               reads the configuration again
    GET    /backhaul/admin/workers              the processes that serve this address, where there are several

With replicas on Redis an order about an engine is everybody's, and the answer is given when all have followed it; an engine is
removed by all at once, since that takes as long as its turns. A reload is that of all workers of this server.

They take a key of their own as a bearer token. Without one they answer to loopback addresses only, and not to browsers, which
send requests there for whatever page is open.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ..config import engine_url
from ..drive.router import Router
from ..errors import ConfigError, LeaseError
from ..fleet.engine import Engine, Role
from ..ledger.redis_link import LedgerUnavailable
from .replicas import Replicas, Wanted
from .siblings import Siblings

PATH = "/backhaul/admin"
MAX_BODY_BYTES = 64 * 1024
MAX_WAIT_S = 600.0
_FOLLOW_S = 10.0
"""For other replicas to follow an order: engines are asked what they are."""
_RELOAD_S = 60.0
_BEGUN_S = 0.05
"""A removal that cannot be is refused within that."""
_STATES = ("removing", "down", "absent", "failing", "draining", "available")
"""From the least able to take a turn."""

RawHeaders = Sequence[tuple[bytes, bytes]]
Query = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Answer:
    """A status and what is said, as JSON types."""

    status: int
    value: Any
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def error(cls, status: int, message: str, code: str, *headers: tuple[str, str]) -> Answer:
        type_ = "server_error" if status >= 500 else "invalid_request_error"
        return cls(status, {"error": {"message": message, "type": type_, "param": None, "code": code}}, headers)


class Reloads(Protocol):
    """Reads the configuration again."""

    async def __call__(self) -> dict[str, Any]:
        """What has changed. Raises `ConfigError`, and then nothing has."""

    async def aclose(self) -> None: ...


class _NewEngine(msgspec.Struct, forbid_unknown_fields=True):
    role: Role
    url: str


class _NotByAll(Exception):
    """An order was followed here, and not everywhere."""


class Admin:
    """Answers for one router, and with `replicas` for all."""

    def __init__(self, router: Router, key: str | None = None) -> None:
        self._router = router
        self.set_key(key)
        self.reload: Reloads | None = None
        """Where there is a configuration to read again."""
        self.replicas: Replicas | None = None
        self.siblings: Siblings | None = None
        """The other workers of this server, where there are any."""

    @property
    def _name(self) -> str:
        return self.replicas.name if self.replicas is not None else "this one"

    def set_key(self, key: str | None) -> None:
        """From now on that key opens, or none is asked for."""
        self._digest = None if key is None else hashlib.sha256(key.encode()).digest()

    async def aclose(self) -> None:
        if self.reload is not None:
            await self.reload.aclose()

    def refusal(self, headers: RawHeaders, *, on_loopback: bool) -> Answer | None:
        """Why this client gets no answer."""
        if self._digest is not None:
            if any(name == b"authorization" and self._opens(value) for name, value in headers):
                return None
            message = f"{PATH} takes the admin key, as Authorization: Bearer KEY"
            return Answer.error(401, message, "invalid_admin_key", ("www-authenticate", "Bearer"))
        if not on_loopback:
            message = f"without an admin key {PATH} answers to clients on the router's own machine only"
            return Answer.error(403, message, "forbidden")
        if any(name == b"origin" or name.startswith(b"sec-fetch-") for name, _ in headers):
            return Answer.error(403, f"without an admin key {PATH} does not answer to browsers", "forbidden")
        return None

    def _opens(self, value: bytes) -> bool:
        scheme, _, key = value.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        return scheme.lower() == b"bearer" and hmac.compare_digest(digest, self._digest or b"")

    async def answer(self, method: str, path: str, query: Query, body: bytes) -> Answer:
        """The answer to a client that is not refused."""
        of_path = {
            "/engines": {"GET": self._list, "POST": self._add, "DELETE": self._remove},
            "/engines/drain": {"POST": self._drain},
            "/flush": {"POST": self._flush},
            "/reload": {"POST": self._reload},
            "/workers": {"GET": self._workers},
        }.get(path.removeprefix(PATH))
        if of_path is None:
            return Answer.error(404, f"{path} is not there; see {PATH}/engines", "not_found")
        if method not in of_path:
            return Answer.error(405, f"{method} is not for {path}", "method_not_allowed")
        try:
            return await of_path[method](query, body)
        except _NotByAll as error:
            return Answer.error(502, str(error), "not_all_workers")
        except ConfigError as error:
            return Answer.error(400, str(error), "cannot_be_done")
        except LeaseError as error:
            return Answer.error(502, str(error), "lease_failed")

    # --- engines

    async def _list(self, query: Query, body: bytes) -> Answer:
        await self._router.connect()
        return Answer(200, {"engines": joined({self._name: self.engines(), **await self._of_others()})})

    def engines(self) -> list[dict[str, Any]]:
        """How this router's are; none before it has connected."""
        try:
            fleet = self._router.fleet
        except RuntimeError:
            return []
        handles = Counter(held.decode for held in self._router.ledger.handles())
        listed = [self._shown(engine, handles[engine.url]) for engine in fleet.engines]
        return [*listed, *({"url": url, "role": role, "state": "absent"} for url, role in self._router.absent.items())]

    def _shown(self, engine: Engine, handles: int) -> dict[str, Any]:
        fleet = self._router.fleet
        if not fleet.takes_part(engine):
            state = "removing"
        elif fleet.is_down(engine.url):
            state = "down"
        elif engine.url in fleet.draining:
            state = "draining"
        else:
            state = "available" if fleet.available(engine) else "failing"
        return {
            "url": engine.url,
            "role": engine.role,
            "state": state,
            "in_flight": fleet.load.in_flight[engine.url],
            "handles": handles,
            "version": engine.version,
            "models": engine.models,
            "connector": engine.connector is not None,
        }

    async def _of_others(self) -> dict[str, list[dict[str, Any]]]:
        """The engines of the other replicas, by the replicas' names; none where they cannot be asked."""
        if self.replicas is None:
            return {}
        try:
            return {one.name: one.engines for one in await self.replicas.others()}
        except LedgerUnavailable:
            return {}

    async def _add(self, query: Query, body: bytes) -> Answer:
        try:
            wanted = msgspec.json.decode(body, type=_NewEngine)
        except msgspec.DecodeError as error:
            expected = '{"role": "prefill" or "decode", "url": "http://host:port"}'
            return Answer.error(400, f"the body is to be {expected}: {error}", "malformed_body")
        engine = await self._router.add_engine(wanted.role, wanted.url)
        not_told = await self._tell(engine.role, engine.url, Wanted.IN)
        return Answer(200, {**self._shown(engine, 0), **not_told})

    async def _drain(self, query: Query, body: bytes) -> Answer:
        url = self._named(query)
        if isinstance(url, Answer):
            return url
        draining = await self._router.drain_engine(url)
        not_told = await self._tell(self._role_of(url), url, Wanted.DRAINING)
        left = Counter(in_flight=draining.in_flight, handles=draining.handles)
        for engines in (await self._of_others()).values():
            left.update({name: one.get(name, 0) for one in engines if one["url"] == url for name in left})
        return Answer(200, {"url": url, **left, "done": not any(left.values()), **not_told})

    async def _remove(self, query: Query, body: bytes) -> Answer:
        url = self._named(query)
        if isinstance(url, Answer):
            return url
        try:
            within_s = float(query["within_s"][-1]) if "within_s" in query else 30.0
            if not 0 <= within_s <= MAX_WAIT_S:
                raise ValueError
        except ValueError:
            return Answer.error(400, f"within_s= takes seconds, 0 to {MAX_WAIT_S:.0f}", "malformed_query")
        if self.replicas is not None:
            try:
                await self.replicas.reachable()
            except LedgerUnavailable as error:
                why = (
                    f"the other replicas use the engine, and cannot be told now: {error}. Drain it, and ask again later"
                )
                return Answer.error(503, why, "replicas_unavailable")
        role = self._role_of(url)
        if not self._router.membership.absent.pop(url, None):
            removing = asyncio.ensure_future(self._router.remove_engine(url, within_s=within_s))
            await asyncio.wait((removing,), timeout=_BEGUN_S)
            if not removing.done() and self.replicas is not None:  # else it may be refused
                self.replicas.tell(role, url, Wanted.OUT, within_s)
            await removing
        await self._tell(role, url, Wanted.OUT, within_s)
        return Answer(200, {"removed": url})

    async def _tell(self, role: Role, url: str, wanted: Wanted, within_s: float = 0.0) -> dict[str, Any]:
        """Has all replicas follow an order that this one has followed. Returns what the answer is to say besides, where they can
        be told later only. Raises `_NotByAll`."""
        if self.replicas is None:
            return {}
        self.replicas.tell(role, url, wanted, within_s)
        try:
            missing = await self.replicas.missing(url, _FOLLOW_S + within_s)
        except LedgerUnavailable as error:
            return {"not_told": f"the other replicas are told when Redis answers again: {error}"}
        if missing:
            raise _NotByAll(f"done here, and not yet by all: {'; '.join(missing)}")
        return {}

    def _role_of(self, url: str) -> Role:
        engine = self._router.fleet.get(url)
        return engine.role if engine is not None else self._router.absent[url]

    def _named(self, query: Query) -> str | Answer:
        """The engine's URL in its one spelling."""
        if not query.get("url"):
            return Answer.error(400, "url= takes the engine's URL", "malformed_query")
        url = engine_url("url", query["url"][-1])
        if url in self._router.absent or self._router.fleet.get(url) is not None:
            return url
        return Answer.error(404, f"{url} is none of this router's engines; see {PATH}/engines", "unknown_engine")

    # --- everything

    async def _flush(self, query: Query, body: bytes) -> Answer:
        await self._router.flush()
        return Answer(200, {"flushed": True})

    async def _reload(self, query: Query, body: bytes) -> Answer:
        if self.reload is None:
            return Answer.error(
                409, "this router was not started by `backhaul serve`: nothing to read", "no_configuration"
            )
        changed = await self.reload()
        if self.siblings is not None:
            answers = await self.siblings.ask("reload", _RELOAD_S)
            missing = [f"worker {worker} has not answered" for worker in self.siblings.others if worker not in answers]
            if failed := missing + [f"worker {worker}: {why}" for worker, why in answers.items() if why]:
                raise _NotByAll(f"done here, and not by all workers, so ask again: {'; '.join(failed)}")
        return Answer(200, changed)

    async def reload_too(self) -> str | None:
        """As another worker was asked to. Returns why it cannot be done."""
        try:
            if self.reload is not None:
                await self.reload()
        except ConfigError as error:
            return str(error)
        return None

    async def _workers(self, query: Query, body: bytes) -> Answer:
        if self.siblings is None:
            return Answer.error(404, "one process serves this address; several do with --workers", "not_found")
        workers = [msgspec.to_builtins(one) for one in await self.siblings.workers()]
        return Answer(200, {"workers": workers, "answers": self.siblings.number})


def joined(by_replica: Mapping[str, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Calls and handles of all replicas; the state is the worst that one of them sees, and `states` has each if they differ."""
    engines: dict[str, dict[str, Any]] = {}
    states: dict[str, dict[str, str]] = {}
    sums: dict[str, Counter[str]] = {}
    for replica, engines_of in by_replica.items():
        for one in engines_of:
            url = one["url"]
            if engines.get(url, {}).get("state", "absent") == "absent":
                engines[url] = one
            states.setdefault(url, {})[replica] = one["state"]
            sums.setdefault(url, Counter()).update({name: one.get(name, 0) for name in ("in_flight", "handles")})
    shown: list[dict[str, Any]] = []
    for url, one in engines.items():
        worst = min(states[url].values(), key=_STATES.index)
        counts: dict[str, Any] = {name: sums[url][name] for name in ("in_flight", "handles") if name in one}
        shown.append({**one, "state": worst, **counts})
        if len(set(states[url].values())) > 1:
            shown[-1]["states"] = states[url]
    return shown
