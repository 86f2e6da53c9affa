"""Lease renewal (a lease: D's promise to keep a handle's blocks until a time), by hand or for a long pause that is announced.

What is held for a conversation is kept until the pause's end, or given back at once where it cannot be."""

from __future__ import annotations

import msgspec

from ..errors import LeaseError
from ..identity.hints import why_not_kept
from ..ledger.protocol import arrived
from ..report import Reason
from .services import Services


class Paused(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of announcing a pause."""

    kept_s: float | None
    """Seconds for which everything that is held stays usable; `None` where nothing is held any more."""
    released: int = 0
    """Handles that were given back."""
    why: str | None = None
    """Why they were, or why there was nothing to keep."""


async def renew(services: Services, conversation: str, ttl_s: float, tenant: str) -> float | None:
    """Seconds for which everything is usable at least, once engines have renewed it; `None` where there is nothing to renew.
    Raises `LeaseError` when an engine did not do it; those of the others are renewed all the same."""
    handles = services.handles
    held = [one for one in await arrived(handles.ledger.held_for(conversation, tenant)) if one.leased]
    if not held:
        return None
    renewal = await services.leases.renew(held, ttl_s)
    now, margin_s = services.clock(), services.config.lease_margin_s
    usable = {name: left - min(margin_s, left / 4) for name, left in renewal.remaining.items()}
    deadlines = {name: now + left for name, left in usable.items()}
    await arrived(handles.ledger.renewed(conversation, deadlines, now, tenant))
    handles.retention.renewed(deadlines, now)
    if renewal.failure is not None:
        raise renewal.failure
    return min((left for left in usable.values() if left), default=None)


async def pause(services: Services, conversation: str, pause_s: float, tenant: str) -> Paused:
    """A lease that cannot be renewed is given back, and the reason says so."""
    config, handles = services.config, services.handles
    held = await arrived(handles.ledger.held_for(conversation, tenant))
    if not held:
        return Paused(kept_s=None, why="nothing is held for this conversation")
    now = services.clock()
    refused = {
        one.name: why
        for one in held
        if (why := why_not_kept(pause_s, config, renewable=one.leased, remaining_s=one.deadline - now))
    }
    short = [one for one in held if one.name not in refused and one.deadline - now < pause_s]
    if short:
        try:
            await renew(services, conversation, pause_s + config.lease_margin_s, tenant)
        except LeaseError as error:
            refused |= {one.name: f"it could not be renewed: {error}" for one in short}
    expired = handles.ledger.drop_for(conversation, lambda one: one.name in refused, Reason.EXPIRED, tenant)
    await handles.end_now(expired)
    now = services.clock()
    held = await arrived(handles.ledger.held_for(conversation, tenant))
    left = [one for one in held if one.deadline > now]
    handles.retention.paused([one.name for one in left], now, pause_s)
    kept = [one.deadline - now for one in left]
    return Paused(
        kept_s=min(kept, default=None), released=len(refused), why="; ".join(sorted(set(refused.values()))) or None
    )
