"""Proof by token ids: which tokens the prompt is, by the engine's own renderer, and where they leave the history on record."""

from __future__ import annotations

import msgspec

from .. import wire
from ..fleet.engine import Engine
from ..ledger import digests
from ..wire.exact_history import content_of, splice
from .placement import Prompt
from .turn import Turn


def rewrites_answer(turn: Turn, token_ids: tuple[int, ...]) -> bool:
    """Whether the request goes on from the last answer, which has become other tokens on the way."""
    branch, common = turn.taken.branch, turn.taken.common
    if not turn.keeps_exact or branch is None or branch.exact is None:
        return False
    if wire.rendering(turn.facts) != branch.exact.rendering:
        return False
    messages = turn.facts.messages
    if common < digests.count(branch.chain) or len(messages) <= common:
        return False
    sent = content_of(messages[common])
    if sent is None or not sent.repeats(branch.exact.said):
        return False
    return token_ids[: len(branch.exact.ran)] != tuple(branch.exact.ran)


def continued(turn: Turn, token_ids: tuple[int, ...], closed: tuple[int, ...], engine: Engine) -> None:
    """The prompt's ids are known, and those of the history up to the last answer."""
    record = turn.taken.branch.exact if turn.taken.branch is not None else None
    exact = splice(record.ran, token_ids, closed) if record is not None else None
    turn.draft.exact_history = exact is not None
    rendered(turn, exact or token_ids, engine)


def rendered(turn: Turn, token_ids: tuple[int, ...], engine: Engine) -> None:
    """The prompt's ids are known."""
    block_size, branch = engine.block_size or 0, turn.taken.branch
    known = branch.blocks if branch is not None and branch.block_size == block_size else b""
    try:
        blocks = digests.block_chain(token_ids, block_size, known)
    except OverflowError:
        turn.no_proof = True
        return
    turn.token_ids, turn.encoded_ids = token_ids, wire.encode_ids(token_ids)
    turn.prompt = Prompt(turn.prompt.message_bytes, len(token_ids), blocks, block_size)
    turn.draft.prompt = len(token_ids)
    _note_divergence(turn, blocks)


def _note_divergence(turn: Turn, blocks: bytes) -> None:
    """Messages that all match, but tokens that do not: it is the engine's own answer that comes back changed."""
    branch, common = turn.taken.branch, turn.taken.common
    if branch is None or common < digests.count(branch.chain) or len(turn.facts.parts) <= common:
        return
    if digests.common(blocks, branch.blocks) < min(digests.count(blocks), digests.count(branch.blocks)):
        diverged_at(turn, common)


def diverged_at(turn: Turn, part: int | None) -> None:
    """Notes the message that differs. A completion's prompt is compared in pieces, and is one message."""
    turn.draft.diverged_at = part if part is None or turn.facts.api.numbered else 0


def ids_that_ran(turn: Turn, ids: msgspec.Raw) -> tuple[int, ...] | None:
    """The ids that D says it was given. The same JSON is the same ids, without reading them. Raises `msgspec.DecodeError`."""
    return turn.token_ids if bytes(ids) == bytes(turn.encoded_ids) else wire.read_ids(ids)
