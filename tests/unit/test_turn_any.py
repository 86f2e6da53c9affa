"""Whatever engines say and whenever the client leaves: a turn answers once and accounts for every handle."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable

import msgspec
from backhaul_router.errors import Leg
from backhaul_router.fleet.engine import Holder
from backhaul_router.fleet.fleet import Fleet
from backhaul_router.identity.ids import Identity
from backhaul_router.ledger.records import Held, Taken
from backhaul_router.report import Route
from backhaul_router.turn.effects import (
    Answered,
    Call,
    Chunk,
    Done,
    Ended,
    EndLease,
    Event,
    Failed,
    GiveBack,
    Lost,
    Open,
    Opened,
    Read,
    Respond,
    Settle,
)
from backhaul_router.turn.states import Collecting, Relaying
from backhaul_router.wire import Endpoint
from core_values import D1, D2, P1, P2, encoded, engine, facts, fleet, handle, leased, params, says
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_drive import (
    BODY,
    BROKEN,
    DONE,
    FIRST,
    JSON,
    MESSAGES,
    OLD,
    PROMPT,
    REFUSED,
    STREAM,
    STREAMED,
    TIMEOUT,
    USAGE,
    A,
    Drive,
    delta,
    finish,
    history,
    kinds,
    prefilled,
    rendered,
    sse,
    whole,
)


class Journey:
    """Feeds a turn whatever may come, and keeps the books on every handle that turns up."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.names = itertools.count()
        self.owed: dict[str, str] = {}
        """Handles whose blocks are pinned for us, by who pins them: every one must be filed, sent on, or released."""
        self.read: set[str] = set()
        """Handles that an engine has read, or may have."""
        self.broken = 0
        """Connections that broke on a request: one may, for all that is known, by the request itself."""
        self.parts: list[bytes] = []
        """Of D's whole answer, as far as it has come."""
        self.has_handle = False
        urls = [P1, P2][: self.draw(st.integers(1, 2))] + [D1, D2][: self.draw(st.integers(1, 2))]
        renders = self.draw(st.booleans())
        taken = self.draw(st.sampled_from([FIRST, history(), history(range(128)), history(common=False)]))
        if self.draw(st.booleans()):
            taken = msgspec.structs.replace(taken, drop=(Held(handle("dropped"), D1, 0.0, 1),))
            self.owed["dropped"] = "d"
        if taken.held is not None:
            self.owed[OLD] = "d"
        identity = self.draw(st.sampled_from([Identity("c", "scope"), None]))
        if identity is None:
            self.owed.clear()
        self.setting(urls, renders, taken, identity)

    def setting(self, urls: list[str], renders: bool, taken: Taken, identity: Identity | None) -> None:
        self.drive = Drive(
            taken,
            request=self.draw(st.sampled_from(REQUESTS)),
            on=fleet(*urls, renders=renders),
            identity=identity,
            route=self.draw(st.sampled_from([None, None, *Route])),
            local_max_tokens=self.draw(st.sampled_from([0, 100])),
            reuse=self.draw(st.sampled_from([True, True, True, False])) if taken is FIRST else True,
        )

    def draw(self, strategy: st.SearchStrategy[A]) -> A:
        return self.data.draw(strategy)

    def one_of(self, *makers: Callable[[], Event]) -> Event:
        return self.draw(st.sampled_from(makers))()

    def run(self) -> None:
        for _ in range(40):
            if self.drive.state == Done():
                break
            if self.draw(st.integers(0, 19)) == 0:
                self.leave()
                break
            self.answer()
        assert self.drive.state == Done(), "the turn goes on for ever"
        self.check()

    def leave(self) -> None:
        need = self.drive.need
        if isinstance(need, Call) and need.leg is Leg.PREFILL:
            self.sent_to_prefill(need, unread=False)
        self.drive.leave()

    # -- what engines may say

    def failed(self) -> Event:
        return Failed(self.draw(st.sampled_from([REFUSED, TIMEOUT, BROKEN])), "x")

    def the_handle(self) -> str:
        """An answer ends once."""
        self.has_handle = True
        return self.new("d")

    def new(self, engine: str) -> str:
        name = f"{engine}-{next(self.names)}"
        self.owed[name] = engine
        return name

    def answer(self) -> None:
        need = self.drive.need
        assert self.broken < 2 or not isinstance(need, Call | Open), (
            "a request went out again after two connections broke"
        )
        match need:
            case Call(Leg.RENDER):
                come = self.one_of(
                    rendered, rendered, lambda: Answered(self.status(), JSON, b"{}"), self.failed, lambda: rendered(())
                )
                self.broken += isinstance(come, Failed) and come.kind is BROKEN
                self.drive.feed(come)
            case Call(Leg.PREFILL):
                self.answer_prefill(need)
            case Call(Leg.DECODE):
                self.answer_decode(need)
            case Open():
                come = self.one_of(
                    lambda: STREAM, lambda: BODY, lambda: BODY, lambda: Opened(self.status(), JSON), self.failed
                )
                self.broken += isinstance(come, Failed) and come.kind is BROKEN
                self.reading, self.parts, self.has_handle = need, [], False
                self.drive.feed(come)
                if come == BODY:  # it is sent when the answer is complete
                    self.decode_has_read()
            case Read():
                self.answer_read()
            case _:
                raise AssertionError(need)

    def status(self) -> int:
        return self.draw(st.sampled_from([400, 401, 404, 413, 422, 429, 500, 502, 503]))

    def sent_to_prefill(self, call: Call, *, unread: bool) -> None:
        name = json.loads(call.body)["kv_transfer_params"].get("remote_request_id")
        if name is not None and not unread:
            assert name not in self.read, "a handle was read twice"
            self.read.add(name)

    def answer_prefill(self, call: Call) -> None:
        def good() -> Event:
            return prefilled(self.new("p"))

        come = self.one_of(
            good,
            good,
            good,
            lambda: prefilled(self.new("p"), prompt=77),
            lambda: prefilled(kv_transfer_params=None),
            lambda: Answered(200, JSON, b"odd"),
            lambda: Answered(self.status(), JSON, b"{}"),
            self.failed,
        )
        refused = isinstance(come, Failed) and come.kind is REFUSED
        self.broken += isinstance(come, Failed) and come.kind is BROKEN
        self.sent_to_prefill(call, unread=refused or (isinstance(come, Answered) and 400 <= come.status < 500))
        if isinstance(come, Answered) and come.status == 200:
            name = json.loads(call.body)["kv_transfer_params"].get("remote_request_id")
            if (name is not None and b"remote_request_id" in come.body) or come.body == b"odd":
                self.owed.pop(name, None)  # P has read it, which frees it
        self.drive.feed(come)

    def answer_decode(self, call: Call) -> None:
        handles = "kv_transfer_params" in json.loads(call.body)
        come = self.one_of(
            lambda: Answered(200, JSON, whole(f"d-{next(self.names)}" if handles else None).data),
            lambda: Answered(200, JSON, whole(f"d-{next(self.names)}" if handles else None).data),
            lambda: Answered(200, JSON, whole(None).data),
            lambda: Answered(200, JSON, b"{"),
            lambda: Answered(self.status(), JSON, b"{}"),
            self.failed,
        )
        self.reading = call
        self.broken += isinstance(come, Failed) and come.kind is BROKEN
        if isinstance(come, Answered) and come.status == 200:
            self.owe(come.body)
            self.decode_has_read()
        self.drive.feed(come)

    def decode_has_read(self) -> None:
        name = json.loads(self.reading.body).get("kv_transfer_params", {}).get("remote_request_id")
        if name is not None:
            self.owed.pop(name, None)

    def answer_read(self) -> None:
        handles = "kv_transfer_params" in json.loads(self.reading.body) and not self.has_handle
        stream = isinstance(self.drive.state, Relaying)
        if stream:
            # events without names, as these are, carry no handle where the API's own events have names
            handles = handles and self.drive.turn.facts.endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS)
            come = self.one_of(
                lambda: sse(delta()),
                lambda: sse(delta()),
                lambda: sse(finish(self.the_handle() if handles else None)),
                lambda: sse(finish(None)),
                lambda: sse(USAGE),
                lambda: sse({"error": {"message": "x"}}),
                lambda: sse({**finish(), "kv_transfer_params": 5}),
                lambda: Chunk(DONE),
                lambda: Chunk(DONE),
                lambda: Chunk(b": ping\n\n"),
                Ended,
                self.failed,
            )
        else:
            come = self.one_of(
                lambda: whole(f"d-{next(self.names)}" if handles else None),
                lambda: whole(None),
                lambda: Chunk(b"{"),
                Ended,
                Ended,
                Ended,
                self.failed,
            )
            if isinstance(come, Chunk):
                self.parts.append(come.data)
            elif come == Ended():
                self.owe_for(b"".join(self.parts))
        self.broken += isinstance(come, Failed) and come.kind is BROKEN
        self.drive.feed(come)
        if any(isinstance(action, Respond) and action.status == 200 for action in self.drive.actions):
            self.decode_has_read()

    def owe_for(self, body: bytes) -> None:
        """The handle of a whole answer."""
        if isinstance(self.drive.state, Collecting) and self.drive.state.status == 200:
            self.owe(body)

    def owe(self, body: bytes) -> None:
        with contextlib.suppress(ValueError):
            given = json.loads(body)["kv_transfer_params"]
            if given is not None:
                self.owed[given["remote_request_id"]] = "d"

    # -- what holds for every turn

    def check(self) -> None:
        drive = self.drive
        self.check_answer(drive)
        released = [name for name, _ in drive.released]
        back = [g.taken.held for g in drive.all(GiveBack)]
        filed = [s.branch.held for s in drive.all(Settle) if s.branch.held is not None]
        assert len(released) == len(set(released)), "a handle was released twice"
        assert len(back) <= 1
        assert None not in back
        assert len(drive.all(Settle)) <= 1
        assert not (back and drive.all(Lost)), "a handle went back, and was then noted as lost"
        for name in ("dropped", OLD, *self.owed):
            places = [name in released, bool(back) and name == OLD, any(f.handle.request_id == name for f in filed)]
            assert sum(places) <= 1, f"{name} went to several places"
            if name in self.owed:
                assert sum(places) == 1, f"{name} stays pinned and no one knows"
        if OLD in self.read:
            assert not back, "a handle that may have been read went back"
            assert not any(f.handle.request_id == OLD for f in filed)
        assert drive.turn.spare is None or drive.all(Settle)

    @staticmethod
    def check_answer(drive: Drive) -> None:
        order = kinds(drive.actions)
        assert order.count("Record") == 1
        assert order.count("Respond") == 1 or (drive.report.error == "client_gone" and "Send" not in order)
        if "Respond" in order:
            assert "Send" not in order[: order.index("Respond")]
        assert set(order[order.index("Record") + 1 :]) <= {"Respond", "Send"}
        assert b"remote_" not in drive.sent
        calls = [need for need in drive.needs if isinstance(need, Call | Open)]
        assert drive.report.retries < len(calls) or not calls


