"""One turn as data: what is known of it, what is decided for it, and its report in the making. The rules are in `states`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from .. import wire
from ..config import RouterConfig
from ..fleet.engine import Engine, Role
from ..fleet.fleet import Fleet
from ..fleet.restarts import Fence
from ..fleet.retention import Reserved
from ..identity.hints import NO_HINTS, Hints
from ..identity.ids import Identity
from ..ledger import digests
from ..ledger.records import Held, Key, Taken
from ..report import Basis, Reason, Route, View
from ..wire.exact_history import AnswerContent
from .placement import Prompt

_ENDS_OTHERWISE: Final = frozenset({"continue_final_message", "add_generation_prompt"})
"""With these a prompt does not end where an answer begins."""
_NOTHING_TAKEN: Final = Taken()
_NOT_ASKED: Final = Fence()
_NO_IDS: Final = msgspec.Raw(b"null")
_NO_PROMPT: Final = Prompt(0)


class ReportDraft(msgspec.Struct):
    """What a `ReuseReport` says and becomes known on the way, by the same names. `accounting` makes the report of it."""

    turn: int | None = None
    """`None` until the ledger has answered."""
    on_record: int | None = None
    diverged_at: int | None = None
    exact_history: bool | None = None
    decided_by: Basis | None = None
    estimates: dict[str, float] | None = None
    moved: str | None = None
    prompt: int | None = None
    offered: int = 0
    verified: int | None = None
    cached: int | None = None
    local: int | None = None
    pulled: int | None = None
    read_bytes: int | None = None
    decode_cached: int | None = None
    computed: int | None = None
    generated: int | None = None
    render_ms: float | None = None
    prefill_ms: float | None = None
    claim_ms: float | None = None
    read_ms: float | None = None
    handle_remaining_s: float | None = None
    retries: int = 0


@dataclass(eq=False, slots=True)
class Turn:
    """What is known of one turn. Its states are frozen; this is what changes."""

    facts: wire.Facts
    identity: Identity | None
    config: RouterConfig
    fleet: Fleet
    started: float
    route: Route | None = None
    """Forces a route wherever it is possible and exact."""
    hints: Hints = NO_HINTS
    tenant: str = ""
    chain: bytes = b""
    """Digests of the history's messages; made here where they are not given."""
    flushes: int = 0
    """The ledger's count when the turn began."""
    key: Key = field(init=False)
    draft: ReportDraft = field(init=False, default_factory=ReportDraft)

    # what is on record, and the handle of it
    taken: Taken = _NOTHING_TAKEN
    spare: Held | None = None
    """The handle taken, as long as no engine has been sent it; a shared one until the turn's end."""
    restarts: int = 0
    """Of the decode engine that holds what was taken, as they were known when it was taken."""
    void: Reason | None = None
    """Why nobody can use the shared handle any more."""

    # the prompt, and what proves it
    prompt: Prompt = _NO_PROMPT
    token_ids: tuple[int, ...] | None = None
    """The prompt's ids, where they are what the engines are sent."""
    encoded_ids: msgspec.Raw = field(default_factory=lambda: _NO_IDS)
    """The same as JSON."""
    by_connector: bool = False
    """P and D check handles by themselves: no ids are asked for."""
    no_proof: bool = False
    left_to_decode: bool = False
    """D has the client's own body, and the turn leaves nothing."""

    # where it runs, and what has failed
    checked: frozenset[tuple[str, str]] = frozenset()
    """Pairs of P and D that this turn had checked."""
    failed_on: frozenset[str] = frozenset()
    erred: frozenset[Role] = frozenset()
    """Roles of which an engine answered with an error: one other is tried, not every one."""
    deaths: int = 0
    """Engines that may have died of this request, in earlier turns with it too."""
    failure: Reason | None = None
    """Why the turn, warm at first, is run again cold."""
    computes: int = 0
    """Estimate of the tokens that the engine which prefills computes."""
    alone: bool = True
    """Nothing of this router's ran there when it was asked."""
    reserved: Reserved | None = None
    """Room on the decode engine."""

    # what came of it
    asked: Fence = _NOT_ASKED
    """What was known of D when it was asked."""
    accounted: bool = False
    """The engine that prefilled has given an account, which goes before its `usage`."""
    said: AnswerContent | None = None
    """What the answer says, where histories are kept exact."""
    decode_began: float = 0.0
    first_byte: float | None = None
    view: View = View.WHOLE
    """What its client may see of the report."""
    comments: bool = False
    """The client wants the report in a comment of the stream."""

    def __post_init__(self) -> None:
        self.chain = self.chain or digests.chain(self.facts.parts)
        conversation = self.identity.conversation if self.identity else ""
        self.key = Key(self.tenant, self.facts.model, self.facts.cache_salt, conversation)

    @property
    def reuses(self) -> bool:
        """Whether this turn reads from and writes to the ledger."""
        return self.identity is not None and self.config.reuse

    @property
    def keeps_exact(self) -> bool:
        """Whether the next prompt may continue the very tokens of this turn (`exact_histories`)."""
        if not self.config.exact_histories or not self.reuses:
            return False
        return self.facts.api.exact_histories and not self.facts.members.keys() & _ENDS_OTHERWISE

    @property
    def ids_to_send(self) -> msgspec.Raw | None:
        return None if self.token_ids is None else self.encoded_ids

    def shows_handle(self, decode: Engine) -> bool:
        """Whether D's answer will carry the handle."""
        return not self.facts.stream or decode.shows_handle(self.facts.api)

    def hides_handle(self, decode: Engine) -> bool:
        """Whether the turn pins blocks there that nobody can release."""
        return decode.hides_handles and not self.shows_handle(decode)
