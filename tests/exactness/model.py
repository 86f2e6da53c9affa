"""What a case of the exactness suite is made of: a conversation so far, what is asked next, and what may be reused for it.

A case knows nothing of engines but their block size. How many tokens it may reuse is a function of token ids alone.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from backhaul_bench.answers import CHAT
from backhaul_router.report import Proof, Reason, Route

Body = dict[str, Any]
Message = dict[str, Any]
Ids = Sequence[int]

STORY = "The cache keeps the keys and values of every token that the engine has run, block by block. "


@dataclass(frozen=True)
class World:
    """Where a case is played."""

    block: int
    """Tokens in a KV block."""
    threshold: int
    """Tokens: fewer than these are computed rather than read."""
    answer: int
    """Tokens of a first answer: enough for P to read it back."""
    mark: str
    """Text that no other play has: put at the beginning, it keeps plays from finding each other's KV."""

    def ids(self, count: int, seed: int = 0) -> list[int]:
        """A prompt of token ids that every model has, and no other play."""
        rng = random.Random(f"{self.mark} {seed}")
        return [rng.randrange(35, 125) for _ in range(count)]


@dataclass(frozen=True)
class Turn:
    """A turn that has been run."""

    body: Body
    prompt: list[int]
    message: Message
    """The answer, as an agent puts it into its history; empty on `/v1/completions`."""
    text: str
    token_ids: list[int]

    @property
    def ran(self) -> list[int]:
        """The tokens whose KV D has: the last one's is computed only when another follows."""
        return [*self.prompt, *self.token_ids][:-1]


@dataclass(frozen=True)
class Past(World):
    """A conversation so far, to which turns are added as they are run."""

    turns: list[Turn] = field(default_factory=list)

    @property
    def first(self) -> Turn:
        return self.turns[0]

    @property
    def last(self) -> Turn:
        return self.turns[-1]

    def history(self, question: str = "Second: ") -> list[Message]:
        """The last turn's messages and its answer, with the next question: the caller's own copy."""
        asked = [*self.last.body["messages"], self.last.message, {"role": "user", "content": question + STORY}]
        return copy.deepcopy(asked)


Rule = Callable[[Ids, Ids, int], int]
"""Tokens that may be reused of what D ran, for a prompt, at a block size."""


def common_blocks(ran: Ids, prompt: Ids, block: int) -> int:
    """The whole blocks with which both begin; P always computes the prompt's last token itself."""
    same = next((i for i, (a, b) in enumerate(zip(ran, prompt, strict=False)) if a != b), min(len(ran), len(prompt)))
    return min(same, len(prompt) - 1) // block * block


def nothing(ran: Ids, prompt: Ids, block: int) -> int:
    return 0


@dataclass(frozen=True)
class Expect:
    """How a turn must have run. `rule` says how much it reused, no more and no less."""

    route: Route
    reason: Reason | None = None
    rule: Rule = common_blocks


WARM = Expect(Route.WARM)


def cold(reason: Reason) -> Expect:
    return Expect(Route.COLD, reason, nothing)


def local(reason: Reason) -> Expect:
    return Expect(Route.LOCAL, reason, nothing)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request, made from the past of its conversation, or of the first one where it is another's."""

    body: Callable[[Past], Body]
    expect: Expect = WARM
    with_connector: Expect | None = None
    """Where the connector can prove more than token ids can."""
    own: Rule = common_blocks
    """What P's own prefix cache finds of a prompt that it has run before."""
    path: str = CHAT
    conversation: str = "one"
    status: int = 200
    leaves: bool = True
    """Whether the next turn continues this one; else it continues the turn before."""

    def expected(self, proof: Proof) -> Expect:
        return self.expect if proof is Proof.TOKENS else self.with_connector or self.expect


@dataclass(frozen=True)
class AtOnce:
    """Requests that run side by side, taking the ledger's handle in this order."""

    asks: tuple[Ask, ...]


@dataclass(frozen=True)
class Flush:
    """`Router.flush`, as before a weight update."""


@dataclass(frozen=True)
class Load:
    """A model name is pointed at one of the site's adapters, on every engine and without a restart."""

    name: str
    adapter: str


Step = Ask | AtOnce | Flush | Load


@dataclass(frozen=True, kw_only=True)
class Case:
    """A first turn, which is cold, and what follows."""

    name: str
    first: Callable[[World], Body]
    then: tuple[Step, ...]
    path: str = CHAT
    before: tuple[Load, ...] = ()
    needs: Literal["images", "adapters"] | None = None
    """What not every engine has."""
    sampled: bool = False
    """One of many alike, of which engines that are slow play half with each proof."""
