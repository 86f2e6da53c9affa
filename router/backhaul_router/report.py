"""The reuse report: what one turn reused, from where, how long each step took, and why not when it did not."""

from __future__ import annotations

import enum
from typing import Any

import msgspec


class Route(enum.StrEnum):
    """How a turn ran."""

    COLD = "cold"
    """The prefill engine computed the whole prompt (its own prefix cache aside)."""
    WARM = "warm"
    """The prefill engine read the history's KV blocks back from the decode engine and computed the rest."""
    LOCAL = "local"
    """The decode engine ran the turn alone, on its own prefix cache."""


class Basis(enum.StrEnum):
    """What decided a turn's route."""

    THRESHOLDS = "thresholds"
    """The configured ones: nothing is known to be clearly faster."""
    ESTIMATES = "estimates"
    """By `estimates`, another route than the thresholds' was clearly faster."""
    MEASURING = "measuring"
    """The thresholds' route, although it was estimated to be slower: its estimate is old."""
    FORCED = "forced"
    """Configuration or the request."""


class Proof(enum.StrEnum):
    """What shows that the KV that a turn reused belongs to its own tokens."""

    TOKENS = "tokens"
    """The router compared chained digests of token ids, and sent the very ids that it compared."""
    CONNECTOR = "connector"
    """The prefill engine compared the handle's block digests with its own prompt's, and the decode engine confirmed the full
    hash of what was about to be read."""
    ENGINE = "engine"
    """The engine's own prefix cache, which is keyed by content; nothing was read from another engine."""


class Reason(enum.StrEnum):
    """Why a turn reused nothing over the wire: the closed list that `ReuseReport.reason` draws from."""

    FIRST_TURN = "first_turn"
    """The conversation has no history on record."""
    NO_CONVERSATION = "no_conversation"
    """The request names no conversation, so there is nothing to look up."""
    NO_HANDLE = "no_handle"
    """The last turn left no handle: it ended by a stop string, was aborted, ran `local`, or its stream hid it."""
    IN_USE = "in_use"
    """Another turn of this conversation holds the handle; on stock engines a handle is read at most once."""
    EXPIRED = "expired"
    """The lease on the decode engine's blocks has ended, or is about to."""
    EVICTED = "evicted"
    """The router had the decode engine give up what it kept, because others needed the memory."""
    DIVERGED = "diverged"
    """The prompt's tokens differ from those that the decode engine ran before one whole block is common."""
    BELOW_THRESHOLD = "below_threshold"
    """Fewer tokens are reusable than `kv_recompute_threshold`: computing them costs less than reading them."""
    ENGINE_CHANGED = "engine_changed"
    """The decode engine that made the handle has restarted since, or is no longer configured."""
    READ_FAILED = "read_failed"
    """The prefill engine could not read the blocks, and the turn was run again without the handle; or it did not read them."""
    DECODE_FAILED = "decode_failed"
    """The decode engine failed before its first byte; the turn was run again on another, without the handle."""
    NO_PROOF = "no_proof"
    """Nothing can show that the handle's tokens are the prompt's: on stock engines images, adapters, fields the renderer
    ignores."""
    UNSAFE_PAIR = "unsafe_pair"
    """This prefill engine cannot read from that decode engine: it was tried, and `backhaul doctor` says how it failed."""
    MULTIPLE_CHOICES = "multiple_choices"
    """`n`, `best_of` or beam search ask for several sequences, and a handle serves one."""
    SLOWER = "slower"
    """By what was measured, reading the history takes clearly longer than computing it."""
    REUSE_OFF = "reuse_off"
    """Reuse is switched off, by configuration or for this turn."""
    FLUSHED = "flushed"
    """Every handle was dropped on request, as before a weight update."""
    LEDGER_UNAVAILABLE = "ledger_unavailable"
    """The ledger is shared by several routers, and did not answer in time; or it has come back from a failure that may have cost
    it what happened last."""


class View(enum.Enum):
    """What a client is shown of its turn's report, in the answer itself."""

    WHOLE = enum.auto()
    WITHOUT_ENGINES = enum.auto()
    """The engines' URLs are nothing to clients elsewhere."""
    SUMMARY = enum.auto()
    """What the answer's head and its token counts say, to clients that are not shown reports."""

    @property
    def without_engines(self) -> View:
        """The same, for whoever has not asked: answers are handed on more readily than reports."""
        return View.WITHOUT_ENGINES if self is View.WHOLE else self

    def of(self, report: ReuseReport) -> bytes:
        """A report as JSON."""
        if self is View.SUMMARY:
            return msgspec.json.encode({name: getattr(report, name) for name in _SUMMARY})
        if self is View.WITHOUT_ENGINES:
            prefill, decode = (url and WITHHELD for url in (report.prefill_engine, report.decode_engine))
            report = msgspec.structs.replace(report, prefill_engine=prefill, decode_engine=decode)
        return msgspec.json.encode(report)


