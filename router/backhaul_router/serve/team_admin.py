"""The operator's endpoints where a router has several workers.

A request reaches one of them. What it changes is changed by that one first, and by the others when it went well there; an engine
is removed by all at once, since that takes as long as its turns. The parent passes it on, and keeps the engines for workers that
are started later. The ledger is shared, so that a flush is everybody's.

    GET /backhaul/admin/workers    the workers, with their process ids
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..config import RouterConfig
from ..drive.router import Router
from ..fleet.engine import Role
from .admin import MAX_WAIT_S, PATH, Answer, Query
from .team import Team, said
from .worker_link import RELOAD, Answers, Member, Said, Whom

if TYPE_CHECKING:
    from .asgi import App

_CHANGE = "change"
_CHANGE_S = 60.0
"""Engines are asked what they are."""
_REMOVE_S = 30.0
_CHANGES = {
    ("POST", "/engines"): _CHANGE,
    ("POST", "/engines/drain"): _CHANGE,
    ("DELETE", "/engines"): _CHANGE,
    ("POST", "/reload"): RELOAD,
}
_BROKEN = Answer.error(500, "an internal error of the worker; its log has the details", "internal_error")
_FAILED = [_BROKEN.status, _BROKEN.value]
_STATES = ("removing", "down", "absent", "failing", "draining", "available")
"""From the least able to take a turn."""


def with_members(config: RouterConfig, members: Sequence[Member]) -> RouterConfig:
    """With those engines, where there are any."""
    if not members:
        return config
    of = {role: tuple(one.url for one in members if one.role == role) for role in Role}
    return dataclasses.replace(config, prefill=of[Role.PREFILL], decode=of[Role.DECODE])


def drain(router: Router, members: Iterable[Member]) -> None:
    """As others drain them."""
    for one in members:
        if one.draining and router.fleet.get(one.url) is not None:
            router.fleet.drain(one.url)


class TeamAdmin:
    """Answers for all workers. Whoever asks has been let in."""

    def __init__(self, team: Team, app: App) -> None:
        self._team = team
        self._app = app
        team.does("engines", self._do_list)
        for kind in (_CHANGE, RELOAD):
            team.does(kind, self._do_change, if_it_fails=_FAILED)

    async def answer(self, method: str, path: str, query: Query, body: bytes) -> Answer:
        """The answer to a client that is not refused. Raises `TeamError`."""
        at = (method, path.removeprefix(PATH))
        if at == ("GET", "/workers"):
            workers = (await self._team.ask("", Whom.NONE)).workers
            return Answer(200, {"workers": msgspec.to_builtins(workers), "answers": self._team.number})
        if at == ("GET", "/engines"):
            return listed(await self._team.ask("engines", Whom.ALL))
        if (kind := _CHANGES.get(at)) is None:
            return await self._app.admin.answer(method, path, query, body)
        removes = method == "DELETE"
        limit_s = _CHANGE_S + (_seconds(query) if removes else 0.0)
        whom = Whom.CHANGE_AT_ONCE if removes else Whom.CHANGE
        answers = await self._team.ask(kind, whom, [method, path, dict(query), body], limit_s)
        return changed(at, self._team.number, answers)

    async def _do_list(self, _: object) -> Said:
        return said((await self._app.admin.answer("GET", f"{PATH}/engines", {}, b"")).value["engines"])

    async def _do_change(self, what: list[Any]) -> Said:
        method, path, query, body = what
        answer = await self._app.admin.answer(method, path, query, body)
        members = self._members() if answer.status < 400 else None
        return said([answer.status, answer.value], good=_well(method, answer), members=members)

    def _members(self) -> list[Member]:
        router, reload = self._app.router, self._app.admin.reload
        leaving = reload.leaving if reload is not None else ()
        there = [one for one in router.fleet.engines if router.fleet.takes_part(one) and one.url not in leaving]
        draining = router.fleet.draining
        return [
            *(Member(one.role, one.url, one.url in draining) for one in there),
            *(Member(role, url) for url, role in router.absent.items()),
        ]


def changed(at: tuple[str, str], asked: int, answers: Answers) -> Answer:
    """What became of a change that worker `asked` was asked for."""
    by_worker = {worker: Answer(*one) for worker, one in answers.answers.items()}
    first = by_worker.get(asked)
    if first is not None and not _well(at[0], first):
        return first
    failed = {worker: one for worker, one in by_worker.items() if not _well(at[0], one)}
    if failed or answers.missing or first is None:
        whys = [f"worker {worker}: {one.value['error']['message']}" for worker, one in sorted(failed.items())]
        whys += [f"worker {worker} has not answered yet" for worker in answers.missing]
        return Answer.error(502, f"not by all workers, so ask again: {'; '.join(whys)}", "not_all_workers")
    done = [one for one in by_worker.values() if one.status < 400]
    if at == ("POST", "/engines/drain"):
        return Answer(200, _drained([one.value for one in done]))
    return first if first in done else next(iter(done), first)


def _well(method: str, answer: Answer) -> bool:
    """An engine that is to go and is not there has gone already."""
    return answer.status < 400 or (method == "DELETE" and answer.status == 404)


def _seconds(query: Query) -> float:
    with contextlib.suppress(KeyError, ValueError):
        if 0 <= (seconds := float(query["within_s"][-1])) <= MAX_WAIT_S:
            return seconds
    return _REMOVE_S  # any other number is refused


def _drained(said_by: Sequence[dict[str, Any]]) -> dict[str, Any]:
    numbers = {name: sum(one[name] for one in said_by) for name in ("in_flight", "handles")}
    return {**said_by[0], **numbers, "done": all(one["done"] for one in said_by)}


def listed(answers: Answers) -> Answer:
    """Calls and handles of all workers; the state is the worst that one of them sees, and `states` has each."""
    engines: dict[str, dict[str, Any]] = {}
    states: dict[str, dict[int, str]] = {}
    sums: dict[str, Counter[str]] = {}
    for worker, engines_of in sorted(answers.answers.items()):
        for one in engines_of:
            url = one["url"]
            if engines.get(url, {}).get("state", "absent") == "absent":
                engines[url] = one
            states.setdefault(url, {})[worker] = one["state"]
            sums.setdefault(url, Counter()).update({name: one.get(name, 0) for name in ("in_flight", "handles")})
    shown: list[dict[str, Any]] = []
    for url, one in engines.items():
        worst = min(states[url].values(), key=_STATES.index)
        counts: dict[str, Any] = {name: sums[url][name] for name in ("in_flight", "handles") if name in one}
        shown.append({**one, "state": worst, **counts})
        if len(set(states[url].values())) > 1:
            shown[-1]["states"] = states[url]
    missing = {"missing_workers": answers.missing} if answers.missing else {}
    return Answer(200, {"engines": shown, **missing})
