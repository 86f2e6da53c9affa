"""What `backhaul bench peers` does: single requests, or with `--conversation` one that grows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from backhaul_cli.options import Count, Numbers

from . import peers, peers_conversation
from .options import OptionsError, Written
from .setups import QWEN3_32B, SETUPS


@dataclass(frozen=True, kw_only=True)
class Options(Written):
    vllm_router: Annotated[Path, "PATH", "the program, such as .../bin/vllm-router"]
    body_bytes: Annotated[Numbers | None, "(default: 2000,200000)"] = None
    concurrency: Annotated[Numbers | None, "requests at a time (default: 1,32)"] = None
    turns: Annotated[
        Count | None, "for each figure; large bodies get a quarter (default: 200); of the conversation (default: 6)"
    ] = None
    conversation: Annotated[
        str | None,
        "SETUP",
        "instead: time to first token of a growing conversation, on engines of a cost model (default: qwen3-32b)",
        {"nargs": "?", "const": QWEN3_32B.name},
    ] = None


def main(options: Options) -> int:
    """Measures, and returns the exit status. Raises `OptionsError`, `PeerError`, `OSError`."""
    names = ("vllm_router", "body_bytes", "concurrency", "turns", "json")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.conversation is None:
        return peers.main(peers.Options(**given))
    if options.body_bytes or options.concurrency:
        raise OptionsError("--conversation goes without --body-bytes and --concurrency")
    if options.conversation not in SETUPS:
        raise OptionsError(f"--conversation {options.conversation}: use one of {', '.join(SETUPS)}")
    return peers_conversation.main(peers_conversation.Options(setup=SETUPS[options.conversation], **given))
