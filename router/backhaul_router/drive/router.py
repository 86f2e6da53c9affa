"""The asynchronous driver: performs what a turn's state machine asks for, over real engines."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, assert_never

from .. import ranks, wire
from ..config import RouterConfig
from ..engines.audit import AuditLine, compare
from ..engines.client import EngineClient, EngineStream
from ..engines.describe import Unreachable, describe, process_began
from ..engines.http_client import HttpClient
from ..engines.leases import EngineLeases, Leases
from ..engines.load_polling import LoadPolling
from ..engines.pair_checks import PairChecks
from ..engines.recovery import Prober
from ..engines.retention_polling import look
from ..errors import ConfigError, LeaseError
from ..fleet import poison
from ..fleet.fleet import Engine, Fleet, Holder, Role, check_fit
from ..fleet.poison import Suspects
from ..fleet.restarts import Verdict
from ..fleet.retention import Cause, Retention
from ..identity.hints import HintError, read_hints
from ..identity.identify import HEADERS, Identity, IdentityError, identify, with_parent
from ..identity.response_ids import KnownResponses
from ..identity.scope import ConversationScope, parent_of
from ..ledger import digests
from ..ledger.protocol import Dropped, Ledger, arrived, open_ledger
from ..ledger.records import Branch, Held, Key
from ..report import Reason, ReuseReport
from ..turn.effects import (
    Action,
    DropEngine,
    EndLease,
    GiveBack,
    Lost,
    NoteResponse,
    Record,
    Release,
    Respond,
    Send,
    Settle,
)
from ..turn.turn import Turn
from ..wire import cache_salt
from . import logs, membership
from .late_answers import Hears, hear_out
from .membership import Draining
from .passthrough import POST, engine_headers, passed, passes
from .pauses import Paused, pause
from .request import Reply, Request, WholeReply, error_reply
from .run import Run
from .spans import NO_SPANS, Tracing
from .write_behind import Filing, Left, note

log = logging.getLogger("backhaul")

_PROBE_AGAIN_S = 10.0
_CHORES_S = 0.05
"""By so much later than it is due something may be dropped or asked."""
_TURNS = {str(endpoint): endpoint for endpoint in wire.Endpoint}


def _refuse_two_ids(headers: Sequence[tuple[str, str]]) -> None:
    """One header that says two things is two ids that disagree. Names are in lower case. Raises `IdentityError`."""
    for wanted in HEADERS:
        if len({value for name, value in headers if value and name == wanted}) > 1:
            raise IdentityError(f"header:{wanted} is there twice, with two ids: name one conversation", wanted)


class Router:
    """Runs turns. One instance holds a ledger and a fleet, and may be used from several event loops and threads."""

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
        self.config = config
        self.tracing = tracing
        self._seed = random.randrange(1, 2**32) if seed is None else seed
        self.client: EngineClient = client or HttpClient(
            connect_timeout_s=config.connect_timeout_s, api_key=config.api_key, ca_file=config.engine_ca_file
        )
        self.clock = clock
        self.responses = KnownResponses()
        """Conversations by the ids of the responses that their turns were answered with."""
        self._ledger: Ledger = open_ledger(config, clock)
        self._retention = Retention(config.retained_tokens_budget, config.one_shot_s)
        self._filing = Filing(self._ledger, self._retention)
        self.suspects = Suspects()
        self.on_report = on_report
        self._fleet: Fleet | None = None
        self._leases: Leases | None = None
        self._pairs: PairChecks | None = None
        self._polling: LoadPolling | None = None
        self._prober: Prober | None = None
        self.engine_urls: list[bytes] = []
        """Of every engine that is or was there; errors for clients elsewhere must not show them."""
        for url in (*config.prefill, *config.decode):
            self._withhold(url)
        self._absent: dict[str, Role] = {}
        self._probed = 0.0
        self._next_chores = -math.inf
        self._background: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Router {self._fleet or 'not connected'}, {self.ledger}>"

    @property
    def ledger(self) -> Ledger:
        """Histories and handles, with what every turn has left whose answer has been given."""
        self._filing.file_all()
        return self._ledger

    @property
    def retention(self) -> Retention:
        """What decode engines keep for this router, likewise."""
        self._filing.file_all()
        return self._retention

    @property
    def fleet(self) -> Fleet:
        """The engines. Raises `RuntimeError` before `connect`."""
        if self._fleet is None:
            raise RuntimeError("the router has not asked its engines yet: await connect() first")
        return self._fleet

    async def connect(self) -> None:
        """Asks every engine what it is and checks that they fit together; done once, before the first turn.

        Raises `ConfigError`: an engine is of an unsupported version or another model, or no engine of a role answers. An
        engine that does not answer while others of its role do is left out, with a warning, and asked again later.
        """
        if self._fleet is not None:
            if self._absent and self.clock() - self._probed > _PROBE_AGAIN_S:
                self._probed = self.clock()
                self._spawn(self._ask_absent())
            return
        wanted = dict.fromkeys(self.config.prefill, Role.PREFILL) | dict.fromkeys(self.config.decode, Role.DECODE)
        found, absent = await self._ask(wanted)
        for role in Role:
            if not any(engine.role is role for engine in found):
                raise ConfigError(f"no {role} engine answers: " + "; ".join(absent.values()))
        check_fit(found)
        for message in absent.values():
            log.warning("left out for now: %s", message)
        for engine in found:
            if engine.role is Role.DECODE and not engine.streams_handles:
                log.warning(
                    "%s does not show handles in %s: those turns leave nothing to reuse, and pin its blocks for "
                    "%.0f s. Install backhaul beside vLLM, which loads its plugin.",
                    engine,
                    engine.silent_streams,
                    self.config.decoder_kv_blocks_ttl,
                )
        if self._fleet is None:
            self._fleet = Fleet(found, self._seed, self._retention)
            self._fleet.processes.shared = self._ledger.shared
            self._polling = LoadPolling(self.client, self._fleet, self.config.load_interval_s)
            self._leases = Leases(self.client, self._fleet, self._spawn)
            self._pairs = PairChecks(self.client, self._fleet, self.config, self.clock, self._spawn)
            self._prober = Prober(self.client, self._fleet, self._leases.release, lambda drop: self.perform(drop, None))
            self._absent = {url: wanted[url] for url in absent}
            self._probed = self.clock()

    async def _ask(self, wanted: Mapping[str, Role]) -> tuple[list[Engine], dict[str, str]]:
        answers = await asyncio.gather(
            *(describe(self.client, url, role) for url, role in wanted.items()), return_exceptions=True
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
        for url, role in list(self._absent.items()):
            try:
                engine = await describe(self.client, url, role)
                if url in self._absent:  # still wanted
                    self.fleet.add(engine)
                    await self.note_began(engine)
            except Unreachable as error:
                log.info("still left out: %s engine %s", role, error)
            except ConfigError as error:
                log.error("left out: %s", error)  # noqa: TRY400
            else:
                self._absent.pop(url, None)

    async def add_engine(self, role: Role, url: str) -> Engine:
        """Lets turns go to another engine from now on, or again to one that drains. Raises `ConfigError`."""
        return await membership.add_engine(self, Role(role), url)

    async def drain_engine(self, url: str) -> Draining:
        """Sends no new conversation to an engine from now on. Returns what is left there. Raises `ConfigError`."""
        return await membership.drain_engine(self, url)

    async def remove_engine(self, url: str, *, within_s: float = 30.0) -> None:
        """Takes an engine out and releases what it holds for this router, after its turns' end or `within_s` seconds. Raises
        `ConfigError`."""
        await membership.remove_engine(self, url, within_s=within_s)

    def reconfigure(self, config: RouterConfig) -> None:
        """Has turns that begin from now on follow `config`. Engines, connections and the ledger stay as they are."""
        self.config = config
        self.retention.configure(config.retained_tokens_budget, config.one_shot_s)
        if self._pairs is not None:
            self._pairs.config = config

    def forget_absent(self, url: str) -> bool:
        """Does not ask an engine any more that has not answered yet. Returns whether there was one."""
        return self._absent.pop(url, None) is not None

    def expect_absent(self, url: str, role: Role) -> None:
        """Asks an engine that is not there from time to time, as a configured one that has not answered."""
        self._absent[url] = role

    @property
    def absent(self) -> Mapping[str, Role]:
        """Configured engines that have not answered yet."""
        return dict(self._absent)

    def note_added(self, url: str) -> None:
        self._absent.pop(url, None)
        self._withhold(url)

    def _withhold(self, url: str) -> None:
        for name in (url, ranks.split(url)[0]):  # messages of the HTTP client have no rank
            if (encoded := name.encode()) not in self.engine_urls:
                self.engine_urls.append(encoded)

    async def release_engine(self, engine: Engine) -> None:
        """Drops and releases every handle of a decode engine."""
        if (engine_id := self.fleet.engine_id(engine.url)) is not None:
            await self._end_now(await arrived(self.ledger.drop_engine(engine.url, engine_id)))

    async def handle(self, request: Request) -> Reply:
        """Runs one request. Returns when the reply's head is known. Errors that a client should see are replies;
        `ConfigError` is raised."""
        path = request.path.partition("?")[0]
        endpoint = _TURNS.get(path) if request.method == "POST" else None
        if endpoint is None and not passes(request.method, path):
            served = ", ".join((*_TURNS, *POST))
            return error_reply(
                path, 404, f"{request.method} {path} is not served here; POST {served}", code="not_found"
            )
        if len(request.body) > self.config.max_body_bytes:
            return error_reply(
                path,
                413,
                f"the body has {len(request.body)} bytes; the limit is {self.config.max_body_bytes} (max_body_bytes=)",
                code="body_too_large",
            )
        named = [(name.lower(), value) for name, value in request.headers]
        headers = dict(named)
        if endpoint is None:
            await self.connect()
            return await passed(request, headers, self.fleet, self.client, self.config)
        try:
            facts = wire.read_request(endpoint, request.body)
            if request.tenant:
                facts = cache_salt.salted(facts, request.tenant)
            if len(headers) < len(named):
                _refuse_two_ids(named)
            identity = identify(
                headers,
                facts.ids,
                request.scope.id if request.scope else None,
                framework=request.framework,
                responses=self.responses,
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
        await self.connect()
        now = self.clock()
        if now >= self._next_chores:
            self._do_chores(now)
        if self.fleet.breaker.any_open:
            self.look_after_engines()
        chain = digests.chain(facts.parts)
        if (deaths := self.suspects.deaths(chain, now)) >= poison.MOST:
            return self._withheld(path)
        if identity is None or identity.by_history:
            identity = await self._by_history(facts, chain, identity, request.tenant)
        turn = Turn(facts, identity, self.config, self.fleet, now, request.route, hints, request.tenant, chain)
        spans = NO_SPANS if self.tracing is None else self.tracing.begin(turn, headers)
        turn.deaths = deaths
        turn.flushes = self.ledger.flushes
        logs.note(turn)
        forwarded = engine_headers(headers, identity.conversation if identity else None)
        run = Run(self, turn, request.scope, forwarded, spans)
        return await run.start()

    def _do_chores(self, now: float) -> None:
        """What time brings about, of which several turns in a row would find nothing."""
        self._next_chores = now + _CHORES_S
        self._drop(self.ledger.sweep(now), why=Cause.EXPIRED)
        if looked_at := self.retention.to_look_at(now):
            self._spawn(self._look_at(looked_at))
        if self.pairs.due(now):
            self._spawn(self.pairs.check_unsafe_again())
        if self._polling is not None and self._polling.due(now):
            self._spawn(self._polling.poll(now))

    def _withheld(self, path: str) -> WholeReply:
        self.fleet.counters.withheld += 1
        message = (
            f"this request was on {poison.MOST} engines when their connections broke, and may be why: "
            f"it is not sent to another one for {poison.WINDOW_S:g} s"
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

    async def end_conversation(self, conversation: str, tenant: str = "") -> None:
        """Forgets the conversation and releases what the engines hold for it. Unknown ids are fine."""
        self._no_longer_load(conversation, tenant)
        await self._ready_to_release()
        await self._end_now(await arrived(self.ledger.forget(conversation, tenant)))

    def renewable(self, conversation: str, tenant: str = "") -> bool:
        """Whether something is held for it that `renew` can keep for longer; where that would have to be asked, perhaps."""
        held = () if self.ledger.shared else self.ledger.held_for(conversation, tenant)
        return self.ledger.shared or (isinstance(held, tuple) and any(one.leased for one in held))

    async def pause(self, conversation: str, seconds: float, tenant: str = "") -> Paused:
        """Keeps what is held for a conversation over a pause of `seconds`, or releases it now where it cannot be kept for so
        long. Raises `ValueError` for what is no pause."""
        return await pause(self, conversation, seconds, tenant)

    async def release_some(
        self, conversation: str, names: Collection[tuple[str, str]], why: Reason, tenant: str = ""
    ) -> None:
        """Releases handles of a conversation, by `Held.name`; its histories stay."""
        await self._ready_to_release()
        dropped = self.ledger.drop_for(conversation, lambda held: held.name in names, why, tenant)
        await self._end_now(await arrived(dropped))

    def forget(self, conversation: str, tenant: str = "") -> None:
        """As `end_conversation`, which releases in the background."""
        self._no_longer_load(conversation, tenant)
        self._drop(self.ledger.forget(conversation, tenant))

    def _no_longer_load(self, conversation: str, tenant: str) -> None:
        if self._fleet is not None:
            self._fleet.end_conversation(conversation, tenant)

    async def flush(self) -> None:
        """Drops every handle and releases it, as weight updates need: old KV still matches by its tokens. Decode engines that
        run our connector end all of their leases, other routers' too. Turns that are running now end as they would, and what they
        leave is released instead of filed. Turns that begin before the update is done are not covered: flush after it.

        Raises `LeaseError` when such an engine did not do it: what it holds can still be read."""
        await self._ready_to_release()
        dropped = await arrived(self.ledger.flush())
        self.retention.dropped(dropped, Cause.FLUSHED)
        if self._leases is None:
            return
        await self._leases.end_now(held for held in dropped if not held.leased)
        try:
            await self._leases.flush()
        except LeaseError:
            self._leases.end((held for held in dropped if held.leased), ride=True)
            raise

    async def renew(self, conversation: str, ttl_s: float | None = None, tenant: str = "") -> float | None:
        """Has the engines keep what they hold for a conversation for another `ttl_s` seconds (`decoder_kv_blocks_ttl` where it
        is not given). Returns for how many seconds it can be used at least; `None` where there is nothing to renew, as with
        stock engines, whose leases cannot be. Raises `LeaseError` when an engine did not do it; those of the others are renewed
        all the same."""
        await self._ready_to_release()
        held = [one for one in await arrived(self.ledger.held_for(conversation, tenant)) if one.leased]
        if not held:
            return None
        renewal = await self.leases_kept.renew(held, ttl_s or self.config.decoder_kv_blocks_ttl)
        now = self.clock()
        usable = {name: left - min(self.config.lease_margin_s, left / 4) for name, left in renewal.remaining.items()}
        deadlines = {name: now + left for name, left in usable.items()}
        await arrived(self.ledger.renewed(conversation, deadlines, now, tenant))
        self.retention.renewed(deadlines, now)
        if renewal.failure is not None:
            raise renewal.failure
        return min((left for left in usable.values() if left), default=None)

    async def leases(self) -> tuple[EngineLeases, ...]:
        """What the decode engines that run our connector hold, for whomever."""
        await self.connect()
        return await self.leases_kept.listing()

    async def audit(self, tolerance: float = 0.01) -> tuple[AuditLine, ...]:
        """Compares what the prefill engines of ours have told this router with what they count themselves, since it connected.
        A difference above `tolerance`, as a fraction of the larger, is logged and counted as an alarm: reuse that the router
        believes in did not happen, or somebody else uses the engines too."""
        await self.connect()
        lines = await compare(self.client, self.fleet, tolerance)
        for line in lines:
            if line.alarm:
                log.warning("audit: %s", line)
                self.fleet.count_alarm()
        return lines

    async def settled(self) -> None:
        """Returns when the releases that this event loop has begun are done."""
        self._release_all_left()
        if self._leases is not None:
            self._leases.hurry()
        loop = asyncio.get_running_loop()
        while tasks := [task for task in tuple(self._background) if task.get_loop() is loop]:
            await asyncio.wait(tasks)

    async def aclose(self) -> None:
        """Releases every handle of this router, but those that it shares with others, and closes the connections."""
        self._release_all_left()
        if self._leases is not None:
            self.pairs.close()
            if self._prober is not None:
                await self._prober.aclose()
            if not self.ledger.shared:
                await self._end_now(await arrived(self.ledger.flush()))
            await self.settled()
            self._leases.closed = True
        await self.ledger.aclose()
        await self.client.aclose()

    async def check(self, prefill: Engine, decode: str, engine_id: str = "") -> bool:
        """Finds out what stands in doubt before P reads from D: whether it can and, with the `engine_id` of a handle, whether D
        is the process that made it. Returns whether D has said so, or is not in doubt."""
        in_doubt = bool(engine_id) and self.fleet.processes.in_doubt(decode, engine_id)
        if in_doubt and not await self._says_which_process(decode, engine_id):
            return False
        if self.pairs.wanted(prefill.url, decode):
            await self.pairs.check(prefill, decode)
        return True

    async def _says_which_process(self, decode: str, engine_id: str) -> bool:
        """Drops what is on file where D is seen to be another process. Returns `False` where that is not to be known."""
        processes = self.fleet.processes
        processes.warn_of_fixed(decode, engine_id)
        asked = processes.asked(decode)
        began = await process_began(self.client, decode)
        verdict = processes.verdict(decode, began, engine_id)
        if verdict is Verdict.SAME:
            processes.confirmed(decode, asked)
        elif verdict is Verdict.ANOTHER and began is not None:
            await self._void_process(decode, began, engine_id)
        else:
            processes.showed(decode, began)
            return False
        return True

    async def note_began(self, engine: Engine) -> None:
        """An engine has been described again: what is on file there is void unless it is the process that made it."""
        began = engine.started_at
        if engine.role is Role.DECODE and began is not None and began != self.fleet.processes.began(engine.url):
            await self._void_process(engine.url, began)

    async def _void_process(self, decode: str, began: float, engine_id: str = "") -> None:
        """Drops what D's process before the one that `began` then has made. It is gone with that process; where nobody knew when
        that one began, it may be the same, and what it holds is released."""
        fleet = self.fleet
        known = fleet.processes.is_known(decode)
        fleet.processes.void(decode)  # until all is dropped, the doubt stays
        for made_by in filter(None, {fleet.engine_id(decode), wire.process_of(engine_id)}):
            dropped = await arrived(self.ledger.drop_engine(decode, made_by))
            if known:
                self._forget_process(decode, dropped)
            else:
                self._end(dropped, why=Cause.UNUSABLE)
        fleet.replaced(decode, began)

    def look_after_engines(self) -> None:
        """Has engines probed that are shut out."""
        if self._prober is not None:
            self._prober.look()

    # --- releases and checks

    @property
    def leases_kept(self) -> Leases:
        """Raises `RuntimeError` before `connect`."""
        if self._leases is None:
            raise RuntimeError("the router has not asked its engines yet: await connect() first")
        return self._leases

    @property
    def pairs(self) -> PairChecks:
        """Raises `RuntimeError` before `connect`."""
        if self._pairs is None:
            raise RuntimeError("the router has not asked its engines yet: await connect() first")
        return self._pairs

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _end(self, dropped: Iterable[Held], *, ride: bool = False, why: Cause = Cause.ENDED) -> None:
        if dropped := tuple(dropped):
            self.retention.dropped(dropped, why)
            self.leases_kept.end(dropped, ride=ride)

    def _drop(
        self,
        dropped: Dropped,
        note: Callable[[tuple[Held, ...]], None] | None = None,
        *,
        ride: bool = False,
        why: Cause = Cause.ENDED,
    ) -> None:
        """Releases what the ledger drops, in the background where it has to be waited for. `note` is told of it first."""
        if not isinstance(dropped, tuple):
            self._spawn(self._drop_later(dropped, note, ride, why))
            return
        if note is not None:
            note(dropped)
        self._end(dropped, ride=ride, why=why)
        if self.retention.due:
            self.give_up_retained()

    async def _drop_later(
        self, dropped: Dropped, note: Callable[[tuple[Held, ...]], None] | None, ride: bool, why: Cause
    ) -> None:
        self._drop(await arrived(dropped), note, ride=ride, why=why)

    async def _ready_to_release(self) -> None:
        """On a shared ledger there may be something to release before this router has run a turn."""
        if self.ledger.shared:
            await self.connect()

    async def _end_now(self, dropped: Iterable[Held]) -> None:
        if dropped := tuple(dropped):
            self.retention.dropped(dropped)
            await self.leases_kept.end_now(dropped)

    async def _look_at(self, decodes: Iterable[str]) -> None:
        await look(self.client, self.fleet, self.leases_kept, decodes)
        self.give_up_retained()

    def give_up_retained(self) -> None:
        """Drops and releases what `retention` has given up."""
        for victim in self.retention.take_due():
            name, key = victim.held.name, victim.key
            dropped = self.ledger.drop_for(
                key.conversation,
                lambda held: held.name == name,  # noqa: B023
                Reason.EVICTED,
                key.tenant,
            )
            if not victim.with_turn:
                self._drop(dropped, ride=True)
                continue
            self.leases_kept.end_soon(Holder.of(victim.held.decode, victim.held.handle.engine_id))
            if not isinstance(dropped, tuple):
                self._spawn(self._forgotten(dropped))

    async def _forgotten(self, dropped: Dropped) -> None:
        await arrived(dropped)

    # --- what a run performs

    def hear_out(self, state: Hears, stream: EngineStream) -> None:
        """Releases what the answer to a client that has left shows to be kept."""
        self._spawn(self._hear_out(state, stream))

    async def _hear_out(self, state: Hears, stream: EngineStream) -> None:
        for action in await hear_out(state, stream):
            self.perform(action, None)

    def perform(self, action: Action, scope: ConversationScope | None, pause_s: float | None = None) -> None:
        """Everything but the client's answer. What a turn leaves is filed when the answer is on its way, or as soon as anything
        looks at the ledger; `pause_s` is the caller's word on when the next turn comes."""
        match action:
            case Release():
                self._spawn(self.leases_kept.release(action))
            case EndLease():
                self.leases_kept.end_one(action)
            case GiveBack(key, taken):
                retention = self.retention
                self._drop(self.ledger.give_back(key, taken), lambda dropped: retention.gave_back(taken, dropped))
            case Lost(key, taken, reason):
                retention = self.retention
                self._drop(self.ledger.lost(key, taken, reason), lambda dropped: retention.lost(taken, dropped))
            case Settle():
                self._leave(Left(action, self.clock(), pause_s))
            case DropEngine(decode, engine_id):
                self._forget_process(decode, self.ledger.drop_engine(decode, engine_id))
            case NoteResponse(response, conversation, tenant):
                self.responses.note(response, conversation, tenant)
            case Record(report):
                self.fleet.count(report)
                for take in (scope.record if scope is not None else None, self.on_report):
                    self._hand_over(report, take)
            case Respond() | Send():
                raise AssertionError("the client's answer is the run's own")
            case _:
                assert_never(action)

    def _leave(self, left: Left) -> None:
        """Files what a turn left. On a shared ledger at once: the next turn may come to another router."""
        settle = left.settle
        if not self._ledger.shared:
            self._filing.add(left)
            asyncio.get_running_loop().call_soon(self._release_left, left)
            return
        dropped = self._ledger.settle(settle.key, settle.taken, settle.branch, left.now)
        self._drop(dropped, lambda dropped: note(self._retention, left, dropped), ride=True)
        self._follow(settle.branch)

    def _release_left(self, left: Left) -> None:
        if not self._filing.take(left):
            return
        if left.fault is not None:
            context = {"message": "what a turn left could not be filed", "exception": left.fault}
            asyncio.get_running_loop().call_exception_handler(context)
            return
        self._drop(left.dropped, ride=True)
        self._follow(left.settle.branch)

    def _release_all_left(self) -> None:
        for left in self._filing.all():
            self._release_left(left)

    def _follow(self, branch: Branch) -> None:
        self._sweep_in_time(branch)
        self._check_before_it_is_needed(branch)

    def _forget_process(self, decode: str, dropped: Dropped) -> None:
        if isinstance(dropped, tuple):
            self.retention.dropped(dropped, Cause.UNUSABLE)
            log.warning("%s has restarted: %d handles of its earlier process are void", decode, len(dropped))
        else:
            self._spawn(self._forget_process_later(decode, dropped))

    async def _forget_process_later(self, decode: str, dropped: Dropped) -> None:
        self._forget_process(decode, await arrived(dropped))

    def _sweep_in_time(self, branch: Branch) -> None:
        """What a request without a conversation left on a stock engine is released though no other request should come."""
        if not branch.by_history or branch.held is None or branch.held.leased:
            return
        if (left_s := branch.held.deadline - self.clock()) <= self.config.one_shot_s:
            asyncio.get_running_loop().call_later(left_s, self._sweep)

    def _sweep(self) -> None:
        self._drop(self.ledger.sweep(self.clock()), why=Cause.EXPIRED)

    def _check_before_it_is_needed(self, branch: Branch) -> None:
        """The next turn will read from this D by way of the same P, if it can: found out while the agent works."""
        prefill = self.fleet.get(branch.prefill)
        if prefill is not None and branch.held is not None and self.pairs.wanted(prefill.url, branch.held.decode):
            self._spawn(self.pairs.check(prefill, branch.held.decode))

    @staticmethod
    def _hand_over(report: ReuseReport, take: Callable[[ReuseReport], None] | None) -> None:
        """Gives a report to someone else's code, whose fault must not cost the client its answer."""
        if take is None:
            return
        try:
            take(report)
        except Exception:
            log.exception("a turn's report could not be handed over: %r", take)

    def usable(self, held: Held) -> Reason | None:
        """Why a handle on file cannot be used any more."""
        return None if self.fleet.made_by_current(held.decode, held.handle.engine_id) else Reason.ENGINE_CHANGED


__all__ = ["Reply", "Request", "Router", "WholeReply"]
