"""Cache budget with eviction: counts what decode engines keep for this router's conversations, and gives up what is too much.

Blocks that a decode engine (D) keeps are blocks that its requests cannot have. Two limits hold for every D whose capacity is
known, checked when a turn is sent there and when one has left something there:

- the *budget*: no more than so many tokens are kept for conversations that may go on;
- *room*: what is kept, what runs and what is about to run fit into D's KV cache together.

What is given up first is what is least expected to be used. A conversation is expected to be used until its last sign of life
(a turn, a renewal) plus its *patience*: `one_shot_s`, doubled with every turn that it has had and once for having a name,
three times at most. While an announced pause lasts, it counts as if it had been silent for as long as the pause still lasts.
The one whose time ends first goes first.

Sizes are of whole blocks, by handle: blocks that two histories have in common count twice, until the engine has said how much
it really keeps (`note_kept`), for other routers too; from then on what this router counts is scaled to that.

The ledger is not asked: this class is told of every handle that is filed, taken and dropped, whatever keeps the ledger. All
methods take a lock, none awaits, and a turn costs a few dictionary and heap operations, however many conversations there are.

Longer than most modules, because the accounts and the rules that read them change together.
"""

from __future__ import annotations

import enum
import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from ..ledger.indexes import CalendarQueue
from ..ledger.records import Branch, Held, Key, Taken

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


_LEAST_SHARE = 0.25
"""Of the budget, which a router may use whatever others keep there."""
_DOUBLINGS = 3
_LOOK_EVERY_S = 5.0
_ANSWER = 256
"""Tokens of an answer, before any was seen."""

Name = tuple[str, str]
"""A handle's (`Held.name`)."""


class Cause(enum.StrEnum):
    """Reason of an eviction, or of any other end of a handle."""

    SUPERSEDED = "superseded"
    """The conversation's next turn has left its own."""
    READ = "read"
    """A prefill engine was sent it; on stock engines that ends it."""
    ENDED = "ended"
    """The conversation has ended, or the ledger made room for others."""
    EXPIRED = "expired"
    UNUSABLE = "unusable"
    """Nobody can read it any more: its engine has restarted, or has let go of it by itself."""
    FLUSHED = "flushed"
    BUDGET = "budget"
    """More was kept than the budget."""
    ROOM = "room"
    """A turn needed the blocks."""


class Victim(msgspec.Struct, frozen=True):
    """Evicted handle. It is out of the accounts, and still to be dropped from the ledger and released."""

    key: Key
    held: Held
    cause: Cause
    with_turn: bool = False
    """A lease that is being released by the turn that needs the room."""


class Reserved(NamedTuple):
    """Reservation: what a turn is expected to need on a decode engine while it runs, in tokens."""

    decode: str
    prompt: int
    answer: int
    sent: bool
    """It is there; else it is still being prefilled."""


