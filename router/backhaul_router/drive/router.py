"""Front door of the router: what comes in is checked, told whose conversation it is, and given to a turn driver."""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from .. import wire
from ..config import RouterConfig
from ..engines.audit import AuditLine, compare
from ..engines.client import EngineClient
from ..engines.http_client import HttpClient
from ..engines.leases import EngineLeases
from ..fleet.breakers import MAX_DEATHS, POISON_WINDOW_S
from ..fleet.engine import Engine, Role
from ..fleet.fleet import Fleet
from ..fleet.retention import Retention
from ..identity.hints import REPORT_HEADER, HintError, checked_pause, read_hints
from ..identity.identify import HEADERS, IdentityError, identify, with_parent
from ..identity.ids import Identity, parent_of
from ..ledger import digests
from ..ledger.protocol import Ledger, arrived
from ..ledger.records import Key
from ..report import ReuseReport
from ..turn.turn import Turn
from ..wire import cache_salt
from . import logs, pauses
from .membership import Draining, Membership
from .passthrough import POST, is_passed_through, pass_through
from .pauses import Paused
from .request import Reply, Request, WholeReply, error_reply
from .run import NO_SPANS, Run, Tracing, engine_headers
from .services import Services

log = logging.getLogger("backhaul")

_TURNS = {str(endpoint): endpoint for endpoint in wire.Endpoint}


def _refuse_two_ids(headers: Sequence[tuple[str, str]]) -> None:
    """One header that says two things is two ids that disagree. Names are in lower case. Raises `IdentityError`."""
    for wanted in HEADERS:
        if len({value for name, value in headers if value and name == wanted}) > 1:
            raise IdentityError(f"header:{wanted} is there twice, with two ids: name one conversation", wanted)


