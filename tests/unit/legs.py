"""What the tests of both legs of a turn share: requests as vLLM's scheduler has them, and an engine's shape."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from backhaul_connector import locators
from backhaul_connector.shape import Shape

BLOCK = 16


def shape(**other: Any) -> Shape:
    fields = {
        "block_size": BLOCK,
        "groups": 1,
        "block_bytes": [1000],
        "recompute_threshold": 32,
        "bidirectional": True,
        "unsupported": None,
    }
    return Shape(**{**fields, **other})


def hashes(prompt: str, tokens: int) -> list[bytes]:
    """Chained hashes of the whole blocks of a prompt, one letter per block."""
    found: list[bytes] = []
    parent = b""
    for letter in prompt[: tokens // BLOCK]:
        parent = hashlib.sha256(parent + letter.encode()).digest()
        found.append(parent)
    return found


@dataclass
class Request:
    """One letter of `prompt` is one block's tokens."""

    prompt: str
    kv_transfer_params: Any
    extra_tokens: int = 5
    """Behind the last whole block."""
    generated: int = 0
    request_id: str = "r"
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    abort_immediately: bool = False
    block_hashes: list[bytes] = field(init=False)
    num_computed_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = hashes(self.prompt, self.num_tokens)
        self.num_computed_tokens = self.num_tokens - 1

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) * BLOCK + self.extra_tokens

    @property
    def all_token_ids(self) -> list[int]:
        """A block's tokens are its letter's number, those behind the last one 0, generated ones 1."""
        prompt = [ord(letter) for letter in self.prompt for _ in range(BLOCK)]
        return [*prompt, *[0] * self.extra_tokens, *[1] * self.generated]

    @property
    def num_output_tokens(self) -> int:
        return self.generated

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.generated


def handle(prompt: str, *, shared: bool = True, **other: Any) -> dict[str, Any]:
    """What D returned for a history of these blocks."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": [list(range(len(prompt)))],
        "remote_engine_id": "D",
        "remote_request_id": "lease",
        "remote_host": "d-host",
        "remote_port": 5600,
        "remote_num_tokens": len(prompt) * BLOCK,
        "backhaul": {
            "version": 1,
            "digests": locators.publish(hashes(prompt, len(prompt) * BLOCK)),
            "block_size": BLOCK,
            "epoch": "e",
            "lease": {"port": 4000, "ttl_s": 9.0, "shared": shared},
        },
        **other,
    }
