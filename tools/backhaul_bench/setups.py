"""Cost models for loopback engines, named after the clusters whose published figures they reproduce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backhaul_loopback import CostModel


@dataclass(frozen=True)
class Published:
    """One figure of a published measurement."""

    route: str
    prompt_tokens: int
    ttft_ms: float


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What loopback engines pretend to be, and the prompts to measure there."""

    name: str
    title: str
    """For people; always says that it is a cost model."""
    costs: CostModel
    prompt_tokens: tuple[int, ...] = ()
    new_tokens: int = 0
    published: tuple[Published, ...] = ()


def _published(off: tuple[int, float], off_longest: tuple[int, float], on_longest: float) -> tuple[Published, ...]:
    return (
        Published("off", *off),
        Published("off", *off_longest),
        Published("warm", off_longest[0], on_longest),
    )


# Each published setup gives three figures: off at the shortest and at the longest prompt, on at the longest. They determine
# the model's three costs, with F per request, c per computed and r per read token, turns that add 2,048 tokens, and D
# holding the history in its own prefix cache:
#     off(L)  = 2F + c L + 2,048 r
#     warm(L) = 2F + c 2,048 + r L
# (at the shortest prompt a turn adds half of it). Between these points the curves are the model's, not a measurement.
QWEN3_32B = Setup(
    name="qwen3-32b",
    title="cost model of Qwen3-32B",
    costs=CostModel(fixed_s=44.85e-3, prefill_s=26.94e-6, transfer_s=12.82e-6),
    prompt_tokens=tuple(range(2048, 24 * 1024 + 1, 2048)),
    new_tokens=2048,
    published=_published((2048, 158.0), (24 * 1024, 778.0), 460.0),
)
GLM_5_FP8 = Setup(
    name="glm-5-fp8",
    title="cost model of GLM-5-FP8",
    costs=CostModel(fixed_s=143.4e-3, prefill_s=98.92e-6, transfer_s=10.38e-6),
    prompt_tokens=tuple(range(2048, 20 * 1024 + 1, 2048)),
    new_tokens=2048,
    published=_published((2048, 500.0), (20 * 1024, 2334.0), 702.0),
)
SETUPS: Mapping[str, Setup] = {setup.name: setup for setup in (QWEN3_32B, GLM_5_FP8)}

DEMO = Setup(
    name="demo",
    title="a cost model: 15 ms per request, 0.12 ms per token computed, 0.01 ms per token read",
    costs=CostModel(fixed_s=15e-3, prefill_s=0.12e-3, transfer_s=0.01e-3, decode_s=2e-3),
)
"""Slow enough to watch, quick enough to wait for; a token is one byte there."""
