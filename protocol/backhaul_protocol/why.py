"""Closed enum of reasons: why an engine read nothing of a handle."""

from __future__ import annotations

import enum
from typing import Final


class Why(enum.StrEnum):
    """An account's `why`, and a refused claim's."""

    DIVERGED = "diverged"
    """P: the prompt and the handle have no leading block in common."""
    BELOW_THRESHOLD = "below_threshold"
    """P: too little to be worth a read."""
    LOCAL_HIT = "local_hit"
    """P: its own prefix cache has all that could be read."""
    NO_DIGESTS = "no_digests"
    """P: a stock engine's handle, without the router's proof."""
    MALFORMED = "malformed"
    """What was sent is no handle, no claim or no message of ours."""
    UNSUPPORTED = "unsupported"
    """An engine or request whose blocks cannot be compared and cut."""
    BIDIRECTIONAL_OFF = "bidirectional_off"
    """P: `bidirectional_kv_xfer` is false."""
    EXPIRED = "expired"
    """D: the lease has ended by itself."""
    RELEASED = "released"
    """D: the lease was released, or read by the one reader that it was for."""
    EVICTED = "evicted"
    """D: the lease has ended because its blocks were needed."""
    UNKNOWN_LEASE = "unknown_lease"
    """D: there is no such lease, or it ended long ago."""
    EPOCH = "epoch"
    """D: every lease of that time was flushed."""
    OTHER_ENGINE = "other_engine"
    """D: the handle is another process's, as after a restart."""
    DIFFERS = "differs"
    """D: the blocks are not the ones that P has located."""
    UNREACHABLE = "unreachable"
    """P: D did not answer the claim in time."""
    READ_FAILED = "read_failed"
    """The transfer failed, or what was read was taken away again (preemption)."""
    HOLD_ENDED = "hold_ended"
    """P: the read took longer than D held the blocks."""
    PROMPT_DIFFERS = "prompt_differs"
    """D: P computed another prompt."""


DECLINED: Final = frozenset({Why.DIVERGED, Why.BELOW_THRESHOLD, Why.LOCAL_HIT})
"""Will be the same for anyone who comes with this prompt: P tells D that a lease which is not shared need not be kept."""
