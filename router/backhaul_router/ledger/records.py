"""Value objects that a ledger keeps and gives: a conversation's key, its histories (branches) with the handles that D left for
them, and what a turn takes of them. No rules of filing: those are in `memory`."""

from __future__ import annotations

import os
from typing import NamedTuple

import msgspec

from ..report import Reason
from ..wire import Handle
from ..wire.exact_history import TokenHistory
from . import digests

UNOPENED = 0
"""Generation of a conversation that a turn is the first to file."""
INSTRUCTIONS = 1
"""Messages that agents of one kind have in common: a system prompt."""


class Key(NamedTuple):
    """Composite key of a conversation's state; nothing crosses any part of it."""

    tenant: str
    model: str
    cache_salt: str
    conversation: str


class Held(msgspec.Struct, frozen=True, gc=False):
    """Filed handle, with what the router knows of it."""

    handle: Handle
    decode: str
    """The decode engine that holds the blocks."""
    deadline: float
    """When the router stops using it: an own clock, below the engine's TTL."""
    tokens: int
    """Leading tokens of the branch's record whose KV the engine holds."""

    @property
    def leased(self) -> bool:
        """The engine runs our connector, and knows its leases by name."""
        return self.handle.lease is not None

    @property
    def shared(self) -> bool:
        """Reading does not use it up."""
        return self.handle.lease is not None and self.handle.lease.shared

    @property
    def name(self) -> tuple[str, str]:
        """What tells it from all others."""
        return self.decode, self.handle.request_id


class Branch(msgspec.Struct, frozen=True, gc=False):
    """One history of a conversation, as its last turn left it."""

    chain: bytes
    """Digests of the messages that the last turn was asked with, without its answer."""
    blocks: bytes
    """Digests of the tokens that D ran, prompt and answer, in whole blocks. Empty when the ids are not known."""
    block_size: int
    tokens: int
    """Tokens that D holds or held in its cache: prompt and answer."""
    message_bytes: int
    """Bytes of those messages, to estimate tokens from."""
    decode: str
    prefill: str | None
    held: Held | None
    missing: Reason | None = None
    """Why `held` is `None`."""
    prompt_tokens: int = 0
    """Those of `tokens` that were the prompt; 0 where they were not counted."""
    by_history: bool = False
    """Its conversation has no name of its own, and is found by what it says."""
    exact: TokenHistory | None = None
    """Where histories are kept exact, and the turn ended as it must for that."""
    number: int = msgspec.field(default_factory=lambda: int.from_bytes(os.urandom(7)))
    """Tells branches apart, those of other processes too."""


class Taken(msgspec.Struct, frozen=True):
    """Result of `take`: the branch that shares the longest history, its handle if it can be used, else why not."""

    generation: int = UNOPENED
    """Tells this conversation from a later one under the same key."""
    turn: int = 1
    """Counts the conversation's turns as they begin."""
    branch: Branch | None = None
    held: Held | None = None
    reason: Reason | None = None
    common: int = 0
    """Leading messages that the request shares with the branch's record."""
    drop: tuple[Held, ...] = ()
    """To be released."""
    forked_from: tuple[Key, int] | None = None
    """Key and generation of the parent conversation that the branch belongs to, where the request is the first one of a
    child that goes on from there. The parent keeps its branch."""
    flushes: int = 0
    """The ledger's count when the turn began: what it leaves after another flush may be KV of weights that are gone."""
    key: Key | None = None
    """The turn's, as the ledger keeps it: what keeps it beside the ledger keeps that one, not a copy of each turn."""

    @property
    def extends(self) -> bool:
        """Whether the request continues or repeats the branch: its whole record is how the request begins. Else it is
        an edit or another agent's, and nobody can tell which."""
        if self.branch is None or self.forked_from is not None:
            return False
        return self.common >= digests.count(self.branch.chain)

    @property
    def supersedes(self) -> bool:
        """Whether the branch is of no more use once the turn has left its own: it was continued, repeated, or edited behind
        its first message. What shares no more than that, such as a system prompt, may be another agent's."""
        return self.extends or (self.forked_from is None and self.common > INSTRUCTIONS)

    @property
    def diverged_at(self) -> int | None:
        """Index of the first message that differs from those on record."""
        if self.branch is None or self.common >= digests.count(self.branch.chain):
            return None
        return self.common