class Router:
    """Facade of a router in this process: runs turns. One instance holds a ledger and a fleet, and may be used from several event
    loops and threads."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        client: EngineClient | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_report: Callable[[ReuseReport], None] | None = None,
        tracing: Tracing | None = None,
        seed: int | None = None,
    ) -> None:
        """A router draws lots between engines that are equal, lest all routers begin with the same one; `seed` fixes how they
        fall, and with 0 the first one is taken."""
        self.tracing = tracing
        self.client: EngineClient = client or HttpClient(
            connect_timeout_s=config.connect_timeout_s, api_key=config.api_key, ca_file=config.engine_ca_file
        )
        self.services = Services(
            config, self.client, clock, on_report, random.randrange(1, 2**32) if seed is None else seed
        )
        self.membership = Membership(self.services)
        self.responses = self.services.responses
        self.engine_urls = self.membership.urls

    def __repr__(self) -> str:
        return f"<Router {self.services.fleet if self.membership.connected else 'not connected'}, {self.ledger}>"

    @property
    def config(self) -> RouterConfig:
        """What turns that begin now follow; `reconfigure` changes it."""
        return self.services.config

    @property
    def clock(self) -> Callable[[], float]:
        return self.services.clock

    @property
    def on_report(self) -> Callable[[ReuseReport], None] | None:
        """Is handed the report of every turn."""
        return self.services.on_report

    @on_report.setter
    def on_report(self, take: Callable[[ReuseReport], None] | None) -> None:
        self.services.on_report = take

    @property
    def ledger(self) -> Ledger:
        """Histories and handles, with what every turn has left whose answer has been given."""
        return self.services.handles.ledger

    @property
    def retention(self) -> Retention:
        """What decode engines keep for this router, likewise."""
        return self.services.handles.retention

    @property
    def fleet(self) -> Fleet:
        """The engines. Raises `RuntimeError` before `connect`."""
        if not self.membership.connected:
            raise RuntimeError("the router has not asked its engines yet: await connect() first")
        return self.services.fleet

    # --- engines

    async def connect(self) -> None:
        """Asks every engine what it is and checks that they fit together; done once, before the first turn.

        Raises `ConfigError`: an engine is of an unsupported version or another model, or no engine of a role answers. An
        engine that does not answer while others of its role do is left out, with a warning, and asked again later.
        """
        await self.membership.connect()

    @property
    def absent(self) -> Mapping[str, Role]:
        """Configured engines that have not answered yet."""
        return self.membership.absent

    async def add_engine(self, role: Role, url: str) -> Engine:
        """Lets turns go to another engine from now on, or again to one that drains. Raises `ConfigError`."""
        return await self.membership.add(Role(role), url)

    async def drain_engine(self, url: str) -> Draining:
        """Sends no new conversation to an engine from now on. Returns what is left there; may be called again.
        Raises `ConfigError` for one that is not there."""
        return await self.membership.drain(url)

    async def remove_engine(self, url: str, *, within_s: float = 30.0) -> None:
        """Takes an engine out and releases what it holds for this router, after its turns' end or `within_s` seconds. Raises
        `ConfigError` for one that is not there, and for the last one of its role."""
        await self.membership.remove(url, within_s=within_s)

    def reconfigure(self, config: RouterConfig) -> None:
        """Has turns that begin from now on follow `config`. Engines, connections and the ledger stay as they are."""
        self.services.config = self.services.pairs.config = config
        self.retention.configure(config.retained_tokens_budget, config.one_shot_s)

    # --- requests

    async def handle(self, request: Request) -> Reply:
        """Runs one request. Returns when the reply's head is known. Errors that a client should see are replies;
        `ConfigError` is raised."""
        services = self.services
        path = request.path.partition("?")[0]
        endpoint = _TURNS.get(path) if request.method == "POST" else None
        if endpoint is None and not is_passed_through(request.method, path):
            served = ", ".join((*_TURNS, *POST))
            return error_reply(
                path, 404, f"{request.method} {path} is not served here; POST {served}", code="not_found"
            )
        if len(request.body) > (limit := services.config.max_body_bytes):
            return error_reply(
                path,
                413,
                f"the body has {len(request.body)} bytes; the limit is {limit} (max_body_bytes=)",
                code="body_too_large",
            )
        named = [(name.lower(), value) for name, value in request.headers]
        headers = dict(named)
        if endpoint is None:
            await self.membership.connect()
            return await pass_through(request, headers, services.fleet, services.client, services.config)
        try:
            facts = wire.read_request(endpoint, request.body)
            if request.tenant:
                facts = cache_salt.salted(facts, request.tenant)
            if len(headers) < len(named):
                _refuse_two_ids(named)
            if (before := facts.ids.get("previous_response_id")) is not None:
                await self.responses.learn(before, request.tenant)
            identity = identify(
                headers,
                facts.ids,
                request.scope.id if request.scope else None,
                framework=request.framework,
                responses=services.responses,
                tenant=request.tenant,
            )
            identity = with_parent(identity, headers, parent_of(request.scope))
            hints = read_hints(headers, request.hints)
        except wire.MalformedBody as error:
            return error_reply(path, 400, str(error), code="malformed_body")
        except IdentityError as error:
            return error_reply(path, 400, str(error), code="conflicting_ids", param=error.param)
        except HintError as error:
            return error_reply(path, 400, str(error), code="malformed_hint", param=error.param)
        if request.tenant and (unknown := self._unknown_response(facts, request.tenant)):
            return error_reply(path, 404, unknown, code="unknown_response", param="previous_response_id")
        if not self.membership.connected or self.membership.absent:
            await self.membership.connect()
        now = services.clock()
        services.do_chores(now)
        chain = digests.chain(facts.parts)
        if (deaths := services.poison_list.deaths(chain, now)) >= MAX_DEATHS:
            return self._withheld(path)
        if identity is None or identity.by_history:
            identity = await self._by_history(facts, chain, identity, request.tenant)
        turn = Turn(facts, identity, services.config, services.fleet, now, request.route, hints, request.tenant, chain)
        spans = NO_SPANS if self.tracing is None else self.tracing.begin(turn, headers)
        turn.deaths = deaths
        turn.comments = REPORT_HEADER in headers
        turn.view = request.view if turn.comments else request.view.without_engines
        turn.flushes = services.handles.ledger.flushes
        logs.note(turn)
        forwarded = engine_headers(headers, identity.conversation if identity else None)
        run = Run(services, turn, request.scope, forwarded, spans)
        return await run.start()

    def _withheld(self, path: str) -> WholeReply:
        self.fleet.counters.withheld += 1
        message = (
            f"this request was on {MAX_DEATHS} engines when their connections broke, and may be why: "
            f"it is not sent to another one for {POISON_WINDOW_S:g} s"
        )
        log.warning("%s: %s", path, message)
        return error_reply(path, 502, message, code="breaks_engines")

    def _unknown_response(self, facts: wire.Facts, tenant: str) -> str | None:
        """Why a tenant cannot go on from the response that it names: the engine would go on from anybody's."""
        before = facts.ids.get("previous_response_id")
        if before is None or not facts.api.refers_to_answers:
            return None
        if isinstance(before, str) and self.responses.conversation_of(before, tenant) is not None:
            return None
        return f"no response {str(before)[:100]!r} is on record here: send the whole history as input"

    async def _by_history(
        self, facts: wire.Facts, chain: bytes, identity: Identity | None, tenant: str
    ) -> Identity | None:
        """The conversation without a name whose messages the request continues, else a new one; `identity` is that of a run,
        which may go on from another's. Requests that leave nothing, and texts to complete, are not told apart this way."""
        leaves = self.config.reuse and not facts.multiple and facts.alone is None
        if not self.config.match_history or not leaves or not facts.api.numbered:
            return identity
        found = await arrived(self.ledger.find(Key(tenant, facts.model, facts.cache_salt, ""), chain))
        if found is not None and (identity is None or found != identity.conversation):
            return Identity(found, "history", identity.parent if identity else None, by_history=True)
        return identity or Identity(f"anon-{uuid.uuid4().hex}", "history", by_history=True, new=True)

    # --- what engines hold

    async def _ready_to_release(self) -> None:
        """On a shared ledger there may be something to release before this router has run a turn."""
        if self.ledger.shared:
            await self.connect()

    async def end_conversation(self, conversation: str, tenant: str = "") -> None:
        """Forgets the conversation and releases what the engines hold for it. Unknown ids are fine."""
        await self._ready_to_release()
        self.services.fleet.load.end_conversation(conversation, tenant)
        await self.services.handles.end_now(self.ledger.forget(conversation, tenant))

    def forget(self, conversation: str, tenant: str = "") -> None:
        """As `end_conversation`, which releases in the background."""
        self.services.forget(conversation, tenant)

    def renewable(self, conversation: str, tenant: str = "") -> bool:
        """Whether something is held for it that `renew` can keep for longer; where that would have to be asked, perhaps."""
        held = () if self.ledger.shared else self.ledger.held_for(conversation, tenant)
        return self.ledger.shared or (isinstance(held, tuple) and any(one.leased for one in held))

    async def renew(self, conversation: str, ttl_s: float | None = None, tenant: str = "") -> float | None:
        """Has the engines keep what they hold for a conversation for another `ttl_s` seconds (`decoder_kv_blocks_ttl` where it
        is not given). Returns for how many seconds it can be used at least; `None` where there is nothing to renew, as with
        stock engines, whose leases cannot be. Raises `LeaseError` when an engine did not do it; those of the others are renewed
        all the same."""
        await self._ready_to_release()
        return await pauses.renew(self.services, conversation, ttl_s or self.config.decoder_kv_blocks_ttl, tenant)

    async def pause(self, conversation: str, seconds: float, tenant: str = "") -> Paused:
        """Keeps what is held for a conversation over a pause of `seconds`, or releases it now where it cannot be kept for so
        long. Raises `ValueError` for what is no pause."""
        pause_s = checked_pause(seconds)
        await self._ready_to_release()
        return await pauses.pause(self.services, conversation, pause_s, tenant)

    async def flush(self) -> None:
        """Drops every handle and releases it, as weight updates need: old KV still matches by its tokens. Decode engines that
        run our connector end all of their leases, other routers' too. Turns that are running now end as they would, and what they
        leave is released instead of filed. Turns that begin before the update is done are not covered: flush after it.

        Raises `LeaseError` when such an engine did not do it: what it holds can still be read."""
        await self._ready_to_release()
        await self.services.handles.flush()

    async def leases(self) -> tuple[EngineLeases, ...]:
        """What the decode engines that run our connector hold, for whomever."""
        await self.connect()
        return await self.services.leases.listing()

    async def audit(self, tolerance: float = 0.01) -> tuple[AuditLine, ...]:
        """Compares what the prefill engines of ours have told this router with what they count themselves, since it connected.
        A difference above `tolerance`, as a fraction of the larger, is logged and counted as an alarm: reuse that the router
        believes in did not happen, or somebody else uses the engines too."""
        await self.connect()
        lines = await compare(self.client, self.fleet, tolerance)
        for line in lines:
            if line.alarm:
                log.warning("audit: %s", line)
                self.fleet.counters.add("audit_alarms")
        return lines

    async def settled(self) -> None:
        """Returns when the releases that this event loop has begun are done."""
        await self.services.settled()

    async def aclose(self) -> None:
        """Releases every handle of this router, but those that it shares with others, and closes the connections."""
        await self.services.aclose()


__all__ = ["Reply", "Request", "Router", "WholeReply"]
