"""What a worker's application asks of the other workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..drive.router import Request
from .metrics_page import MetricsPage, Page
from .team import Team, said
from .team_admin import TeamAdmin
from .team_reports import TeamRecord, TeamResponses
from .worker_link import Said, Whom

if TYPE_CHECKING:
    from .asgi import App


class Colleagues:
    """Of one application."""

    def __init__(self, team: Team, app: App) -> None:
        self._team = team
        self._metrics = app.metrics
        self.admin = TeamAdmin(team, app)
        self.record = TeamRecord(team, app)
        self._responses = TeamResponses(team, app.router.responses)
        team.does("metrics", self._do_metrics)

    @property
    def name(self) -> Mapping[str, Any]:
        """Who answers."""
        return {"worker": self._team.number}

    async def learn(self, request: Request) -> None:
        """Makes known here what the request refers to, if any worker knows it. Raises `TeamError`."""
        await self._responses.learn(request)

    async def metrics_page(self, metrics: MetricsPage, accept: str, *, on_loopback: bool) -> Page:
        """Every worker's series. Raises `TeamError`."""
        if (refusal := metrics.refusal(on_loopback=on_loopback)) is not None:
            return refusal
        from .team_metrics import page

        answers = await self._team.ask("metrics", Whom.ALL)
        return 200, *page(accept, answers.answers, answers.workers)

    async def _do_metrics(self, _: object) -> Said:
        from .team_metrics import families_of

        registry = self._metrics.registry if self._metrics is not None else None
        return said(families_of(registry) if registry is not None else [])
