"""Locators: how P finds its prompt's leading blocks in what D published."""

from __future__ import annotations

import hashlib

from backhaul_connector import locators
from hypothesis import given
from hypothesis import strategies as st


def chain(tokens: list[int]) -> list[bytes]:
    """Chained hashes, one per token, as vLLM makes one per block."""
    hashes: list[bytes] = []
    parent = b""
    for token in tokens:
        parent = hashlib.sha256(parent + token.to_bytes(4)).digest()
        hashes.append(parent)
    return hashes


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=60))
def test_the_common_blocks_are_those_of_the_longest_common_prefix(theirs: list[int], mine: list[int]) -> None:
    same = next((i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b), min(len(theirs), len(mine)))
    packed = locators.read(locators.publish(chain(theirs)))
    assert packed is not None
    assert locators.common(packed, chain(mine)) == same


def test_what_is_no_list_of_locators_is_none() -> None:
    for published in ("%%%", "AAA", "A" * 7, "\u00e9\u00e9\u00e9\u00e9", "AAAA"):
        assert locators.read(published) is None


def test_a_locator_takes_a_third_of_a_byte_per_token_of_a_block_of_16() -> None:
    assert len(locators.publish(chain(list(range(750))))) / (750 * 16) < 0.34


def test_where_vllm_hashes_smaller_units_the_hash_at_a_blocks_end_is_the_blocks() -> None:
    hashes = chain(list(range(11)))
    assert list(locators.whole_blocks(hashes, 4, 2)) == [hashes[3], hashes[7]]
    assert list(locators.whole_blocks(hashes, 1, 3)) == hashes[:3]
    assert list(locators.whole_blocks(hashes, 4, 0)) == []
