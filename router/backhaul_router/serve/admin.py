"""The endpoints for whoever operates a router.

    GET    /backhaul/admin/engines              what there is, and how each of them is
    POST   /backhaul/admin/engines              {"role": "decode", "url": "http://d3:8200"}: turns go there from now on
    POST   /backhaul/admin/engines/drain?url=U  no new conversation goes there; what is left to do
    DELETE /backhaul/admin/engines?url=U        takes it out, after its turns' end or ?within_s=30 seconds
    POST   /backhaul/admin/flush                drops and releases every handle, for a weight update
    POST   /backhaul/admin/reload               reads the configuration again

They take a key of their own as a bearer token. Without one they answer to loopback addresses only, and not to browsers, which
send requests there for whatever page is open.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import msgspec

from ..config import engine_url
from ..drive.router import Router
from ..errors import ConfigError, LeaseError
from ..fleet.engine import Engine, Role

PATH = "/backhaul/admin"
MAX_BODY_BYTES = 64 * 1024
MAX_WAIT_S = 600.0

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

    @property
    def leaving(self) -> Collection[str]:
        """Engines that are taken out as soon as nothing is left to do there."""

    async def aclose(self) -> None: ...


class _NewEngine(msgspec.Struct, forbid_unknown_fields=True):
    role: Role
    url: str


class Admin:
    """Answers for one router."""

    def __init__(self, router: Router, key: str | None = None) -> None:
        self._router = router
        self.set_key(key)
        self.reload: Reloads | None = None
        """Where there is a configuration to read again."""

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
        for (allowed, at), run in (
            (("GET", "/engines"), self._list),
            (("POST", "/engines"), self._add),
            (("POST", "/engines/drain"), self._drain),
            (("DELETE", "/engines"), self._remove),
            (("POST", "/flush"), self._flush),
            (("POST", "/reload"), self._reload),
        ):
            if (method, path.removeprefix(PATH)) == (allowed, at):
                try:
                    return await run(query, body)
                except ConfigError as error:
                    return Answer.error(400, str(error), "cannot_be_done")
                except LeaseError as error:
                    return Answer.error(502, str(error), "lease_failed")
        if path.removeprefix(PATH) in ("/engines", "/engines/drain", "/flush", "/reload"):
            return Answer.error(405, f"{method} is not for {path}", "method_not_allowed")
        return Answer.error(404, f"{path} is not there; see {PATH}/engines", "not_found")

    # --- engines

    async def _list(self, query: Query, body: bytes) -> Answer:
        await self._router.connect()
        handles = Counter(held.decode for held in self._router.ledger.handles())
        listed = [self._shown(engine, handles[engine.url]) for engine in self._router.fleet.engines]
        absent = [{"url": url, "role": role, "state": "absent"} for url, role in self._router.absent.items()]
        return Answer(200, {"engines": [*listed, *absent]})

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

    async def _add(self, query: Query, body: bytes) -> Answer:
        try:
            wanted = msgspec.json.decode(body, type=_NewEngine)
        except msgspec.DecodeError as error:
            expected = '{"role": "prefill" or "decode", "url": "http://host:port"}'
            return Answer.error(400, f"the body is to be {expected}: {error}", "malformed_body")
        engine = await self._router.add_engine(wanted.role, wanted.url)
        return Answer(200, self._shown(engine, 0))

    async def _drain(self, query: Query, body: bytes) -> Answer:
        url = self._named(query)
        if isinstance(url, Answer):
            return url
        draining = await self._router.drain_engine(url)
        return Answer(200, {**asdict(draining), "done": draining.done})

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
        if not self._router.membership.absent.pop(url, None):
            await self._router.remove_engine(url, within_s=within_s)
        return Answer(200, {"removed": url})

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
        return Answer(200, await self.reload())
