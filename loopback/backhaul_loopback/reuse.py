"""Per-request state: what the connector knows about one request: what was offered, proven and read, and why it was not more."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from backhaul_connector.claims import Target
from backhaul_protocol import VERSION
from backhaul_protocol.leases import LeaseAnswer
from backhaul_protocol.messages import Asked
from backhaul_protocol.why import Why


@dataclass(eq=False)
class Grant:
    """D holds the lease for this reader."""

    claim: str
    granted: float
    ends: float
    """On the reader's clock, counted from before it asked: no later than D's own count."""
    returned: bool = False


@dataclass(eq=False)
class Reuse:
    asked: Asked = field(default_factory=lambda: Asked(version=VERSION))
    named: bool = False
    """The request brought a `backhaul` object."""
    is_prefill_leg: bool = False
    retain: bool = False
    """D keeps the request's blocks."""
    offered: int = 0
    """Tokens that the handle covers."""
    located: int = 0
    """Leading whole blocks that the handle has in common with the prompt, by what D published."""
    by_tokens: bool = False
    """The router vouches for the handle, which a stock D made."""
    holder: Target | None = None
    claiming: asyncio.Task[None] | None = None
    grant: Grant | None = None
    claim_s: float = 0.0
    verified: int = 0
    """Tokens of the located blocks, or those that the router vouches for."""
    why: Why | None = None
    operated: LeaseAnswer | None = None
    """What came of the lease operations that the request asked for."""
