"""Accounts of what each decode engine keeps, in tokens and by handle, ordered by when a handle is least expected to be used."""

from __future__ import annotations

import msgspec

from ..ledger.deadlines import CalendarQueue
from ..ledger.records import Held, Key

DEFAULT_SHARE = 0.5
"""Of D's KV cache, where no budget is given."""
NOBODY = Key("", "", "", "")


class RetainedHandle(msgspec.Struct, eq=False, gc=False):
    """Entry of one handle. There are as many as there are live conversations: what is added here is added to each of them."""

    held: Held | None
    """`None` when it has ended."""
    key: Key
    tokens: int
    deadline: float
    seen: float
    patience_s: float
    resumes: float = 0.0
    """When an announced pause ends."""
    busy: int = 0
    """Turns that have taken it."""

    def expected_until(self, now: float) -> float:
        if self.resumes > now:
            return now - (self.resumes - now) + self.patience_s
        return max(self.seen, self.resumes) + self.patience_s

    def look_again(self, now: float) -> None:
        """Moves its place to what is expected now, which changes none of what will be."""
        if self.resumes > now:
            self.seen = now
        else:
            self.seen, self.resumes = max(self.seen, self.resumes), 0.0


def place_of(kept: RetainedHandle) -> float:
    """Until when it was expected to be used as of `seen`: under this it is in the order."""
    seen, resumes = kept.seen, kept.resumes
    return seen - (resumes - seen) + kept.patience_s if resumes > seen else seen + kept.patience_s


def _awaited(kept: RetainedHandle) -> float | None:
    return None if kept.held is None else place_of(kept)


def deadline_of(kept: RetainedHandle) -> float | None:
    return None if kept.held is None else kept.deadline


class DecodeAccount:
    """Ledger account of one decode engine, in tokens. Whoever has the engine's `Retention` holds the lock."""

    def __init__(self) -> None:
        self.capacity: int | None = None
        self.block_size = 1
        self.kept = 0
        self.prompts = 0
        self.answers = 0
        self.sent = 0
        """Of the prompts, those that are there."""
        self.scale = 1.0
        """What the engine really keeps for us, of what our handles add up to."""
        self.others = 0
        """Kept for others, as far as is known."""
        self.handles: dict[str, RetainedHandle] = {}
        """By request id."""
        self.order = CalendarQueue(_awaited)
        """By when they are least expected to be used any more."""
        self.known = False
        """It is one of the fleet's engines. Of another the account ends with what it counts."""

    def whole_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size) * self.block_size

    @property
    def empty(self) -> bool:
        return not (self.handles or self.prompts or self.answers)

    def budget(self, given: int | None) -> int | None:
        """Tokens that may be kept: those that are configured (`given`), else a share of the capacity, where it is known."""
        return given if given is not None or self.capacity is None else int(self.capacity * DEFAULT_SHARE)

    @property
    def own(self) -> float:
        return self.kept * self.scale

    @property
    def in_use(self) -> float:
        return self.own + self.others + self.prompts + self.answers
