"""Whether a router can take turns: what a load balancer asks, which `/health` does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..drive.router import Router
from ..errors import ConfigError
from ..fleet.engine import Role


@dataclass(frozen=True)
class Readiness:
    """`reason` is `None` for a router that is ready. It names no engine: whoever asks may be anybody."""

    reason: str | None
    engines: Mapping[Role, Mapping[str, int]]

    @property
    def status(self) -> int:
        return 200 if self.reason is None else 503

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "ready": self.reason is None,
            "reason": self.reason,
            **{str(r): dict(n) for r, n in self.engines.items()},
        }


async def readiness(router: Router, *, stopping: bool) -> Readiness:
    """Asks the engines first, where nobody has yet, or where some have not answered for a while."""
    config = router.config
    configured = {Role.PREFILL: len(config.prefill), Role.DECODE: len(config.decode)}
    try:
        await router.connect()
    except ConfigError:
        nothing = {role: {"available": 0, "configured": number} for role, number in configured.items()}
        return Readiness("shutting down" if stopping else "the engines cannot be used; the log says why", nothing)
    fleet = router.fleet
    available = {role: sum(fleet.available(e) for e in fleet.engines if e.role is role) for role in Role}
    engines = {role: {"available": number, "configured": configured[role]} for role, number in available.items()}
    without = [str(role) for role, number in available.items() if not number]
    reason = f"no {' and no '.join(without)} engine is available" if without else None
    return Readiness("shutting down" if stopping else reason, engines)