REQUESTS = [
    facts(messages=MESSAGES),
    STREAMED,
    facts(messages=MESSAGES, stream=True, stream_options={"include_usage": True}),
    facts(messages=MESSAGES, n=2),
    facts(messages=MESSAGES, prompt_logprobs=1, stream=True),
    facts(messages=[*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}]),
    facts({"model": "m", "prompt": list(PROMPT)}, Endpoint.COMPLETIONS),
    facts({"model": "m", "messages": MESSAGES, "max_tokens": 9}, Endpoint.MESSAGES),
    facts({"model": "m", "input": MESSAGES}, Endpoint.RESPONSES),
]


class ConnectorJourney(Journey):
    """The same over engines some of which run our connector, with a handle that is shared. What becomes of stock handles is
    `Journey`'s; here each turn says once that it is done with the shared one, and every lease is filed or ended."""

    def setting(self, urls: list[str], renders: bool, taken: Taken, identity: Identity | None) -> None:
        engines = [
            engine(url, renders=renders, connector=self.draw(st.sampled_from([1, 1, None])), streams_handles=True)
            for url in urls
        ]
        if taken.held is not None and taken.branch is not None:
            left = leased(OLD)
            on_file = msgspec.structs.replace(taken.branch, held=left)
            taken = msgspec.structs.replace(taken, branch=on_file, held=left)
        self.taken = taken if identity is not None else Taken()
        on = Fleet(engines)
        on.releases.add(Holder(D1), ["due"])
        self.drive = Drive(
            taken,
            request=self.draw(st.sampled_from(REQUESTS)),
            on=on,
            identity=identity,
            route=self.draw(st.sampled_from([None, None, *Route])),
            local_max_tokens=self.draw(st.sampled_from([0, 100])),
            reuse=self.draw(st.sampled_from([True, True, True, False])) if taken.held is None else True,
        )

    def sent_to_prefill(self, call: Call, *, unread: bool) -> None:
        """A shared handle may be read twice."""
        body = json.loads(call.body)
        given = body["kv_transfer_params"]
        said, proven = given.get("backhaul"), "prompt_token_ids" in given or isinstance(body.get("prompt"), list)
        if call.engine.connector is None:
            assert said is None
            assert "remote_request_id" not in given or proven, "an unproven handle went to a stock P"
        elif "remote_request_id" in given:
            assert "digests" in said or (said == {"version": 1, "proof": "tokens"} and proven)

    def answer(self) -> None:
        need = self.drive.need
        if isinstance(need, Call) and need.leg is Leg.PREFILL and self.draw(st.booleans()):
            why = self.draw(st.sampled_from([None, "local_hit", "diverged", "expired", "read_failed", "odd"]))
            account = {"prompt": len(PROMPT), "local": 0, "verified": 0, "pulled": 0 if why else 96, "why": why}
            self.sent_to_prefill(need, unread=False)
            given = json.loads(prefilled(self.new("p")).body)
            if need.engine.connector:
                given["kv_transfer_params"]["backhaul"] = {"version": 1, "account": account}
            self.drive.feed(Answered(200, JSON, encoded(given)))
        elif (
            isinstance(need, Call)
            and need.leg is Leg.DECODE
            and "kv_transfer_params" in json.loads(need.body)
            and need.engine.connector
            and self.draw(st.booleans())
        ):
            name, self.reading = self.the_handle(), need
            self.decode_has_read()
            self.drive.feed(Answered(200, JSON, whole(kv_transfer_params={**params(name), "backhaul": says()}).data))
            self.leases.add(name)
        elif isinstance(need, Read) and self.reading.engine.connector and self.draw(st.booleans()):
            name = self.the_handle()
            left = {**params(name), "backhaul": says()}
            streams = isinstance(self.drive.state, Relaying)
            self.drive.feed(
                sse({**finish(name), "kv_transfer_params": left}) if streams else whole(kv_transfer_params=left)
            )
            self.leases.add(name)
        else:
            super().answer()

    def run(self) -> None:
        self.leases: set[str] = set()
        super().run()

    def check(self) -> None:
        drive = self.drive
        self.check_answer(drive)
        done = [
            action for kind in (GiveBack, Lost, Settle) for action in drive.all(kind) if action.taken.held is not None
        ]
        assert len(done) == (self.taken.held is not None), "a turn says once that it is done with a shared handle"
        assert OLD not in [lease.id for lease in drive.all(EndLease)], "what others may have is the ledger's to release"
        ended = [lease.id for lease in drive.all(EndLease)]
        filed = {s.branch.held.handle.request_id for s in drive.all(Settle) if s.branch.held is not None}
        assert filed.isdisjoint(ended)
        asked = [need for need in drive.needs if isinstance(need, Open | Call) and b'"due"' in need.body]
        on_the_way = drive.fleet.releases.take(Holder(D1)) == ("due",)
        assert on_the_way or asked or "due" in ended, "a lease that was due is forgotten"


@settings(max_examples=6 * settings().max_examples)
@given(st.data())
def test_every_turn_of_our_connector_is_done_with_its_handle_once(data: st.DataObject) -> None:
    ConnectorJourney(data).run()


@settings(max_examples=6 * settings().max_examples)
@given(st.data())
def test_every_turn_answers_once_and_accounts_for_every_handle(data: st.DataObject) -> None:
    Journey(data).run()
