"""What one turn cost an engine with the connector, in tokens of its prompt, as the answer tells the router."""

from __future__ import annotations

from typing import Any

from .metrics import BYTES_PER_TOKEN
from .reuse import Reuse
from .sequence import Seq

_UNASKED = Reuse()


def of_prefill(seq: Seq) -> dict[str, Any]:
    reuse, pulled = seq.reuse or _UNASKED, seq.num_external
    return {
        "prompt": seq.num_prompt,
        "offered": reuse.offered,
        "verified": reuse.verified,
        "local": seq.num_local,
        "pulled": pulled,
        "computed": seq.num_prompt - seq.num_local - pulled,
        "bytes": pulled * BYTES_PER_TOKEN,
        "read_ms": seq.read_s * 1000 if seq.reading else None,
        "claim_ms": reuse.claim_s * 1000 if reuse.claiming is not None else None,
        "why": reuse.why,
    }


def of_decode(seq: Seq) -> dict[str, Any]:
    reuse = seq.reuse or _UNASKED
    return {
        "prompt": seq.num_prompt,
        "received": seq.num_external,
        "local": seq.num_local,
        "computed": seq.num_prompt - seq.num_local - seq.num_external,
        "generated": len(seq.output),
        "why": reuse.why,
    }