class Retention:
    """Cache budget with eviction: counts, and chooses. Give `take_due` to whoever can drop and release."""

    def __init__(self, budget: int | None = None, one_shot_s: float = 60.0) -> None:
        """`budget`: tokens per decode engine; `None` for `DEFAULT_SHARE` of what each has."""
        self.configure(budget, one_shot_s)
        self._decodes: dict[str, DecodeAccount] = {}
        self._deadlines = CalendarQueue(deadline_of)
        self._due: list[Victim] = []
        self._answer = float(_ANSWER)
        self._now = 0.0
        self._looked = -math.inf
        self._released: Counter[Cause] = Counter()
        self._lock = threading.Lock()

    def configure(self, budget: int | None, one_shot_s: float) -> None:
        """What counts from the next turn on."""
        self._given_budget = budget
        self._patience_s = tuple(one_shot_s * 2**doublings for doublings in range(_DOUBLINGS + 1))

    def __repr__(self) -> str:
        kept = ", ".join(f"{url}: {self.retained(url):,}" for url in sorted(self._decodes))
        return f"<Retention {len(self)} handles; tokens {{{kept}}}>"

    def __len__(self) -> int:
        """Handles that are kept."""
        return sum(len(account.handles) for account in tuple(self._decodes.values()))

    def names(self) -> frozenset[Name]:
        """Of the handles that are kept."""
        with self._lock:
            return frozenset((url, name) for url, account in self._decodes.items() for name in account.handles)

    def know(self, decode: str, capacity: int | None, block_size: int | None) -> None:
        """What an engine says of its KV cache, in tokens; nothing is given up for room where it does not say."""
        with self._lock:
            account = self._of(decode)
            account.capacity, account.block_size, account.known = capacity, block_size or 1, True

    def remove(self, decode: str) -> None:
        """The engine is none of the fleet's any more: its account ends with the last handle and the last turn there."""
        with self._lock:
            if (account := self._decodes.get(decode)) is not None:
                account.known = False
                self._close_if_unknown(decode, account)

    # --- what is kept

    def retained(self, decode: str) -> int:
        """Tokens that a decode engine keeps for conversations that may go on: this router's, and, as far as the engine has said
        so, others'."""
        account = self._decodes.get(decode)
        return round(account.own) + account.others if account else 0

    def budget(self, decode: str) -> int | None:
        """`None` where there is none: it is not configured, and the engine does not say how much it has."""
        account = self._decodes.get(decode)
        return self._given_budget if account is None else account.budget(self._given_budget)

    def free(self, decode: str) -> int | None:
        """Tokens that nothing is expected to use: below 0 where turns wait for others. `None` where the engine does not say how
        much it has."""
        account = self._decodes.get(decode)
        return None if account is None or account.capacity is None else account.capacity - round(account.in_use)

    @property
    def released(self) -> Mapping[Cause, int]:
        """How many handles have ended, by cause."""
        with self._lock:
            return dict(self._released)

    # --- what happens to handles

    def took(self, taken: Taken) -> None:
        """The ledger has handed out a handle, or dropped some."""
        with self._lock:
            if taken.held is not None and (kept := self._find(taken.held.name)) is not None:
                kept.busy += 1
            self._forget(taken.drop, Cause.UNUSABLE)

    def read(self, held: Held) -> None:
        """An engine was sent a handle that reading uses up."""
        with self._lock:
            self._forget((held,), Cause.READ)

    def gave_back(self, taken: Taken, dropped: Iterable[Held]) -> None:
        with self._lock:
            self._done(taken.held)
            self._forget(dropped, Cause.ENDED)

    def lost(self, taken: Taken, dropped: Iterable[Held]) -> None:
        with self._lock:
            self._done(taken.held)
            if taken.held is not None and not taken.held.shared:
                self._forget((taken.held,), Cause.UNUSABLE)
            self._forget(dropped, Cause.UNUSABLE)

    def settled(self, key: Key, taken: Taken, branch: Branch, dropped: Iterable[Held], now: float) -> None:
        """The ledger has filed `branch`, unless its handle is among those that it has dropped. Gives up what is too much by
        now."""
        dropped = tuple(dropped)
        left = branch.held
        if left is not None and any(one.name == left.name for one in dropped):
            left = None
        with self._lock:
            self._now = now
            before = taken.held
            if before is not None and (kept := self._find(before.name)) is not None:
                used_up = kept.busy and not before.shared
                self._done(before)
                if used_up and (left is None or left.name != before.name):
                    self._forget((before,), Cause.SUPERSEDED)
            self._forget(dropped, Cause.SUPERSEDED)
            self._expire(now)
            if left is not None:
                doublings = taken.turn - branch.by_history
                self._file(taken.key or key, left, self._patience_s[min(doublings, _DOUBLINGS)], now)

    def dropped(self, held: Iterable[Held], cause: Cause = Cause.ENDED) -> None:
        with self._lock:
            self._forget(held, cause)

    def renewed(self, deadlines: Mapping[Name, float], now: float) -> None:
        """These are kept until then, and still wanted."""
        with self._lock:
            self._now = now
            for name, deadline in deadlines.items():
                if (kept := self._find(name)) is not None:
                    self._watch(kept, deadline)
                    self._seen(kept, self._decodes[name[0]], now, kept.resumes)

    def paused(self, names: Iterable[Name], now: float, pause_s: float) -> None:
        """Their conversation goes on after so many seconds, and hardly before."""
        with self._lock:
            self._now = now
            for name in names:
                if (kept := self._find(name)) is not None:
                    self._seen(kept, self._decodes[name[0]], now, now + pause_s)

    # --- room for turns

    def answer_of(self, limit: int | None) -> int:
        """Tokens that an answer is expected to have at most: twice the mean of those before, or the request's own limit."""
        return min(round(2 * self._answer), limit or 2**31)

    def note_answer(self, tokens: int) -> None:
        self._answer += (tokens - self._answer) / 32

    def reserve(
        self, decode: str, prompt: int, answer: int, *, sent: bool = True
    ) -> tuple[Reserved, tuple[Victim, ...]]:
        """A turn goes there, now (`sent`) or soon, that needs so many tokens beyond what is kept for it already. Gives up what is
        in its way."""
        with self._lock:
            account = self._of(decode)
            needed = account.whole_blocks(prompt + answer)
            answer = min(answer, needed)
            reserved = Reserved(decode, needed - answer, answer, sent)
            account.prompts += reserved.prompt
            account.sent += reserved.prompt * sent
            account.answers += reserved.answer
            return reserved, self._keep_to_limits(account, with_turn=True)

    def unreserve(self, reserved: Reserved) -> None:
        with self._lock:
            account = self._of(reserved.decode)
            account.prompts -= reserved.prompt
            account.sent -= reserved.prompt * reserved.sent
            account.answers -= reserved.answer
            self._close_if_unknown(reserved.decode, account)

    @property
    def due(self) -> bool:
        """Whether `take_due` has something."""
        return bool(self._due)

    def take_due(self) -> tuple[Victim, ...]:
        """What was given up since the last call, in the caller's hands from now on."""
        with self._lock:
            due, self._due = tuple(self._due), []
            return due

    # --- what engines say

    def to_look_at(self, now: float) -> tuple[str, ...]:
        """Decode engines that should be asked what they keep: every few seconds, those where it begins to matter."""
        if now - self._looked < _LOOK_EVERY_S:
            return ()
        with self._lock:
            self._looked = now
            self._expire(now)
            return tuple(
                url
                for url, account in self._decodes.items()
                if (budget := self.budget(url)) is not None and account.kept > budget / 2
            )

    def running(self, decode: str) -> int:
        """Prompt tokens of turns that were sent there and have not ended."""
        account = self._decodes.get(decode)
        return account.sent if account else 0

    def note_kept(self, decode: str, tokens: int) -> None:
        """What an engine keeps in all, as it says itself, for whomever."""
        with self._lock:
            if (account := self._decodes.get(decode)) is None:
                return  # removed while it was asked
            account.others = max(0, tokens - account.kept)
            account.scale = min(1.0, max(tokens, 1) / account.kept) if account.kept else 1.0
            self._keep_to_limits(account)

    # --- with the lock held

    def _of(self, decode: str) -> DecodeAccount:
        account = self._decodes.get(decode)
        if account is None:
            account = self._decodes[decode] = DecodeAccount()
        return account

    def _find(self, name: Name) -> RetainedHandle | None:
        account = self._decodes.get(name[0])
        return None if account is None else account.handles.get(name[1])

    def _file(self, key: Key, held: Held, patience_s: float, now: float) -> None:
        account, name = self._of(held.decode), held.handle.request_id
        kept = account.handles.get(name)
        if kept is None:
            tokens = account.whole_blocks(held.handle.tokens)
            kept = RetainedHandle(held, key, tokens, held.deadline, now, patience_s)
            account.handles[name] = kept
            account.kept += tokens
            account.order.put(kept, place_of(kept))
            self._deadlines.put(kept, kept.deadline)
        else:
            kept.held, kept.key = held, key
            self._watch(kept, held.deadline)
            self._seen(kept, account, now, 0.0, patience_s)
        self._keep_to_limits(account)

    def _watch(self, kept: RetainedHandle, deadline: float) -> None:
        before, kept.deadline = kept.deadline, deadline
        if deadline != before:
            self._deadlines.void(before)
            self._deadlines.put(kept, deadline)

    @staticmethod
    def _seen(
        kept: RetainedHandle, account: DecodeAccount, now: float, resumes: float, patience_s: float | None = None
    ) -> None:
        """A sign of life; a pause until `resumes` follows."""
        before = place_of(kept)
        kept.seen, kept.resumes = now, resumes
        kept.patience_s = kept.patience_s if patience_s is None else patience_s
        if (place := place_of(kept)) != before:
            account.order.void(before)
            account.order.put(kept, place)

    def _done(self, held: Held | None) -> None:
        kept = self._find(held.name) if held is not None else None
        if kept is not None and kept.busy:
            kept.busy -= 1

    def _forget(self, dropped: Iterable[Held], cause: Cause) -> None:
        for held in dropped:
            self._end(held.name, cause)

    def _end(self, name: Name, cause: Cause) -> None:
        decode, request_id = name
        account = self._decodes.get(decode)
        kept = None if account is None else account.handles.pop(request_id, None)
        if account is None or kept is None:
            return
        place, kept.held, kept.key = place_of(kept), None, NOBODY  # its places in the lists are void, and keep nothing
        account.order.void(place)
        self._deadlines.void(kept.deadline)
        account.kept -= kept.tokens
        self._released[cause] += 1
        self._close_if_unknown(decode, account)

    def _close_if_unknown(self, decode: str, account: DecodeAccount) -> None:
        if not account.known and account.empty and self._decodes.get(decode) is account:
            del self._decodes[decode]

    def _expire(self, now: float) -> None:
        """What engines have let go of, though nobody has told: as when another router's turn has read it."""
        while (kept := self._deadlines.take(now)) is not None:
            if kept.held is not None:
                self._end(kept.held.name, Cause.EXPIRED)

    def _keep_to_limits(self, account: DecodeAccount, *, with_turn: bool = False) -> tuple[Victim, ...]:
        over = account.in_use - account.capacity if account.capacity is not None else 0.0
        cause = Cause.ROOM if over > 0 else Cause.BUDGET
        if (budget := account.budget(self._given_budget)) is not None:
            over = max(over, account.own - max(budget - account.others, budget * _LEAST_SHARE))
        return self._give_up(account, over / account.scale, cause, with_turn) if over > 0 else ()

    def _give_up(self, account: DecodeAccount, tokens: float, cause: Cause, with_turn: bool) -> tuple[Victim, ...]:
        victims: list[Victim] = []
        busy: list[RetainedHandle] = []
        order = account.order
        while tokens > 0 and (kept := order.take(math.inf)) is not None:
            held = kept.held
            if held is None:
                continue
            if kept.busy:
                busy.append(kept)
            elif kept.expected_until(self._now) > place_of(kept):  # the end of a pause has come nearer
                kept.look_again(self._now)
                order.put(kept, place_of(kept))
            else:
                victims.append(Victim(kept.key, held, cause, with_turn and held.leased))
                tokens -= kept.tokens
                self._end(held.name, cause)
        for kept in busy:
            order.put(kept, place_of(kept))
        self._due += victims
        return tuple(victims)
