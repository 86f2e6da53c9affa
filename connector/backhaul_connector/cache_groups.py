"""Capability check of vLLM's KV cache groups: whether their blocks can be compared, cut, or only be read as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from .shape import Request

_KEEP_ALL = (FullAttentionSpec, MLAAttentionSpec)
"""Exactly these: a subclass may free blocks in the middle, as R-SWA does."""


def windows(specs: Sequence[Any], block_size: int) -> tuple[int, ...] | str:
    """Each group's sliding window in tokens, 0 where all KV is kept; empty where every group keeps all. A text says what makes
    one impossible to read by its hashes."""
    found = []
    for spec in specs:
        if isinstance(spec, MambaSpec):
            return "state-space layers keep one state, which the step after the last token may have moved on"
        if spec.block_size != block_size:
            return "layers differ in block size"
        if spec.prefix_replay_tokens > 0:
            return "layers compute the end of a prefix again"
        window = _window(spec)
        if window is None:
            return f"layers keep their KV in another way ({type(spec).__name__})"
        found.append(window)
    return tuple(found) if any(found) else ()


def _window(spec: Any) -> int | None:
    if type(spec) is UniformTypeKVCacheSpecs:
        return 0 if all(_window(inner) == 0 for inner in spec.kv_cache_specs.values()) else None
    if type(spec) in _KEEP_ALL:
        return None if spec.non_causal else 0
    if type(spec) is SlidingWindowSpec and not spec.extra_retained_tokens:
        return int(spec.sliding_window)
    return None


def extra_keys(request: Request, start: int, end: int) -> object:
    """What vLLM puts into the hash of a block of these tokens beside them."""
    keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
    return keys
