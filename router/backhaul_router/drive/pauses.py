"""A long pause ahead: what is held for a conversation is kept until its end, or given back at once where it cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..errors import LeaseError
from ..identity.hints import checked_pause, why_not_kept
from ..ledger.protocol import arrived
from ..report import Reason

if TYPE_CHECKING:
    from .router import Router


class Paused(msgspec.Struct, frozen=True, kw_only=True):
    """What came of announcing a pause."""

    kept_s: float | None
    """Seconds for which everything that is held stays usable; `None` where nothing is held any more."""
    released: int = 0
    """Handles that were given back."""
    why: str | None = None
    """Why they were, or why there was nothing to keep."""


async def pause(router: Router, conversation: str, seconds: float, tenant: str = "") -> Paused:
    """Raises `ValueError` for what is no pause. A lease that cannot be renewed is given back, and the reason says so."""
    pause_s = checked_pause(seconds)
    held = await arrived(router.ledger.held_for(conversation, tenant))
    if not held:
        return Paused(kept_s=None, why="nothing is held for this conversation")
    now = router.clock()
    refused = {
        one.name: why
        for one in held
        if (why := why_not_kept(pause_s, router.config, renewable=one.leased, remaining_s=one.deadline - now))
    }
    short = [one for one in held if one.name not in refused and one.deadline - now < pause_s]
    if short:
        try:
            await router.renew(conversation, pause_s + router.config.lease_margin_s, tenant)
        except LeaseError as error:
            refused |= {one.name: f"it could not be renewed: {error}" for one in short}
    await router.release_some(conversation, set(refused), Reason.EXPIRED, tenant)
    now = router.clock()
    held = await arrived(router.ledger.held_for(conversation, tenant))
    left = [one for one in held if one.deadline > now]
    router.retention.paused([one.name for one in left], now, pause_s)
    kept = [one.deadline - now for one in left]
    return Paused(
        kept_s=min(kept, default=None), released=len(refused), why="; ".join(sorted(set(refused.values()))) or None
    )
