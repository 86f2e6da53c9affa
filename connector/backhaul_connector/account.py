"""What one turn's tokens cost on an engine, as its answer says under `backhaul.account`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PrefillAccount:
    """On P. All counts are tokens of the prompt."""

    prompt: int
    offered: int = 0
    """What the handle's locators cover."""
    verified: int = 0
    """The leading whole blocks that both prompts have in common."""
    local: int = 0
    """From P's own prefix cache."""
    pulled: int = 0
    """Read from D."""
    bytes: int = 0
    read_ms: float | None = None
    claim_ms: float | None = None
    why: str | None = None
    """Why nothing was pulled."""

    def fields(self) -> dict[str, object]:
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
            "why": None if self.pulled else self.why,
        }


@dataclass
class DecodeAccount:
    """On D. All counts are tokens."""

    prompt: int
    received: int = 0
    """Of the prompt, read from P."""
    local: int = 0
    """Of the prompt, from D's own prefix cache."""
    why: str | None = None
    """Why nothing was received though P's handle was there."""

    def fields(self, generated: int) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "received": self.received,
            "local": self.local,
            "computed": max(0, self.prompt - self.local - self.received),
            "generated": generated,
            "why": self.why,
        }
