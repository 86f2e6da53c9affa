"""The proofs that there are: the suite runs with each."""

from __future__ import annotations

import dataclasses
from typing import Any

from backhaul_loopback import EngineConfig
from backhaul_router.report import Proof

_CHOOSES = "connector" in {field.name for field in dataclasses.fields(EngineConfig)}

PROOFS = tuple(proof for proof in Proof if proof is Proof.TOKENS or (proof is not Proof.ENGINE and _CHOOSES))


def loopback_settings(proof: Proof) -> dict[str, Any]:
    """What a loopback engine is told for a proof."""
    return {"connector": "stock" if proof is Proof.TOKENS else "backhaul"} if _CHOOSES else {}
