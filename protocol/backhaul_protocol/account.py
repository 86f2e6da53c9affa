"""Per-request accounting: what one turn's tokens cost an engine, as its answer says under `backhaul.account`."""

from __future__ import annotations

import msgspec

from .why import Why


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """As the router reads it. Counts are tokens; P and D each fill in their own part."""

    prompt: int | None = None
    offered: int | None = None
    verified: int | None = None
    local: int | None = None
    pulled: int | None = None
    computed: int | None = None
    bytes: int | None = None
    read_ms: float | None = None
    claim_ms: float | None = None
    received: int | None = None
    generated: int | None = None
    why: Why | None = None
    unknown_why: str | None = None
    """No engine says this: it is a `why` that this release does not know."""


class PrefillAccount(msgspec.Struct):
    """P's, as it fills in. All counts are tokens of the prompt."""

    prompt: int
    offered: int = 0
    """What the handle's digests cover."""
    verified: int = 0
    """The leading part that both prompts have in common."""
    local: int = 0
    """From P's own prefix cache."""
    pulled: int = 0
    """Read from D."""
    bytes: int = 0
    """Read from D."""
    read_ms: float | None = None
    claim_ms: float | None = None
    """How long D took to confirm that the blocks are there and the right ones."""
    why: Why | None = None
    """Why nothing was pulled."""

    def to_dict(self) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "offered": self.offered,
            "verified": self.verified,
            "local": self.local,
            "pulled": self.pulled,
            "computed": max(0, self.prompt - self.local - self.pulled),
            "bytes": self.bytes,
            "read_ms": self.read_ms,
            "claim_ms": self.claim_ms,
            "why": None if self.pulled or self.why is None else str(self.why),
        }


class DecodeAccount(msgspec.Struct):
    """D's, as it fills in. All counts are tokens."""

    prompt: int
    received: int = 0
    """Of the prompt, read from P."""
    local: int = 0
    """Of the prompt, from D's own prefix cache."""
    why: Why | None = None
    """Why nothing was received though P's handle was there."""

    def to_dict(self, generated: int) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "received": self.received,
            "local": self.local,
            "computed": max(0, self.prompt - self.local - self.received),
            "generated": generated,
            "why": None if self.why is None else str(self.why),
        }