WITHHELD = "(url withheld)"
_SUMMARY = ("conversation", "turn", "route", "reason", "offered", "cached", "computed")


class ReuseReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one turn reused. Counts are tokens, times are milliseconds; `None` means not known, never zero.

    Engines that run our connector give an account of each request, and what is here is their word. A stock P reports only
    the sum of what it found in its own prefix cache and what it read (`cached`), so there `verified`, `local`, `pulled` and
    the times of the read are `None`, as is what a stock D found in its own cache (`decode_cached`).
    """

    conversation: str | None
    """The conversation's id; `None` when the request named none."""
    tenant: str = ""
    """Whose conversation it is, by the name of its API keys; empty where there are none."""
    turn: int
    """Counts the conversation's turns as they begin, from 1."""
    model: str | None = None
    """As the request names it; `None` when it names none."""
    route: Route
    proof: Proof | None = None
    reason: Reason | None = None
    """Why the route is not `warm`, or why a `warm` try ended cold; `None` on a warm turn, and on a `local` turn
    chosen because the suffix was short."""
    identity_source: str | None = None
    """Where the conversation id came from, such as `header:x-conversation-id`, `scope`, or `history` where the request
    names none and is known by its messages."""
    decided_by: Basis | None = None
    """What decided the route; `None` where there was nothing to decide."""
    estimates: dict[str, float] | None = None
    """Milliseconds to the first byte, rendering aside, that the routes were estimated at which the turn could take, where the
    engines have been measured. `None` before that."""
    moved: str | None = None
    """Why the turn left an engine of the turn before: its role and `full`, `busy`, `failed` (in this turn),
    `unavailable` (it drains, or fails) or `gone`, such as `decode:full`; both, with a comma between, where it left both."""
    parent: str | None = None
    """The conversation that this one is a child of, as a sub-agent's is."""
    diverged_at: int | None = None
    """Index of the first message that differs from the history on record, the engine's own answer included; `None` when
    all of it matches. On `/v1/completions` the prompt counts as one message."""
    on_record: int | None = None
    """Tokens of the history that the router has on record and the request goes on from, prompts and answers: what it could
    have reused if it had changed nothing. 0 when there is none, as on a first turn."""
    exact_history: bool | None = None
    """With `exact_histories`: the last answer came back as other tokens, and the engine's own took their place; false where that
    could not be done. `None` where it came back as it was, and where the setting is off."""
    prompt: int | None = None
    """Tokens of the prompt."""
    offered: int = 0
    """Tokens whose KV was offered to P for reading, in whole blocks: proven ones by token ids, with the connector all that the
    handle covers."""
    verified: int | None = None
    """Tokens of those that P found to be this prompt's."""
    cached: int | None = None
    """Tokens that the engine that prefilled (P; D when `local`) found cached or read."""
    local: int | None = None
    """Tokens that P found in its own prefix cache."""
    pulled: int | None = None
    """Tokens whose KV P read from D."""
    read_bytes: int | None = None
    """Bytes of that KV."""
    decode_cached: int | None = None
    """Tokens that D found in its own prefix cache."""
    computed: int | None = None
    """Tokens that were prefilled by computing: `prompt - cached`."""
    generated: int | None = None
    """Tokens of the answer."""
    render_ms: float | None = None
    prefill_ms: float | None = None
    claim_ms: float | None = None
    """Of `prefill_ms`: until D had confirmed what P was about to read."""
    read_ms: float | None = None
    """Of `prefill_ms`: reading it."""
    first_byte_ms: float | None = None
    """From the request's arrival to the first byte of the answer's body."""
    total_ms: float = 0.0
    prefill_engine: str | None = None
    decode_engine: str | None = None
    handle_remaining_s: float | None = None
    """Seconds for which the handle that this turn left can still be used; `None` when it left none."""
    saved_ms: float | None = None
    """Estimate of the time to first token that reuse saved."""
    saved_basis: str | None = None
    """How `saved_ms` was estimated."""
    retries: int = 0
    """Engine calls that were repeated, on this or on another engine."""
    status: int = 200
    """HTTP status that the client got."""
    error: str | None = None
    """What ended the turn early, such as `client_gone`; `None` when it ran to its end."""

    @property
    def reused(self) -> int:
        """Prompt tokens that were not computed for this turn, as far as is known."""
        return self.cached or 0

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types, keys as the attributes are named."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]
