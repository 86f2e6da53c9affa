"""Sequence (vLLM's request state): a prompt on its way to an answer, and what comes out of the engine core for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .blocks import Block, chain_digest
from .reuse import Reuse
from .script import Script
from .template import Prompt
from .transfer import Params


@dataclass(eq=False, kw_only=True)
class Seq:
    """One prompt on its way to one answer."""

    request_id: str
    prompt: Prompt
    script: Script
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    token_steps: bool = False
    """One token per step, where the caller has to look at each (stop strings); else about a word."""
    params: Params | None = None
    salt: str = ""
    choice: int = 0

    keys: list[int] = field(default_factory=list)
    """What each position's KV is computed from: the prompt's, then the answer's."""
    digests: list[bytes] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    num_computed: int = 0
    state: int = 0
    """Over the KV of the first `num_computed` positions."""
    seed: int = 0
    """What the answer is a function of: the state after the prompt."""
    output: list[int] = field(default_factory=list)
    num_local: int = 0
    """Prompt tokens whose KV the prefix cache had."""
    num_external: int = 0
    """Prompt tokens whose KV was read from the peer."""
    num_created: int = 0
    """Prompt tokens that the prefix cache has only since this request."""
    tracked: bool = False
    """The connector knows the request; a pin of one that it does not know never ends."""
    reading: bool = False
    """A read has begun, which goes on even if the request does not."""
    read_before: float | None = None
    """When the peer stops holding the blocks, on this engine's clock: what was read later may be anyone's."""
    read_s: float = 0.0
    reuse: Reuse | None = None
    """What Backhaul's connector knows of a request with parameters; unset on stock engines."""

    @property
    def num_prompt(self) -> int:
        return len(self.prompt.tokens)

    def extend_digests(self, block_size: int) -> None:
        """Adds the digests of the blocks that `keys` fill by now."""
        parent = self.digests[-1] if self.digests else b""
        for index in range(len(self.digests), len(self.keys) // block_size):
            keys = self.keys[index * block_size : (index + 1) * block_size]
            parent = chain_digest(parent, keys, self.salt if index == 0 else "")
            self.digests.append(parent)


@dataclass(frozen=True)
class Step:
    """Tokens that came out together, and on the last one how it ended."""

    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | None = None
    kv_transfer_params: Params | None = None
